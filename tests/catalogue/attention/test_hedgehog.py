from __future__ import annotations

import pytest
import torch

from attnbench.catalogue.attention.kernel.hedgehog import Hedgehog
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import CAUSAL, HOLES, SHAPE, both, close, qkv


def trained(shape: Shape, chunk: int | None = 5) -> Hedgehog:
    module = Hedgehog(shape, chunk=chunk).double()
    with torch.no_grad():
        for weight in module.parameters():
            weight += 0.5 * torch.randn_like(weight)
    return module


@both
@pytest.mark.parametrize("chunk", [1, 7, 23, None])
def test_equals_the_formula_with_one_matrix_per_head(shape: Shape, chunk: int | None) -> None:
    module, inputs = trained(shape, chunk), qkv(shape)
    for key_mask in (None, HOLES):
        close(module(*inputs, key_mask=key_mask), module.dense(*inputs, key_mask=key_mask))


def test_it_starts_as_the_identity() -> None:
    module, (q, k, v) = Hedgehog(SHAPE).double(), qkv(SHAPE)
    phi_q, phi_k = (torch.cat([x, -x], -1).softmax(-1) for x in (q, k))
    weights = phi_q @ phi_k.mT
    close(module(q, k, v), weights @ v / weights.sum(-1, keepdim=True))


def test_large_features_do_not_overflow() -> None:
    q, _, v = (x.float() for x in qkv(CAUSAL))
    out = Hedgehog(CAUSAL)(200 * q, 200 * q, v)
    assert out.isfinite().all()
    torch.testing.assert_close(out[:, :, 0], v[:, :, 0])


def test_a_row_whose_products_all_underflow_is_not_a_number() -> None:
    q, k, v = (x.float() for x in qkv(SHAPE))
    q[..., 0], k[..., 1] = 1e4, 1e4
    out = Hedgehog(SHAPE)(q, k, v)
    assert out.isnan().all()
