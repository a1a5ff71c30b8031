from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.kernel.taylor import Taylor, TaylorFeatures
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import HOLES, close

SHAPE = Shape(batch=2, heads=2, seq_len=23, head_dim=11)  # a block of eight channels and one of three
CAUSAL = Shape(batch=2, heads=2, seq_len=23, head_dim=11, causal=True)
both = pytest.mark.parametrize("shape", [SHAPE, CAUSAL], ids=["all", "causal"])


def qkv(shape: Shape, scale: float = 1.0) -> list[Tensor]:
    sizes = (shape.N, shape.M, shape.M)
    q, k, v = (torch.randn(shape.B, shape.H, n, shape.D, dtype=torch.float64) for n in sizes)
    return [scale * q, scale * k, v]


@both
@pytest.mark.parametrize("chunk", [1, 7, 23, None])
def test_equals_three_terms_of_the_series_for_every_chunk(shape: Shape, chunk: int | None) -> None:
    module, inputs = Taylor(shape, chunk=chunk), qkv(shape)
    for key_mask in (None, HOLES):
        close(module(*inputs, key_mask=key_mask), module.dense(*inputs, key_mask=key_mask))


@pytest.mark.parametrize(("head_dim", "width"), [(1, 3), (4, 21), (8, 73), (11, 109), (64, 2369)])
def test_products_of_features_are_the_series_and_pairs_are_counted_once(head_dim: int, width: int) -> None:
    features = TaylorFeatures(head_dim)
    x, y = (torch.randn(1, 5, head_dim, dtype=torch.float64) for _ in range(2))
    phi_x, phi_y = (torch.full((1, 5, features.width), torch.nan, dtype=torch.float64) for _ in range(2))
    features.queries(x, phi_x)
    features.keys(y, phi_y)
    s = x @ y.mT / head_dim**0.5
    assert features.width == width
    close(phi_x @ phi_y.mT, 1 + s + s**2 / 2)
