from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure

from attnbench.figures.frontier import draw_frontier
from attnbench.figures.kit.page import NothingToDraw, laid_out
from attnbench.figures.kit.palette import DARK, LIGHT, drawn_in

Words = Callable[[Figure], str]
chart = partial(draw_frontier, title="Fastest within error 0.1: a")


def tries(variant: str, errors: dict[int, float], *, target: str = "error", budget: float = 0.1, **columns: Any) -> Any:
    """As ``Match.to_rows`` gives them: time and memory grow with the knob."""
    return [
        {
            "target": target, "budget": budget, "variant": variant, "knob": "m", "value": value,
            "label": f"{variant}:m={value}", "status": "ok", "reason": "", "error_kind": "approximation",
            "error": error, "error_low": 0.9 * error, "error_high": 1.1 * error, "time_median_s": 1e-5 * value,
            "peak_bytes": 1000 * value, "chosen": False, "own_form": "", **columns,
        }
        for value, error in errors.items()
    ]  # fmt: skip


def frame(*rows: list[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame([row for part in rows for row in part])


FALLING = {m: 2 / math.sqrt(m) for m in (8, 16, 32, 64, 512, 256)}


def test_the_frontier_is_a_line_in_order_of_cost_and_what_it_beats_is_pale() -> None:
    figure = chart(frame(tries("a", FALLING | {128: 0.9})))
    ax = figure.axes[0]
    (line,) = [one for one in ax.lines if len(one.get_xdata()) == len(FALLING)]
    assert list(line.get_xdata()) == [1e-5 * m for m in sorted(FALLING)]
    (pale,) = [one for one in ax.lines if one.get_alpha() == 0.3 and one.get_marker() == line.get_marker()]
    assert (list(pale.get_xdata()), list(pale.get_ydata())) == ([1e-5 * 128], [0.9])


@pytest.mark.parametrize(("target", "budget"), [("error", 0.1), ("time", 2e-3), ("memory", 2e5)])
def test_the_budget_is_a_line_across_what_it_is_a_budget_of(target: str, budget: float) -> None:
    ax = chart(frame(tries("a", FALLING, target=target, budget=budget))).axes[0]
    (line,) = [one for one in ax.lines if one.get_label() == "budget"]
    level = line.get_ydata() if target == "error" else line.get_xdata()
    assert set(level) == {budget}
    assert ax.get_xlabel().startswith("peak memory" if target == "memory" else "median time")
    inside = ax.get_ylim() if target == "error" else ax.get_xlim()
    assert inside[0] < budget < inside[1]


def test_the_chosen_setting_has_a_ring_and_stands_in_the_key(words: Words) -> None:
    rows = tries("a", FALLING)
    rows[3]["chosen"] = True
    drawn = chart(frame(rows, tries("b", {8: 0.5})))
    (ring,) = drawn.axes[0].collections
    assert ring.get_offsets().tolist() == [[1e-5 * 64, 0.25]]
    assert {"m=64", "budget not met"} <= {*words(drawn).splitlines()}


def test_exact_methods_stand_at_the_lower_edge_and_do_not_stretch_the_scale(words: Words) -> None:
    exact = tries("softmax", {8: 2e-7}, error_kind="exact", knob="", value=None, chosen=True)
    drawn = chart(frame(tries("a", FALLING), exact))
    low, _ = drawn.axes[0].get_ylim()
    assert low > 1e-3
    assert "At the lower edge: equal to softmax attention up to rounding." in words(drawn)
    assert any(list(line.get_ydata()) == [low] for line in drawn.axes[0].lines)
    assert "as it stands" in words(drawn)


def test_other_operators_own_forms_and_failures_are_told(words: Words) -> None:
    rows = frame(
        tries("a", FALLING, error_kind="distance"),
        tries("b", {8: 0.5}, own_form="a window of its own"),
        tries("b", {16: math.nan, 32: math.nan}, status="oom", reason="needs 9 GiB"),
    )
    said = words(chart(rows)).splitlines()
    assert {"a *", "b†"} <= {*said}
    assert any("is not an error" in line for line in said)
    assert "b: oom at m = 16, 32 — needs 9 GiB" in said


def test_a_variant_that_has_no_error_is_named(words: Words) -> None:
    fitted = tries("linformer", {8: math.nan}, error_kind="learned", target="time")
    said = words(chart(frame(tries("a", FALLING, target="time"), fitted)))
    assert "Without an error, and not drawn: linformer." in said


def test_without_an_error_or_with_exact_methods_alone_there_is_no_chart() -> None:
    with pytest.raises(NothingToDraw, match="both an error and a peak memory"):
        chart(frame(tries("a", {8: math.nan}, target="memory")))
    with pytest.raises(NothingToDraw, match="every setting equals softmax attention"):
        chart(frame(tries("softmax", {8: 1e-7})))


def scores(variant: str, values: dict[int, float], **columns: Any) -> Any:
    """The same for a budget of a score, with an interval of ±0.05."""
    rows = tries(variant, dict.fromkeys(values, math.nan), target="score", budget=0.9, error_kind=None, **columns)
    ends = {m: (score - 0.05, score + 0.05) for m, score in values.items()}
    return [
        {**row, "score": values[row["value"]], "score_low": ends[row["value"]][0], "score_high": ends[row["value"]][1]}
        for row in rows
    ]


RISING = {8: 0.3, 16: 0.5, 64: 0.92, 32: 0.8}


def test_of_scores_the_best_are_above_and_the_budget_is_a_line_across_them(words: Words) -> None:
    rows = scores("a", RISING | {48: 0.6})
    rows[2]["chosen"] = True
    figure = chart(frame(rows))
    ax = figure.axes[0]
    (line,) = [one for one in ax.lines if len(one.get_xdata()) == len(RISING)]
    assert list(line.get_ydata()) == sorted(RISING.values())
    (pale,) = [one for one in ax.lines if one.get_alpha() == 0.3 and one.get_marker() == line.get_marker()]
    assert list(pale.get_ydata()) == [0.6]
    (budget,) = [one for one in ax.lines if one.get_label() == "budget"]
    assert set(budget.get_ydata()) == {0.9}
    assert ax.get_yscale() == "linear"
    low, high = ax.get_ylim()
    assert low < 0.25
    assert high > 0.97
    (ring,) = ax.collections
    assert ring.get_offsets().tolist() == [[1e-5 * 64, 0.92]]
    assert {"Fastest within error 0.1: a", "m=64"} <= {*words(figure).splitlines()}


def test_variants_without_a_score_are_named_and_without_any_there_is_no_chart(words: Words) -> None:
    failed = scores("b", {8: math.nan}, status="crash", reason="1 of 3 trainings failed")
    unscored = scores("c", {8: math.nan})
    said = words(chart(frame(scores("a", RISING), failed, unscored))).splitlines()
    assert "Without a score, and not drawn: c." in said
    assert any(line.startswith("b: crash at m = 8 — 1 of 3 trainings failed") for line in said)
    with pytest.raises(NothingToDraw, match="no setting has both a score and a median time"):
        chart(frame(unscored))


def test_it_follows_the_style() -> None:
    with drawn_in("dark"):
        assert chart(frame(tries("a", FALLING))).axes[0].lines[-1].get_color() in (*DARK.sequence, DARK.ink)
    assert chart(frame(tries("a", FALLING))).axes[0].lines[-1].get_color() in (*LIGHT.sequence, LIGHT.ink)


@pytest.mark.parametrize("width", ["page", "column"])
def test_every_word_of_scores_can_be_read(width: str, faults: Callable[[Figure], list[str]]) -> None:
    rows = [scores(f"performer:kernel=k{k}", {m: score / (k + 1) for m, score in RISING.items()}) for k in range(4)]
    with laid_out(width):
        assert faults(chart(frame(*rows), about="recall, n = 64, 2 layers, 2 × 32, " * 4)) == []


@pytest.mark.parametrize("count", [1, 4, 10])
@pytest.mark.parametrize("width", ["page", "column"])
def test_every_word_can_be_read(count: int, width: str, faults: Callable[[Figure], list[str]]) -> None:
    rows = [
        tries(f"performer:beta=1.{k},kernel=hyperbolic", {m: e / (k + 1) for m, e in FALLING.items()})
        for k in range(count)
    ]
    with laid_out(width):
        assert faults(chart(frame(*rows), about="operator forward " * 10)) == []
