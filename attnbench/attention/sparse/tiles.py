"""Tiles of the Sparse Transformer's patterns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnbench.engines.patterns.bands import ROWS, band, blocks_per_tile, triangle
from attnbench.engines.patterns.keys import Shared, Window
from attnbench.engines.patterns.tiles import Blocks, Heads, Keys, Mask, Tile, batches, minus_infinity
from attnbench.engines.tiling import tile_scores


def strided(q: Tensor, length: int, causal: bool) -> Iterator[Tile]:
    """A band of ``length`` before (and after), and every ``length``-th token; k and v are padded to whole blocks."""
    n = q.shape[2]
    total = -(-n // length)

    def column(rows: Blocks) -> tuple[Keys, ...]:
        # The band already holds the distances 0 and l: blocks t - 1, t and (both ways) t + 1 are not in the column.
        t, residue = divmod(rows.start, length)
        width = t + rows.count - 2 if causal else total
        if width < 1 or total < 3:
            return ()
        first = max(0, t - 1)
        block = torch.arange(t, t + rows.count, device=q.device)[:, None, None]
        other = torch.arange(first, min(width, t + rows.count + 1), device=q.device)
        blocked = other > block - 2 if causal else (other - block).abs() < 2
        masks: tuple[Mask, ...] = ((first, minus_infinity(blocked, q)),) if first < width else ()
        if not causal and n % length:
            beyond = torch.arange(residue, residue + rows.size, device=q.device)[None, :, None] >= n % length
            masks += ((width - 1, minus_infinity(beyond, q)),)
        return (_Column(length, residue, width, masks),)

    # A column is one small product per residue; with few rows in it, reading its keys would dominate.
    return band(q, before=length, after=0 if causal else length, step=length, also=column, least=16)


@dataclass(frozen=True, slots=True)
class _Column:
    """Row r of each query block sees row residue + r of the first ``width`` blocks of ``length`` keys."""

    length: int
    residue: int
    width: int
    masks: tuple[Mask, ...]

    def positions(self, rows: Blocks, heads: Heads, device: torch.device) -> Tensor:
        row = self.residue + torch.arange(rows.size, device=device)
        return (row[:, None] + torch.arange(self.width, device=device) * self.length)[None, None]

    def _columns(self, y: Tensor, heads: Heads, rows: int, dtype: torch.dtype) -> Tensor:
        return Blocks(self.residue, self.width, rows, 1, self.length).of(y, heads, dtype)

    def of(self, y: Tensor, heads: Heads, rows: Blocks, dtype: torch.dtype) -> Tensor:
        return self._columns(y, heads, rows.size, dtype)

    def dot(self, x: Tensor, own: Tensor) -> Tensor:
        return (x.transpose(1, 2) @ own.transpose(2, 3)).transpose(1, 2)

    def mix(self, p: Tensor, own: Tensor, out: Tensor | None) -> Tensor:
        sums = (p.transpose(1, 2) @ own).transpose(1, 2)
        return sums if out is None else out.copy_(sums)

    def spread(self, p: Tensor, x: Tensor, into: Tensor, heads: Heads) -> None:
        part = p.transpose(1, 2).transpose(2, 3) @ x.transpose(1, 2)
        self._columns(into, heads, x.shape[2], into.dtype).add_(part)


def stride(q: Tensor, length: int, causal: bool) -> Iterator[Tile]:
    """Token i sees the tokens j with (i - j) mod ``length`` = 0."""
    whole, longer = divmod(q.shape[2], length)
    for first, last, size in ((0, longer, whole + 1), (longer, length, whole)):
        if last == first or size == 0:
            continue
        for start, rows in batches(0, size, ROWS):
            span = start + rows if causal else size
            masks = triangle(q, start, rows) if causal else ()
            most = max(1, tile_scores(q) // (rows * span))
            for residue, count in batches(first, last, most):
                # Blocks are residue classes: block t has the tokens residue + t, residue + t + length, ...
                keys = Window(Blocks(residue, span, count, 1, length), masks)
                yield Tile(Blocks(residue + start * length, rows, count, 1, length), (keys,))


def _summaries(q: Tensor, length: int, summary: int, t: int, count: int) -> tuple[Keys, ...]:
    """The summaries of earlier blocks, for each of the blocks t .. t + count - 1."""
    if t + count < 2:
        return ()
    block = torch.arange(count, device=q.device)[:, None, None]
    other = torch.arange((count - 1) * summary, device=q.device) // summary
    masks = ((t * summary, minus_infinity(other >= block, q)),) if count > 1 else ()
    return (Shared(Blocks(length - summary, summary, t + count - 1, length), masks),)


def fixed(q: Tensor, length: int, summary: int, causal: bool) -> Iterator[Tile]:
    """Each token's own block, and the last ``summary`` tokens of the blocks before it."""
    n = q.shape[2]
    total = n // length
    ordinary = length if causal else length - summary
    for start, size in batches(0, ordinary, ROWS):
        # If causal, rows stop at their own last token and see a triangle of their own columns.
        span = start + size if causal else length
        masks = triangle(q, start, size) if causal else ()
        most = blocks_per_tile(q, total, size * (span + total * summary))
        for t, count in batches(0, total, most):
            own = Window(Blocks(t * length, span, count, length), masks)
            earlier = _summaries(q, length, summary, t, count)
            yield Tile(Blocks(t * length + start, size, count, length), (own, *earlier))
    if not causal:
        for t in range(total):
            everything_on = Window(Blocks(t * length, n - t * length))
            for start, size in batches((t + 1) * length - summary, (t + 1) * length, ROWS):
                yield Tile(Blocks(start, size), (everything_on, *_summaries(q, length, summary, t, 1)))
    for start, size in batches(total * length, n, ROWS):
        span = (start + size if causal else n) - total * length
        own = Window(Blocks(total * length, span), triangle(q, span - size, size) if causal else ())
        yield Tile(Blocks(start, size), (own, *_summaries(q, length, summary, total, 1)))


