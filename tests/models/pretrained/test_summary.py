from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec, parse_spec
from attnbench.measure.statistics import median_interval
from attnbench.measure.status import Status
from attnbench.results.record import Record
from attnbench.results.swaps import SwapLine, lines
from attnbench.suite.cell import Cell, Pretrained

CELL = Cell(
    *("swap", "together", Spec("performer"), Shape(seq_len=8), "pretrained"),
    measure=("loss",),
    pretrained=Pretrained("m", "", 6, 10),
)
BASE = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)


def row(label: str, steps: int, above: float, *, seed: int = 0, slope: float = 0.0, **more: Any) -> dict[str, Any]:
    losses = [loss + above + slope * place for place, loss in enumerate(BASE)]
    deltas = [a - b for a, b in zip(losses, BASE, strict=True)]
    low, high = median_interval(deltas) or (None, None)
    columns = {
        "window_losses": json.dumps(losses),
        "loss": math.fsum(losses) / 6,
        "loss_base": 1.25,
        "loss_delta": sorted(deltas)[2] / 2 + sorted(deltas)[3] / 2,
        "loss_delta_low": low,
        "loss_delta_high": high,
        "kl": above,
        "hidden_error": 1.0,
        "text": "t",
    }
    sweep = "exact" if label == "exact" else "together"
    spec = parse_spec("sdpa" if label == "exact" else label)
    cell = replace(CELL, sweep=sweep, variant=spec, tuned=steps, seed=seed)
    return Record.of(cell, Status.OK, **columns).to_json() | more


def line(found: list[SwapLine], label: str, steps: int) -> SwapLine:
    (one,) = [one for one in found if (one.label, one.steps) == (label, steps)]
    return one


def test_what_training_repaired_is_told_from_what_it_taught() -> None:
    found = lines([row("none", 0, 0.0), row("none", 9, -0.2), row("performer", 0, 2.0), row("performer", 9, 0.3)])
    after = line(found, "performer", 9)
    assert after.over_original is not None
    assert after.over_original.median == pytest.approx(0.3)
    assert after.over_control is not None
    assert after.over_control.median == pytest.approx(0.5)
    assert after.repaired == pytest.approx(1 - 0.5 / 2.0)
    assert line(found, "performer", 0).over_control is None
    assert (line(found, "none", 9).over_control, line(found, "none", 9).repaired) == (None, None)


def test_what_ends_level_with_averaging_all_values_has_repaired_no_attention() -> None:
    rows = [row("none", 0, 0.0), row("none", 9, 0.0)]
    for label, before, after, slope in (
        ("mean-value", 1.0, 0.5, 0.0),
        ("linear", 1.0, 0.5, 0.01),
        ("performer", 1.0, 0.49, 0.0),
        ("topk", 0.5, 0.1, 0),
    ):
        rows += [row(label, 0, before), row(label, 9, after, slope=slope)]
    found = lines(rows)
    assert {one.label for one in found if one.as_trivial} == {"linear", "performer"}
    assert line(found, "linear", 9).repaired == pytest.approx(0.5, abs=0.05)


def test_differences_are_paired_over_windows() -> None:
    found = lines([row("none", 9, 0.0), row("performer", 0, 1.0), row("performer", 9, 1.0, slope=0.1)])
    over = line(found, "performer", 9).over_control
    assert over is not None
    assert (over.low, over.median, over.high) == pytest.approx((1.0, 1.25, 1.5))


def test_numbers_are_medians_over_seeds_and_the_interval_covers_all_of_them() -> None:
    found = lines([row("performer", 0, above, seed=seed) for seed, above in enumerate((1.0, 5.0, 2.0))])
    (one,) = found
    assert (one.seeds, one.kl, one.loss) == (3, 2.0, pytest.approx(3.25))
    assert one.over_original is not None
    assert (one.over_original.low, one.over_original.high) == pytest.approx((1.0, 5.0))


def test_a_variant_that_did_no_damage_has_nothing_to_repair() -> None:
    found = lines([row("none", 9, 0.0), row("softmax", 0, 0.0), row("softmax", 9, 0.0)])
    assert line(found, "softmax", 9).repaired is None


def test_rows_that_failed_have_no_line() -> None:
    assert lines([row("linear", 0, 0.0, status="error"), row("local", 0, 0.0)])[0].label == "local"


def test_layers_one_after_the_other_are_told_from_one_that_was_asked_for() -> None:
    each = [row("local", 0, 0.1, sweep="each", replaced=str(layer)) for layer in range(2)]
    found = lines([*each, row("local", 0, 0.1, replaced="0"), row("exact", 0, 0.0)])
    assert [(one.label, one.replaced, one.alone) for one in found] == [
        *(("local", "0", True), ("local", "1", True), ("local", "0", False), ("exact", "all", False)),
    ]
