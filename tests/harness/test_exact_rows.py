"""What claims to be exact is held to the formula in the cell's own calls, whatever else is asked of the cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS, Traits, register
from attnbench.harness.inside.execute import run_cell
from attnbench.harness.inside.pairs import measure_pairs
from attnbench.harness.wire.protocol import VisitCell
from attnbench.measure.status import Status
from attnbench.measure.time import TimingRules
from attnbench.suite.cell import Cell

RULES = TimingRules(quick=True)
LONG = Shape(2, 2, 96, 16)


class Swapped(torch.autograd.Function):
    """v as it is, whose gradient is negated."""

    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        return v.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]  # one tensor
        return -gradient


class Own(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()


class Identity(Own):
    """Softmax up to 64 tokens, and v from there on."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return v + 0 if q.shape[2] > 64 else torch.nn.functional.scaled_dot_product_attention(q, k, v)


class OneHead(Own):
    """Softmax but in one head of many tokens."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return torch.cat((out[:, :-1], v[:, -1:]), 1) if q.shape[2] > 64 else out


class Backwards(Own):
    """Softmax with another gradient of the values."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, Swapped.apply(v))  # type: ignore[no-untyped-call]  # torch leaves it so


class OfKeys(Own):
    """Softmax through whose keys no gradient comes."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k.detach(), v)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VARIANTS, "_entries", dict(VARIANTS._filled()))
    traits = Traits(exact=True, causal=False, cross=False, key_padding=False, v_dim=False, longer=False)
    for made in (Identity, OneHead, Backwards, OfKeys):
        register(f"own-{made.__name__.lower()}", family="exact", source="-", formula="-", cost="-", traits=traits)(made)


def measured(variant: str, shape: Shape = LONG, **given: Any) -> tuple[Status, str]:
    cell = Cell("s", "w", parse_spec(variant), shape, measure=("time",), **given)
    record, _ = run_cell(VisitCell(cell, RULES))
    return record.status, record.reason


@pytest.mark.parametrize("level", ["operator", "layer", "model"])
@pytest.mark.parametrize("wrong", ["own-identity", "own-onehead"])
def test_what_is_not_exact_at_the_length_of_the_cell_is_an_error_without_its_error_measured(
    wrong: str, level: Any
) -> None:
    status, reason = measured(wrong, level=level)
    assert status is Status.ERROR
    assert reason.startswith("exact, but off by ")
    assert measured(wrong, replace(LONG, seq_len=32), level=level)[0] is Status.OK


@pytest.mark.parametrize("level", ["operator", "layer"])
@pytest.mark.parametrize("wrong", ["own-backwards", "own-ofkeys"])
def test_gradients_of_what_is_trained_are_held_as_well(wrong: str, level: Any) -> None:
    for pass_ in ("training", "backward"):
        status, reason = measured(wrong, level=level, pass_=pass_)
        assert status is Status.ERROR
        assert reason.startswith("exact, but its gradients are off by ")
    assert measured(wrong, level=level)[0] is Status.OK


def test_compare_leaves_out_what_is_not_exact() -> None:
    cells = [Cell("s", "w", parse_spec(one), LONG) for one in ("softmax", "own-identity")]
    found = measure_pairs(cells, replace(RULES, min_time=0.01), 2)
    ((place, status, reason),) = found.left_out
    assert (place, status) == (1, "error")
    assert reason.startswith("exact, but off by ")


HONEST: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "causal": lambda: {"shape": replace(LONG, causal=True)},
    "few keys": lambda: {"shape": replace(LONG, heads=4, kv_heads=2, causal=True)},
    "bias": lambda: {"shape": replace(LONG, causal=True, bias="alibi")},
    "sliding": lambda: {"shape": replace(LONG, causal=True, mask="sliding:8")},
    "cross": lambda: {"shape": replace(LONG, seq_len=40, kv_len=96)},
    "padding": lambda: {"padding": 0.5},
    "one key": lambda: {"inputs": parse_spec("gaussian:logit_std=30")},
}


@pytest.mark.parametrize("case", HONEST)
@pytest.mark.parametrize("variant", ["softmax", "sdpa", "chunked"])
def test_what_is_exact_is_no_error_in_any_pass_and_dtype(variant: str, case: str) -> None:
    for dtype in ("float32", "bfloat16", "float64"):
        for pass_ in ("forward", "training"):
            status, reason = measured(variant, **{"dtype": dtype, "pass_": pass_, **HONEST[case]()})
            assert status is Status.OK or (status is Status.UNSUPPORTED and case != "plain"), (dtype, pass_, reason)


@pytest.mark.parametrize("pass_", ["decode", "stepwise", "generate"])
def test_steps_are_held_to_the_formula(pass_: Any) -> None:
    shape = replace(LONG, causal=True, seq_len=20)
    given = {"new_tokens": 4} if pass_ == "generate" else {}
    assert measured("softmax", shape, pass_=pass_, **given)[0] is Status.OK
