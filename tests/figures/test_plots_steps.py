"""The error over the steps of a generation has a line for each variant, a panel for each input."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure

from attnbench.errors import UsageError
from attnbench.figures import draw
from attnbench.figures.kit.page import NothingToDraw
from attnbench.figures.steps import draw_steps

Words = Callable[[Figure], str]


def generated(run: Any, label: str, errors: list[float], **columns: Any) -> dict[str, Any]:
    at = {"pass": "generate", "seq_len": 96, "new_tokens": 4, "error_kind": "approximation", "error_draws": 1}
    steps = {"rel_error": errors[0], "rel_error_steps": json.dumps(errors)}
    return run.row(label, **{**at, **steps, **columns})  # type: ignore[no-any-return]


@pytest.fixture
def frame(run: Any) -> pd.DataFrame:
    rows = []
    for inputs in ("gaussian:logit_std=1", "sink"):
        rows += [
            generated(run, "performer", [0.1, 0.2, 0.3, 0.4], inputs=inputs),
            generated(run, "local", [0.3, 0.3, 0.2, 0.2], inputs=inputs),
            generated(run, "softmax", [1e-7] * 4, inputs=inputs, error_kind="exact"),
        ]
    return run.table(rows)  # type: ignore[no-any-return]


def lines(figure: Figure) -> list[list[tuple[list[float], list[float]]]]:
    """x and y of each line of each panel."""
    panels = [ax for ax in figure.axes if ax.get_xlabel() == "new token"]
    drawn = [[line for line in ax.lines if len(line.get_xdata()) == 4] for ax in panels]  # type: ignore[arg-type]
    return [[([*map(float, line.get_xdata())], [*map(float, line.get_ydata())]) for line in one] for one in drawn]


def test_each_input_has_a_panel_and_each_approximation_a_line(frame: pd.DataFrame, words: Words) -> None:
    figure = draw(frame, figures=["steps"])["steps"]
    first, second = lines(figure)
    assert first == second
    assert sorted(first) == [
        ([1.0, 2.0, 3.0, 4.0], [0.1, 0.2, 0.3, 0.4]),
        ([1.0, 2.0, 3.0, 4.0], [0.3, 0.3, 0.2, 0.2]),
    ]
    said = words(figure)
    assert "Left out — exact up to rounding: softmax" in said
    assert "sink" in said


def test_an_error_stands_in_the_middle_of_its_stretch_of_tokens(run: Any) -> None:
    rows = [generated(run, "local", [0.1, 0.2, 0.3, 0.4], new_tokens=64)]
    (((x, _),),) = lines(draw_steps(run.table(rows)))
    assert x == [8.5, 24.5, 40.5, 56.5]


def test_without_steps_there_is_nothing_to_draw(frame: pd.DataFrame, run: Any) -> None:
    forward = frame.assign(rel_error_steps="")
    with pytest.raises(NothingToDraw):
        draw_steps(forward)
    with pytest.raises(UsageError, match="no errors of steps at n = 7; there are: 96"):
        draw_steps(frame, n=7)


def test_the_distance_of_another_operator_is_marked_and_is_never_the_least_error(run: Any, words: Words) -> None:
    rows = [
        generated(run, "local", [0.3, 0.3, 0.3, 0.3]),
        generated(run, "linear", [0.001, 0.001, 0.001, 0.001], error_kind="distance"),
    ]
    said = words(draw_steps(run.table(rows))).splitlines()
    assert "Least mean error over the new tokens: local" in said
    assert "linear *" in said
    assert any("is not an error" in line for line in said)


@pytest.mark.parametrize("without", [None, math.nan, math.inf])
def test_a_stretch_without_an_error_leaves_out_its_point_alone(without: float | None, run: Any, words: Words) -> None:
    ends = {"performer": 0.5, "local": 0.3}
    rows = [generated(run, one, [0.1, without, e, e, e], new_tokens=5) for one, e in ends.items()]  # type: ignore[list-item]
    figure = draw_steps(run.table(rows))
    assert sorted(lines(figure)[0]) == [([1.0, 3.0, 4.0, 5.0], [0.1, e, e, e]) for e in (0.3, 0.5)]
    assert "Least mean error over the new tokens: local" in words(figure)
