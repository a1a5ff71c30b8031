"""What each query has chosen, as a selection: its pairs one by one for who asks, and attention to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnbench.engines.gathered.chosen import attend_to_chosen
from attnbench.engines.masks import emptied


@dataclass(frozen=True, slots=True)
class Choice:
    """The blocks of keys that each query has chosen, as :func:`attend_to_chosen` takes them."""

    chosen: Tensor
    """``(B, S, N, n)``, numbers of blocks, each at most once in a row; below 0: none."""
    heads: int
    """H, of queries; a multiple of S."""
    keys: int
    """M."""
    size: int = 1
    """Keys of a block; the last one may have fewer."""
    causal: bool = False
    real: Tensor | None = None
    """``(B, M)`` bool: the keys that are no padding; None where all are real."""

    def pairs(self, queries: slice) -> Tensor:
        """``(B, H, n, M)`` bool: the keys that each of these n queries attends to."""
        chosen, blocks = self.chosen[:, :, queries].long(), -(-self.keys // self.size)
        taken = torch.zeros(*chosen.shape[:3], blocks + 1, dtype=torch.bool, device=chosen.device)
        taken.scatter_(3, torch.where(chosen < 0, blocks, chosen), True)
        seen = taken[..., :blocks].repeat_interleave(self.size, 3)[..., : self.keys]
        seen = seen.repeat_interleave(self.heads // chosen.shape[1], 1)
        if self.causal:
            start, stop, _ = queries.indices(self.chosen.shape[2])
            i = torch.arange(start, stop, device=chosen.device)
            seen &= torch.arange(self.keys, device=chosen.device) <= i[:, None]
        return seen if self.real is None else seen & self.real[:, None, None]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Softmax attention of q ``(B, H, N, D)`` to what was chosen of k and v ``(B, K, M, ·)``."""
        k, v = emptied(self.real, k, v)
        own, causal = self.size, self.causal
        return attend_to_chosen(q, k, v, self.chosen, size=own, causal=causal, key_mask=self.real)
