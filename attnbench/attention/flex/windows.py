"""A sliding window and global tokens for FlexAttention: which blocks it computes, and which pairs in them it sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from attnbench.engines.flex.blocks import BLOCK, listed

Blocks = NDArray[np.bool_]


@dataclass(frozen=True)
class Windows:
    """Which keys a query sees."""

    window: int
    """Token i sees i - window .. i + window."""
    global_tokens: int
    """How many first tokens see every token and are seen by every token."""
    causal: bool
    """Whether token i sees only those of all these up to i."""

    def sees(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Whether query i sees key j, as a function for FlexAttention to compile; its numbers become constants."""
        window, first = self.window, self.global_tokens
        if self.causal:
            return lambda i, j: (j <= i) & ((i - j <= window) | (j < first))
        return lambda i, j: ((i - j <= window) & (j - i <= window)) | (i < first) | (j < first)

    def blocks(self, n: int) -> tuple[Blocks, Blocks]:
        """For n tokens, the blocks whose every pair is seen, and those with some pair seen, ``(n / 128, n / 128)``."""
        starts = np.arange(0, n, BLOCK)
        ends = np.minimum(starts + BLOCK, n) - 1
        least, most = starts[:, None] - ends, ends[:, None] - starts  # distances i - j in a block
        inside, touching = ends < self.global_tokens, starts < self.global_tokens
        full = (least >= -self.window) & (most <= self.window) | inside | inside[:, None]
        some = (most >= -self.window) & (least <= self.window) | touching | touching[:, None]
        return (full & (least >= 0), some & (most >= 0)) if self.causal else (full, some)

    def pairs(self, n: int, *, sink: bool = False) -> int:
        """How many pairs of n tokens, and of them and a sink, the computed blocks hold."""
        return pairs_in(self.blocks(n), (n, n), sink=sink)

    def block_mask(self, n: int, device: torch.device, key_mask: Tensor | None, *, sink: bool = False) -> BlockMask:
        """The block mask for n queries and keys; a key mask ``(B, n)`` is asked in every block."""
        if key_mask is None:
            return _kept(self, n, device, sink=sink)
        full, some = self.blocks(n)
        sees, real = self.sees(), real_keys(key_mask, sink=sink)
        asked = np.zeros_like(full)
        return listed_blocks(asked, some, lambda b, h, i, j: real[b, j] & sees(i, j), (n, n), device, sink=sink)

    def seeing(self, key_mask: Tensor) -> Tensor:
        """Which queries see a real key, ``(B, 1, N, 1)`` bool."""
        n = key_mask.shape[1]
        count = torch.nn.functional.pad(key_mask.cumsum(1), (1, 0))
        i = torch.arange(n, device=key_mask.device)
        stop = (i + 1 + (0 if self.causal else self.window)).clamp(max=n)
        seen = count[:, stop] > count[:, (i - self.window).clamp(min=0)]
        seen |= count[:, stop.clamp(max=self.global_tokens)] > 0
        if not self.causal:
            seen |= (count[:, min(n, self.global_tokens), None] > 0) | ((i < self.global_tokens) & (count[:, -1:] > 0))
        return seen[:, None, :, None]


@lru_cache(maxsize=8)
def _kept(windows: Windows, n: int, device: torch.device, *, sink: bool) -> BlockMask:
    sees = windows.sees()
    full, some = windows.blocks(n)
    with torch.inference_mode(False):  # kept, and gradients may be wanted next time
        return listed_blocks(full, some, lambda b, h, i, j: sees(i, j), (n, n), device, sink=sink)


def with_sink(full: Blocks, some: Blocks, keys: int) -> tuple[Blocks, Blocks]:
    """The same blocks where one key that all queries see stands behind the others."""
    more = keys // BLOCK + 1 - full.shape[1]
    full, some = (np.pad(blocks, ((0, 0), (0, more)), constant_values=True) for blocks in (full, some))
    some[:, -1] = True
    return full, some


def real_keys(key_mask: Tensor, *, sink: bool) -> Tensor:
    """The key mask of all keys, the sink's among them, which is never padding."""
    return torch.nn.functional.pad(key_mask, (0, 1), value=True) if sink else key_mask


def pairs_in(blocks: tuple[Blocks, Blocks], lengths: tuple[int, int], *, sink: bool) -> int:
    """How many pairs of queries and keys the computed blocks hold."""
    (N, M), some = lengths, blocks[1]
    if sink:
        some, M = with_sink(*blocks, M)[1], M + 1
    rows, columns = (np.minimum(BLOCK, n - np.arange(0, n, BLOCK)) for n in (N, M))
    return int(rows @ some @ columns)


def listed_blocks(
    full: Blocks,
    some: Blocks,
    mod: Callable[..., Tensor],
    lengths: tuple[int, int],
    device: torch.device,
    *,
    sink: bool = False,
) -> BlockMask:
    """A block mask from the blocks that are computed whole, and all that are computed, where pairs are asked about.

    Args:
        mod: whether a query sees a key.
        lengths: N and M.
        sink: whether one key that all queries see stands behind the M others.
    """
    N, M = lengths
    if sink:
        full, some = with_sink(full, some, M)
        sees, place = mod, M
        mod, M = lambda b, h, i, j: (j == place) | sees(b, h, i, j), M + 1
    whole, every = (torch.from_numpy(x).to(device)[None, None] for x in (full, some))
    return listed(whole, every, mod, (N, M))
