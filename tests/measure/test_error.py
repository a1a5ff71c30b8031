from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any

import pytest
import torch
from pydantic import Field
from torch import Generator, Tensor, nn

from attnbench.cell import Cell
from attnbench.errors import Unsupported, UsageError
from attnbench.measure.error import ErrorResult, mean_of_visible, measure_error
from attnbench.position_bias import position_bias
from attnbench.qkv import INPUTS, register_input
from attnbench.reference import exact_attention, masked_attention
from attnbench.shape import Bias, Shape
from attnbench.spec import parse_spec
from attnbench.variant import VARIANTS, No, Traits, register

SHAPE = Shape(2, 2, 12, 8)
SOFTMAX, OTHER = Traits(target="softmax"), Traits(target="other")


class Exact(nn.Module):
    """Softmax in the dtype it is given."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.causal = shape.causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return exact_attention(q, k, v, causal=self.causal).to(q.dtype)


class Biased(Exact):
    """Softmax with the bias of the shape."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.position_bias = position_bias(shape)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return exact_attention(q, k, v, causal=self.causal, bias=self.position_bias).to(q.dtype)


class Scaled(Exact):
    """Exact attention times a factor."""

    def __init__(self, shape: Shape, *, factor: Annotated[float, Field(description="factor")] = 1.5) -> None:
        super().__init__(shape)
        self.factor = factor

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return super().forward(q, k, v) * self.factor


class Noisy(Exact):
    """Exact attention times a factor drawn in the constructor."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.register_buffer("factor", 1 + torch.rand(()))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return super().forward(q, k, v) * self.factor


class Mean(Exact):
    """Mean of the visible values."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return mean_of_visible(v, q.shape[2], causal=self.causal).to(q.dtype)


