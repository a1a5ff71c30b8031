"""Error against the variant's own formula over the length: does rounding add up, is a carry lost?"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnbench.figures.kit.page import NothingToDraw
from attnbench.figures.kit.score_lines import ScoreLine, ScorePanel, draw_lines, draw_plain, least_last
from attnbench.figures.kit.style import Look, in_style
from attnbench.figures.kit.ticks import length, log_axis, padded
from attnbench.measure.status import Status
from attnbench.results.frame.settings import PANELS, Setting, check_columns, settings, without_room
from attnbench.results.frame.words import own_form_note, short_names, where
from attnbench.units import format_number

NEEDS = "own errors at two lengths"
_COLUMNS = {"own_error": "outputs", "own_error_grad": "gradients"}
_ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Largest relative error of one rounding to a data type."""
_LEAST = 0.05
"""Fewer roundings are drawn there: 0 has no place on a scale of powers."""


@in_style
def draw_own_error(rows: pd.DataFrame) -> Figure:
    """Draw the errors of outputs and of gradients against the own formula over n, with a panel for each data type.

    Thin lines show the last half of the tokens alone. Rows that were measured differently get separate panels. Raises
    NothingToDraw without own errors at two lengths.
    """
    check_columns(rows)
    drawn = rows[(rows["status"] == Status.OK) & np.isfinite(rows["own_error"].astype(float))]
    if drawn["seq_len"].nunique() < 2:
        why = dict.fromkeys(str(note) for note in rows["own_error_note"] if note and note == note)
        raise NothingToDraw("; ".join(why) or f"needs {NEEDS}")
    found = settings(drawn, also_same=("inputs",))
    names, hidden = short_names(drawn)
    shown = found[:PANELS]
    panels = [_panel(setting, names, column) for setting in shown for column in _COLUMNS]
    panels = [panel for panel in panels if panel.lines]
    every = pd.concat([setting.rows for setting in shown])
    rounding = [f"{_ROUNDING[dtype]:.2g} in {dtype}" for dtype in _rounded_to(every).unique()]
    notes = [
        "Relative error of one example against the variant's own formula in float64, on the same rounded inputs and "
        f"weights, divided by that of one rounding: {', '.join(rounding)}. Thin, dashed: the last half of the tokens "
        "alone. Names from the smallest error at the longest length up.",
        hidden,
        own_form_note(names),
        without_room(found),
    ]
    error, name, of = max((max(line.y), line.name, panel.heading) for panel in panels for line in panel.lines)
    title = f"Largest error against the own formula: {name}, {format_number(error, 2)} roundings ({of})"
    values = [
        y for panel in panels for line in panel.lines for y in (*line.y, *(y for _, ys in line.single for y in ys))
    ]
    lengths = sorted(every["seq_len"].unique())
    return draw_lines(title, where(every, None), notes, panels, "roundings", partial(_scale, values, lengths), _draw)


def _rounded_to(rows: pd.DataFrame) -> pd.Series[Any]:
    """The type of a state that decoding keeps in one, else that of all numbers."""
    return rows["state_dtype"].where(rows["state_dtype"].isin(list(_ROUNDING)), rows["dtype"])


def _panel(setting: Setting, names: Mapping[str, str], column: str) -> ScorePanel:
    lines, one = [], _ROUNDING[str(_rounded_to(setting.rows).iloc[0])]
    for label, part in setting.rows.groupby("label", sort=False):
        part = part[np.isfinite(part[column].astype(float))].sort_values("seq_len")
        if part.empty:
            continue
        x, y, late = (
            tuple(map(float, (part[name].fillna(0) / unit).clip(lower=least)))
            for name, unit, least in (("seq_len", 1, 1), (column, one, _LEAST), ("own_error_late", one, _LEAST))
        )
        behind = ((x, late),) if column == "own_error" else ()
        lines.append(ScoreLine(names[str(label)], str(part["family"].iloc[0]), x, y, y, y, behind))
    heading = ", ".join(filter(None, (setting.name or setting.rows["dtype"].iloc[0], _COLUMNS[column])))
    return ScorePanel(heading, tuple(sorted(lines, key=least_last)), ())


def _scale(values: list[float], lengths: list[int], ax: Axes, panel: ScorePanel) -> None:
    log_axis(ax, "y", padded(values, share=0.07, least=4), base=2 if max(values) < 1000 * min(values) else 10, most=6)
    log_axis(ax, "x", padded(lengths, share=0.04), at=lengths, most=len(lengths), text=length)
    ax.set_xlabel("n (log2 scale)")


def _draw(ax: Axes, line: ScoreLine, look: Look) -> None:
    draw_plain(ax, line, look)
    for x, y in line.single:
        ax.plot(x, y, lw=0.7, ls="--", color=look.colour, alpha=0.9)
