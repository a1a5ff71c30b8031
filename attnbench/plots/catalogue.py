"""Every variant on one page: a line for each, and a panel each for time, memory, error and decoding."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnbench.errors import UsageError
from attnbench.plots.page import Page, draw_nothing, new_page, shorten
from attnbench.plots.setting import choose, compared, failures, timed, where
from attnbench.plots.style import FAINT, FAMILY_COLOURS, INK, LINE, OTHER_COLOUR, SMALL_SIZE, in_style
from attnbench.plots.ticks import log_axis, padded, plain, power_ticks, trimmed
from attnbench.status import Status
from attnbench.units import format_bytes, format_seconds

TITLE = "Every variant: time, memory, error, decoding"
ENOUGH = 24
"""Labels at one length from which on a scatter plot cannot name them all."""

_STEP = 0.165
"""Inches from line to line."""
_NAMES = 1.95
_GAP = 0.16
_MARKS = ("o", "s", "^", "D")
_ROUNDING = 1e-5
_FAMILIES = list(FAMILY_COLOURS)


@dataclass(frozen=True)
class _Panel:
    """One column: what it shows of each label."""

    title: str
    values: dict[str, list[tuple[float, str, bool]]]
    """Label -> (value, marker, whether it is hollow)."""
    text: Callable[[float], str]
    base: int
    """Of the logarithm whose powers are ticks: 2 for bytes, else 10."""
    intervals: dict[str, tuple[float, float]]
    words: dict[str, str]
    """Label -> what stands instead of a number."""
    lines: Sequence[tuple[float, str]] = ()
    """Values marked for comparison, with the marker of the inputs that they belong to."""


def applies(frame: pd.DataFrame) -> bool:
    """More labels were timed at one length than a scatter plot can name."""
    rows = timed(frame)
    rows = rows[rows["pass"] != "decode"]
    return not rows.empty and int(rows.groupby(["level", "pass", "seq_len"])["label"].nunique().max()) >= ENOUGH


@in_style
def draw_catalogue(
    frame: pd.DataFrame, *, n: int | None = None, level: str | None = None, pass_: str | None = None
) -> Figure:
    """A line for each label, grouped by family, and panels for time, peak memory, error and decoding.

    Args:
        frame: rows as :func:`attnbench.plots.load.read_results` gives them.
        n: the length; by default the one with most labels, and the longest of these.
        level, pass_: which rows of time and memory; by default the layer's and forward, where there are any.

    Raises:
        UsageError: a length, level or pass that has no rows.
        ResultsError: not a results table.
    """
    every = timed(frame)
    steps, whole = every[every["pass"] == "decode"], every[every["pass"] != "decode"]
    prefer = {"level": ("layer", "operator", "model"), "pass": ("forward", "training")}
    chosen = choose(whole, prefer, level=level, pass_=pass_)
    if chosen.rows.empty:
        return draw_nothing(TITLE, [], ["no time or memory was measured"])
    counts = chosen.rows.groupby("seq_len")["label"].nunique()
    if n is not None and n not in counts.index:
        raise UsageError(f"no rows with n = {n}; there are: {', '.join(map(str, counts.index))}")
    n = n or int(counts[counts == counts.max()].index.max())
    rows = chosen.rows[chosen.rows["seq_len"] == n].drop_duplicates("label", keep="last")
    panels = [*_cost(rows), *_error(compared(frame)), *_decoding(choose(steps).rows if len(steps) else steps)]
    families = {str(row["label"]): str(row["family"]) for row in _records(rows)}
    order = {label: i for i, label in enumerate(families)}
    labels = sorted(families, key=lambda label: (_rank(families[label]), order[label]))
    notes = [
        "Each panel has a scale of its own; bars are 95 % intervals, where they are wider than the mark.",
        _note_on_errors(panels, compared(frame)),
        *(f"Not measured — {line}" for line in failures(rows, at_n=False)),
    ]
    return _draw(labels, families, panels, where(rows, n), [note for note in notes if note])


def _records(rows: pd.DataFrame) -> list[dict[Hashable, Any]]:
    """Rows as plain dictionaries."""
    return rows.to_dict("records")


def _rank(family: str) -> int:
    return _FAMILIES.index(family) if family in _FAMILIES else len(_FAMILIES)


def _cost(rows: pd.DataFrame) -> list[_Panel]:
    panels = []
    for column, title, text in (
        ("time_median_s", "time", lambda value: trimmed(format_seconds(value))),
        ("peak_bytes", "peak memory", lambda value: trimmed(format_bytes(int(value)))),
    ):
        if rows[column].notna().any():
            words = {r["label"]: str(r["status"]) for r in _records(rows) if r["status"] != Status.OK}
            panels.append(_Panel(title, _dots(rows, column), text, _base(column), _intervals(rows, column), words))
    return panels


def _decoding(rows: pd.DataFrame) -> list[_Panel]:
    """Time of one token and what is kept of those before it."""
    panels = []
    for column, title, text in (
        ("time_median_s", "one token", lambda value: trimmed(format_seconds(value))),
        ("state_bytes", "its state", lambda value: trimmed(format_bytes(int(value)))),
    ):
        if len(rows) and rows[column].notna().any():
            words = {
                r["label"]: "–" if r["status"] == Status.UNSUPPORTED else str(r["status"])
                for r in _records(rows)
                if r["status"] != Status.OK
            }
            panels.append(_Panel(title, _dots(rows, column), text, _base(column), _intervals(rows, column), words))
    return panels


def _base(column: str) -> int:
    return 2 if column.endswith("bytes") else 10


def _dots(rows: pd.DataFrame, column: str) -> dict[str, list[tuple[float, str, bool]]]:
    there = rows[(rows["status"] == Status.OK) & (rows[column] > 0)]
    return {label: [(float(value), "o", False)] for label, value in zip(there["label"], there[column], strict=True)}


def _intervals(rows: pd.DataFrame, column: str) -> dict[str, tuple[float, float]]:
    if column != "time_median_s":
        return {}
    there = rows[rows["time_ci_low_s"] > 0]
    return {r["label"]: (r["time_ci_low_s"], r["time_ci_high_s"]) for r in _records(there)}


def _error(rows: pd.DataFrame) -> list[_Panel]:
    if rows.empty:
        return []
    values: dict[str, list[tuple[float, str, bool]]] = {}
    words: dict[str, str] = {}
    lines = []
    for mark, (_, part) in zip(_MARKS, rows.groupby("inputs", sort=False), strict=False):
        for row in _records(part):
            label, error = row["label"], row["rel_error"]
            if row["error_kind"] == "learned":
                words[label] = "learned"
            elif error < _ROUNDING:
                words[label] = "exact"
            elif math.isfinite(error):
                values.setdefault(label, []).append((error, mark, row["error_kind"] == "distance"))
        trivial = part["trivial_error"].dropna()
        if len(trivial):
            lines.append((float(trivial.median()), mark))
    for row in _records(rows):
        if row["label"] not in values and row["label"] not in words and row["status"] != Status.OK:
            words[row["label"]] = str(row["status"])
    return [_Panel("relative error", values, plain, 10, {}, words, lines)]


def _note_on_errors(panels: Sequence[_Panel], rows: pd.DataFrame) -> str:
    if not any(panel.title == "relative error" for panel in panels):
        return ""
    marks = {"o": "circles", "s": "squares", "^": "triangles", "D": "diamonds"}
    said = ", ".join(f"{marks[m]} {name}" for m, name in zip(_MARKS, dict.fromkeys(rows["inputs"]), strict=False))
    return (
        f"Relative error: {said}; lines: answering mean(V). Hollow: another operator, whose distance from softmax "
        "attention is no error (an arrow: beyond the scale). learned: means nothing before fitting."
    )


def _draw(
    labels: Sequence[str], families: dict[str, str], panels: Sequence[_Panel], about: Sequence[str], notes: list[str]
) -> Figure:
    groups = list(dict.fromkeys(families[label] for label in labels))
    lines: list[tuple[str, str]] = []  # (family, label), the label empty in a group's heading
    for family in groups:
        lines += [(family, ""), *((family, label) for label in labels if families[label] == family)]
    tall = _STEP * len(lines)
    page = new_page(TITLE, about, notes, width=8.6, room=tall + 0.62)
    bottom = page.top - 0.42 - tall
    names = page.blank(page.left, bottom, _NAMES, tall)
    names.set_ylim(len(lines), 0)
    for row, (family, label) in enumerate(lines):
        colour = FAMILY_COLOURS.get(family, OTHER_COLOUR)
        text = shorten(label or family.upper(), _NAMES - 0.1, SMALL_SIZE)
        ink, weight = (INK, "normal") if label else (colour, "bold")
        left = 0.1 if label else 0.0
        names.text(left, row + 0.5, text, va="center", fontsize=SMALL_SIZE, color=ink, fontweight=weight)
    room = page.right - page.left - _NAMES - 0.12  # half of the last tick's number
    wide = (room - _GAP * (len(panels) - 1)) / max(1, len(panels))
    for place, panel in enumerate(panels):
        _draw_panel(page, (page.left + _NAMES + place * (wide + _GAP), bottom, wide, tall), panel, lines)
    return page.figure


def _draw_panel(
    page: Page, place: tuple[float, float, float, float], panel: _Panel, lines: Sequence[tuple[str, str]]
) -> None:
    ax = page.axes(*place)
    # A distance of another operator may be anything; it does not stretch the scale of the errors.
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
        ax.axvline(value, color=FAINT, lw=0.8, ls=":", zorder=1)
        ax.plot([value], [0.15], mark, color=FAINT, ms=3, clip_on=False)
    for row, (family, label) in enumerate(lines):
        if label:
            _draw_line(ax, row + 0.5, panel, label, FAMILY_COLOURS.get(family, OTHER_COLOUR))


def _draw_line(ax: Axes, y: float, panel: _Panel, label: str, colour: str) -> None:
    ax.axhline(y, color=LINE, lw=0.4, zorder=0)
    for value, mark, hollow in panel.values.get(label, []):
        low, high = ax.get_xlim()
        beyond = "<" if value < low else ">" if value > high else mark
        face = "white" if hollow else colour
        ax.plot(
            [min(max(value, low), high)], [y], beyond, color=colour, mfc=face, mew=0.9, ms=4.2, zorder=3, clip_on=False
        )
    if label in panel.intervals:
        ax.plot(panel.intervals[label], [y, y], color=colour, lw=1.6, zorder=2, solid_capstyle="butt")
    if label in panel.words and label not in panel.values:
        ax.text(
            0.01, y, panel.words[label], transform=ax.get_yaxis_transform(), fontsize=SMALL_SIZE - 0.7, color=FAINT,
            va="center",
        )  # fmt: skip
