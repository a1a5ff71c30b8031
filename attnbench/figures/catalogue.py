"""Every variant on one page: a line for each, and a panel each for time, memory, error and decoding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnbench.figures.kit.page import NothingToDraw, Page, new_page, only_on_a_page, shorten, stacked, text_width
from attnbench.figures.kit.palette import palette
from attnbench.figures.kit.style import SMALL_SIZE, in_style
from attnbench.figures.kit.ticks import COSTS, log_axis, padded, plain, power_ticks
from attnbench.figures.scaling import cheapest
from attnbench.measure.status import Status
from attnbench.results.frame.agreement import ROUNDING, alike, same_run
from attnbench.results.frame.settings import (
    PANELS,
    Setting,
    chosen_length,
    compared,
    of_length,
    only_length,
    records,
    settings,
    timed,
    without_room,
)
from attnbench.results.frame.words import failures, named_as, own_form_note, where

ENOUGH = 24
"""Fewest labels at one length that are too many for a scatter plot to name."""
NEEDS = f"times of {ENOUGH} variants"

_STEP = 0.165
"""Inches from line to line."""
_NAMES, _MOST = 2.05, 2.6
"""Width of the names, and of the longest."""
_GAP = 0.22
_HEAD = 0.62
"""Inches above and below the lines, for titles and scales."""


def applies(frame: pd.DataFrame, whole: pd.DataFrame | None = None) -> bool:
    """More labels were timed at one length than a scatter plot can name."""
    rows = timed(frame)
    rows = rows[rows["pass"] != "decode"]
    return not rows.empty and int(rows.groupby(["level", "pass", "seq_len"])["label"].nunique().max()) >= ENOUGH


@in_style
def draw_catalogue(frame: pd.DataFrame, *, n: int | None = None, whole: pd.DataFrame | None = None) -> Figure:
    """Draw a line for each label, grouped by family, and panels for time, peak memory, error and decoding.

    Rows that were measured differently get separate lists, the layer and the forward pass first. By default ``n`` is
    the longest of the lengths with most measured labels, at which errors and decoding are shown too, if they were
    measured there. Raises UsageError if a length or value has no rows, and NothingToDraw if no time or memory was
    measured.
    """
    only_on_a_page("catalogue")
    whole = frame if whole is None else whole
    every = timed(frame)
    prefer = {"level": ("layer", "operator", "model"), "pass": ("forward", "training")}
    listed = of_length(every[every["pass"] != "decode"], n, "rows")
    found = [one for one in settings(listed, prefer) if len(one.ok)]
    if not found:
        raise NothingToDraw("; ".join(failures(every)) or "no time or memory was measured")
    steps = every[every["pass"] == "decode"]
    lists = [_list(setting, whole, steps) for setting in found[:PANELS]]
    rows = pd.concat([one.rows for one in lists])
    marks = dict(zip(dict.fromkeys(pd.concat([one.errors for one in lists])["inputs"]), MARKS, strict=False))
    notes = [
        note_on_errors(lists, marks),
        *dict.fromkeys(f"One token{at}." for one in lists if (at := one.at_another(one.steps))),
        own_form_note(rows["label"]),
        "Each panel has a scale of its own; bars are 95 % intervals, where they are wider than the mark.",
        *(f"Not measured — {line}" for line in failures(rows, at_n=False)),
        without_room(found),
    ]
    return _draw(lists, marks, where(rows, only_length(rows)), notes)


@dataclass(frozen=True)
class _VariantList:
    heading: str
    rows: pd.DataFrame
    errors: pd.DataFrame
    steps: pd.DataFrame

    def panels(self, marks: Mapping[str, str]) -> list[ColumnPanel]:
        """Time and peak memory, error, and the time of one token and the bytes kept for the earlier ones."""
        cost = _measured(self.rows, {"time_median_s": "time", "peak_bytes": "peak memory"}, {})
        one_token = {"time_median_s": "one token", "state_bytes": "its state"}
        decoding = _measured(self.steps, one_token, {Status.UNSUPPORTED: "–"})
        return [*cost, *error(self.errors, marks), *decoding]

    def at_another(self, rows: pd.DataFrame) -> str:
        """``, at n = 512`` if these rows beside the list are of that length, and the list is of another."""
        at = only_length(rows)
        return f", at n = {at}" if len(rows) and at != only_length(self.rows) else ""

    @property
    def lines(self) -> list[tuple[str, str]]:
        families = {str(row["label"]): str(row["family"]) for row in records(self.rows, "label", "family")}
        known = [*palette().families, *dict.fromkeys(families.values())]
        groups = sorted(set(families.values()), key=known.index)
        return [
            (family, label)
            for family in groups
            for label in ("", *(one for one in families if families[one] == family))
        ]


def _list(setting: Setting, frame: pd.DataFrame, steps: pd.DataFrame) -> _VariantList:
    n = chosen_length(None, setting.ok.groupby("seq_len")["label"].nunique(), "rows")
    rows = setting.rows[setting.rows["seq_len"] == n].drop_duplicates("label", keep="last")
    run = compared(same_run(frame, setting)), same_run(steps, setting)
    errors, steps = (named_as(_beside(setting, some, n), rows["label"]) for some in run)
    return _VariantList(setting.about, rows, errors, steps)


def _beside(setting: Setting, rows: pd.DataFrame, n: int) -> pd.DataFrame:
    """The rows that are most like a setting, at the length ``n`` if one was measured there."""
    if rows.empty:
        return rows
    found = alike(rows, setting)
    counts = (found.ok if len(found.ok) else found.rows)["seq_len"].value_counts()
    at = n if n in counts else chosen_length(None, counts, "rows")
    return found.rows[found.rows["seq_len"] == at]


def _draw(
    lists: Sequence[_VariantList], marks: Mapping[str, str], about: Sequence[str], notes: Sequence[str]
) -> Figure:
    rooms = [_STEP * len(one.lines) + _HEAD for one in lists]
    title = cheapest([Setting(one.rows, about=one.heading) for one in lists], {}) or "Every variant"
    page = new_page(title, about, notes, width=9.6, room=stacked(rooms, [one.heading for one in lists]))
    for part, one in zip(page.parts([one.heading for one in lists], rooms), lists, strict=True):
        _draw_list(part, one, one.panels(marks))
    return page.figure


def _draw_list(page: Page, one: _VariantList, panels: Sequence[ColumnPanel]) -> None:
    lines = one.lines
    tall = _STEP * len(lines)
    bottom = page.top - 0.42 - tall
    width = min(_MOST, max(_NAMES, *(text_width(label, SMALL_SIZE) + 0.2 for _, label in lines)))
    names = page.blank(page.left, bottom, width, tall)
    names.set_ylim(len(lines), 0)
    for row, (family, label) in enumerate(lines):
        text = shorten(label or family.upper(), width - 0.1, SMALL_SIZE)
        weight = "normal" if label else "bold"
        names.text(0.13, row + 0.5, text, va="center", fontsize=SMALL_SIZE, fontweight=weight)
        if not label:
            names.plot([0.04], [row + 0.5], "s", color=palette().family(family), markersize=5)
    room = page.right - page.left - width - 0.12  # half of the last tick's number
    wide = (room - _GAP * (len(panels) - 1)) / max(1, len(panels))
    for place, panel in enumerate(panels):
        _draw_panel(page, (page.left + width + place * (wide + _GAP), bottom, wide, tall), panel, lines)


def _draw_panel(
    page: Page, place: tuple[float, float, float, float], panel: ColumnPanel, lines: Sequence[tuple[str, str]]
) -> None:
    ax = page.axes(*place)
    # The distance of another operator may be anything, so it does not stretch the scale of the errors.
    dots = [value for found in panel.values.values() for value, _, hollow in found if not hollow]
    dots += [value for value, _ in panel.lines]
    limits = padded(dots or [value for found in panel.values.values() for value, _, _ in found], share=0.09, least=6.0)
    log_axis(ax, "x", limits, base=panel.base, text=panel.text, at=power_ticks(*limits, panel.base, 3), most=3)
    ax.tick_params(axis="x", labeltop=True, length=2, pad=1)
    ax.set_ylim(len(lines), 0)
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    ax.set_title(panel.title, loc="left", pad=14)
    ax.grid(axis="x")
    for value, mark in panel.lines:
        ax.axvline(value, color=palette().faint, lw=0.8, ls=":", zorder=1)
        ax.plot([value], [0.15], mark, color=palette().faint, ms=3, clip_on=False)
    rows = [row + 0.5 for row, (_, label) in enumerate(lines) if label]
    across: dict[str, Any] = {"transform": ax.get_yaxis_transform(), "color": palette().line, "lw": 0.4, "zorder": 0}
    ax.plot(np.tile([0, 1, math.nan], len(rows)), np.repeat(rows, 3), **across)
    for row, (family, label) in enumerate(lines):
        if label:
            _draw_line(ax, row + 0.5, panel, label, palette().family(family))


def _draw_line(ax: Axes, y: float, panel: ColumnPanel, label: str, colour: str) -> None:
    for value, mark, hollow in panel.values.get(label, []):
        low, high = ax.get_xlim()
        beyond = "<" if value < low else ">" if value > high else mark
        face = palette().page if hollow else colour
        ax.plot(
            [min(max(value, low), high)], [y], beyond, color=colour, mfc=face, mew=0.9, ms=4.2, zorder=3, clip_on=False
        )
    if label in panel.intervals:
        ax.plot(panel.intervals[label], [y, y], color=colour, lw=1.6, zorder=2, solid_capstyle="butt")
    if label in panel.words and label not in panel.values:
        box = {"facecolor": palette().page, "edgecolor": "none", "pad": 0.6}  # so that the line does not strike it out
        faint: dict[str, Any] = {"fontsize": SMALL_SIZE - 0.7, "color": palette().faint, "va": "center"}
        ax.text(0.01, y, panel.words[label], transform=ax.get_yaxis_transform(), bbox=box, **faint)


MARKS = {"o": "circles", "s": "squares", "^": "triangles", "D": "diamonds"}


@dataclass(frozen=True)
class ColumnPanel:
    """The values of one column for each label."""

    title: str
    values: dict[str, list[tuple[float, str, bool]]]
    """Label -> (value, marker, True if hollow)."""
    text: Callable[[float], str]
    base: int
    """Base of the logarithm; its powers are ticks: 2 for bytes, else 10."""
    intervals: dict[str, tuple[float, float]]
    words: dict[str, str]
    lines: Sequence[tuple[float, str]] = ()
    """Values marked for comparison, each with the marker of its inputs."""


def _measured(rows: pd.DataFrame, titles: Mapping[str, str], said: Mapping[str, str]) -> list[ColumnPanel]:
    """A panel for each of these columns that has a value; ``said`` has other words for a status."""
    failed = [one for one in records(rows, "label", "status") if one["status"] != Status.OK]
    words = {one["label"]: said.get(one["status"], str(one["status"])) for one in failed}
    ok = rows[rows["status"] == Status.OK]
    panels = []
    for column, title in titles.items():
        if rows[column].notna().any():
            values = {
                one["label"]: [(float(one[column]), "o", False)] for one in records(ok[ok[column] > 0], "label", column)
            }
            is_time = column == "time_median_s"
            held = records(ok[is_time & (ok["time_ci_low_s"] > 0)], "label", "time_ci_low_s", "time_ci_high_s")
            intervals = {one["label"]: (one["time_ci_low_s"], one["time_ci_high_s"]) for one in held}
            _, text, base = COSTS["time_median_s" if is_time else "peak_bytes"]
            panels.append(ColumnPanel(title, values, text, base, intervals, words))
    return panels


def error(rows: pd.DataFrame, marks: Mapping[str, str]) -> list[ColumnPanel]:
    """The panel of the relative error, with the marker that each of the inputs has."""
    if rows.empty:
        return []
    values: dict[str, list[tuple[float, str, bool]]] = {}
    words: dict[str, str] = {}
    lines = []
    for inputs, part in rows[rows["inputs"].isin(marks)].groupby("inputs", sort=False):
        mark = marks[str(inputs)]
        for row in records(part, "label", "rel_error", "error_kind"):
            label, error = row["label"], row["rel_error"]
            if row["error_kind"] == "learned":
                words[label] = "learned"
            elif error < ROUNDING:
                words[label] = "exact"
            elif math.isfinite(error):
                values.setdefault(label, []).append((error, mark, row["error_kind"] == "distance"))
        trivial = part["trivial_error"].dropna()
        if len(trivial):
            lines.append((float(trivial.median()), mark))
    for row in records(rows, "label", "status"):
        if row["label"] not in values and row["label"] not in words and row["status"] != Status.OK:
            words[row["label"]] = str(row["status"])
    return [ColumnPanel("relative error", values, plain, 10, {}, words, lines)]


def note_on_errors(lists: Sequence[_VariantList], marks: Mapping[str, str]) -> str:
    """The meaning of the error markers, and the inputs that have none; empty without errors."""
    if not marks:
        return ""
    said = ", ".join(f"{MARKS[mark]} {name}" for name, mark in marks.items())
    at = "".join(dict.fromkeys(at for one in lists if (at := one.at_another(one.errors))))
    others = dict.fromkeys(name for one in lists for name in one.errors["inputs"] if name not in marks)
    return (
        f"Error{at}: {said}; dotted: answering mean(V); hollow: the distance of another operator, which is no error; "
        "arrow: beyond the scale; learned: nothing was fitted."
    ) + f" Not drawn, for want of marks: {', '.join(others)}." * bool(others)
