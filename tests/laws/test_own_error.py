"""Errors against a variant's own formula show what its distance from softmax attention hides."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import pytest
import torch
from pydantic import Field
from torch import Generator, Tensor, nn

from attnbench.contract.inputs import INPUTS, register_input
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.contract.variant import VARIANTS, Traits, register
from attnbench.errors import Unsupported
from attnbench.harness.inside.execute import run_cell
from attnbench.harness.wire.protocol import VisitCell
from attnbench.laws import own_error
from attnbench.laws.own_error import OwnError, measure_own_error
from attnbench.measure.status import Status
from attnbench.measure.time import TimingRules
from attnbench.suite.cell import Cell

SHAPE, CHUNK = Shape(2, 2, 64, 8, causal=True), 16


class Sums(nn.Module):
    """o_i = Σ_{j<=i} (q_i·k_j) v_j, in chunks with a state, in ``accumulator`` at least."""

    accumulator: torch.dtype = torch.float32
    carries = True

    def __init__(self, shape: Shape) -> None:
        super().__init__()

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return (q @ k.mT).tril() @ v

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        wide = torch.promote_types(q.dtype, self.accumulator)
        state, outputs = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3], dtype=wide), []
        for at in range(0, q.shape[2], CHUNK):
            a, b, c = (x[:, :, at : at + CHUNK].to(wide) for x in (q, k, v))
            outputs.append((a @ b.mT).tril() @ c + a @ state)
            if self.carries:
                state = state + b.mT @ c
        return torch.cat(outputs, 2).to(q.dtype)


class Forgetful(Sums):
    """The state is lost after half of the tokens."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        half = q.shape[2] // 2
        first = super().forward(*(x[:, :, :half] for x in (q, k, v)))
        return torch.cat([first, super().forward(*(x[:, :, half:] for x in (q, k, v)))], 2)


class Short(Sums):
    """The state is a sum in the type of its inputs, one token after the other."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        state, outputs = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]), []
        for t in range(q.shape[2]):
            state = state + k[:, :, t, :, None] * v[:, :, t, None]
            outputs.append(q[:, :, t, None] @ state)
        return torch.cat(outputs, 2)


class Gradient(Sums):
    """The output is right, and the gradient of the keys is a tenth off."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return super().forward(q, 1.1 * k - 0.1 * k.detach(), v)


class Loop(Sums):
    """The formula never ends."""

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        while True:
            q = q + 1


class Forward(Sums):
    """There is no backward pass."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError("it has no backward pass")
        return super().forward(q, k, v)


class Overflow(Sums):
    """The output is right, and the gradient is not finite."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return super().forward(q + (q - q.detach()).sqrt(), k, v)


