"""Error over the steps of a generation: does the state of the prompt still serve the last tokens?"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnbench.figures.error_lines import at_one_length
from attnbench.figures.kit.page import NothingToDraw, winners
from attnbench.figures.kit.score_lines import ScoreLine, ScorePanel, draw_lines, least_last, linear_x
from attnbench.figures.kit.style import Look, in_style
from attnbench.figures.kit.ticks import linear_ticks
from attnbench.measure.status import Status
from attnbench.results.frame import marks
from attnbench.results.frame.settings import PANELS, Setting, compared, of_length, only_length, settings, without_room
from attnbench.results.frame.words import failures, short_names, where

NEEDS = "errors of pass generate"
_MARKS = 6
"""Most marks on a line."""


@in_style
def draw_steps(frame: pd.DataFrame, *, n: int | None = None) -> Figure:
    """Draw the relative error of new tokens against their number, in a panel for each input.

    A note names exact methods, which are left out. Rows that were measured differently get separate panels. ``n`` is
    the prompt's length; by default the longest of those with most rows. Raises UsageError if it has no rows, and
    NothingToDraw without an error of steps.
    """
    rows = compared(frame)
    drawn = of_length(rows[_has_steps(rows) & (rows["error_kind"] != "exact")], n, "errors of steps")
    if drawn.empty:
        raise NothingToDraw("; ".join(failures(rows)) or f"needs {NEEDS}")
    found = settings(drawn, also_same=("inputs",))
    names, hidden = short_names(drawn)
    shown = [replace(setting, rows=at_one_length(setting)) for setting in found[:PANELS]]
    panels = [_panel(setting, names) for setting in shown]
    exact = rows.loc[_has_steps(rows) & (rows["error_kind"] == "exact"), "label"]
    notes = [
        "Relative error of the outputs of neighbouring new tokens against attention to the whole cache, in float64. "
        "Names from the smallest last error up.",
        f"Left out — exact up to rounding: {', '.join(dict.fromkeys(exact))}." if len(exact) else "",
        hidden,
        *marks.notes(line.name for panel in panels for line in panel.lines),
        *(f"Not drawn — {line}" for line in failures(rows)),
        without_room(found),
    ]
    every = pd.concat([setting.rows for setting in shown])
    fair = [[line for line in panel.lines if not line.name.endswith(marks.NO_ERROR)] for panel in panels]
    means = [[(math.fsum(line.y) / len(line.y), line.name) for line in lines] for lines in fair if lines]
    title = f"Least mean error over the new tokens: {winners(means, largest=False)}" if means else "No approximation"
    return draw_lines(title, where(every, only_length(every)), notes, panels, "relative error", _scale, _draw)


def _has_steps(rows: pd.DataFrame) -> pd.Series[bool]:
    steps = rows["rel_error_steps"]
    return (rows["status"] == Status.OK) & steps.notna() & (steps != "")


def _panel(setting: Setting, names: Mapping[str, str]) -> ScorePanel:
    lines = [
        _line(row, names[str(row["label"])] + marks.NO_ERROR * (row["error_kind"] == "distance"))
        for _, row in setting.rows.iterrows()
    ]
    return ScorePanel(setting.about, tuple(sorted(lines, key=least_last)), ())


def _line(row: pd.Series, name: str) -> ScoreLine:
    every = np.array(json.loads(row["rel_error_steps"]), dtype=float)
    ends = np.linspace(0, float(row["new_tokens"]), len(every) + 1)
    known = np.isfinite(every)
    middle, errors = (tuple(map(float, one[known])) for one in ((ends[1:] + ends[:-1] + 1) / 2, every))
    return ScoreLine(name, str(row["family"]), middle, errors, errors, errors)


def _scale(ax: Axes, panel: ScorePanel) -> None:
    linear_x(ax, max(line.x[-1] for line in panel.lines) + 0.5, "new token")
    _, high = ax.get_ylim()
    ax.set_ylim(0, high)
    ax.set_yticks([tick for tick in linear_ticks(0, high) if tick <= high])


def _draw(ax: Axes, line: ScoreLine, look: Look) -> None:
    ax.plot(line.x, line.y, lw=1.4, markersize=3.4, alpha=0.95, markevery=-(-len(line.x) // _MARKS), **look.line)
