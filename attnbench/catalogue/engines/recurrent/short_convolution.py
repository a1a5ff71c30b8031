"""A convolution over the last few tokens, channel by channel, as recurrent layers have it in front of their state."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad

from attnbench.catalogue.engines import forms
from attnbench.catalogue.engines.precision import accumulator

Width = Annotated[int, Field(ge=1, description="tokens under the short convolution, the token itself included")]
"""The option of all layers that have one."""


class Remembered(NamedTuple):
    """A recurrence's state and recent tokens."""

    state: Tensor
    """``(B, H, rows, E)`` of all heads, float32 at least."""
    last: Tensor
    """The last tokens that the convolution still reads, ``(B, few, ·)``; zeros in front of the first."""


class ShortConvolution(nn.Module):
    """y_t = Σ_s w_s ⊙ x_{t-s} + b over 0 <= s < width, ``(B, N, channels)``; outside of the sequence stand zeros.

    ``weight`` ``(channels, width)`` has the token's own column last; b is there if ``bias``. Both are drawn from
    U(-1/√width, 1/√width), as PyTorch draws them for a depthwise convolution.
    """

    at_once = True

    def __init__(self, channels: int, width: int, *, bias: bool = False) -> None:
        super().__init__()
        self.before, self.after = width - 1, 0
        self.weight = nn.Parameter(torch.empty(channels, width).uniform_(-1, 1) * width**-0.5)
        self.b = nn.Parameter(torch.empty(channels).uniform_(-1, 1) * width**-0.5) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if not x.shape[1]:
            return x
        return self.inside(pad(x.mT, (self.before, self.after)), x.dtype)

    def inside(self, channels: Tensor, out: torch.dtype) -> Tensor:
        """Windows of channels ``(B, channels, n)`` that lie inside, as tokens ``(B, n - width + 1, channels)``."""
        dtype = accumulator(out)
        weight, b = self._numbers(channels)
        y = conv1d(channels.to(dtype), weight[:, None], b, groups=len(weight)).mT
        # What rounds it may as well turn it round: a kernel would copy channels whose tokens lie side by side.
        return y.to(out, memory_format=torch.contiguous_format) if forms.on_device(y) else y.to(out)

    def _numbers(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        dtype = accumulator(x.dtype)
        return self.weight.to(dtype), None if self.b is None else self.b.to(dtype)

    def begin(self, x: Tensor) -> Tensor:
        """The last ``width - 1`` of the tokens ``(B, n, channels)``, n >= 0, with zeros in front of the first."""
        missing = max(0, self.before - x.shape[1])
        return pad(x[:, max(0, x.shape[1] - self.before) :], (0, 0, missing, 0)).clone()

    def step(self, last: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The next outputs and the last tokens, for tokens x ``(B, n, channels)``."""
        window, (weight, b) = torch.cat((last, x), 1), self._numbers(x)
        if x.shape[1] > 1:
            y = conv1d(window.to(weight.dtype).mT, weight[:, None], groups=len(weight)).mT
        else:
            y = (window.to(weight.dtype) * weight.mT).sum(1, keepdim=True)
        return (y if b is None else y + b).to(x.dtype), window[:, x.shape[1] :]
