"""Inputs that take turns, so that no call gets the inputs of the call before it.

Otherwise a call could return its last result. Two further copies of the inputs would spoil the caches that a call finds
warm, or fill the memory. So each input is a window into one stretch of memory that is a little longer than itself. The
windows begin at different tokens, so whatever stands at one place in one stands somewhere else in the others. They
share nearly all of their memory, have the same shape and strides, and begin at a boundary of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd, prod

import torch
from torch import Tensor

SEEN = 2
"""How many windows take turns while a call is timed. Until that is over, it sees no others."""
UNSEEN = 40
_ALIGNMENT = 64  # bytes
_SHARE = 8
"""Windows that take turns are an eighth of the tokens apart, so that even the means of their values differ."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of one shape into ``memory``, which is a little longer."""

    memory: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    step: int
    """How many numbers apart the windows at two neighbouring places are."""
    apart: int
    """How many places apart the two windows that take turns are."""

    @classmethod
    def into(cls, x: Tensor, more: Callable[[int], Tensor], *, tokens: int = -2) -> Windows:
        """Windows, the first of which is ``x``, in its own order of memory.

        Args:
            more: gives as many further numbers as it is asked for, for the end.
            tokens: the dimension of ``x`` along which its tokens stand.
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
