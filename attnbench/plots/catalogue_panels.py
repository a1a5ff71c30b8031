"""The columns of the catalogue: each label's time, memory, error and cost of decoding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd

from attnbench.plots.agreement import ROUNDING
from attnbench.plots.frames import records
from attnbench.plots.ticks import plain, trimmed
from attnbench.status import Status
from attnbench.units import format_bytes, format_seconds

MARKS = ("o", "s", "^", "D")
"""Markers of the inputs whose errors are shown, in their order."""


@dataclass(frozen=True)
class Panel:
    """One column: what it shows for each label."""

    title: str
    values: dict[str, list[tuple[float, str, bool]]]
    """Label -> (value, marker, whether it is hollow)."""
    text: Callable[[float], str]
    base: int
    """Base of the logarithm; its powers are ticks: 2 for bytes, else 10."""
    intervals: dict[str, tuple[float, float]]
    words: dict[str, str]
    """Label -> the word shown instead of a number."""
    lines: Sequence[tuple[float, str]] = ()
    """Values marked for comparison, each with the marker of its inputs."""


def cost(rows: pd.DataFrame) -> list[Panel]:
    """Panels of time and peak memory."""
    panels = []
    for column, title, text in (
        ("time_median_s", "time", lambda value: trimmed(format_seconds(value))),
        ("peak_bytes", "peak memory", lambda value: trimmed(format_bytes(int(value)))),
    ):
        if rows[column].notna().any():
            words = {r["label"]: str(r["status"]) for r in records(rows, "label", "status") if r["status"] != Status.OK}
            panels.append(Panel(title, _dots(rows, column), text, _base(column), _intervals(rows, column), words))
    return panels


def decoding(rows: pd.DataFrame) -> list[Panel]:
    """Panels of the time of one token and of what is kept of the tokens before it."""
    panels = []
    for column, title, text in (
        ("time_median_s", "one token", lambda value: trimmed(format_seconds(value))),
        ("state_bytes", "its state", lambda value: trimmed(format_bytes(int(value)))),
    ):
        if len(rows) and rows[column].notna().any():
            words = {
                r["label"]: "–" if r["status"] == Status.UNSUPPORTED else str(r["status"])
                for r in records(rows, "label", "status")
                if r["status"] != Status.OK
            }
            panels.append(Panel(title, _dots(rows, column), text, _base(column), _intervals(rows, column), words))
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
    return {
        r["label"]: (r["time_ci_low_s"], r["time_ci_high_s"])
        for r in records(there, "label", "time_ci_low_s", "time_ci_high_s")
    }


def error(rows: pd.DataFrame) -> list[Panel]:
    """The panel of the relative error, with a marker for each of the inputs."""
    if rows.empty:
        return []
    values: dict[str, list[tuple[float, str, bool]]] = {}
    words: dict[str, str] = {}
    lines = []
    for mark, (_, part) in zip(MARKS, rows.groupby("inputs", sort=False), strict=False):
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
    return [Panel("relative error", values, plain, 10, {}, words, lines)]


def note_on_errors(panels: Sequence[Panel], rows: pd.DataFrame) -> str:
    """The meaning of the error markers; empty without errors."""
    if not any(panel.title == "relative error" for panel in panels):
        return ""
    marks = {"o": "circles", "s": "squares", "^": "triangles", "D": "diamonds"}
    said = ", ".join(f"{marks[m]} {name}" for m, name in zip(MARKS, dict.fromkeys(rows["inputs"]), strict=False))
    return (
        f"Relative error: {said}; lines: answering mean(V). Hollow: another operator, whose distance from softmax "
        "attention is no error (an arrow: beyond the scale). learned: means nothing before fitting."
    )
