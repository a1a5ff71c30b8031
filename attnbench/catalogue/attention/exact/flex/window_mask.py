"""Masks of places for FlexAttention: its blocks, and the pairs seen in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from attnbench.catalogue.engines.flex.block_mask import BLOCK, asking, listed
from attnbench.contract.problem.visible import Visible

Blocks = NDArray[np.bool_]


class PlacePattern(ABC):
    """The keys of M that each of N queries sees."""

    @abstractmethod
    def sees(self, N: int, M: int, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
        """A function for FlexAttention to compile: True if query i sees key j; its numbers become constants."""

    @abstractmethod
    def blocks(self, N: int, M: int) -> tuple[Blocks, Blocks]:
        """The blocks with all pairs seen, and those with any, ``(N / 128, M / 128)``."""

    @abstractmethod
    def seeing(self, key_mask: Tensor, N: int) -> Tensor:
        """The queries that see a real key, ``(B, 1, N, 1)`` bool."""

    def pairs(self, N: int, M: int, *, sink: bool = False) -> int:
        """Number of pairs in the computed blocks, those with a sink included."""
        return _blocks(self, N, M, sink=sink).pairs

    def block_mask(
        self, N: int, M: int, device: torch.device, key_mask: Tensor | None, *, sink: bool = False
    ) -> BlockMask:
        """The block mask of N queries and M keys; with a key mask ``(B, M)`` every block is masked pair by pair.

        ``sink``: one key that all queries see stands behind the M others.
        """
        mask = _kept(self, N, M, device, sink=sink, masked=key_mask is not None)
        if key_mask is not None:
            real = pad(key_mask, (0, 1), value=True) if sink else key_mask  # a sink is never padding
            seen, mask = mask.mask_mod, copy(mask)
            mask.mask_mod = asking(real, seen)
        return mask


class _SeenBlocks(NamedTuple):
    full: Blocks
    some: Blocks
    pairs: int
    """Number of pairs in the latter."""


@lru_cache(maxsize=8)
def _blocks(pattern: PlacePattern, N: int, M: int, *, sink: bool) -> _SeenBlocks:
    full, some = pattern.blocks(N, M)
    if sink:
        (full, some), M = with_sink(full, some, M), M + 1
    rows, columns = (np.minimum(BLOCK, n - np.arange(0, n, BLOCK)) for n in (N, M))
    return _SeenBlocks(full, some, int(rows @ some @ columns))


@lru_cache(maxsize=8)
def _kept(pattern: PlacePattern, N: int, M: int, device: torch.device, *, sink: bool, masked: bool) -> BlockMask:
    with torch.inference_mode(False):  # kept, and gradients may be wanted next time
        sees = pattern.sees(N, M, device)
        full, some = (torch.from_numpy(x).to(device)[None, None] for x in _blocks(pattern, N, M, sink=sink)[:2])

        def mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (j == M) | sees(i, j) if sink else sees(i, j)

        return listed(torch.zeros_like(full) if masked else full, some, mod, (N, M + sink))


def with_sink(full: Blocks, some: Blocks, keys: int) -> tuple[Blocks, Blocks]:
    """The same blocks with one further key behind the others that all queries see."""
    more = keys // BLOCK + 1 - full.shape[1]
    full, some = (np.pad(blocks, ((0, 0), (0, more)), constant_values=True) for blocks in (full, some))
    some[:, -1] = True
    return full, some


@dataclass(frozen=True)
class Places(PlacePattern):
    """The places that an axis ``mask``, causality and the first query's place leave."""

    visible: Visible

    def sees(self, N: int, M: int, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
        if self.visible == Visible():
            return lambda i, j: i >= 0
        if self.visible == Visible(causal=True):
            return lambda i, j: i >= j
        first, stop = self.visible.spans(slice(0, N), M, device)
        return lambda i, j: (first[i] <= j) & (j < stop[i])

    def blocks(self, N: int, M: int) -> tuple[Blocks, Blocks]:
        full, some = np.zeros((2, -(-N // BLOCK), -(-M // BLOCK)), dtype=np.bool_)
        for row, start in enumerate(range(0, N, BLOCK)):
            queries = slice(start, min(start + BLOCK, N))
            of_some, of_all = self.visible.seen_by_some(queries, M), self.visible.seen_by_all(queries, M)
            some[row, of_some.start // BLOCK : -(-of_some.stop // BLOCK)] = True
            stop = full.shape[1] if of_all.stop == M else of_all.stop // BLOCK  # the last block may have fewer keys
            full[row, -(-of_all.start // BLOCK) : stop] = True
        return full & some, some

    def seeing(self, key_mask: Tensor, N: int) -> Tensor:
        return self.visible.seeing(key_mask, N)


@dataclass(frozen=True)
class WindowPattern(PlacePattern):
    """A sliding window and global tokens, of as many queries as keys."""

    window: int
    """Token i sees i - window .. i + window."""
    global_tokens: int
    """First tokens that see every token and are seen by every token."""
    causal: bool
    """Token i sees no token after i."""

    def sees(self, N: int, M: int, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
        window, first = self.window, self.global_tokens
        if self.causal:
            return lambda i, j: (j <= i) & ((i - j <= window) | (j < first))
        return lambda i, j: ((i - j <= window) & (j - i <= window)) | (i < first) | (j < first)

    def blocks(self, N: int, M: int) -> tuple[Blocks, Blocks]:
        starts = np.arange(0, N, BLOCK)
        ends = np.minimum(starts + BLOCK, N) - 1
        least, most = starts[:, None] - ends, ends[:, None] - starts  # distances i - j in a block
        inside, touching = ends < self.global_tokens, starts < self.global_tokens
        full = (least >= -self.window) & (most <= self.window) | inside | inside[:, None]
        some = (most >= -self.window) & (least <= self.window) | touching | touching[:, None]
        return (full & (least >= 0), some & (most >= 0)) if self.causal else (full, some)

    def seeing(self, key_mask: Tensor, N: int) -> Tensor:
        count = pad(key_mask.cumsum(1), (1, 0))
        i = torch.arange(N, device=key_mask.device)
        stop = (i + 1 + (0 if self.causal else self.window)).clamp(max=N)
        seen = count[:, stop] > count[:, (i - self.window).clamp(min=0)]
        seen |= count[:, stop.clamp(max=self.global_tokens)] > 0
        if not self.causal:
            seen |= (count[:, min(N, self.global_tokens), None] > 0) | ((i < self.global_tokens) & (count[:, -1:] > 0))
        return seen[:, None, :, None]