class Broken(Exact):
    """Infinite in the draws whose first random number is above 0.7."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.register_buffer("infinite", torch.rand(()) > 0.7)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return v.masked_fill(self.infinite, float("inf"))


class Never(nn.Module):
    """Must not be run."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()

    def forward(self, *inputs: Tensor, key_mask: Tensor | None = None) -> Tensor:
        raise AssertionError


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    VARIANTS._filled()  # all that there are, lest they be registered while the table is another one
    monkeypatch.setattr(VARIANTS, "_entries", {})
    monkeypatch.setattr(INPUTS, "_entries", dict(INPUTS._filled()))
    for name, cls, traits in (
        ("exact", Exact, Traits(exact=True)),
        ("biased", Biased, Traits(exact=True, bias=True)),
        ("deaf", Exact, Traits(exact=True, bias=True)),
        ("scaled", Scaled, SOFTMAX),
        ("noisy", Noisy, Traits(target="softmax", stochastic=True)),
        ("mean", Mean, SOFTMAX),
        ("elsewhere", Scaled, OTHER),
        ("broken", Broken, SOFTMAX),
        ("fitted", Never, Traits(target="learned", causal=No("the future is in it"))),
    ):
        register(name, family="exact", source="", formula="", cost="", traits=traits)(cls)
    register("mixer", family="mixing", source="", formula="", cost="", kind="mixer", traits=OTHER)(Never)

    @register_input("fixed")
    def fixed(shape: Shape, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
        """The same whatever the seed."""
        q, k, v = torch.linspace(-1, 1, 3 * shape.B * shape.H * shape.N * shape.D).sin().chunk(3)
        size = shape.B, shape.H, shape.N, shape.D
        return q.view(size), k.view(size), v.view(size)

    return


def measured(
    variant: str, shape: Shape = SHAPE, *, inputs: str = "gaussian", draws: int = 3, **given: Any
) -> ErrorResult:
    one = Cell("s", "w", parse_spec(variant), shape, inputs=parse_spec(inputs), error_draws=draws, **given)
    return measure_error(one)


def test_an_exact_variant_has_rounding_error_only() -> None:
    result = measured("exact", dtype="float64")
    assert result.kind == "exact"
    assert result.rel_error == 0
    assert result.max_abs_error == 0
    assert result.cosine == pytest.approx(1)
    assert 0 < measured("exact").rel_error < 1e-7


def test_rounding_the_inputs_is_not_the_variants_error() -> None:
    # The oracle sees the same bfloat16 inputs; what is left is the rounding of the output, 2^-9 at most per number.
    assert 2**-12 < measured("exact", dtype="bfloat16").rel_error < 2**-8


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", ["alibi", "relative"])
def test_the_oracle_has_the_bias_of_the_shape(bias: Bias, causal: bool) -> None:
    shape = replace(SHAPE, bias=bias, causal=causal)
    for dtype, bound in (("float64", 1e-15), ("float32", 1e-7), ("bfloat16", 2**-8)):
        assert measured("biased", shape, dtype=dtype).rel_error <= bound
        assert measured("deaf", shape, dtype=dtype).rel_error > 0.04
    assert measured("biased", shape).draws == 3
    with pytest.raises(Unsupported, match="bias: a bias belongs to a pair of tokens"):
        measured("scaled", shape)


def test_relative_error_and_cosine_are_those_of_the_definition() -> None:
    result = measured("scaled:factor=1.5")
    assert result.kind == "approximation"
    assert result.rel_error == pytest.approx(0.5, rel=1e-6)
    assert result.rel_error_std == pytest.approx(0, abs=1e-6)
    assert result.cosine == pytest.approx(1)
    assert measured("scaled:factor=-2.0").cosine == pytest.approx(-1)
    assert result.draws == 3


def test_the_largest_absolute_error_is_over_all_draws() -> None:
    each = [measured("scaled", draws=1, seed=seed).max_abs_error for seed in range(3)]
    assert measured("scaled").max_abs_error == max(each)


def test_another_operator_has_a_distance() -> None:
    assert measured("elsewhere").kind == "distance"
    assert measured("elsewhere").rel_error == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("shape", [SHAPE, Shape(2, 2, 12, 8, causal=True), Shape(1, 2, 5, 8, 9)], ids=str)
def test_the_trivial_error_is_that_of_the_mean_of_visible_values(shape: Shape) -> None:
    result = measured("mean", shape, dtype="float64")
    assert result.rel_error == pytest.approx(result.trivial_error, rel=1e-12)
    assert result.trivial_error > 0.1


def test_the_mean_of_visible_values_is_attention_without_logits() -> None:
    v = torch.randn(2, 3, 7, 4, dtype=torch.float64)
    flat = torch.zeros(2, 3, 7, 4, dtype=torch.float64)
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    torch.testing.assert_close(mean_of_visible(v, 7, causal=True), masked_attention(flat, flat, v, causal))
    torch.testing.assert_close(mean_of_visible(v, 7, causal=False), masked_attention(flat, flat, v, causal | True))


def test_random_weights_that_should_be_learned_have_no_error() -> None:
    assert measured("fitted") == ErrorResult("learned", draws=0)


def test_what_a_learned_variant_does_not_allow_is_reported_all_the_same() -> None:
    with pytest.raises(Unsupported, match="the future is in it"):
        measured("fitted", Shape(1, 1, 4, 8, causal=True))


def test_a_mixer_has_no_error() -> None:
    with pytest.raises(Unsupported, match="a mixer has no q, k, v"):
        measured("mixer")


def test_draws_differ_in_input_and_in_variant() -> None:
    alone = [measured("noisy", draws=1, seed=seed) for seed in (0, 1, 2)]
    errors = sorted(result.rel_error for result in alone)
    together = measured("noisy")
    assert errors[0] < errors[1] < errors[2]
    assert together.rel_error == errors[1]
    assert together.rel_error_std == pytest.approx(torch.tensor(errors).std().item(), rel=1e-5)
    assert together.trivial_error == sorted(result.trivial_error for result in alone)[1]


def test_repeating_a_fixed_input_does_not_count_as_several_draws() -> None:
    result = measured("scaled", inputs="fixed", draws=5)
    assert result.draws == 1
    assert result.rel_error_std is None


def test_a_stochastic_variant_on_a_fixed_input_has_several_draws() -> None:
    result = measured("noisy", inputs="fixed", draws=5)
    assert result.draws == 5
    assert result.rel_error_std > 0


def test_one_draw_has_no_standard_deviation() -> None:
    assert measured("noisy", draws=1).rel_error_std is None


def test_the_same_seed_gives_the_same_numbers() -> None:
    assert measured("noisy") == measured("noisy")


def test_one_draw_with_infinity_is_not_hidden_by_the_median_of_the_others() -> None:
    each = [measured("broken", draws=1, seed=seed).rel_error for seed in range(6)]
    assert 0 < sum(map(math.isnan, each)) < 3
    result = measured("broken", draws=6)
    assert math.isnan(result.rel_error)
    assert result == ErrorResult("approximation", rel_error=result.rel_error)


def test_no_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        measured("exact", draws=0)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'exact'"):
        measured("exakt")
    with pytest.raises(UsageError, match="did you mean 'gaussian'"):
        measured("exact", inputs="gausian")


def test_long_inputs_are_compared_in_blocks_without_changing_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measured("noisy")
    monkeypatch.setattr("attnbench.measure.error._ORACLE_LOGITS", 2 * 2 * 12 * 5)
    blocked = measured("noisy")
    assert blocked.rel_error == pytest.approx(whole.rel_error, rel=1e-12)
    assert blocked.max_abs_error == pytest.approx(whole.max_abs_error, rel=1e-12)
