"""Sparse Transformer attention: strided and fixed factorised patterns, both factors merged in one softmax."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench.attention.bands import ROWS, band, blocks_per_tile, triangle
from attnbench.attention.block_sparse import (
    Blocks,
    Heads,
    Keys,
    Mask,
    Shared,
    Tile,
    Window,
    attend,
    batches,
    minus_infinity,
)
from attnbench.errors import UsageError
from attnbench.shape import Shape
from attnbench.variant import No, Traits, register

_SUMMARY = 8


@register(
    "sparse",
    family="fixed pattern",
    source="Child et al. 2019, arXiv:1904.10509, sections 4.3 and 5.1",
    formula="softmax over A¹ ∪ A²; strided: i − l ≤ j ≤ i, or l | i − j; fixed: own block, or j mod l ≥ l − c",
    cost="O(n·√n·d)",
    time_exponent=1.5,
    memory_exponent=1.5,
    traits=Traits(cross=No("both patterns need queries and keys at the same positions")),
    settings=("length=4", "pattern=fixed,length=4,summary=1"),
)
class Sparse(nn.Module):
    """Sparse Transformer: a local part and a strided or summary part.

    With l = ``length`` (about √n) and j <= i throughout:

    - ``strided``: A¹ = {i - l .. i}, A² = {j : (i - j) mod l = 0};
    - ``fixed``: A¹ = {j : ⌊j / l⌋ = ⌊i / l⌋}, A² = {j : j mod l >= l - c}, c = ``summary``.

    Every head takes one softmax over the union (the paper's merged heads); a key that lies in both parts counts once.
    The patterns are causal by definition. Without ``causal`` the mask is symmetrised: i and j see one another where
    the later of them sees the earlier; so with ``fixed`` summary tokens see all that follows, the others only the
    summaries before them.

    q, k, v: ``(B, H, N, D)`` -> ``(B, H, N, D)``, any N. Time N·√N·D, or N·(l + c·N / l)·D. The paper's memory is
    that of its N·√N scores; here they exist for one tile at a time, forward and backward, which is O(N). (Strided, not
    causal and N not a multiple of l: k and v are copied to pad them.)
    Differs from the authors' code: there the strided window is l wide including i, here l + 1 as in the paper.

    Raises:
        UsageError: ``summary`` with ``pattern=strided``, or above ``length``.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        pattern: Annotated[Literal["strided", "fixed"], Field(description="strided | fixed")] = "strided",
        length: Annotated[int | None, Field(ge=1, description="stride or block length l; none: √seq_len")] = None,
        summary: Annotated[int, Field(ge=1, description="fixed: tokens c per block that later blocks see")] = _SUMMARY,
    ) -> None:
        super().__init__()
        if pattern == "strided" and summary != _SUMMARY:
            raise UsageError("sparse: summary belongs to pattern=fixed")
        if length is not None and pattern == "fixed" and summary > length:
            raise UsageError(f"sparse: summary={summary} does not fit into blocks of length={length}")
        self.causal = shape.causal
        self.pattern = pattern
        self.length = length or max(1, isqrt(shape.N))
        self.summary = min(summary, self.length)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        length = self.length
        if self.pattern == "fixed":
            return attend(q, k, v, _fixed(q, length, self.summary, self.causal), key_mask=key_mask)
        if not self.causal and (missing := -q.shape[2] % length):
            # Columns of equal length; the band never reaches the padding, and _Column masks its own.
            k, v = nn.functional.pad(k, (0, 0, 0, missing)), nn.functional.pad(v, (0, 0, 0, missing))
            key_mask = None if key_mask is None else nn.functional.pad(key_mask, (0, missing))
        return attend(q, k, v, _strided(q, length, self.causal), key_mask=key_mask)


def _strided(q: Tensor, length: int, causal: bool) -> Iterator[Tile]:
    n = q.shape[2]
    total = -(-n // length)

    def column(rows: Blocks) -> tuple[Keys, ...]:
        # The band holds the distances 0 and l already: blocks t - 1, t and (both ways) t + 1 are not in the column.
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

    def _columns(self, y: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
        blocks = Blocks(0, self.length, self.width, self.length).of(y, dtype)
        return blocks[:, :, self.residue : self.residue + rows].transpose(1, 2)

    def dot(self, x: Tensor, y: Tensor, heads: Heads) -> Tensor:
        columns = self._columns(y[heads], x.shape[2], x.dtype)
        return (x.transpose(1, 2) @ columns.transpose(2, 3)).transpose(1, 2)

    def mix(self, p: Tensor, y: Tensor, heads: Heads) -> Tensor:
        return (p.transpose(1, 2) @ self._columns(y[heads], p.shape[2], p.dtype)).transpose(1, 2)

    def spread(self, p: Tensor, x: Tensor, into: Tensor, heads: Heads) -> None:
        part = p.transpose(1, 2).transpose(2, 3) @ x.transpose(1, 2)
        self._columns(into[heads], x.shape[2], into.dtype).add_(part)


def _fixed(q: Tensor, length: int, summary: int, causal: bool) -> Iterator[Tile]:
    n = q.shape[2]
    total = n // length
    ordinary = length if causal else length - summary

    def earlier(t: int, count: int) -> tuple[Keys, ...]:
        """Summaries of the blocks before t .. t + count - 1."""
        if t + count < 2:
            return ()
        block = torch.arange(count, device=q.device)[:, None, None]
        other = torch.arange((count - 1) * summary, device=q.device) // summary
        masks = ((t * summary, minus_infinity(other >= block, q)),) if count > 1 else ()
        return (Shared(Blocks(length - summary, summary, t + count - 1, length), masks),)

    for start, size in batches(0, ordinary, ROWS):
        # Causal rows stop at their own last token, and see a triangle of their own columns.
        span = start + size if causal else length
        masks = triangle(q, start, size) if causal else ()
        most = blocks_per_tile(q, total, size * (span + total * summary))
        for t, count in batches(0, total, most):
            own = Window(Blocks(t * length, span, count, length), masks)
            yield Tile(Blocks(t * length + start, size, count, length), (own, *earlier(t, count)))
    if not causal:
        for t in range(total):
            everything_on = Window(Blocks(t * length, n - t * length))
            for start, size in batches((t + 1) * length - summary, (t + 1) * length, ROWS):
                yield Tile(Blocks(start, size), (everything_on, *earlier(t, 1)))
    for start, size in batches(total * length, n, ROWS):
        span = (start + size if causal else n) - total * length
        own = Window(Blocks(total * length, span), triangle(q, span - size, size) if causal else ())
        yield Tile(Blocks(start, size), (own, *earlier(total, 1)))
