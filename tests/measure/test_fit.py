"""``fit``: what a variant learns is fitted to the exact output, and its error is then one."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import ClassVar

import pytest
import torch
from torch import Generator, Tensor, nn

from attnbench.catalogue.build import build
from attnbench.contract.inputs import INPUTS, draw_qkv, register_input
from attnbench.contract.problem.padding import key_mask as key_mask_of
from attnbench.contract.problem.reference import exact_attention, relative_error
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS, No, Traits, register
from attnbench.errors import Unsupported
from attnbench.harness.inside.execute import run_cell
from attnbench.harness.wire.protocol import VisitCell
from attnbench.laws import exact_error
from attnbench.laws.exact_error import ErrorResult, fit, learnt, measure_error
from attnbench.measure.status import Status
from attnbench.measure.time import TimingRules
from attnbench.suite.cell import Cell
from attnbench.suite.expand import expand
from attnbench.suite.messages import Origin
from attnbench.suite.schema import Suite

SHAPE = Shape(2, 2, 12, 8)


class Gain(nn.Module):
    """Exact attention times a learned number, which starts at a half."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.causal, self.gain = shape.causal, nn.Parameter(torch.tensor(0.5))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        assert self.gain.dtype == q.dtype
        return self.gain * exact_attention(q, k, v, causal=self.causal, key_mask=key_mask).to(q)


class Noted(Gain):
    """Keeps the seed of its weights, and the queries and the padding that it meets."""

    seeds: ClassVar[list[int]] = []
    met: ClassVar[list[tuple[Tensor, Tensor | None]]] = []

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.seeds.append(torch.initial_seed())

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        self.met.append((q, key_mask))
        return super().forward(q, k, v, key_mask=key_mask)


class Remembered(nn.Module):
    """One learned answer, whatever is asked."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.answer = nn.Parameter(torch.zeros(shape.B, shape.H, shape.N, shape.D))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return self.answer + torch.zeros_like(q)


class Burst(Gain):
    """Infinite once it was fitted."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        out = super().forward(q, k, v, key_mask=key_mask)
        return out / 0 if torch.is_inference_mode_enabled() else out


class Cut(Gain):
    """Lets no gradient through."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return super().forward(q, k, v, key_mask=key_mask).detach()


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    Noted.seeds.clear(), Noted.met.clear()
    monkeypatch.setattr(exact_error._kept_problem, "_results", OrderedDict())  # what other tests drew
    monkeypatch.setattr(VARIANTS, "_entries", dict(VARIANTS._filled()))
    monkeypatch.setattr(INPUTS, "_entries", dict(INPUTS._filled()))
    learned = Traits(target="learned", causal=No("the future is in it"))
    for name, cls, traits in (
        ("gain", Gain, Traits(target="learned", key_padding=True)),
        ("elsewhere", Gain, Traits(target="other")),
        ("noted", Noted, Traits(target="learned", key_padding=True)),
        ("remembered", Remembered, learned),
        ("cut", Cut, learned),
        ("burst", Burst, learned),
    ):
        register(name, family="exact", source="", formula="", cost="", traits=traits)(cls)

    @register_input("three")
    def three(shape: Shape, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Three draws that take turns."""
        return draw_qkv(parse_spec("gaussian"), shape, generator.initial_seed() % 3)

    return


def cell(variant: str, shape: Shape = SHAPE, *, inputs: str = "gaussian", draws: int = 2, fit: int = 300) -> Cell:
    named = parse_spec(variant)
    return Cell("s", "w", named, shape, inputs=parse_spec(inputs), measure=("error",), error_draws=draws, fit=fit)


def fitted(variant: str, shape: Shape = SHAPE, **given: object) -> ErrorResult:
    return measure_error(cell(variant, shape, **given))


def test_what_is_learned_is_fitted_to_the_exact_output_and_has_an_error_then() -> None:
    assert fitted("gain", fit=0) == ErrorResult("learned")
    result = fitted("gain")
    assert (result.kind, result.fit_steps, result.draws, result.doubt) == ("approximation", 300, 2, "")
    assert result.rel_error is not None
    assert result.rel_error < 0.01
    assert result.trivial_error is not None
    assert result.trivial_error > 0.1


def test_more_steps_fit_better_and_one_hardly_fits_at_all() -> None:
    errors = [fitted("gain", fit=steps).rel_error for steps in (1, 30, 300)]
    assert errors[0] > 0.45
    assert errors[0] > errors[1] > errors[2]


def test_what_bursts_after_its_steps_says_how_many_they_were() -> None:
    result = fitted("burst", fit=2)
    assert (result.kind, result.fit_steps, result.draws, result.cosine) == ("approximation", 2, 0, None)
    assert result.rel_error != result.rel_error


def test_another_operator_that_was_fitted_is_still_another_operator() -> None:
    result = fitted("elsewhere")
    assert (result.kind, result.fit_steps) == ("distance", 300)
    assert result.rel_error is not None
    assert result.rel_error < 0.01


@pytest.mark.parametrize("variant", ["performer:features=8", "local:window=4", "softmax"])
def test_what_learns_nothing_is_measured_as_it_is(variant: str) -> None:
    result = fitted(variant)
    assert result.fit_steps is None
    assert result == fitted(variant, fit=0)


@pytest.mark.parametrize("steps", [1, 2, 10])
def test_steps_become_smaller_along_half_a_wave(steps: int) -> None:
    one, places = nn.Linear(1, 1, bias=False), list[float]()

    def loss(step: int) -> Tensor:
        assert step == len(places)
        places.append(one.weight.item())
        return one.weight.sum()  # whose gradient is 1 everywhere, so that a step is as long as the rate

    fit(one, loss, steps)
    walked = [before - after for before, after in pairwise([*places, one.weight.item()])]
    assert walked == pytest.approx(
        [0.01 * math.cos(math.pi * step / steps / 2) ** 2 for step in range(steps)], abs=1e-6
    )


