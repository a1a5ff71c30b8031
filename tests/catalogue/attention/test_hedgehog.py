from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.kernel.hedgehog import Hedgehog
from attnbench.contract.problem.reference import masked_attention
from attnbench.contract.problem.shape import Shape

SHAPE = Shape(batch=2, heads=3, seq_len=23, head_dim=4)
CAUSAL = Shape(batch=2, heads=3, seq_len=23, head_dim=4, causal=True)
both = pytest.mark.parametrize("shape", [SHAPE, CAUSAL], ids=["all", "causal"])
HOLES = torch.arange(23) % 5 != torch.tensor([[0], [3]])


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-11)


def qkv(shape: Shape) -> list[Tensor]:
    return [torch.randn(shape.B, shape.H, n, shape.D, dtype=torch.float64) for n in (shape.N, shape.M, shape.M)]


def trained(shape: Shape, chunk: int | None = 5) -> Hedgehog:
    module = Hedgehog(shape, chunk=chunk).double()
    with torch.no_grad():
        for weight in module.parameters():
            weight += 0.5 * torch.randn_like(weight)
    return module


def by_hand(module: Hedgehog, q: Tensor, k: Tensor, v: Tensor, causal: bool, key_mask: Tensor | None = None) -> Tensor:
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            u, w = q[b, h] @ module.W_q[h].T, k[b, h] @ module.W_k[h].T
            phi_q, phi_k = (torch.cat([x.exp(), (-x).exp()], 1) for x in (u, w))
            phi_q, phi_k = (phi / phi.sum(1, keepdim=True) for phi in (phi_q, phi_k))
            weights = phi_q @ phi_k.T
            if causal:
                weights = weights.tril()
            if key_mask is not None:
                weights = weights * key_mask[b]
            total = weights.sum(1, keepdim=True)
            out[b, h] = weights @ v[b, h] / total.masked_fill(total == 0, 1.0)
    return out


@both
@pytest.mark.parametrize("chunk", [1, 7, 23, None])
def test_equals_the_formula_with_one_matrix_per_head(shape: Shape, chunk: int | None) -> None:
    module, inputs = trained(shape, chunk), qkv(shape)
    for key_mask in (None, HOLES):
        expected = by_hand(module, *inputs, shape.causal, key_mask)
        close(module(*inputs, key_mask=key_mask), expected)
        close(module.dense(*inputs, key_mask=key_mask), expected)


@both
def test_gradients_of_inputs_and_matrices_equal_those_of_the_formula(shape: Shape) -> None:
    module, inputs = trained(shape), [x.requires_grad_() for x in qkv(shape)]
    wanted, grad = [*inputs, *module.parameters()], torch.randn_like(inputs[0])
    mine = torch.autograd.grad(module(*inputs, key_mask=HOLES), wanted, grad)
    theirs = torch.autograd.grad(by_hand(module, *inputs, shape.causal, HOLES), wanted, grad)
    for one, other in zip(mine, theirs, strict=True):
        close(one, other)


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


def test_fitting_the_matrices_brings_it_closer_to_softmax_attention() -> None:
    shape = Shape(batch=1, heads=2, seq_len=16, head_dim=4)
    module, (q, k, v) = Hedgehog(shape).double(), qkv(shape)
    target = masked_attention(3 * q, k, v, torch.ones(16, 16, dtype=torch.bool))

    def error() -> Tensor:
        return (module(q, k, v) - target).square().mean()

    before = error().item()
    optimiser = torch.optim.Adam(module.parameters(), lr=0.05)
    for _ in range(60):
        optimiser.zero_grad()
        error().backward()
        optimiser.step()
    assert error().item() < 0.5 * before


def test_a_row_whose_products_all_underflow_is_not_a_number() -> None:
    q, k, v = (x.float() for x in qkv(SHAPE))
    q[..., 0], k[..., 1] = 1e4, 1e4
    out = Hedgehog(SHAPE)(q, k, v)
    assert out.isnan().all()
