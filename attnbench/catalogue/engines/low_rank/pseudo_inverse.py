"""The pseudo-inverse of small matrices by Newton's iteration."""

from __future__ import annotations

import torch
from torch import Tensor

from attnbench.catalogue.engines.products import best_for


def newton(A: Tensor, Z: Tensor, iterations: int) -> Tensor:
    """Nearly the pseudo-inverse of A ``(..., R, S)``: ``iterations`` steps of third order from Z ``(..., S, R)``."""
    size = (*A.shape[:-2], *Z.shape[-2:])
    A, Z = A.reshape(-1, *A.shape[-2:]), Z.expand(size).reshape(-1, *Z.shape[-2:])
    with best_for(A, Z):
        for _ in range(iterations):
            AZ = torch.bmm(A, Z)
            # Z·(13 - AZ·(15 - AZ·(7 - AZ)))/4 without the identity written out.
            inner = torch.baddbmm(AZ, AZ, AZ, beta=7, alpha=-1)
            inner = torch.baddbmm(AZ, AZ, inner, beta=15, alpha=-1)
            Z = torch.baddbmm(Z, Z, inner, beta=13 / 4, alpha=-1 / 4)
    return Z.view(size)
