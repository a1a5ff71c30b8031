"""The notation for a pattern of blocks: tiles of query rows and all the keys that they see.

A pattern is a list of :class:`Tile`. A tile holds some query rows and *all* the keys that they see, so that the
softmax of each row is complete inside its tile. The key sets of a tile must not intersect, so that no key is counted
twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attnbench.catalogue.engines.precision import accumulator

Heads = tuple[int, slice]
"""Index of consecutive heads of one example in a tensor ``(B, H, n, d)``."""

Mask = tuple[int, Tensor]
"""A first column, and 0 / -inf, broadcastable to (blocks, rows, columns), to add to the scores from that column on."""

Label = tuple[slice, int | Tensor]
"""Some columns, and the labels of their pairs: one for all, or (rows, columns)."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """``count`` blocks of ``size`` tokens: blocks are ``step`` positions apart, the tokens of a block ``stride``.

    If there are several blocks, step is a multiple of stride or the other way round.
    """

    start: int
    size: int
    count: int = 1
    step: int = 1
    stride: int = 1

    def of(self, x: Tensor, heads: Heads, dtype: torch.dtype | None = None) -> Tensor:
        """View of x ``(B, H, n, d)`` as ``(heads, count, size, d)``; blocks may overlap, nothing is copied.

        A dtype other than x's gives a view of a converted copy of these tokens.
        """
        if (dtype is not None and dtype != x.dtype) or torch.compiler.is_compiling():
            return self._sliced(x, heads, x.dtype if dtype is None else dtype)
        b, some = heads
        example, head, token, number = x.stride()
        return x.as_strided(
            (some.stop - some.start, self.count, self.size, x.shape[3]),
            (head, self.step * token, self.stride * token, number),
            x.storage_offset() + b * example + some.start * head + self.start * token,
        )

    def _sliced(self, x: Tensor, heads: Heads, dtype: torch.dtype) -> Tensor:
        """:meth:`of` in several steps, which take longer but can be compiled, and convert only these tokens."""
        b, some = heads
        stop = self.start + (self.count - 1) * self.step + (self.size - 1) * self.stride + 1
        interleaved = self.count > 1 and self.step < self.stride
        part = x[b, some, self.start : stop : self.step if interleaved else self.stride].to(dtype)
        if interleaved:
            return part.unfold(1, self.count, self.stride // self.step).permute(0, 3, 1, 2)
        return part.unfold(1, self.size, max(1, self.step // self.stride)).transpose(2, 3)

    def positions(self, device: torch.device) -> Tensor:
        block, token = torch.arange(self.count, device=device), torch.arange(self.size, device=device)
        return self.start + block[:, None] * self.step + token * self.stride


class Keys(Protocol):
    """Some keys of a tile, and the three products of attention with them.

    x is ``(heads, blocks, rows, d)`` in the dtype of accumulation, y and ``into`` are ``(B, H, n, d)``, and p is
    ``(heads, blocks, rows, width)``. ``heads`` are x's heads in y. ``own`` is the result of :meth:`of`.
    """

    @property
    def width(self) -> int:
        """Keys that each query row sees."""

    @property
    def masks(self) -> tuple[Mask, ...]:
        """Masks of the pairs that are not attended to; columns count from this object's first."""

    def positions(self, rows: Blocks, heads: Heads, device: torch.device) -> Tensor:
        """The positions of the keys that ``rows`` see, broadcastable to ``(heads, blocks, rows, width)``."""

    def of(self, y: Tensor, heads: Heads, rows: Blocks, dtype: torch.dtype) -> Tensor:
        """The part of y that ``rows`` see, laid out for the products."""

    def dot(self, x: Tensor, own: Tensor) -> Tensor:
        """Inner products of the rows with their keys, shaped as p."""

    def mix(self, p: Tensor, own: Tensor, out: Tensor | None) -> Tensor:
        """Each row's sum of its keys' y, weighted by p; shaped as x, in ``out`` if given."""

    def spread(self, p: Tensor, x: Tensor, into: Tensor, heads: Heads) -> None:
        """The transpose of :meth:`mix`: add p times the row's x to each of its keys."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows and all the keys that they see; the key sets must be disjoint."""

    rows: Blocks
    keys: tuple[Keys, ...]
    by_head: bool = False
    labels: tuple[Label, ...] = ()
    """The labels of pairs: a row's logit for the label is added to the score. Columns count over all ``keys``."""

    @property
    def scores(self) -> int:
        return self.rows.count * self.rows.size * sum(keys.width for keys in self.keys)

    def columns(self) -> Iterator[tuple[Keys, slice]]:
        first = 0
        for keys in self.keys:
            yield keys, slice(first, first + keys.width)
            first += keys.width


def minus_infinity(blocked: Tensor, like: Tensor) -> Tensor:
    """0 / -inf from a bool mask, in the accumulator of ``like``."""
    accumulate = accumulator(like.dtype)
    return torch.zeros(blocked.shape, dtype=accumulate, device=like.device).masked_fill_(blocked, float("-inf"))


def batches(first: int, stop: int, count: int) -> Iterator[tuple[int, int]]:
    """(start, length) of consecutive pieces of at most ``count`` in first .. stop - 1."""
    for start in range(first, stop, count):
        yield start, min(count, stop - start)
