"""A video as a sequence: frames of rows and columns, ordered so that near tokens are side by side."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnbench.catalogue.engines.blocks.block_softmax import attend_in_form
from attnbench.catalogue.engines.blocks.selection import BlockPairs, BlockSelection
from attnbench.catalogue.engines.flex.pair_pattern import FlexPattern
from attnbench.contract.problem.sink import Sink
from attnbench.errors import UsageError

_SIDES = re.compile(r"[1-9][0-9]*(x[1-9][0-9]*)*")


def sides(text: str, count: int, option: str) -> tuple[int, ...]:
    """The whole numbers of ``4x8x8``, the value of ``option``.

    Raises:
        UsageError: it is not so many whole numbers of at least 1.
    """
    found = tuple(map(int, text.split("x"))) if _SIDES.fullmatch(text) else ()
    if len(found) != count:
        example = "x".join("488"[:count])
        raise UsageError(f"{option}={text!r} must be {count} whole numbers of at least 1 with an x between: {example}")
    return found


class Layout(NamedTuple):
    """Tokens in another order, with gaps, so that a block of consecutive places holds tokens that belong together."""

    places: Tensor
    block: int
    blocks: int

    def spread(self, x: Tensor) -> Tensor:
        """``(B, H, blocks · block, d)`` from x ``(B, H, n, d)``; 0 for no token."""
        return x.new_zeros(*x.shape[:2], self.blocks * self.block, x.shape[3]).index_copy(2, self.places, x)

    def selection(self, kept: Tensor) -> BlockSelection:
        """The pairs of places that count in each head, from the kept pairs of blocks ``(P, 2)``."""
        real = torch.zeros(1, self.blocks * self.block, dtype=torch.bool, device=kept.device)
        real[:, self.places] = True
        pairs, full = BlockPairs(self.block, self.block, *kept.T), len(self.places) == real.shape[1]
        return BlockSelection((1, 1, real.shape[1]), False, (pairs,), None if full else real)


Planned = Callable[[int, torch.device], tuple[Layout, Tensor]]
"""The layout of so many tokens, and its pairs of a block of queries and a block of keys, ``(P, 2)``."""


def attend_on_canvas(
    flex: FlexPattern, plan: Planned, q: Tensor, k: Tensor, v: Tensor, sink: Sink | None = None
) -> Tensor:
    """Softmax attention of each block of queries to the keys of its blocks, ``(B, H, n, E)``.

    q is ``(B, H, n, D)``, k and v ``(B, K, n, ·)``.
    """

    def made() -> tuple[Layout, BlockSelection]:
        layout, kept = plan(q.shape[2], q.device)
        selection = layout.selection(kept)
        if flex.may_run(q):
            selection.block_mask  # noqa: B018  # made and kept with the plan
        return layout, selection

    layout, selection = flex.kept((q.shape[2], q.device), made) if flex.may_run(q) else made()
    spread = layout.spread(q), layout.spread(k), layout.spread(v)
    return attend_in_form(flex, *spread, selection, sink).index_select(2, layout.places)


def in_tiles(n: int, canvas: tuple[int, ...], tile: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """The tile ``(n, 3)`` of each of ``n`` tokens of frames, rows and columns, and its place in the tile ``(n,)``.

    The last frame may be incomplete; tiles at the far sides may reach beyond the canvas.
    """
    i = torch.arange(n, device=device)
    _, rows, columns = canvas
    at = torch.stack([i // (rows * columns), i // columns % rows, i % columns], 1)
    size = torch.tensor(tile, device=device)
    inside = at % size
    return at // size, (inside[:, 0] * tile[1] + inside[:, 1]) * tile[2] + inside[:, 2]


def with_text(layout: Layout, kept: Tensor, text: int) -> tuple[Layout, Tensor]:
    """The layout with ``text`` further tokens behind all others, in full attention to and from all."""
    if not text:
        return layout, kept
    first, block = layout.blocks, layout.block
    more = -(-text // block)
    device = kept.device
    places = torch.cat([layout.places, first * block + torch.arange(text, device=device)])
    every, own = torch.arange(first + more, device=device), torch.arange(first, first + more, device=device)
    to_text = torch.cartesian_prod(every[:first], own)
    return Layout(places, block, first + more), torch.cat([kept, to_text, torch.cartesian_prod(own, every)])


def tokens_seen(x: Tensor, text: int) -> Tensor:
    """A mask ``(n, n)`` from that of a video's tokens ``(n - text, n - text)``: text sees all, and all see it."""
    return pad(x, (0, text, 0, text), value=True)
