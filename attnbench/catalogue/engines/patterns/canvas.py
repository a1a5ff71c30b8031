"""A video as a sequence: frames of rows and columns, ordered so that near tokens are side by side."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from attnbench.catalogue.engines.blocks.block_softmax import attend_in_form
from attnbench.catalogue.engines.blocks.selection import BlockPairs, BlockSelection
from attnbench.catalogue.engines.flex.pair_pattern import FlexPattern, Form
from attnbench.contract.problem.reference import masked_attention, of_query_heads
from attnbench.contract.problem.shape import Shape
from attnbench.contract.problem.sink import sink_of
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


class OnCanvas(nn.Module):
    """Softmax attention of each block of queries to the keys of its blocks, in a video with a text behind it.

    A subclass gives the pairs of a video's tokens, by the formula and as blocks.

    Args:
        shape: of the inputs, q ``(B, H, N, D)``, k and v ``(B, K, N, ·)``.
        name: of the variant with its options, for the cache of verdicts.
        text: last tokens, which attend to all tokens and all attend to.
        form: of the computation.
    """

    def __init__(self, shape: Shape, name: str, text: int, form: Form) -> None:
        super().__init__()
        self.flex, self.sink, self.text = FlexPattern(f"{name}, text={text}", form), sink_of(shape), text

    def read(self, n: int, device: torch.device) -> Tensor:
        """By the formula, the pairs of ``n`` tokens of a video that meet, ``(n, n)`` bool."""
        raise NotImplementedError

    def _plan(self, n: int, device: torch.device) -> tuple[Layout, Tensor]:
        """The layout of ``n`` tokens of a video, and its pairs of a block of queries and one of keys, ``(P, 2)``."""
        raise NotImplementedError

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        text = min(self.text, q.shape[2])
        # Text sees all, and all see it.
        seen = pad(self.read(q.shape[2] - text, q.device), (0, text, 0, text), value=True)
        k, v = (of_query_heads(x, q.shape[1]) for x in (k, v))
        return masked_attention(q, k, v, seen, sink=None if self.sink is None else self.sink.logit)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        def made() -> tuple[Layout, BlockSelection]:
            text = min(self.text, q.shape[2])
            layout, kept = with_text(*self._plan(q.shape[2] - text, q.device), text)
            selection = layout.selection(kept)
            if self.flex.may_run(q):
                selection.block_mask  # noqa: B018  # made and kept with the plan
            return layout, selection

        layout, selection = self.flex.kept((q.shape[2], q.device), made) if self.flex.may_run(q) else made()
        spread = layout.spread(q), layout.spread(k), layout.spread(v)
        return attend_in_form(self.flex, *spread, selection, self.sink).index_select(2, layout.places)


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
