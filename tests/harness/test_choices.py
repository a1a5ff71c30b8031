"""Rows of variants that choose which pairs count say what they chose, and how long that alone took."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnbench.catalogue.build import build
from attnbench.contract.inputs import draw_qkv
from attnbench.contract.problem.padding import key_mask
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec, parse_spec
from attnbench.harness.inside import call as calls
from attnbench.harness.inside.execute import run_cell
from attnbench.harness.wire.protocol import VisitCell
from attnbench.measure.time import TimingRules
from attnbench.results.record import Record
from attnbench.suite.cell import Cell, Pass

SHAPE = Shape(batch=2, heads=2, seq_len=64, head_dim=8, causal=True)


def measure(text: str, **changes: object) -> Record:
    cell = Cell("s", "w", parse_spec(text), SHAPE, measure=("time", "error"), error_draws=1)
    return run_cell(VisitCell(replace(cell, **changes), TimingRules(quick=True)))[0]


@pytest.mark.parametrize("pass_", ["forward", "backward", "training"])
def test_a_row_says_what_was_kept_and_how_long_the_choice_took(pass_: Pass) -> None:
    row = measure("moba:block=8,blocks=2", pass_=pass_)
    assert row.status == "ok", row.reason
    q, k, _ = draw_qkv(Spec("gaussian"), SHAPE, 0)
    seen = build("moba:block=8,blocks=2", SHAPE).select(q, k).pairs(slice(0, 64))  # type: ignore[operator]
    weights = (q.double() @ k.double().mT * 8**-0.5).masked_fill(~torch.ones(64, 64).tril().bool(), -torch.inf)
    assert row.kept_mass == pytest.approx(float((weights.softmax(-1) * seen).sum(-1).mean()), abs=1e-9)
    assert row.kept_pairs == pytest.approx(float(seen.sum()) / (4 * 64 * 65 / 2))
    assert row.select_s is not None
    assert row.time_median_s is not None
    assert row.select_s > 0


def test_a_full_budget_keeps_all() -> None:
    row = measure("xattention:threshold=1")
    assert (row.kept_mass, row.kept_pairs) == (pytest.approx(1), 1.0)
    assert row.rel_error is not None
    assert row.rel_error < 1e-6


def test_padded_tokens_count_in_neither_share() -> None:
    row = measure("moba:block=8,blocks=2", padding=0.25)
    mask = key_mask(SHAPE, 0.25)
    assert mask is not None
    q, k, _ = draw_qkv(Spec("gaussian"), SHAPE, 0)
    seen = build("moba:block=8,blocks=2", SHAPE).select(q, k, key_mask=mask).pairs(slice(0, 64))  # type: ignore[operator]
    real = mask[:, None, :, None]
    visible = torch.ones(64, 64).tril().bool() & mask[:, None, None] & real
    assert row.kept_pairs == pytest.approx(float((seen & real).sum()) / float(2 * visible.sum()))
    assert row.kept_mass is not None
    assert 0 < row.kept_mass < 1


def test_others_have_none_of_these() -> None:
    for row in (measure("softmax"), measure("softmax", level="layer", measure=("time",))):
        assert (row.select_s, row.kept_mass, row.kept_pairs) == (None, None, None)


def test_a_window_keeps_pairs_without_choosing_them() -> None:
    row = measure("local:window=3")
    assert row.select_s is None
    assert row.kept_mass is not None
    assert row.kept_pairs is not None
    assert 0 < row.kept_mass < 1
    assert 0 < row.kept_pairs < 1


def test_a_choice_in_a_layer_is_not_timed_alone() -> None:
    row = measure("moba:block=8,blocks=2", level="layer", measure=("time",))
    assert row.status == "ok", row.reason
    assert row.select_s is None


def test_the_choice_that_is_timed_is_made_on_the_inputs_of_the_call() -> None:
    cell = Cell("s", "w", parse_spec("moba:block=8,blocks=2"), SHAPE)
    made = calls.prepare(cell)
    assert made.select is not None
    chosen = [made.select().pairs(slice(0, 64)) for _ in range(2)]
    q, k, _ = draw_qkv(Spec("gaussian"), SHAPE, 0)
    assert torch.equal(chosen[0], build(cell.variant, SHAPE).select(q, k).pairs(slice(0, 64)))  # type: ignore[operator]
    assert not torch.equal(chosen[0], chosen[1])  # inputs take turns
