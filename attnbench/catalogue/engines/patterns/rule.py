"""A fixed pattern as a selection: a rule on places alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rule:
    """A map from places to the keys that a query sees."""

    sees: Callable[[Tensor, Tensor], Tensor]
    keys: int
    device: torch.device

    def pairs(self, queries: slice) -> Tensor:
        start, stop, _ = queries.indices(self.keys)
        i = torch.arange(start, stop, device=self.device)[:, None]
        return self.sees(i, torch.arange(self.keys, device=self.device))[None, None]