def summaries(q: Tensor, length: int, summary: int, causal: bool) -> Iterator[Tile]:
    """Only the last ``summary`` tokens of each block; a token before the first of them sees itself."""
    n = q.shape[2]
    total = n // length
    ordinary = length - summary
    if alone := min(ordinary, n):
        yield Tile(Blocks(0, 1, alone), (Window(Blocks(0, 1, alone)),))
    for start, size in batches(0, ordinary, ROWS):
        most = blocks_per_tile(q, total, size * max(1, total * summary))
        for t, count in batches(1, total, most):
            earlier = _summaries(q, length, summary, t, count)
            yield Tile(Blocks(t * length + start, size, count, length), earlier)
    if total:
        for start, size in batches(total * length, min(n, total * length + ordinary), ROWS):
            yield Tile(Blocks(start, size), _summaries(q, length, summary, total, 1))
    if causal:
        for start, size in batches(ordinary, length, ROWS):
            masks = triangle(q, start - ordinary, size)
            span = start - ordinary + size
            most = blocks_per_tile(q, total, size * (span + total * summary))
            for t, count in batches(0, total, most):
                own = Window(Blocks(t * length + ordinary, span, count, length), masks)
                earlier = _summaries(q, length, summary, t, count)
                yield Tile(Blocks(t * length + start, size, count, length), (own, *earlier))
    for t in range(total if causal else 0, total + 1):
        first, stop = t * length + ordinary, min(n, (t + 1) * length)
        for start, size in batches(first, stop, ROWS):
            span = (start + size if causal else n) - first
            own = Window(Blocks(first, span), triangle(q, span - size, size) if causal else ())
            yield Tile(Blocks(start, size), (own, *_summaries(q, length, summary, t, 1)))
