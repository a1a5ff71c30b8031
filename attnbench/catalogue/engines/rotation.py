"""Rotary positions: pairs of channels turned by angles that grow with the position."""

from __future__ import annotations

from math import log2

import torch
from torch import Tensor, nn

from attnbench.catalogue.engines.precision import accumulator
from attnbench.errors import Unsupported


def frequencies(like: Tensor) -> Tensor:
    """10000^(-2c/D), the angles from one position to the next, ``(D/2,)``, float64."""
    D = like.shape[3]
    return torch.exp2(torch.arange(0, D, 2, device=like.device, dtype=torch.float64) * (-log2(10000.0) / D))


def angles(start: int, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of i·10000^(-2c/D) at the positions i from ``start`` on, ``(count, D/2)``."""
    theta, device = frequencies(like), like.device
    if count == 1:  # a step of decoding, where calls cost more than sines
        turn, dtype = (theta * start)[None], accumulator(like.dtype)
        return turn.cos().to(dtype), turn.sin().to(dtype)
    # exp(i(a + b)θ) as a product of two factors: sines cost more than all the rest.
    run = min(count, 64)
    coarse, fine = (
        torch.polar(torch.ones_like(angle), angle)
        for angle in (
            torch.arange(start, start + count, max(run, 1), device=device)[:, None] * theta,
            torch.arange(run, device=device)[:, None] * theta,
        )
    )
    both = torch.view_as_real(coarse[:, None] * fine).to(accumulator(like.dtype)).flatten(0, 1)[:count]
    return both[..., 0], both[..., 1]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x ``(..., n, D)``, channels c and c + D/2 turned by one angle."""
    real, imaginary = x.chunk(2, -1)
    turned = (real * cos).addcmul(imaginary, sin, value=-1), (real * sin).addcmul(imaginary, cos)
    return torch.cat(turned, -1)


class Rotary(nn.Module):
    """Turns queries and keys by their places; their products then depend on the distance of the places alone.

    Su et al. 2021, arXiv:2104.09864, equation 15.

    Args:
        length: most tokens of a sequence.
        width: D, even.

    Raises:
        Unsupported: D is odd.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        if width % 2:
            raise Unsupported(f"rotary positions turn pairs of channels, and head_dim {width} is odd")
        cos, sin = angles(0, length, torch.empty(1, 1, 1, width))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def make_room(self, more: int) -> None:
        """Turn so many more places."""
        length, half = self.cos.shape
        further = angles(length, more, self.cos.new_empty(1, 1, 1, 2 * half))
        self.cos, self.sin = (torch.cat(both) for both in zip((self.cos, self.sin), further, strict=True))

    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        """x ``(B, H, n, D)``, whose first token is at place ``first``; no place is beyond ``length``."""
        n = x.shape[-2]
        return rotate(x, self.cos.narrow(0, first, n), self.sin.narrow(0, first, n))
