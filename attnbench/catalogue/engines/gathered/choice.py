"""The keys that each query has chosen, as a selection, and attention to them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from attnbench.catalogue.engines.blocks.selection import BlockSelection, Grid
from attnbench.catalogue.engines.flex.block_mask import Seen
from attnbench.catalogue.engines.flex.pair_pattern import FlexPattern
from attnbench.catalogue.engines.gathered.chosen import attend_to_chosen
from attnbench.catalogue.engines.masks import emptied


@dataclass(frozen=True)
class Choice:
    """Chosen blocks of keys for each query, as :func:`attend_to_chosen` takes them."""

    chosen: Tensor
    """``(B, S, N, n)``, numbers of blocks, distinct in a row; below 0: none."""
    heads: int
    keys: int
    size: int = 1
    """Keys of a block; the last one may have fewer."""
    causal: bool = False
    real: Tensor | None = None

    def pairs(self, queries: slice) -> Tensor:
        chosen = self.chosen[:, :, queries]
        seen = self._taken(chosen).repeat_interleave(self.size, 3)[..., : self.keys]
        seen = seen.repeat_interleave(self.heads // chosen.shape[1], 1)
        if self.causal:
            start, stop, _ = queries.indices(self.chosen.shape[2])
            i = torch.arange(start, stop, device=chosen.device)
            seen &= torch.arange(self.keys, device=chosen.device) <= i[:, None]
        return seen if self.real is None else seen & self.real[:, None, None]

    def of(self, B: int, H: int, N: int) -> Choice:
        if (len(self.chosen), self.heads, self.keys) == (B, H, N):
            return self
        part = self.chosen[:B, : H * self.chosen.shape[1] // self.heads, :N]
        real = None if self.real is None else self.real[:B, :N]
        return Choice(torch.where(part * self.size < N, part, -1), H, N, self.size, self.causal, real)

    @cached_property
    def block_mask(self) -> BlockMask:
        B, S, N = self.chosen.shape[:3]
        grid = Grid(1, self.size, self._taken(self.chosen))
        seen, share = BlockSelection((B, S, N), self.causal, (grid,)).seen(), self.heads // S
        full, some = (blocks.repeat_interleave(share, 1) for blocks in seen[:2])
        of_heads = Seen(full, some, lambda b, h, i, j: seen.mod(b, h // share, i, j), N)
        return of_heads.mask(self.real)

    def _taken(self, chosen: Tensor) -> Tensor:
        blocks = -(-self.keys // self.size)
        taken = torch.zeros(*chosen.shape[:3], blocks + 1, dtype=torch.bool, device=chosen.device)
        taken.scatter_(3, torch.where(chosen < 0, blocks, chosen).long(), True)
        return taken[..., :blocks]

    def attend_in_form(self, flex: FlexPattern, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def plain(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
            return self.of(*q.shape[:3]).attend(q, k, v)

        def masks(q: Tensor, key_mask: Tensor | None) -> tuple[BlockMask, None]:
            return self.of(*q.shape[:3]).block_mask, None

        return flex.over(plain, masks, q, k, v, key_mask=self.real)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = emptied(self.real, k, v)
        return attend_to_chosen(q, k, v, self.chosen, size=self.size, causal=self.causal, key_mask=self.real)
