from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.kernel.favor_plus_plus import FavorPlusPlus, inverse_rho
from attnbench.catalogue.attention.kernel.performer import Performer
from attnbench.catalogue.engines import tiling
from attnbench.catalogue.engines.linear.random_maps import Projection, draw_projection
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import mask, qkv

SHAPE = Shape(batch=2, heads=3, seq_len=23, head_dim=8)
CAUSAL = Shape(batch=2, heads=3, seq_len=23, head_dim=8, causal=True)
both = pytest.mark.parametrize("shape", [SHAPE, CAUSAL], ids=["all", "causal"])


def by_hand(model: FavorPlusPlus, inputs: list[Tensor], causal: bool, key_mask: Tensor | None) -> Tensor:
    """Example by example and head by head, padding cut out."""
    q, k, v = inputs
    D, omega = q.shape[-1], model.projection.double()
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        real = torch.arange(k.shape[2]) if key_mask is None else key_mask[b].nonzero()[:, 0]
        rows = real if key_mask is not None and q.shape[2] == k.shape[2] else torch.arange(q.shape[2])
        for h in range(q.shape[1]):
            x, y = q[b, h] / D**0.25, k[b, h, real] / D**0.25
            S = torch.cdist(x[rows], -y).square().mean()
            if causal:
                S = torch.tensor(2 * D**0.5, dtype=torch.float64)
            if model.spread is not None:
                S = torch.tensor(model.spread, dtype=torch.float64)
            rho = (((D + 2 * S) ** 2 + 8 * D * S).sqrt() - D - 2 * S) / (4 * S)
            A = (1 - 1 / rho) / 8
            f = [
                (A * (omega * omega).sum(1) + (1 - 4 * A).sqrt() * (z @ omega.T) - (z * z).sum(1)[:, None] / 2).exp()
                for z in (x, y)
            ]
            weights = f[0] @ f[1].T
            if causal:
                weights = weights * (torch.arange(len(x))[:, None] >= real)
            total = weights.sum(1, keepdim=True)
            out[b, h] = weights @ v[b, h, real] / torch.where(total == 0, 1.0, total)
    return out


@both
@pytest.mark.parametrize("chunk", [1, 5, 64, None])
@pytest.mark.parametrize("spread", [None, 4.0])
@pytest.mark.parametrize("padded", [False, True])
def test_equals_the_dense_formula_for_every_chunk(
    shape: Shape, chunk: int | None, spread: float | None, padded: bool
) -> None:
    model = FavorPlusPlus(shape, features=11, chunk=chunk, spread=spread)
    inputs, key_mask = qkv(shape), mask() if padded else None
    expected = by_hand(model, inputs, shape.causal, key_mask)
    assert torch.allclose(model(*inputs, key_mask=key_mask), expected, atol=1e-11)
    assert torch.allclose(model.dense(*inputs, key_mask=key_mask), expected, atol=1e-11)


@pytest.mark.parametrize("kv_len", [9, 31])
def test_keys_of_another_length_count_as_pairs_with_every_query(kv_len: int) -> None:
    shape = Shape(2, 3, 23, 8, kv_len=kv_len)
    model = FavorPlusPlus(shape, features=11)
    inputs, key_mask = qkv(shape), torch.rand(2, kv_len) < 0.7
    expected = by_hand(model, inputs, False, key_mask)
    assert torch.allclose(model(*inputs, key_mask=key_mask), expected, atol=1e-11)
    assert torch.allclose(model.dense(*inputs, key_mask=key_mask), expected, atol=1e-11)


Q = torch.tensor([[0.5, 0.2, 0.4, 0.3], [-0.1, 0.9, 0.2, 0.2]], dtype=torch.float64)[None, None]
K = torch.tensor([[0.3, 0.6, 0.1, 0.7], [0.4, -0.8, 0.3, 0.1], [0.5, 0.2, 0.4, 0.3]], dtype=torch.float64)[None, None]


