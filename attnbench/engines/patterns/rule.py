"""A fixed pattern as a selection: which pairs count, by their places alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rule:
    """Which keys a query sees, whatever it and they hold."""

    sees: Callable[[Tensor, Tensor], Tensor]
    """Places of queries ``(n, 1)`` and of keys ``(M,)`` -> ``(n, M)`` bool."""
    keys: int
    """M."""
    device: torch.device

    def pairs(self, queries: slice) -> Tensor:
        """``(1, 1, n, M)`` bool: the keys that each of these n queries attends to."""
        start, stop, _ = queries.indices(self.keys)
        i = torch.arange(start, stop, device=self.device)[:, None]
        return self.sees(i, torch.arange(self.keys, device=self.device))[None, None]
