from __future__ import annotations

import math

import pytest
import torch

from attnbench.catalogue.attention.kernel.rfa import RandomFeatureAttention
from attnbench.catalogue.engines import tiling
from attnbench.catalogue.engines.linear.random_maps import Projection, draw_projection
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import mask, qkv

SHAPE = Shape(batch=2, heads=3, seq_len=23, head_dim=8)
CAUSAL = Shape(batch=2, heads=3, seq_len=23, head_dim=8, causal=True)
both = pytest.mark.parametrize("shape", [SHAPE, CAUSAL], ids=["all", "causal"])
kernels = pytest.mark.parametrize("kernel", ["gaussian", "arccos"])


def make(shape: Shape, kernel: str, **options: object) -> RandomFeatureAttention:
    model = RandomFeatureAttention(shape, kernel=kernel, **options).double()  # type: ignore[arg-type]
    with torch.no_grad():
        model.sigma += 0.3 * torch.randn_like(model.sigma)
    return model


@both
@kernels
@pytest.mark.parametrize("chunk", [1, 5, 64, None])
@pytest.mark.parametrize("padded", [False, True])
def test_equals_the_dense_formula_for_every_chunk(shape: Shape, kernel: str, chunk: int | None, padded: bool) -> None:
    model = make(shape, kernel, features=11, chunk=chunk, temperature=0.8 if kernel == "gaussian" else 1.0)
    inputs, key_mask = qkv(shape), mask() if padded else None
    expected = model.dense(*inputs, key_mask=key_mask)
    size = expected.abs().amax(-1, keepdim=True).clamp(min=1.0)  # denominators may come near 0
    assert ((model(*inputs, key_mask=key_mask) - expected) / size).abs().max() < 1e-11


@kernels
def test_only_the_directions_of_queries_and_keys_matter(kernel: str) -> None:
    q, k, v = qkv(SHAPE)
    model = make(SHAPE, kernel)
    lengths = torch.rand(2, 3, 23, 1, dtype=torch.float64) + 0.1
    assert torch.allclose(model(q * lengths, k / lengths, v), model(q, k, v), rtol=1e-9, atol=1e-10)
    q[0, 0, 0] = 0.0
    assert model(q, k, v).isfinite().all()


Q = torch.tensor([[0.5, 0.2, 0.4, 0.3], [-0.1, 0.9, 0.2, 0.2]], dtype=torch.float64)[None, None]
K = torch.tensor([[0.3, 0.6, 0.1, 0.7], [0.4, -0.8, 0.3, 0.1], [0.5, 0.2, 0.4, 0.3]], dtype=torch.float64)[None, None]


@pytest.mark.parametrize("projection", ["iid", "orthogonal"])
@pytest.mark.parametrize(("kernel", "temperature"), [("gaussian", 0.7), ("gaussian", 1.0), ("arccos", 1.0)])
def test_mean_and_variance_of_the_kernel_are_the_closed_forms(
    kernel: str, projection: Projection, temperature: float
) -> None:
    draws, shape = 60_000, Shape(1, 1, 2, 4, kv_len=3)
    options = {"features": 4, "projection": projection, "temperature": temperature}
    model = make(shape, kernel, **options)
    mean, variance = model.kernel_mean(Q, K), model.kernel_variance(Q, K)
    model.projection = draw_projection(4 * draws, 4, projection).double().view(draws, 1, 4, 4)
    estimates = model.kernel(Q, K)
    assert ((estimates.mean(0) - mean[0]).abs() <= 4 * estimates.std(0) / draws**0.5 + 1e-12).all()
    assert (variance is not None) == (kernel == "gaussian" and projection == "iid")
    if variance is not None:
        assert torch.allclose(estimates.var(0), variance[0], rtol=0.05, atol=1e-12)


def test_gaussian_features_estimate_the_softmax_of_cosines_where_sigma_is_one() -> None:
    shape = Shape(1, 1, 2, 4, kv_len=3)
    model = RandomFeatureAttention(shape, temperature=0.8).double()
    cosine = torch.cosine_similarity(Q[:, :, :, None], K[:, :, None], dim=-1)
    expected = (cosine / 0.64).exp()
    assert torch.allclose(model.kernel_mean(Q, K) * math.exp(1 / 0.64), expected, rtol=1e-12)


@pytest.mark.parametrize("chunk", [None, 5])
def test_without_gradients_every_head_is_prepared_by_its_own_sigma(
    chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiling.TUNED, "linear.features", tiling.Tuned(1, 2))  # a head at a time
    model, inputs = make(SHAPE, "gaussian", chunk=chunk), qkv(SHAPE)
    with torch.no_grad():
        model.sigma.uniform_(0.5, 2.0)
        for key_mask in (None, mask()):
            expected = model.dense(*inputs, key_mask=key_mask)
            torch.testing.assert_close(model(*inputs, key_mask=key_mask), expected, rtol=1e-9, atol=1e-9)
