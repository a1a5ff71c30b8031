"""The fixed pattern: a token's own block, and the last tokens of each block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from attnbench.catalogue.engines.decoding.kv_cache import Cache
from attnbench.catalogue.engines.patterns.bands import ROWS, blocks_per_tile, triangle
from attnbench.catalogue.engines.patterns.keys import SharedKeys, Window
from attnbench.catalogue.engines.patterns.tiles import Blocks, Keys, Tile, batches, minus_infinity


class Summaries(NamedTuple):
    """The state of decoding."""

    summaries: Cache
    """The summary tokens; of :class:`Fixed` those of whole blocks only."""
    block: Cache
    """The block that is not yet whole, for :class:`Fixed`; else empty."""
    length: int

    @property
    def overwrites(self) -> tuple[str, ...]:
        return ("block",)


class Fixed:
    """A¹ ∪ A², in one softmax; ``near`` is A¹ and ``far`` A², for tokens i and j <= i."""

    def __init__(self, length: int, summary: int) -> None:
        self.length, self.summary = length, summary
        self.ordinary = length - summary

    def near(self, i: Tensor, j: Tensor) -> Tensor:
        return i // self.length == j // self.length

    def far(self, i: Tensor, j: Tensor) -> Tensor:
        return j % self.length >= self.ordinary

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        return self.near(i, j) | self.far(i, j)

    def padding(self, n: int, causal: bool) -> int:
        return 0

    def tiles(self, q: Tensor, causal: bool) -> Iterator[Tile]:
        n, length, summary = q.shape[2], self.length, self.summary
        total = n // length
        for start, size in batches(0, length if causal else self.ordinary, ROWS):
            # If causal, rows stop at their own last token and see a triangle of their own columns.
            span = start + size if causal else length
            masks = triangle(q, start, size) if causal else ()
            most = blocks_per_tile(q, total, size * (span + total * summary))
            for t, count in batches(0, total, most):
                own = Window(Blocks(t * length, span, count, length), masks)
                yield Tile(Blocks(t * length + start, size, count, length), (own, *self._earlier(q, t, count)))
        if not causal:
            for t in range(total):
                everything_on = Window(Blocks(t * length, n - t * length))
                for start, size in batches(t * length + self.ordinary, (t + 1) * length, ROWS):
                    yield Tile(Blocks(start, size), (everything_on, *self._earlier(q, t)))
        for start, size in batches(total * length, n, ROWS):
            span = (start + size if causal else n) - total * length
            own = Window(Blocks(total * length, span), triangle(q, span - size, size) if causal else ())
            yield Tile(Blocks(start, size), (own, *self._earlier(q, total)))

    def _earlier(self, q: Tensor, t: int, count: int = 1) -> tuple[Keys, ...]:
        if t + count < 2:
            return ()
        block = torch.arange(count, device=q.device)[:, None, None]
        other = torch.arange((count - 1) * self.summary, device=q.device) // self.summary
        masks = ((t * self.summary, minus_infinity(other >= block, q)),) if count > 1 else ()
        return (SharedKeys(Blocks(self.ordinary, self.summary, t + count - 1, self.length), masks),)

    def begin(self, k: Tensor, v: Tensor, tokens: int) -> Summaries:
        """Decoding keeps one block and the summaries of those before it."""
        n = k.shape[2]
        return self._begin(k, v, tokens, n - n % self.length, self.length)

    def _begin(self, k: Tensor, v: Tensor, tokens: int, whole: int, block: int) -> Summaries:
        blocks, rest = divmod(tokens, self.length)
        room = blocks * self.summary + max(0, rest - self.ordinary)
        kept = torch.arange(whole, device=k.device) % self.length >= self.ordinary
        summaries = Cache.of(k[:, :, :whole][:, :, kept], v[:, :, :whole][:, :, kept], room)
        return Summaries(summaries, Cache.of(k[:, :, whole:], v[:, :, whole:], block), k.shape[2])

    def step(self, state: Summaries, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Summaries]:
        """The keys and values that the token of k and v sees, in order, and the state with it."""
        summaries, block, t = state
        block = block.append(k, v)
        keys, values = torch.cat([summaries.keys, block.keys], 2), torch.cat([summaries.values, block.values], 2)
        if block.length == self.length:
            for i in range(self.ordinary, self.length):
                summaries = summaries.append(block.k[:, :, i : i + 1], block.v[:, :, i : i + 1])
            block = block._replace(length=0)
        return keys, values, Summaries(summaries, block, t + 1)


class SummaryTokens(Fixed):
    """A² alone; a token without any sees itself."""

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        return self.far(i, j) | (i == j) & (i < self.ordinary)

    def tiles(self, q: Tensor, causal: bool) -> Iterator[Tile]:
        n, length, summary, ordinary = q.shape[2], self.length, self.summary, self.ordinary
        total = n // length
        if alone := min(ordinary, n):
            yield Tile(Blocks(0, 1, alone), (Window(Blocks(0, 1, alone)),))
        for start, size in batches(0, ordinary, ROWS):
            most = blocks_per_tile(q, total, size * max(1, total * summary))
            for t, count in batches(1, total, most):
                yield Tile(Blocks(t * length + start, size, count, length), self._earlier(q, t, count))
        if total:
            for start, size in batches(total * length, min(n, total * length + ordinary), ROWS):
                yield Tile(Blocks(start, size), self._earlier(q, total))
        if causal:
            for start, size in batches(ordinary, length, ROWS):
                masks = triangle(q, start - ordinary, size)
                span = start - ordinary + size
                most = blocks_per_tile(q, total, size * (span + total * summary))
                for t, count in batches(0, total, most):
                    own = Window(Blocks(t * length + ordinary, span, count, length), masks)
                    yield Tile(Blocks(t * length + start, size, count, length), (own, *self._earlier(q, t, count)))
        for t in range(total if causal else 0, total + 1):
            first, stop = t * length + ordinary, min(n, (t + 1) * length)
            for start, size in batches(first, stop, ROWS):
                span = (start + size if causal else n) - first
                own = Window(Blocks(first, span), triangle(q, span - size, size) if causal else ())
                yield Tile(Blocks(start, size), (own, *self._earlier(q, t)))

    def begin(self, k: Tensor, v: Tensor, tokens: int) -> Summaries:
        return self._begin(k, v, tokens, k.shape[2], 0)

    def step(self, state: Summaries, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Summaries]:
        summaries, block, t = state
        if t % self.length >= self.ordinary:
            summaries = summaries.append(k, v)
        keys, values = (summaries.keys, summaries.values) if summaries.length else (k, v)
        return keys, values, Summaries(summaries, block, t + 1)
