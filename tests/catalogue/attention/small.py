"""Sequences as short as those of the laws, which the tests of most variants draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from attnbench.catalogue.build import build
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.measure.memory import peak_tensor_bytes

Made = TypeVar("Made", bound=nn.Module)

SHAPE = Shape(batch=2, heads=3, seq_len=23, head_dim=4)
CAUSAL = Shape(batch=2, heads=3, seq_len=23, head_dim=4, causal=True)
HOLES = torch.arange(23) % 5 != torch.tensor([[0], [3]])
"""A key mask with padding between real tokens, and at a first one."""
both = pytest.mark.parametrize("shape", [SHAPE, CAUSAL], ids=["all", "causal"])


def built(kind: type[Made], text: str | Spec, shape: Shape, /, *, seed: int = 0, **options: Any) -> Made:
    module = build(text, shape, seed=seed, **options)
    assert isinstance(module, kind)
    return module


def peak_of(call: Callable[[], object]) -> int:
    peak = peak_tensor_bytes(call)
    assert peak is not None
    return peak


def qkv(shape: Shape, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    sizes = ((shape.H, shape.N, shape.D), (shape.K, shape.M, shape.D), (shape.K, shape.M, shape.E))
    return [torch.randn(shape.B, *size, dtype=dtype) for size in sizes]


def draw(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64)


def tokens(shape: Shape) -> Tensor:
    return draw(shape.B, shape.N, shape.C)


def mask() -> Tensor:
    """Padding at the end, a hole in the middle, and a sequence that begins with padding."""
    real = torch.ones(2, 23, dtype=torch.bool)
    real[0, -5:] = False
    real[0, 7] = False
    real[1, :4] = False
    return real


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
