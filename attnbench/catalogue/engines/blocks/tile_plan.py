"""A cut of the kept pairs of blocks into tiles of one size, each computed by one product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnbench.catalogue.engines.blocks.selection import BlockPairs, BlockSelection
from attnbench.catalogue.engines.tiling import budget

WIDE = 64
"""Fewest queries, and keys, of a tile: smaller blocks share one."""


@dataclass(frozen=True, slots=True)
class BlockTile:
    """T products of U blocks of queries with W blocks of keys; U or W is 1. -1 stands for no block."""

    units: Tensor
    """``(T, U)``, numbers of blocks of queries."""
    blocks: Tensor
    """``(T, W)``, numbers of blocks of keys among those of all heads and examples."""
    columns: int
    """Keys of a block."""
    cut: bool

    @property
    def keys(self) -> Tensor:
        """``(T·W,)``, for fetching; -1 becomes the tile's first block, of the same example: nothing is seen."""
        return torch.where(self.blocks < 0, self.blocks[:, :1], self.blocks).flatten()

    def places(self, first: int, last: int) -> Tensor:
        """``(T·U,)``: places of its blocks of queries between ``first`` and ``last``; -1 becomes ``last``."""
        return torch.where(self.units < 0, last - first, self.units - first).flatten()

    @property
    def queries(self) -> Tensor:
        """``(T·U,)``, for fetching; -1 becomes the tile's first block, whose example reads the same keys."""
        return torch.where(self.units < 0, self.units[:, :1], self.units).flatten()


@dataclass(frozen=True, slots=True)
class _TileList:
    units: Tensor
    blocks: Tensor
    columns: int
    cut: bool
    bounds: list[int]
    """Starts of the ranges' tiles, and the end of the last one."""
    step: int
    """Tiles taken together."""


@dataclass(frozen=True)
class TilePlan:
    """The tiles of one call. Each range of blocks of queries has sums of its own, which stay in a cache."""

    selection: BlockSelection
    groups: int
    rows: int
    units: int
    tokens: int
    """Keys of each head, padded to whole blocks."""
    per: int
    lists: tuple[_TileList, ...]

    @classmethod
    def of(cls, selection: BlockSelection, groups: int, widths: tuple[int, int], device: torch.device) -> TilePlan:
        """The plan of a call with ``groups`` heads of queries for one of keys; widths are those of keys and values."""
        N = selection.size[2]
        rows = selection.parts[0].rows
        largest = max(part.columns for part in selection.parts)
        units, tokens = -(-N // rows), -(-N // largest) * largest
        most = budget("blocks.scores", device)
        per = max(1, most // (rows * max(widths)))
        made = cls(selection, groups, rows, units, tokens, per, ())
        lists = [one for part in selection.parts for one in made._lists(part, widths, most)]
        return cls(selection, groups, rows, units, tokens, per, tuple(lists))

    @property
    def total(self) -> int:
        B, H, _ = self.selection.size
        return B * H * self.units

    def ranges(self) -> Iterator[tuple[int, int, int]]:
        """Number, first block of queries, and last block + 1 of each range."""
        for number, first in enumerate(range(0, self.total, self.per)):
            yield number, first, min(first + self.per, self.total)

    def tiles(self, number: int) -> Iterator[BlockTile]:
        for one in self.lists:
            stop = one.bounds[number + 1]
            for a in range(one.bounds[number], stop, one.step):
                b = min(a + one.step, stop)
                yield BlockTile(one.units[a:b], one.blocks[a:b], one.columns, one.cut)

    def hidden(self, tile: BlockTile) -> Tensor:
        """The pairs of a tile that are not seen, ``(T, 1 or U·rows, W·columns)`` bool."""
        N = self.selection.size[2]
        in_head = self.tokens // tile.columns
        inside = torch.arange(tile.columns, device=tile.units.device)
        at = tile.blocks % in_head * tile.columns  # with -1 it is the last block, which is then hidden
        keys = at[..., None] + inside
        never = (tile.blocks[..., None] < 0) | (keys >= N)
        real = self.selection.real
        if real is not None:
            example = tile.keys.view_as(tile.blocks) // (in_head * (self.selection.size[1] // self.groups))
            never = never | ~real[example[..., None], keys.clamp(max=N - 1)]
        hidden = never.flatten(1).unsqueeze(1)
        if not self.selection.causal:
            return hidden
        row = torch.arange(self.rows, device=tile.units.device)
        places = (tile.units.clamp(min=0) % self.units * self.rows)[..., None] + row
        return hidden | (keys.flatten(1).unsqueeze(1) > places.flatten(1).unsqueeze(2))

    def _lists(self, part: BlockPairs, widths: tuple[int, int], most: int) -> Iterator[_TileList]:
        _, H, N = self.selection.size
        in_head = self.tokens // part.columns
        head = part.queries // self.units
        shared = head // H * (H // self.groups) + head % H // self.groups
        blocks = shared * in_head + part.keys
        last = (part.keys + 1) * part.columns - 1
        whole = last < N if self.selection.real is None else torch.zeros_like(last, dtype=torch.bool)
        if self.selection.causal:
            whole &= last <= part.queries % self.units * self.rows
        for cut, some in ((False, whole), (True, ~whole)):
            yield self._list((part.queries[some], blocks[some]), part, widths, most, cut)

    def _list(
        self, pairs: tuple[Tensor, Tensor], part: BlockPairs, widths: tuple[int, int], most: int, cut: bool
    ) -> _TileList:
        queries, blocks = pairs
        number = queries // self.per
        every = self.total * (self.tokens // part.columns)  # at least as many as there are blocks of keys
        if self.rows <= part.columns:  # blocks of queries that want the same keys share a tile
            found, units = _grouped(number * every + blocks, queries, -(-WIDE // self.rows))
            number, wanted = found // every, (found % every).unsqueeze(1)
        else:
            found, wanted = _grouped(queries, blocks, -(-WIDE // part.columns))
            number, units = found // self.per, found.unsqueeze(1)
        count = -(-self.total // self.per)
        bounds = [0, *torch.bincount(number, minlength=count).cumsum(0).tolist()]
        R, C = units.shape[1] * self.rows, wanted.shape[1] * part.columns
        step = max(1, most // (R * C + (R + C) * sum(widths)))
        return _TileList(units, wanted, part.columns, cut or wanted.shape[1] > 1, bounds, step)


def _grouped(major: Tensor, minor: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Major of each row ``(T,)``, and rows ``(T, size)`` of minors of one major, filled up with -1."""
    major, order = major.sort(stable=True)
    minor = minor[order]
    if size == 1:
        return major, minor.unsqueeze(1)
    found, counts = torch.unique_consecutive(major, return_counts=True)
    lines = (counts + size - 1) // size
    run = torch.repeat_interleave(torch.arange(len(found), device=major.device), counts)
    place = torch.arange(len(major), device=major.device) - (counts.cumsum(0) - counts)[run]
    rows = minor.new_full((int(lines.sum()), size), -1)
    rows[(lines.cumsum(0) - lines)[run] + place // size, place % size] = minor
    return torch.repeat_interleave(found, lines), rows
