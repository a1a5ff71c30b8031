"""Block masks for FlexAttention: which blocks of pairs it computes, in which it asks about every pair, and how."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from attnbench.engines.flex.kernel import Mod
from attnbench.engines.tiling import budget

BLOCK = 128
"""Queries and keys in a block, which is left out, computed whole, or computed with every pair asked about."""


class Seen(NamedTuple):
    """The pairs that count among n queries and n keys."""

    full: Tensor
    """``(B or 1, H or 1, Q, K)`` bool, the blocks whose every pair counts."""
    some: Tensor
    """The same of those with some pair that counts."""
    mod: Mod
    """Whether query i of head h of example b sees key j, from b, h, i and j."""
    n: int

    def mask(self, key_mask: Tensor | None) -> BlockMask:
        """The block mask; with a key mask ``(B, n)`` every pair of its blocks is asked about."""
        if key_mask is None:
            return listed(self.full, self.some, self.mod, (self.n, self.n))
        mod = asking(key_mask, self.mod)
        return listed(torch.zeros_like(self.full), self.some, mod, (self.n, self.n))

    def pairs(self, heads: int) -> int:
        """How many pairs the computed blocks hold, over ``heads`` heads of one example."""
        size = BLOCK - torch.zeros(self.some.shape[-1], dtype=torch.float64, device=self.some.device)
        size[-1] -= -self.n % BLOCK
        held = (self.some.double() @ size @ size).sum()
        return int(held * heads / self.some.shape[:2].numel())


def asking(key_mask: Tensor, mod: Mod) -> Mod:
    """The same pairs, without those of padded keys; ``key_mask`` is ``(B, n)``, or ``(1, n)`` for all examples."""
    if len(key_mask) == 1:
        return lambda b, h, i, j: key_mask[0, j] & mod(b, h, i, j)
    return lambda b, h, i, j: key_mask[b, j] & mod(b, h, i, j)


def by_places(sees: Callable[[Tensor, Tensor], Tensor], q: Tensor) -> Seen:
    """What counts by the places of a query and a key alone, for all heads, asked for some blocks of queries at a time.

    Args:
        sees: places of queries ``(r, 1)`` and of keys ``(n,)`` -> ``(r, n)`` bool; of one each for FlexAttention.
    """
    n = q.shape[2]
    j = torch.arange(n, dtype=torch.int32, device=q.device)
    rows = max(1, budget("flex.places", q.device) // (n * BLOCK)) * BLOCK
    full, some = [], []
    for i in torch.split(j, rows):
        seen = sees(i[:, None], j)
        inside = _in_blocks(seen, value=False), _in_blocks(seen, value=True)
        some.append(inside[0].any(3).any(1))
        full.append(inside[1].all(3).all(1))
    return Seen(torch.cat(full)[None, None], torch.cat(some)[None, None], lambda b, h, i, j: sees(i, j), n)


def _in_blocks(seen: Tensor, *, value: bool) -> Tensor:
    """``(Q, 128, K, 128)`` from ``(r, n)``, filled up with ``value``."""
    filled = pad(seen, (0, -seen.shape[1] % BLOCK, 0, -seen.shape[0] % BLOCK), value=value)
    return filled.view(-1, BLOCK, filled.shape[1] // BLOCK, BLOCK)


def listed(full: Tensor, some: Tensor, mod: Mod, lengths: tuple[int, int]) -> BlockMask:
    """A block mask from the blocks that are computed whole, and all that are computed, where pairs are asked about.

    Args:
        full, some: ``(B or 1, H or 1, Q, K)`` bool.
        lengths: of queries and keys.
    """
    # Blocks seen in full are given even where there are none: the code made for a CPU relies on it.
    asked, whole = _numbers(some & ~full), _numbers(full)
    return BlockMask.from_kv_blocks(*asked, *whole, BLOCK_SIZE=BLOCK, mask_mod=mod, seq_lengths=lengths)


def _numbers(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries has, and their numbers, before those of the others; int32."""
    return blocks.sum(-1, dtype=torch.int32), (~blocks).byte().argsort(dim=-1, stable=True).int()
