"""Rotary positions: pairs of channels turned by angles that grow with the position."""

from __future__ import annotations

from math import log2

import torch
from torch import Tensor

from attnbench.engines.precision import accumulator


def angles(start: int, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of i·10000^(-2c/D) at the positions i from ``start`` on, ``(count, D/2)``."""
    D, device = like.shape[3], like.device
    theta = torch.exp2(torch.arange(0, D, 2, device=device, dtype=torch.float64) * (-log2(10000.0) / D))
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