class NoFormula(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return v


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict(VARIANTS._filled())
    monkeypatch.setattr(VARIANTS, "_entries", known)
    for cls in (Sums, Forgetful, Short, Gradient, Loop, Forward, Overflow, NoFormula):
        facts = {"family": "kernel", "source": "", "formula": "", "cost": ""}
        register(cls.__name__, **facts, traits=Traits(target="other"))(cls)


def measured(variant: str, shape: Shape = SHAPE, dtype: str = "float32") -> OwnError:
    return measure_own_error(Cell("s", "w", Spec(variant), shape, dtype=dtype))


@pytest.mark.parametrize(("dtype", "rounding"), [("float64", 1e-14), ("float32", 1e-6), ("bfloat16", 1e-2)])
def test_a_sound_variant_has_rounding_alone_in_outputs_and_gradients(dtype: str, rounding: float) -> None:
    found = measured("Sums", dtype=dtype)
    assert found.note == ""
    for error in (found.output, found.late, found.grad):
        assert error is not None
        assert rounding / 1000 < error < rounding


def test_a_lost_carry_shows_most_in_the_last_half() -> None:
    found = measured("Forgetful")
    assert found.output is not None
    assert found.late is not None
    assert found.late > found.output > 0.1


def test_a_state_in_bfloat16_shows_where_the_output_alone_is_rounded() -> None:
    long = replace(SHAPE, seq_len=512)
    sound, short = (measured(name, long, "bfloat16") for name in ("Sums", "Short"))
    assert sound.output is not None
    assert short.output is not None
    assert short.output > 3 * sound.output
    in_float32 = measured("Short", long).output
    assert in_float32 is not None
    assert in_float32 < 1e-5, "it is right in more digits"


def test_a_wrong_gradient_shows_in_the_gradients_alone() -> None:
    found = measured("Gradient")
    assert found.output is not None
    assert found.output < 1e-6
    assert found.grad == pytest.approx(0.1, rel=1e-3), "the worst of the inputs, and no mean over them"


@pytest.mark.parametrize(
    ("variant", "shape", "words"),
    [
        ("NoFormula", SHAPE, "it states no formula of its own"),
        ("Loop", SHAPE, "its formula takes more than 0.2 s"),
        ("Sums", replace(SHAPE, seq_len=4096), "2 heads of 4096 × 4096 pairs are more than 8388608"),
    ],
)
def test_without_a_number_there_is_a_reason(
    variant: str, shape: Shape, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_error, "SECONDS", 0.2)
    found = measured(variant, shape)
    assert (found.output, found.late, found.grad) == (None, None, None)
    assert words in found.note


@pytest.fixture
def zeros(monkeypatch: pytest.MonkeyPatch) -> Spec:
    """An input whose values are 0, as those of a captured layer may be, and from half on its queries as well."""
    monkeypatch.setattr(INPUTS, "_entries", dict(INPUTS._filled()))

    @register_input("zeros")
    def draw(
        shape: Shape, generator: Generator, *, values: Annotated[float, Field(description="")] = 0.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Zeros."""
        q, k, v = (torch.randn(shape.B, shape.H, shape.N, shape.D, generator=generator) for _ in range(3))
        q[:, :, shape.N // 2 :] = 0
        return q, k, values * v

    return Spec("zeros")


@pytest.mark.parametrize("given", [{}, {"pass_": "stepwise", "state_dtype": "float32"}], ids=["whole", "steps"])
def test_a_formula_whose_output_is_zero_leaves_no_relative_error(given: dict[str, Any], zeros: Spec) -> None:
    found = measure_own_error(Cell("s", "w", Spec("linear"), SHAPE, inputs=zeros, **given))
    assert found == OwnError(note="own error: the formula's output is 0")


def test_a_last_half_of_zeros_has_no_error_of_its_own(zeros: Spec) -> None:
    found = measure_own_error(Cell("s", "w", Spec("Sums"), SHAPE, inputs=Spec("zeros", (("values", 1.0),))))
    assert found.output is not None
    assert 0 < found.output < 1e-6
    assert (found.late, found.note) == (None, "")


@pytest.mark.parametrize(
    ("variant", "note"),
    [
        ("Forward", "no gradients: RuntimeError: it has no backward pass"),
        ("Overflow", "the gradients hold NaN or infinity"),
    ],
)
def test_without_a_backward_pass_the_outputs_have_an_error_all_the_same(variant: str, note: str) -> None:
    found = measured(variant)
    assert found.output is not None
    assert found.grad is None
    assert note in found.note


def test_an_exact_variant_is_held_to_softmax_attention_with_bias_and_shared_heads() -> None:
    found = measured("sdpa", replace(SHAPE, heads=4, kv_heads=2, bias="alibi"))
    assert found.note == ""
    assert found.grad is not None
    assert found.grad < 1e-5


def test_a_mixer_has_none() -> None:
    with pytest.raises(Unsupported):
        measured("lstm")


def test_a_row_has_the_columns_where_the_cell_asks_for_them() -> None:
    cell = Cell("s", "w", Spec("Sums"), SHAPE, measure=("own_error",))
    record, _ = run_cell(VisitCell(cell, TimingRules(quick=True)))
    assert record.status is Status.OK
    assert record.own_error == measure_own_error(cell).output
    assert record.own_error_late is not None
    assert record.own_error_grad is not None
    assert (record.rel_error, record.time_median_s) == (None, None)
    record, _ = run_cell(VisitCell(replace(cell, measure=("error",)), TimingRules(quick=True)))
    assert (record.own_error, record.own_error_note) == (None, "")
