"""Block masks for FlexAttention: blocks of pairs left out, computed whole, or masked pair by pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from attnbench.catalogue.engines.flex.flex_attention import Mod
from attnbench.catalogue.engines.tiling import budget

BLOCK = 128
"""Queries and keys in a block."""


class Seen(NamedTuple):
    """The pairs that count among n queries and n keys."""

    full: Tensor
    """``(B or 1, H or 1, Q, K)`` bool, the blocks with every pair."""
    some: Tensor
    """Like ``full``, the blocks with any pair."""
    mod: Mod
    """Maps b, h, i and j to True if query i of head h of example b sees key j."""
    n: int

    def mask(self, key_mask: Tensor | None) -> BlockMask:
        """The block mask; with a key mask ``(B, n)`` every pair of its blocks is asked about."""
        if key_mask is None:
            return listed(self.full, self.some, self.mod, (self.n, self.n))
        mod = asking(key_mask, self.mod)
        return listed(torch.zeros_like(self.full), self.some, mod, (self.n, self.n))

    def pairs(self, heads: int) -> int:
        """Number of pairs in the computed blocks, over ``heads`` heads of one example."""
        size = BLOCK - torch.zeros(self.some.shape[-1], dtype=torch.float64, device=self.some.device)
        size[-1] -= -self.n % BLOCK
        held = (self.some.double() @ size @ size).sum()
        return int(held * heads / self.some.shape[:2].numel())


def asking(key_mask: Tensor, mod: Mod) -> Mod:
    """``mod`` without the pairs of padded keys; ``key_mask`` is ``(B, n)``, or ``(1, n)`` for all examples."""
    if len(key_mask) == 1:
        return lambda b, h, i, j: key_mask[0, j] & mod(b, h, i, j)
    return lambda b, h, i, j: key_mask[b, j] & mod(b, h, i, j)


def by_places(sees: Callable[[Tensor, Tensor], Tensor], q: Tensor) -> Seen:
    """The pairs of a pattern that depends on places alone, asked for some blocks of queries at a time.

    ``sees`` maps places of queries ``(r, 1)`` and of keys ``(n,)`` to ``(r, n)`` bool; FlexAttention gives one of each.
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
    filled = pad(seen, (0, -seen.shape[1] % BLOCK, 0, -seen.shape[0] % BLOCK), value=value)
    return filled.view(-1, BLOCK, filled.shape[1] // BLOCK, BLOCK)


def listed(full: Tensor, some: Tensor, mod: Mod, lengths: tuple[int, int]) -> BlockMask:
    """A block mask from the blocks computed whole and all computed blocks, ``(B or 1, H or 1, Q, K)`` bool."""
    # Whole blocks are given even if there are none: the code generated for a CPU relies on it.
    asked, whole = _numbers(some & ~full), _numbers(full)
    return BlockMask.from_kv_blocks(*asked, *whole, BLOCK_SIZE=BLOCK, mask_mod=mod, seq_lengths=lengths)


def _numbers(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return blocks.sum(-1, dtype=torch.int32), (~blocks).byte().argsort(dim=-1, stable=True).int()