@pytest.mark.parametrize("projection", ["iid", "orthogonal"])
@pytest.mark.parametrize("spread", [None, 0.0, 3.0])
def test_products_are_unbiased_and_of_the_variance_in_closed_form(projection: Projection, spread: float | None) -> None:
    draws = 100_000
    model = FavorPlusPlus(Shape(1, 1, 2, 4, kv_len=3), features=4, projection=projection, spread=spread).double()
    variance = model.kernel_variance(Q, K)
    model.projection = draw_projection(4 * draws, 4, projection).double().view(draws, 1, 4, 4)
    estimates = model.kernel(Q, K)
    standard_error = estimates.std(0) / draws**0.5
    assert ((estimates.mean(0) - (Q @ K.mT / 2).exp()[0]).abs() < 4 * standard_error).all()
    assert (variance is None) == (projection == "orthogonal")
    if variance is not None:
        assert torch.allclose(estimates.var(0), variance[0], rtol=0.06)


@pytest.mark.parametrize(("head_dim", "expected"), [(16, 8.9), (64, 14.3)])
def test_relative_variance_is_the_known_one_and_below_that_of_positive_features(head_dim: int, expected: float) -> None:
    shape = Shape(1, 1, 1, head_dim)
    q = torch.randn(1, 1, 1, head_dim, dtype=torch.float64)
    k = torch.randn(1, 1, 1, head_dim, dtype=torch.float64)
    length = (q + k).norm() * head_dim**-0.25
    q, k = (x * 2.96**0.5 / length for x in (q, k))
    truth = math.exp(2 * float((q * k).sum()) / head_dim**0.5)
    tuned = FavorPlusPlus(shape, features=1, projection="iid").kernel_variance(q, k)
    plain = Performer(shape, features=1, projection="iid").kernel_variance(q, k)
    assert tuned is not None
    assert plain is not None
    assert float(tuned) / truth == pytest.approx(expected, abs=0.06)
    assert float(plain) / truth == pytest.approx(18.3, abs=0.06)


@pytest.mark.parametrize("head_dim", [1, 4, 64])
@pytest.mark.parametrize("spread", [0.05, 1.0, 16.0, 300.0])
def test_the_parameter_is_where_the_variance_is_least(head_dim: int, spread: float) -> None:
    t = float(inverse_rho(torch.tensor(spread, dtype=torch.float64), head_dim))

    def log_second_moment(t: float) -> float:
        A = (1 - t) / 8
        exponent = 2 * (1 - 4 * A) / (1 - 8 * A) * spread
        return head_dim * math.log(1 - 4 * A) - head_dim / 2 * math.log(1 - 8 * A) + exponent

    least = log_second_moment(t)
    assert t > 1
    for other in (1.0, 1 + 0.99 * (t - 1), 1 + 1.01 * (t - 1), 2 * t):
        assert log_second_moment(other) > least


def test_no_spread_gives_the_positive_features_of_the_performer() -> None:
    q, k, v = qkv(SHAPE)
    mine, theirs = FavorPlusPlus(SHAPE, features=16, spread=0.0), Performer(SHAPE, features=16)
    theirs.projection.copy_(mine.projection)
    assert torch.allclose(mine(q, k, v), theirs(q, k, v), atol=1e-12)


def test_the_causal_spread_is_the_mean_for_standard_normal_inputs() -> None:
    q, k, _ = (x.expand(*x.shape) for x in qkv(Shape(1, 1, 4000, 8)))
    x, y = q[0, 0] * 8**-0.25, k[0, 0] * 8**-0.25
    assert float((x + y).square().sum(1).mean()) == pytest.approx(2 * 8**0.5, rel=0.05)
    inputs = qkv(CAUSAL)
    torch.manual_seed(0)
    default = FavorPlusPlus(CAUSAL, features=16).double()
    torch.manual_seed(0)
    told = FavorPlusPlus(CAUSAL, features=16, spread=2 * 8**0.5).double()
    torch.testing.assert_close(default(*inputs), told(*inputs))


def test_without_gradients_every_head_is_tuned_to_its_own_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiling.TUNED, "linear.features", tiling.Tuned(1, 2))  # a head at a time
    q, k, v = qkv(SHAPE)
    q = q * torch.linspace(0.3, 1.5, q.shape[1], dtype=q.dtype)[:, None, None]
    model = FavorPlusPlus(SHAPE, features=16).double()
    with torch.no_grad():
        for key_mask in (None, mask()):
            expected = model.dense(q, k, v, key_mask=key_mask)
            torch.testing.assert_close(model(q, k, v, key_mask=key_mask), expected, rtol=1e-9, atol=1e-9)
