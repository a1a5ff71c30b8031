"""The keys that a tile's rows see, and the products of attention with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnbench.catalogue.engines.patterns.tiles import Blocks, Heads, Mask
from attnbench.catalogue.engines.products import bmm, laid_out
from attnbench.catalogue.engines.tiling import large_steps, row_blocks


# By bmm, since matmul copies a single transposed matrix in four dimensions.
def inner_products(x: Tensor, own: Tensor) -> Tensor:
    """``(heads, blocks, rows, width)`` from x ``(heads, blocks, rows, d)`` and own ``(heads·blocks, width, d)``."""
    return bmm(x.flatten(0, 1), own.transpose(1, 2)).view(*x.shape[:3], -1)


def weighted_sums(p: Tensor, own: Tensor, out: Tensor | None = None) -> Tensor:
    """``(heads, blocks, rows, d)`` from p ``(heads, blocks, rows, width)`` and own ``(heads·blocks, width, d)``."""
    if out is not None:
        bmm(p.flatten(0, 1), own, out=out.flatten(0, 1))
        return out
    return bmm(p.flatten(0, 1), own).view(*p.shape[:3], -1)


def sums_by_key(p: Tensor, x: Tensor) -> Tensor:
    """``(heads, blocks, width, d)`` from p ``(heads, blocks, rows, width)`` and x ``(heads, blocks, rows, d)``."""
    return bmm(p.flatten(0, 1).transpose(1, 2), x.flatten(0, 1)).view(*p.shape[:2], p.shape[3], -1)


class _OwnBlock:
    __slots__ = ()

    def dot(self, x: Tensor, own: Tensor) -> Tensor:
        return inner_products(x, own)

    def mix(self, p: Tensor, own: Tensor, out: Tensor | None) -> Tensor:
        return weighted_sums(p, own, out)


@dataclass(frozen=True, slots=True)
class Window(_OwnBlock):
    """The queries of block t see the keys of block t."""

    blocks: Blocks
    masks: tuple[Mask, ...] = ()

    @property
    def width(self) -> int:
        return self.blocks.size

    def positions(self, rows: Blocks, heads: Heads, device: torch.device) -> Tensor:
        return self.blocks.positions(device)[None, :, None]

    def of(self, y: Tensor, heads: Heads, rows: Blocks, dtype: torch.dtype) -> Tensor:
        return laid_out(self.blocks.of(y, heads, dtype).flatten(0, 1))

    def spread(self, p: Tensor, x: Tensor, into: Tensor, heads: Heads) -> None:
        _add(self.blocks, sums_by_key(p, x), into, heads)


def _add(b: Blocks, sums: Tensor, into: Tensor, heads: Heads) -> None:
    target = b.of(into, heads)
    apart = b.count == 1 or b.step < b.stride
    # No piece of a block is longer than the step, so that it does not overlap the same piece of other blocks.
    for piece in (slice(None),) if apart else row_blocks(b.size, b.step // b.stride):
        target[:, :, piece].add_(sums[:, :, piece])


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """Every query of the tile sees the keys of every one of these blocks."""

    blocks: Blocks
    masks: tuple[Mask, ...] = ()

    @property
    def width(self) -> int:
        return self.blocks.count * self.blocks.size

    def positions(self, rows: Blocks, heads: Heads, device: torch.device) -> Tensor:
        return self.blocks.positions(device).view(1, 1, 1, -1)

    def of(self, y: Tensor, heads: Heads, rows: Blocks, dtype: torch.dtype) -> Tensor:
        return laid_out(self.blocks.of(y, heads, dtype).flatten(1, 2))

    def dot(self, x: Tensor, own: Tensor) -> Tensor:
        return inner_products(x.flatten(1, 2)[:, None], own).view(*x.shape[:3], self.width)

    def mix(self, p: Tensor, own: Tensor, out: Tensor | None) -> Tensor:
        into = None if out is None else out.flatten(1, 2)[:, None]
        return weighted_sums(p.flatten(1, 2)[:, None], own, into).view(*p.shape[:3], own.shape[-1])

    def spread(self, p: Tensor, x: Tensor, into: Tensor, heads: Heads) -> None:
        keys = sums_by_key(p.flatten(1, 2)[:, None], x.flatten(1, 2)[:, None])
        self.blocks.of(into, heads).add_(keys.view(-1, self.blocks.count, self.blocks.size, x.shape[3]))


@dataclass(frozen=True, slots=True)
class Beside(_OwnBlock):
    """The queries of block t see the keys of block t of ``own``, and every query those of ``shared``.

    Both are copied side by side for a single product, in place of two products with joined scores.
    """

    own: Blocks
    shared: Blocks
    masks: tuple[Mask, ...] = ()

    @property
    def width(self) -> int:
        return self.own.size + self.shared.count * self.shared.size

    def positions(self, rows: Blocks, heads: Heads, device: torch.device) -> Tensor:
        own, shared = self.own.positions(device), self.shared.positions(device).view(1, -1)
        return torch.cat([own, shared.expand(len(own), -1)], 1)[None, :, None]

    def of(self, y: Tensor, heads: Heads, rows: Blocks, dtype: torch.dtype) -> Tensor:
        own, shared = self.own.of(y, heads, dtype), self.shared.of(y, heads, dtype).flatten(1, 2)[:, None]
        return torch.cat([own, shared.expand(-1, own.shape[1], -1, -1)], 2).flatten(0, 1)

    def spread(self, p: Tensor, x: Tensor, into: Tensor, heads: Heads) -> None:
        sums, size = sums_by_key(p, x), self.own.size
        _add(self.own, sums[:, :, :size], into, heads)
        shared = self.shared.of(into, heads)
        shared.add_(sums[:, :, size:].sum(1).view(shared.shape))


@dataclass(frozen=True, slots=True)
class Gathered(_OwnBlock):
    """Each query block of each head sees the blocks of ``size`` keys in its row of ``table`` (H, blocks, picks)."""

    table: Tensor
    size: int
    masks = ()

    @property
    def width(self) -> int:
        return self.table.shape[2] * self.size

    def positions(self, rows: Blocks, heads: Heads, device: torch.device) -> Tensor:
        head = torch.arange(heads[1].start, heads[1].stop, device=device) % len(self.table)
        tokens = self.table[head][..., None] * self.size + torch.arange(self.size, device=device)
        return tokens.flatten(2)[:, :, None]

    def _picked(self, heads: Heads, whole: int) -> Tensor:
        """Indices of the blocks seen, where the ``whole`` blocks of each of ``heads`` lie end to end."""
        first, stop = heads[1].start, heads[1].stop
        if stop == first + 1:
            return self.table[first % len(self.table)].flatten()
        head = torch.arange(first, stop, device=self.table.device)
        picked: Tensor = self.table[head % len(self.table)] + (head - first)[:, None, None] * whole
        return picked.flatten()

    def of(self, y: Tensor, heads: Heads, rows: Blocks, dtype: torch.dtype) -> Tensor:
        whole = y.shape[2] // self.size
        blocks = y[heads][:, : whole * self.size].reshape(-1, self.size * y.shape[3])
        picked = blocks.index_select(0, self._picked(heads, whole)).to(dtype)
        return picked.view(-1, self.width, y.shape[3])

    def spread(self, p: Tensor, x: Tensor, into: Tensor, heads: Heads) -> None:
        b, some = heads
        size, d = self.size, into.shape[3]
        whole = into.shape[2] // size
        parts = sums_by_key(p, x)
        if some.stop > some.start + 1 and into.shape[2] % size == 0 and into.is_contiguous():
            blocks = into[heads].view(-1, size * d)  # of all heads, end to end
            blocks.index_add_(0, self._picked(heads, whole), parts.view(-1, size * d))
            return
        if large_steps(into):  # all heads in one step, token by token, since their blocks do not lie end to end
            each = torch.arange(some.start, some.stop, device=into.device)
            first = self.table[each % len(self.table)] * size + (each - each[0])[:, None, None] * into.shape[2]
            tokens = (first[..., None] + torch.arange(size, device=into.device)).flatten()
            into[heads].view(-1, d).index_add_(0, tokens, parts.view(-1, d))
            return
        for head, part in zip(range(some.start, some.stop), parts, strict=True):
            blocks = into[b, head, : whole * size].view(whole, size * d)
            blocks.index_add_(0, self._picked((b, slice(head, head + 1)), whole), part.view(-1, size * d))
