"""Sequences as short as those of the laws, which the tests of most variants draw."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.contract.problem.shape import Shape

SHAPE = Shape(batch=2, heads=3, seq_len=23, head_dim=4)
CAUSAL = Shape(batch=2, heads=3, seq_len=23, head_dim=4, causal=True)
HOLES = torch.arange(23) % 5 != torch.tensor([[1], [3]])
"""A key mask with padding between real tokens."""
both = pytest.mark.parametrize("shape", [SHAPE, CAUSAL], ids=["all", "causal"])


def qkv(shape: Shape) -> list[Tensor]:
    return [torch.randn(shape.B, shape.H, n, shape.D, dtype=torch.float64) for n in (shape.N, shape.M, shape.M)]


def tokens(shape: Shape) -> Tensor:
    return torch.randn(shape.B, shape.N, shape.C, dtype=torch.float64)


def mask() -> Tensor:
    """Padding at the end, a hole in the middle, and a sequence that begins with padding."""
    real = torch.ones(2, 23, dtype=torch.bool)
    real[0, -5:] = False
    real[0, 7] = False
    real[1, :4] = False
    return real


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-11)
