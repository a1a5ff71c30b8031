"""Figures for one column of a paper: nothing is too small to read, and nothing lies on anything else."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import pi, sqrt
from typing import Any

import pandas as pd
import pytest
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from attnbench.errors import UsageError
from attnbench.figures import draw
from tests.committed import rows_of

Faults = Callable[[Figure], list[str]]
INCHES = 3.3


def column(frame: pd.DataFrame, **options: Any) -> dict[str, Figure]:
    return draw(frame, width="column", **options)


@pytest.mark.parametrize("run", ["lra-cpu", pytest.param("lra-h200", marks=pytest.mark.slow), "long-cpu"])
def test_every_word_of_the_committed_runs_can_be_read_in_a_column(run: str, faults: Faults) -> None:
    figures = column(rows_of(run), title="A title that is much longer than a column is wide, twice")
    assert figures
    for figure in figures.values():
        assert figure.get_size_inches()[0] == INCHES
        assert faults(figure) == []


def test_and_so_can_maps_and_tables(performer: pd.DataFrame, linformer: pd.DataFrame, faults: Faults) -> None:
    drawn = column(performer) | column(linformer)
    assert {"map", "error", "speedup", "scaling"} <= set(drawn)
    for figure in drawn.values():
        assert faults(figure) == []


@pytest.mark.parametrize(
    ("run", "name"),
    [("claims-cpu", "error"), ("score-cpu", "scores"), ("swap-minilm", "swap"), ("generate-cpu", "error")],
)
@pytest.mark.parametrize("width", ["page", "column"])
def test_no_name_or_heading_is_cut(run: str, name: str, width: str, faults: Faults) -> None:
    (figure,) = draw(rows_of(run), figures=[name], width=width).values()
    assert faults(figure) == []
    assert [text.get_text() for ax in figure.axes for text in ax.texts if "…" in text.get_text()] == []
    headings = [text.get_text() for text in figure.texts[1:] if text.get_weight() == "bold"]
    assert [heading for heading in headings if "…" in heading] == []


@pytest.mark.parametrize("width", [pytest.param("page", marks=pytest.mark.slow), "column"])
def test_headings_of_many_settings_and_ticks_of_many_lengths_stand_apart(run: Any, width: str, faults: Faults) -> None:
    rows = [
        row
        for dtype in ("float32", "bfloat16")
        for causal in (False, True)
        for padding in (0.0, 0.5)
        for row in run.lra_rows(range(1024, 16385, 1024), dtype=dtype, causal=causal, padding=padding, head_dim=16)
        if row["variant"] in ("softmax", "sdpa", "performer", "local", "linear", "chunked")
    ]
    drawn = draw(run.table(rows), figures=["tradeoff", "scaling"], width=width)
    assert len(drawn) == 2
    for name, figure in drawn.items():
        assert faults(figure) == [], name
    headings = [text.get_text().replace("\n", " ") for text in drawn["scaling"].texts if text.get_weight() == "bold"]
    assert headings[1:4] == [
        f"float32 · {form}" for form in ("not causal · no padding", "not causal · 50% padding", "causal · no padding")
    ]


def test_numbers_stand_for_the_names_that_a_column_has_no_room_for(lra: pd.DataFrame) -> None:
    (figure,) = column(lra, figures=["tradeoff"]).values()
    panel = next(ax for ax in figure.axes if ax.axison)
    drawn = [text.get_text() for text in panel.texts if text.get_text().isdigit()]
    listed = [text.get_text() for ax in figure.axes if not ax.axison for text in ax.texts]
    named = dict(pairwise(listed))
    assert len(drawn) == len({*drawn}) > 8
    assert {named[number].removesuffix("†").partition(":")[0] for number in drawn} <= {*lra["variant"]}


def test_the_largest_circle_is_drawn_whole_at_the_edge_of_its_panel() -> None:
    (figure,) = column(rows_of("lra-cpu"), figures=["tradeoff"]).values()
    panel = next(ax for ax in figure.axes if ax.axison)
    circles = [one for one in panel.collections if isinstance(one, PathCollection)]
    tops = [
        panel.transData.transform(one.get_offsets())[0][1] + sqrt(one.get_sizes()[0] / pi) * figure.dpi / 72
        for one in circles
    ]
    beyond = [one for one, top in zip(circles, tops, strict=True) if top > panel.get_window_extent().y1]
    assert [one.get_clip_on() for one in beyond] == [False]


def test_what_a_column_cannot_hold_is_refused_in_a_line(run: Any) -> None:
    with pytest.raises(UsageError, match="peers is too wide for one column; draw it without --width column"):
        column(rows_of("peers-cpu-as-shipped"), figures=["peers"])
    with pytest.raises(UsageError, match="unknown width 'colum'; did you mean 'column'"):
        draw(run.table(run.lra_rows((64,))), width="colum")


def test_a_page_is_as_wide_as_before_after_a_column(lra: pd.DataFrame) -> None:
    column(lra, figures=["scaling"])
    assert draw(lra, figures=["scaling"])["scaling"].get_size_inches()[0] == 8.0


def test_a_panel_of_scores_is_no_taller_for_long_names() -> None:
    (figure,) = column(rows_of("score-cpu"), figures=["scores"]).values()
    panels = [ax for ax in figure.axes if ax.get_xlabel() == "score"]
    tall = [ax.get_position().height * figure.get_size_inches()[1] for ax in panels]
    assert len(tall) > 4
    assert max(tall) <= 7 * 0.275 + 1e-6


def test_the_name_of_a_line_that_is_too_long_is_cut_and_its_number_is_not(lra: pd.DataFrame) -> None:
    errors = (lra["sweep"] == "error") & (lra["variant"] == "oracle-lowrank")
    frame = lra.assign(label=lra["label"].mask(errors, "oracle-lowrank:rank=512,another=option,third=true"))
    figure = column(frame, figures=["tradeoff"])["tradeoff"]
    (said,) = [text.get_text() for ax in figure.axes for text in ax.texts if "oracle-lowrank:" in text.get_text()]
    assert said.endswith("…: 0.21")
