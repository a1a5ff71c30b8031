from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.kernel.lara import LARA
from attnbench.contract.problem.shape import Shape

SHAPE = Shape(batch=2, heads=3, seq_len=23, head_dim=8)
OPTIONS = ({}, {"query_term": 0.0}, {"query_term": 0.5, "sampled": False}, {"query_term": 0.0, "sampled": False})
options = pytest.mark.parametrize("option", OPTIONS, ids=str)


def qkv(shape: Shape = SHAPE, scale: float = 1.0) -> list[Tensor]:
    sizes = ((shape.N, shape.D), (shape.M, shape.D), (shape.M, shape.D))
    q, k, v = (torch.randn(shape.B, shape.H, *size, dtype=torch.float64) for size in sizes)
    return [q * scale, k * scale, v]


def runs(x: Tensor, count: int) -> list[Tensor]:
    """Means of runs whose lengths differ by at most one, longer ones first."""
    short, longer = divmod(len(x), count)
    lengths = [short + 1] * longer + [short] * (count - longer)
    return [part.mean(0) for part in x.split(lengths)]


def by_hand(model: LARA, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """One query, one sample, one density at a time, by the words of the docstring."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    D = q.shape[3]
    for b in range(q.shape[0]):
        real = torch.arange(k.shape[2]) if key_mask is None else key_mask[b].nonzero()[:, 0]
        for h in range(q.shape[1]):
            x, y = q[b, h] / D**0.25, k[b, h, real] / D**0.25
            if len(y) == 0:
                continue
            counted = x[real] if q.shape[2] == k.shape[2] else x
            near_x = runs(counted, min(model.landmarks, len(counted)))
            near_y = runs(y, min(model.landmarks, len(y)))
            pairs = list(zip(near_x, near_y, strict=False))
            mu = [one + other for one, other in pairs]
            omega = [m + model.noise[c] for c, m in enumerate(mu)]
            for n in range(len(x)):
                closeness = torch.stack([x[n] @ one for one, _ in pairs]).softmax(0)
                weights = torch.zeros(len(y), dtype=torch.float64)
                for c, w in enumerate(omega):
                    densities = [math.exp(-float((w - m) @ (w - m)) / 2) for m in mu]
                    alpha = densities[c] / sum(densities)
                    alpha += model.query_term * (float(closeness[c]) - 1 / len(mu))
                    normal = math.exp(-float(w @ w) / 2)
                    xi = torch.exp(x[n] @ w - x[n] @ x[n] / 2) * torch.exp(y @ w - (y * y).sum(1) / 2)
                    weights += max(alpha, 0.0) * normal / densities[c] * xi
                out[b, h, n] = weights @ v[b, h, real] / weights.sum()
    return out


@options
@pytest.mark.parametrize("landmarks", [1, 4, 23, 40])
@pytest.mark.parametrize("padded", [False, True])
def test_equals_the_formula_sample_by_sample(option: dict[str, float], landmarks: int, padded: bool) -> None:
    shape = Shape(2, 1, 13, 4)
    model = LARA(shape, landmarks=landmarks, **option).double()  # type: ignore[arg-type]
    inputs = qkv(shape)
    key_mask = torch.rand(2, 13) < 0.6 if padded else None
    expected, out, dense = (f(*inputs, key_mask=key_mask) for f in (partial(by_hand, model), model, model.dense))
    real = torch.ones(2, 13, dtype=torch.bool) if key_mask is None else key_mask
    for each in (out, dense):  # of padded tokens it may be anything
        assert torch.allclose(each.transpose(1, 2)[real], expected.transpose(1, 2)[real], atol=1e-10)


@options
@pytest.mark.parametrize(("N", "M"), [(5, 9), (9, 5), (2, 9), (9, 2)])
def test_cross_attention_pairs_runs_by_number(option: dict[str, float], N: int, M: int) -> None:
    shape = Shape(2, 1, N, 4, kv_len=M)
    model = LARA(shape, landmarks=4, **option).double()  # type: ignore[arg-type]
    inputs = qkv(shape)
    for key_mask in (None, torch.arange(M) < torch.tensor([[1], [M]])):
        expected = by_hand(model, *inputs, key_mask)
        assert torch.allclose(model(*inputs, key_mask=key_mask), expected, atol=1e-10)
        assert torch.allclose(model.dense(*inputs, key_mask=key_mask), expected, atol=1e-10)


def test_the_balance_heuristic_is_unbiased_for_the_denominators_of_softmax() -> None:
    # With V the identity the output is normalised; the sums before that are read off the formula by hand.
    draws, D, C = 40_000, 4, 3
    torch.manual_seed(1)
    x, y = (torch.rand(7, D, dtype=torch.float64) * 0.8 for _ in range(2))
    mu = torch.stack(runs(x, C)) + torch.stack(runs(y, C))
    omega = mu + torch.randn(draws, C, D, dtype=torch.float64)
    density = (-(omega[:, :, None] - mu).square().sum(-1) / 2).exp().sum(-1)
    ratio = (-omega.square().sum(-1) / 2).exp() / density
    xi_x, xi_y = ((omega @ z.T - z.square().sum(1) / 2).exp() for z in (x, y))
    estimates = torch.einsum("sc,scn,scm->snm", ratio, xi_x, xi_y)
    standard_error = estimates.std(0) / draws**0.5
    assert ((estimates.mean(0) - (x @ y.T).exp()).abs() < 4.5 * standard_error).all()
    # And the module divides exactly such sums.
    model = LARA(Shape(1, 1, 7, D), landmarks=C, query_term=0.0).double()
    model.noise = (omega - mu)[0]
    v = torch.randn(1, 1, 7, D, dtype=torch.float64)
    expected = estimates[0] / estimates[0].sum(1, keepdim=True) @ v[0, 0]
    q, k = ((z * D**0.25)[None, None] for z in (x, y))
    assert torch.allclose(model(q, k, v)[0, 0], expected, atol=1e-12)


@options
def test_large_logits_give_finite_outputs_and_gradients(option: dict[str, float]) -> None:
    inputs = [x.float().requires_grad_() for x in qkv(scale=12.0)]
    out = LARA(SHAPE, landmarks=5, **option)(*inputs)  # type: ignore[arg-type]
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), inputs))