def test_a_bias_and_a_sink_of_the_question_are_not_learnt() -> None:
    module = build("softmax", replace(SHAPE, bias="relative", sink="learned"))
    assert len(list(module.parameters())) == 2
    assert learnt(module) == []
    assert len(learnt(build("linformer:rank=4", SHAPE))) == 1


def test_it_is_fitted_to_draws_that_are_not_measured() -> None:
    one = fitted("remembered", inputs="three")  # fitted to the third draw alone
    assert one.doubt == ""
    assert one.rel_error is not None
    assert one.rel_error > 1.1  # two independent answers differ by √2 of their norm
    everything = fitted("remembered", inputs="three", draws=3)
    assert everything.doubt == "fitted to the inputs that it is measured on: three has no others"
    assert everything.rel_error is not None
    assert 0.7 < everything.rel_error < 0.9  # the mean of three leaves √(2/3)


def test_the_same_cell_gives_the_same_numbers() -> None:
    assert fitted("gain", fit=20) == fitted("gain", fit=20)
    assert fitted("linformer:rank=4", fit=5) == fitted("linformer:rank=4", fit=5)


def test_padding_is_not_fitted_to() -> None:
    padded = replace(cell("gain", Shape(4, 2, 12, 8)), padding=0.4)
    result = measure_error(padded)
    assert result.rel_error is not None
    assert result.rel_error < 0.01


def test_a_lower_precision_is_fitted_in_float32() -> None:
    result = measure_error(replace(cell("gain"), dtype="bfloat16"))
    assert result.rel_error is not None
    assert result.rel_error < 0.01


def test_the_loss_is_the_squared_relative_error_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    losses: list[Tensor] = []

    def note(operator: nn.Module, loss: Callable[[int], Tensor], steps: int) -> None:
        losses.extend(loss(step).detach() for step in range(steps))

    monkeypatch.setattr(exact_error, "fit", note)
    for padding in (0.0, 0.4):
        measure_error(replace(cell("gain", fit=3), padding=padding, dtype="float64"))
    assert [float(one) for one in losses] == pytest.approx([0.25] * 6)
    assert {one.dtype for one in losses} == {torch.float32}


def test_a_variant_is_fitted_once_with_the_seed_of_its_cell() -> None:
    for seed in (0, 7):
        Noted.seeds.clear()
        measure_error(replace(cell("noted", fit=2, draws=3), seed=seed))
        assert Noted.seeds == [seed]


def test_what_is_fitted_meets_inputs_that_are_rounded_and_padded_as_those_of_the_error() -> None:
    measure_error(replace(cell("noted", fit=3), dtype="bfloat16", padding=0.4))
    *lessons, _, _ = Noted.met
    assert len(lessons) == 3
    for q, key_mask in lessons:
        assert torch.equal(q, q.bfloat16().float())
        assert torch.equal(key_mask, key_mask_of(SHAPE, 0.4))


@pytest.mark.parametrize(("room", "lessons"), [(2**22, 16), (5 * 384, 5), (5 * 384 - 1, 4), (383, 1)])
def test_large_lessons_are_few_and_none_of_them_is_measured(
    monkeypatch: pytest.MonkeyPatch, room: int, lessons: int
) -> None:
    monkeypatch.setattr(exact_error, "_LESSON_ELEMENTS", room)
    assert measure_error(replace(cell("noted", fit=20), seed=3)).doubt == ""
    *taken, one, other = [q for q, _ in Noted.met]
    first = {q.numpy().tobytes() for q in taken}
    assert len(first) == lessons
    assert not first & {q.numpy().tobytes() for q in (one, other)}


def test_draws_before_those_that_are_measured_are_lessons_like_any_other() -> None:
    assert measure_error(replace(cell("gain", inputs="three", draws=1, fit=1), seed=2)).doubt == ""


def test_what_no_gradient_reaches_is_unsupported_and_so_is_a_shape() -> None:
    with pytest.raises(Unsupported, match=r"^fit: no gradient reaches what it learns$"):
        fitted("cut")
    with pytest.raises(Unsupported, match="the future is in it"):
        fitted("remembered", replace(SHAPE, causal=True))


def test_a_suite_fits_to_a_captured_model_and_its_rows_have_less_error_and_say_what_they_were_fitted_to() -> None:
    sweep = {
        "name": "fitted",
        "measure": ["error"],
        "error_draws": 3,  # the three captured layers
        "fit": 100,
        "matrix": {
            "variant": ["linformer:rank=8", "hedgehog"],
            "inputs": "minilm",
            "seq_len": 24,
            "heads": 2,
            "head_dim": 32,
        },
    }
    for one in expand(Suite.of({"name": "tiny", "sweeps": [sweep]}, Origin())):
        operator, before = build(one.variant, one.shape, seed=one.seed), list[float]()
        for seed in range(3):
            q, k, v = draw_qkv(one.inputs, one.shape, seed)
            before.append(relative_error(operator(q, k, v), exact_attention(q, k, v)))
        record, _ = run_cell(VisitCell(one, TimingRules(quick=True)))
        assert record.status is Status.OK, record.reason
        assert (record.error_kind, record.fit_steps, record.error_draws) == ("approximation", 100, 3)
        assert record.rel_error is not None
        assert record.rel_error < 0.6 * median(before)
        assert "fitted to the inputs that it is measured on: minilm has no others" in record.warnings
