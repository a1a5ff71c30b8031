"""Inputs that take turns, so that no call gets the inputs of the call before it and could return its last result.

Further copies would spoil warm caches or fill the memory. So each input is a window into one slightly longer stretch of
memory, beginning at another token: the same address holds different values in each input. Windows share nearly all of
their memory, have the same shape and strides, and begin at a boundary of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd, prod

import torch
from torch import Tensor

SEEN = 2
"""Number of windows in turn while a call is timed. Until that is over, it sees no others."""
UNSEEN = 40
_ALIGNMENT = 64  # bytes
_SHARE = 8
"""Windows that take turns are an eighth of the tokens apart, so that even the means of their values differ."""


@dataclass(frozen=True, slots=True)
class MemoryWindows:
    """Windows of one shape into ``memory``, which is a little longer."""

    memory: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    step: int
    """Numbers between the windows at two neighbouring places."""
    apart: int
    """Places between the two windows that take turns."""

    @classmethod
    def into(cls, x: Tensor, more: Callable[[int], Tensor], *, tokens: int = -2) -> MemoryWindows:
        """Windows with ``x`` as the first, in its own order of memory; ``tokens`` is its dimension of tokens.

        ``more`` gives as many further numbers as it is asked for, for the end.
        """
        order = sorted(range(x.dim()), key=lambda dim: x.stride(dim), reverse=True)
        x = x.permute(order).contiguous().permute([order.index(dim) for dim in range(x.dim())])
        token = x.stride(tokens) if x.shape[tokens] > 1 else prod(x.shape[tokens:][1:])
        lines = _ALIGNMENT // gcd(_ALIGNMENT, token * x.itemsize)
        apart = max(2 * UNSEEN, x.shape[tokens] // _SHARE // lines)
        step = token * lines
        flat = x.permute(order).reshape(-1)
        end = flat[: apart * step] if 2 * apart * step <= flat.numel() else more(apart * step).to(flat)
        return cls(torch.cat([flat, end]), tuple(x.shape), tuple(x.stride()), step, apart)

    def at(self, number: int) -> Tensor:
        """The window of this number: below :data:`SEEN` one that takes turns, an unseen one for :data:`UNSEEN` more."""
        place = number * self.apart if number < SEEN else self.apart // 2 + number - SEEN
        return self.memory.as_strided(self.size, self.stride, place * self.step)
