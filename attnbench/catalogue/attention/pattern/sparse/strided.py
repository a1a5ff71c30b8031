"""The strided pattern: the tokens before, and every l-th."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnbench.catalogue.engines.decoding import kv_cache
from attnbench.catalogue.engines.decoding.kv_cache import Cache
from attnbench.catalogue.engines.patterns.bands import ROWS, band, triangle
from attnbench.catalogue.engines.patterns.keys import Window
from attnbench.catalogue.engines.patterns.tiles import Blocks, Heads, Keys, Mask, Tile, batches, minus_infinity
from attnbench.catalogue.engines.tiling import tile_scores


class Strided:
    """A¹ ∪ A², in one softmax; ``near`` is A¹ and ``far`` A², for tokens i and j <= i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def near(self, i: Tensor, j: Tensor) -> Tensor:
        return i - j <= self.length

    def far(self, i: Tensor, j: Tensor) -> Tensor:
        return (i - j) % self.length == 0

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        return self.near(i, j) | self.far(i, j)

    def padding(self, n: int, causal: bool) -> int:
        """Keys to add behind the n of a sequence, which no token may see."""
        return 0 if causal else -n % self.length  # columns are equally long then, and each masks its own

    def tiles(self, q: Tensor, causal: bool) -> Iterator[Tile]:
        """A band of l before (and after), and every l-th token."""
        n, length = q.shape[2], self.length
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
            return (_ColumnKeys(length, residue, width, masks),)

        # A column is one small product per residue; with few rows in it, reading its keys would dominate.
        return band(q, (length, 0 if causal else length), step=length, also=column, least=16)

    def begin(self, k: Tensor, v: Tensor, tokens: int) -> Cache:
        """Decoding: every key is seen again l tokens later."""
        return Cache.of(k, v, tokens)

    def step(self, state: Cache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Cache]:
        """The keys and values that the token of k and v sees, in order, and the state with it."""
        parts, state = self._parts(state.length), state.append(k, v)
        return kv_cache.pick(state.keys, parts), kv_cache.pick(state.values, parts), state

    def _parts(self, t: int) -> list[slice]:
        first = max(0, t - self.length)
        return [slice(t % self.length, first, self.length), slice(first, t + 1)]


class Stride(Strided):
    """A² alone."""

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        return self.far(i, j)

    def padding(self, n: int, causal: bool) -> int:
        return 0

    def tiles(self, q: Tensor, causal: bool) -> Iterator[Tile]:
        length = self.length
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

    def _parts(self, t: int) -> list[slice]:
        return [slice(t % self.length, t + 1, self.length)]


@dataclass(frozen=True, slots=True)
class _ColumnKeys:
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
