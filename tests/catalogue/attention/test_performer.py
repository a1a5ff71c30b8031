from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.kernel.performer import Performer
from attnbench.catalogue.build import build
from attnbench.catalogue.engines.linear.all_keys import attend_all
from attnbench.catalogue.engines.linear.causal import attend_causally
from attnbench.catalogue.engines.linear.random_maps import (
    HyperbolicFeatures,
    Norms,
    PositiveFeatures,
    Projection,
    ReluFeatures,
    TrigFeatures,
    draw_projection,
)
from attnbench.contract.problem.shape import Shape
from attnbench.measure.memory import peak_tensor_bytes
from tests.catalogue.attention.small import built
from tests.pairwise import pairwise

Kernel = Literal["positive", "hyperbolic", "trig", "relu"]
KERNELS: tuple[Kernel, ...] = ("positive", "hyperbolic", "trig", "relu")
MAPS = {
    "positive": PositiveFeatures,
    "hyperbolic": HyperbolicFeatures,
    "trig": TrigFeatures,
    "relu": ReluFeatures,
}
SHAPE = Shape(batch=2, heads=3, seq_len=23, head_dim=8)


def qkv(shape: Shape = SHAPE, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    q = torch.randn(shape.B, shape.H, shape.N, shape.D, dtype=dtype) * scale
    k = torch.randn(shape.B, shape.H, shape.M, shape.D, dtype=dtype) * scale
    return q, k, torch.randn(shape.B, shape.H, shape.M, shape.D, dtype=dtype)


def mask(shape: Shape = SHAPE) -> Tensor:
    """Padding at the end, a hole in the middle, and one sequence that starts with padding."""
    real = torch.ones(shape.B, shape.M, dtype=torch.bool)
    real[0, -5:] = False
    real[0, 7] = False
    real[-1, :4] = False
    return real


def causal_shape(shape: Shape = SHAPE) -> Shape:
    return Shape(shape.B, shape.H, shape.N, shape.D, causal=True)


@pytest.mark.parametrize(
    ("kernel", "causal", "chunk", "padded"), pairwise(KERNELS, [False, True], [1, 3, 8, 23, 64, None], [False, True])
)
def test_equals_the_dense_formula_for_every_chunk(
    kernel: Kernel, causal: bool, chunk: int | None, padded: bool
) -> None:
    model = Performer(causal_shape() if causal else SHAPE, features=11, kernel=kernel, chunk=chunk)
    q, k, v = qkv()
    key_mask = mask() if padded else None
    expected = model.dense(q, k, v, key_mask=key_mask)
    size = expected.abs().amax(-1, keepdim=True).clamp(min=1.0)  # trig denominators may come near 0
    assert ((model(q, k, v, key_mask=key_mask) - expected) / size).abs().max() < 1e-10


# The estimator


def kernel_estimates(kernel: Kernel, projection: Projection, x: Tensor, y: Tensor, rows: int, draws: int) -> Tensor:
    """φ(x)·φ(y) of ``draws`` independent ω with ``rows`` <= D rows, by the maps that the forward pass uses."""
    D = x.numel()
    omega = draw_projection(draws * D, D, projection).double().view(draws, D, D)[:, :rows]
    features = MAPS[kernel](omega.mT * D**-0.25)
    phi = []
    for token in (x, y):
        out = torch.empty(draws, 1, features.width, dtype=torch.float64)
        log_weight = features.keys(token.double().expand(draws, 1, D), out)
        phi.append(out if log_weight is None else out * log_weight.exp2())
    products = torch.linalg.vecdot(phi[0], phi[1])[:, 0]
    return products / (rows * (2 if kernel == "hyperbolic" else 1))


X = torch.tensor([0.5, 0.2, 0.4, 0.3], dtype=torch.float64)  # not centred: a skewed ω would show
Y = torch.tensor([0.3, 0.6, 0.1, 0.7], dtype=torch.float64)
LONG_X = torch.full((8,), 0.3, dtype=torch.float64)
LONG_Y = torch.linspace(0.2, 0.4, 8, dtype=torch.float64)


@pytest.mark.parametrize("projection", ["orthogonal", "iid"])
@pytest.mark.parametrize("kernel", ["positive", "hyperbolic", "trig"])
def test_products_of_features_are_unbiased_for_the_softmax_kernel(projection: Projection, kernel: Kernel) -> None:
    for x, y in ((X, Y), (LONG_X, LONG_Y)):
        draws = 20_000
        estimates = kernel_estimates(kernel, projection, x, y, x.numel(), draws)
        truth = math.exp(float(x @ y) / x.numel() ** 0.5)
        standard_error = float(estimates.std()) / draws**0.5
        assert abs(float(estimates.mean()) - truth) < 4 * standard_error
        assert standard_error < 0.01 * truth  # sharp enough to see a QR without signs, off by several per cent


@pytest.mark.parametrize("kernel", ["positive", "hyperbolic", "trig"])
def test_mean_squared_error_of_independent_features_is_the_closed_form(kernel: Kernel) -> None:
    rows, draws = 4, 150_000
    estimates = kernel_estimates(kernel, "iid", X, Y, rows, draws)
    x, y = X * 4**-0.25, Y * 4**-0.25
    truth = math.exp(float(x @ y))
    z, delta = float((x + y).square().sum()), float((x - y).square().sum())
    positive = math.exp(z) * truth**2 * (1 - math.exp(-z)) / rows
    expected = {
        "trig": math.exp(z) * truth**-2 * (1 - math.exp(-delta)) ** 2 / (2 * rows),
        "positive": positive,
        "hyperbolic": (1 - math.exp(-z)) * positive / 2,
    }[kernel]
    assert float((estimates - truth).square().mean()) == pytest.approx(expected, rel=0.05)


def test_orthogonal_features_stay_below_the_bound_of_theorem_2() -> None:
    rows, draws = 4, 50_000
    x, y = X * 4**-0.25, Y * 4**-0.25
    truth = math.exp(float(x @ y))
    z = float((x + y).square().sum())
    iid = math.exp(z) * truth**2 * (1 - math.exp(-z)) / rows
    gain = 2 * (rows - 1) / (rows * (4 + 2)) * (truth - math.exp(-float(x @ x + y @ y) / 2)) ** 2
    assert gain > 0.02 * iid
    error = float((kernel_estimates("positive", "orthogonal", X, Y, rows, draws) - truth).square().mean())
    assert error < iid - gain


@pytest.mark.parametrize("projection", ["orthogonal", "iid"])
def test_relu_features_estimate_the_arc_cosine_kernel(projection: Projection) -> None:
    draws = 20_000
    estimates = kernel_estimates("relu", projection, X, Y, 4, draws)
    x, y = X * 4**-0.25, Y * 4**-0.25
    lengths = float(x.norm()), float(y.norm())
    angle = math.acos(float(x @ y) / (lengths[0] * lengths[1]))
    arc_cosine = lengths[0] * lengths[1] * (math.sin(angle) + (math.pi - angle) * math.cos(angle)) / (2 * math.pi)
    truth = arc_cosine + 1e-3 * sum(lengths) / math.sqrt(2 * math.pi) + 1e-6
    assert abs(float(estimates.mean()) - truth) < 4 * float(estimates.std()) / draws**0.5


def drawn_again(model: Performer, draws: int) -> None:
    """Many ω in the place of one, so that the kernel has a leading dimension of draws."""
    (rows, D), (projection, norms) = model.projection.shape, model.drawn
    assert rows == D
    many = draw_projection(draws * D, D, projection, "chi" if norms == "chi" else "sqrt-d").double()
    if norms == "quantile":
        order = torch.rand(draws, D).argsort(1)
        many *= (model.projection.norm(dim=1)[order] / D**0.5).view(-1, 1)
    model.projection = many.view(draws, 1, D, D)


Q = torch.stack([X, X - 0.6])[None, None]
K = torch.stack([Y, 0.5 - Y, 0.2 + 0 * Y])[None, None]
SMALL = Shape(batch=1, heads=1, seq_len=2, head_dim=4)


@pytest.mark.parametrize("norms", ["chi", "sqrt-d", "quantile"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_mean_of_the_kernel_is_the_closed_form(kernel: Kernel, norms: Norms) -> None:
    model = Performer(SMALL, features=4, kernel=kernel, norms=norms).double()
    mean = model.kernel_mean(Q, K)
    drawn_again(model, 40_000)
    estimates = model.kernel(Q, K)
    standard_error = estimates.std(0) / 200
    assert ((estimates.mean(0) - mean).abs() < 4 * standard_error).all()
    assert (standard_error < 0.01).all()
    if norms != "chi" and kernel != "relu":
        assert ((mean - (Q @ K.mT / 2).exp()).abs() > 1e-3).any()


@pytest.mark.parametrize("kernel", ["positive", "hyperbolic", "trig"])
def test_the_variance_of_the_kernel_is_the_closed_form_where_there_is_one(kernel: Kernel) -> None:
    model = Performer(SMALL, features=4, kernel=kernel, projection="iid").double()
    variance = model.kernel_variance(Q, K)
    assert variance is not None
    drawn_again(model, 150_000)
    torch.testing.assert_close(model.kernel(Q, K).var(0)[None], variance, rtol=0.06, atol=0.0)
    assert Performer(SMALL, features=4, kernel=kernel).kernel_variance(Q, K) is None
    assert Performer(SMALL, kernel="relu", projection="iid").kernel_variance(Q, K) is None


# Stability


class Shifted(PositiveFeatures):
    """A constant added to every key exponent."""

    shift = 0.0

    def keys(self, x: Tensor, out: Tensor) -> Tensor:
        return super().keys(x, out) + self.shift


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shift", [-5000.0, 300.0, 1e5])
def test_a_constant_added_to_all_key_exponents_changes_nothing(causal: bool, shift: float) -> None:
    q, k, v = qkv(dtype=torch.float32)
    weight = (draw_projection(16, 8) * 8**-0.25).T
    shifted = Shifted(weight)
    shifted.shift = shift
    attend = attend_causally if causal else attend_all
    assert torch.allclose(attend(q, k, v, shifted), attend(q, k, v, PositiveFeatures(weight)), atol=0.02)


@pytest.mark.parametrize("chunk", [2, 64])
def test_a_row_that_sees_only_tiny_keys_does_not_underflow(chunk: int) -> None:
    model = Performer(causal_shape(), features=32, chunk=chunk)
    q, k, v = qkv(scale=0.5)
    k[:, :, :3] *= 40.0  # exponents some hundred below those of the keys that follow
    out = model(q.float(), k.float(), v.float())
    assert torch.allclose(out.double(), model(q, k, v), atol=1e-3)
    assert torch.allclose(out[:, :, 0], v[:, :, 0].float(), atol=1e-6)


def test_negative_denominators_of_trig_features_keep_their_sign() -> None:
    model = Performer(SHAPE, features=2, kernel="trig")
    q, k, v = qkv(scale=2.0)
    negative = model.kernel(q, k).sum(-1) < -0.1
    assert negative.sum() > 5
    assert torch.allclose(model(q, k, v)[negative], model.dense(q, k, v)[negative], rtol=1e-8)


# Draws


def test_the_seed_decides_the_draw_and_redraw_changes_it() -> None:
    first, again, other = (build("performer:features=16", SHAPE, seed=seed) for seed in (1, 1, 2))
    assert isinstance(first, Performer)
    q, k, v = qkv(dtype=torch.float32)
    before = first(q, k, v)
    assert torch.equal(before, again(q, k, v))
    assert not torch.allclose(before, other(q, k, v))
    storage = first.projection.data_ptr()
    first.redraw()
    assert first.projection.data_ptr() == storage
    assert not torch.allclose(before, first(q, k, v))
    assert first.state_dict()["projection"].shape == (16, 8)


def test_options_choose_the_projection() -> None:
    fixed = built(Performer, "performer:features=8,norms=sqrt-d,projection=iid", SHAPE)
    assert torch.allclose(fixed.projection.norm(dim=1), torch.tensor(8**0.5))
    assert (fixed.projection @ fixed.projection.T).triu(1).abs().max() > 0.5
    orthogonal = built(Performer, "performer:features=8", SHAPE)
    assert (orthogonal.projection @ orthogonal.projection.T).triu(1).abs().max() < 1e-5
    fixed.redraw()
    assert torch.allclose(fixed.projection.norm(dim=1), torch.tensor(8**0.5))


# Cost


def test_sums_for_the_backward_pass_are_kept_only_where_there_will_be_one() -> None:
    shape = Shape(batch=1, heads=1, seq_len=2048, head_dim=8, causal=True)
    model = Performer(shape, features=256)
    inputs = [x.requires_grad_() for x in qkv(shape, dtype=torch.float32)]
    with torch.no_grad():
        without = peak_tensor_bytes(lambda: model(*inputs))
    assert without is not None
    assert without < (peak_tensor_bytes(lambda: model(*inputs)) or 0) - 3 * 256 * 9 * 4


def test_a_denominator_that_underflows_is_not_a_number() -> None:
    shape = Shape(batch=1, heads=1, seq_len=4, head_dim=16)
    model = Performer(shape, features=16)
    q = torch.full((1, 1, 4, 16), 40.0)
    assert model(q, -q, torch.randn(1, 1, 4, 16)).isnan().any()
    assert model(q / 40, -q / 40, torch.randn(1, 1, 4, 16)).isfinite().all()


def test_a_module_cast_to_half_precision_rounds_its_projection() -> None:
    module = Performer(SHAPE, features=16)
    before = module.projection.clone()
    assert torch.equal(module.half().projection.float(), before.half().float())
    assert not torch.equal(module.projection.float(), before)


# A scale for queries and its inverse for keys


@pytest.mark.parametrize("kernel", ["positive", "hyperbolic", "trig"])
@pytest.mark.parametrize("causal", [False, True])
def test_beta_multiplies_queries_and_divides_keys(kernel: str, causal: bool) -> None:
    shape = Shape(1, 2, 9, 4, causal=causal)
    q, k, v = (torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(3))
    one, other = (build("performer", shape, features=16, kernel=kernel, **more) for more in ({"beta": 1.7}, {}))
    torch.testing.assert_close(one(q, k, v), other(1.7 * q, k / 1.7, v))
    torch.testing.assert_close(one.kernel(q, k), other.kernel(1.7 * q, k / 1.7))


def test_a_beta_that_makes_queries_and_keys_alike_in_size_has_the_least_variance() -> None:
    q, k = 0.5 * torch.randn(1, 1, 50, 8, dtype=torch.float64), 2 * torch.randn(1, 1, 50, 8, dtype=torch.float64)
    variances = {}
    for beta in (1.0, 2.0, 4.0):
        module = build("performer", Shape(1, 1, 50, 8), projection="iid", beta=beta)
        relative = module.kernel_variance(q, k) / module.kernel_mean(q, k).square()
        variances[beta] = float(relative.median())
    assert variances[2.0] < variances[1.0]
    assert variances[2.0] < variances[4.0]
