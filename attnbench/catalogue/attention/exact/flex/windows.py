"""Masks of places for FlexAttention: its blocks, and the pairs seen in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from attnbench.catalogue.engines.flex.blocks import BLOCK, listed
from attnbench.catalogue.engines.flex.kernel import Mod
from attnbench.contract.problem.visible import Visible

Blocks = NDArray[np.bool_]


class Pattern(ABC):
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
        full, some = self.blocks(N, M)
        if sink:
            some, M = with_sink(full, some, M)[1], M + 1
        rows, columns = (np.minimum(BLOCK, n - np.arange(0, n, BLOCK)) for n in (N, M))
        return int(rows @ some @ columns)

    def block_mask(
        self, N: int, M: int, device: torch.device, key_mask: Tensor | None, *, sink: bool = False
    ) -> BlockMask:
        """The block mask of N queries and M keys; with a key mask ``(B, M)`` every block is masked pair by pair.

        ``sink``: one key that all queries see stands behind the M others.
        """
        if key_mask is None:
            return _kept(self, N, M, device, sink=sink)
        (full, some), sees = self.blocks(N, M), self.sees(N, M, device)
        real = pad(key_mask, (0, 1), value=True) if sink else key_mask  # a sink is never padding
        asked = np.zeros_like(full), some
        return _listed(asked, lambda b, h, i, j: real[b, j] & sees(i, j), (N, M), device, sink=sink)


@lru_cache(maxsize=8)
def _kept(pattern: Pattern, N: int, M: int, device: torch.device, *, sink: bool) -> BlockMask:
    with torch.inference_mode(False):  # kept, and gradients may be wanted next time
        sees = pattern.sees(N, M, device)
        return _listed(pattern.blocks(N, M), lambda b, h, i, j: sees(i, j), (N, M), device, sink=sink)


def _listed(
    blocks: tuple[Blocks, Blocks], mod: Mod, lengths: tuple[int, int], device: torch.device, *, sink: bool
) -> BlockMask:
    N, M = lengths
    if sink:
        blocks = with_sink(*blocks, M)
        sees, place = mod, M
        mod, M = lambda b, h, i, j: (j == place) | sees(b, h, i, j), M + 1
    whole, every = (torch.from_numpy(x).to(device)[None, None] for x in blocks)
    return listed(whole, every, mod, (N, M))


def with_sink(full: Blocks, some: Blocks, keys: int) -> tuple[Blocks, Blocks]:
    """The same blocks with one further key behind the others that all queries see."""
    more = keys // BLOCK + 1 - full.shape[1]
    full, some = (np.pad(blocks, ((0, 0), (0, more)), constant_values=True) for blocks in (full, some))
    some[:, -1] = True
    return full, some


@dataclass(frozen=True)
class Places(Pattern):
    """The places that an axis ``mask``, causality and the first query's place leave."""

    visible: Visible

    def sees(self, N: int, M: int, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
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
class Windows(Pattern):
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
