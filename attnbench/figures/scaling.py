"""Time and peak memory against length, with the measured power of n and the one that the paper claims."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from attnbench.figures.kit.legend import NAMES, count_lines, on_all, write_entry
from attnbench.figures.kit.page import (
    NothingToDraw,
    Page,
    counted,
    narrow,
    narrow_room,
    new_page,
    only_on_a_page,
    shorten,
    stacked,
    text_width,
)
from attnbench.figures.kit.palette import palette
from attnbench.figures.kit.sheets import COLUMN
from attnbench.figures.kit.style import SMALL_SIZE, in_style, mark
from attnbench.figures.kit.ticks import COSTS, length, log_axis, padded
from attnbench.figures.published.lra import NYSTROMFORMER, OWN_ROOM, WIDE, draw_lines
from attnbench.figures.published.point_file import read_points
from attnbench.figures.series import LARGER, LONGEST, Series, names_room, panels_of
from attnbench.results.frame.relative import apart
from attnbench.results.frame.settings import PANELS, Setting, only_length, settings, timed, without_room
from attnbench.results.frame.words import failures, own_form_note, short_names, where
from attnbench.suite.cell import STEPS

NEEDS = "times at two lengths"
_POWERS = 0.95
"""Width of a column of powers, in inches."""
_AXIS, _GAP = 0.42, 0.18
_MARKS = 60
"""Most markers on a line."""
_ROW = 0.14
"""Height of a line that names stopped variants, in inches."""


def applies(frame: pd.DataFrame, whole: pd.DataFrame | None = None) -> bool:
    """Something was timed (or failed to be) at two lengths or more."""
    return timed(frame)["seq_len"].nunique() > 1


@in_style
def draw_scaling(frame: pd.DataFrame, *, overlay: str | Path | None = None) -> Figure:
    """Draw two log-log panels with a table of fitted and claimed powers of n, and mark where each variant stopped.

    Rows that were measured differently get lines with other dashes, or panels if lines are many. ``overlay``:
    ``published`` adds the Nyströmformer paper's measurements, a path those of :mod:`a file of points
    <attnbench.figures.published.point_file>`. Raises UsageError if no row has a value or the file is no such file, and
    NothingToDraw without a time or memory.
    """
    points = None
    if overlay:
        only_on_a_page(f"scaling with --overlay {overlay}")
        points = read_points(NYSTROMFORMER if overlay == "published" else Path(overlay))
    rows = timed(frame)
    prefer = {"level": ("operator", "layer", "model"), "pass": ("forward", "training")}
    every = settings(rows, prefer, also_same=("inputs",))
    held = [one for one in every if (one.ok[["time_median_s", "peak_bytes"]] > 0).any(axis=None)]
    if not held:
        raise NothingToDraw("; ".join(failures(rows)) or "no row holds a time or a memory")
    found = [one for one in held if only_length(one.rows) is None] or held
    single = "; ".join(one.name for one in held if only_length(one.rows)) * (len(found) < len(held))
    panels = panels_of(found[:PANELS])
    lines = [line for _, drawn in panels for line in drawn]
    shown = pd.concat([one.rows for one in found[:PANELS]])
    names, hidden = short_names(pd.concat([line.rows for line in lines]))
    notes = [
        own_form_note(names),
        f"Power of n: least squares on the longest {LONGEST} lengths of each line, ± half its 95 % interval; after "
        "the slash what its paper claims; bold if the whole interval is larger, and the power by more "
        f"than {LARGER}. Bands: 95 % intervals of the median.",
        "Crosses: the length at which a line stopped; their height is that of their words."
        * any(line.stopped for line in lines),
        hidden,
        *(f"Without {name}: it was not measured." for name in _unmeasured(panels)),
        *(f"Not drawn — {line}" for line in failures(shown)),
        f"Not drawn, at one length: {single}." * bool(single),
        without_room(found),
    ]
    rooms = [
        narrow_room(heading) + _table_height(drawn)
        if narrow()
        else max(4.2, 0.5 + 0.16 * _rows(drawn, _names_beside(drawn), 0.0))
        for heading, drawn in panels
    ]
    headings = [heading for heading, _ in panels]
    page = new_page(
        cheapest(found, names) or "Time and peak memory against length",
        where(shown),
        notes,
        width=WIDE if points else 8.0,
        room=stacked(rooms, headings),
    )
    for place, (part, (_, drawn)) in enumerate(zip(page.parts(headings, rooms), panels, strict=True)):
        _block(replace(part, right=part.left + OWN_ROOM) if points else part, drawn)
        if points and place == 0:
            draw_lines(part, part.left + OWN_ROOM + 0.4, points)
    return page.figure


def cheapest(found: Sequence[Setting], names: Mapping[str, str]) -> str:
    """The first setting's ``Fastest at n = 64k: linear; least memory: local``, without references; else empty.

    The fastest is followed by those not told apart from it; if these are all, it cannot be told. The memory of decoding
    is its cache or state, and not the peak of one step.
    """
    rows = found[0].ok[found[0].ok["family"] != "reference"]
    rows, said = rows[rows["seq_len"] == rows["seq_len"].max()], []
    kept = bool(rows["pass"].isin(STEPS).all())
    memory = ("state_bytes", "least cache or state") if kept else ("peak_bytes", "least memory")
    for column, words in (("time_median_s", "Fastest at n = {}"), memory):
        here = rows[rows[column] > 0].sort_values(column, kind="stable")
        if here["label"].nunique() > 1:
            least = here[here[column] == here[column].iloc[0]]
            best = counted([names.get(label, label) for label in dict.fromkeys(least["label"])], 1)
            if column == "time_median_s":
                near = here[~here.index.isin([*least.index, *apart(found[0], least["label"].iloc[0])])]
                tied = counted([names.get(label, label) for label in dict.fromkeys(near["label"])], 1)
                best += f", not told apart from {tied}" * bool(tied)
                best = "cannot be told" if len(least) + len(near) == len(here) else best
            said.append(f"{words.format(length(int(here['seq_len'].iloc[0])))}: {best}")
    return "; ".join(said) + f" ({', '.join(found[0].about.split(' · ')[:2])})" * bool(said and found[1:])


def _measured(drawn: Sequence[Series]) -> list[str]:
    return [column for column in COSTS if any((line.rows[column] > 0).any() for line in drawn)]


def _unmeasured(panels: Sequence[tuple[str, Sequence[Series]]]) -> list[str]:
    known = [_measured(drawn) for _, drawn in panels]
    return [name for column, (name, *_) in COSTS.items() if any(column not in one for one in known)]


def _table_height(drawn: Sequence[Series]) -> float:
    return 0.65 + 0.16 * _rows(drawn, _names_beside(drawn), COLUMN - 0.3)


def _rows(drawn: Sequence[Series], names: float, width: float) -> int:
    long = [_is_long(line, names) for line in drawn]
    return sum(long) + sum(
        count_lines([line.name], width if own else names) for line, own in zip(drawn, long, strict=True)
    )


def _names_beside(drawn: Sequence[Series]) -> float:
    """Width that names have beside their powers, with the pieces of their lines."""
    if narrow():  # all the room there is
        return COLUMN - 0.28 - _POWERS * len(_measured(drawn))
    return min(names_room(), max(text_width(line.name, SMALL_SIZE) for line in drawn)) + NAMES


def _is_long(line: Series, names: float) -> bool:
    """True if the name takes a line of its own."""
    return narrow() and text_width(line.name, SMALL_SIZE) > names - NAMES


def _block(page: Page, drawn: Sequence[Series]) -> None:
    names, columns = _names_beside(drawn), _measured(drawn)
    if narrow():
        page, table = page.split(_table_height(drawn))
        left, right = page.left + 0.66, page.right - 0.1
    else:
        left, right = page.left + 0.66, page.right - names - _POWERS * len(columns) - 0.3
        table = replace(page, left=right + 0.2)
    tall = (page.top - page.bottom - _AXIS + _GAP) / len(columns) - _GAP
    lengths = sorted({n for line in drawn for n in line.rows["seq_len"]} | {s.stopped[0] for s in drawn if s.stopped})
    for place, column in enumerate(columns):
        name, text, base = COSTS[column]
        ax = page.axes(left, page.top - tall - place * (tall + _GAP), right - left, tall)
        ends = [column, "time_ci_low_s", "time_ci_high_s"] if column == "time_median_s" else [column]
        shown = [line.rows[ends].to_numpy(dtype=float) for line in drawn]
        # A band that reaches farther than three times its value would flatten all lines, and leaves the axes instead.
        values = np.concatenate([np.clip(one, one[:, :1] / 3, one[:, :1] * 3).ravel() for one in shown])
        limits = padded(values, share=0.05)
        stops = _stops(drawn) if place == 0 else {}
        # Leave room above the lines to name the stopped ones.
        share = min(0.5, _ROW * (len(stops) + 0.5) / tall) if stops else 0.0
        top = math.exp(math.log(limits[0]) + math.log(limits[1] / limits[0]) / (1 - share))
        log_axis(ax, "x", padded(lengths, share=0.04), at=lengths, text=length, most=6)
        log_axis(ax, "y", (limits[0], top), base=base, text=text, most=4 if narrow() else 6)
        ax.set_ylabel(name)
        ax.grid(axis="both")
        for line in drawn:
            _line(ax, line, column)
        for row, ((n, status), stopped) in enumerate(stops.items()):
            _mark_stop(ax, (right - left, tall), row, n, status, stopped)
        ax.tick_params(labelbottom=place == len(columns) - 1)
    ax.set_xlabel("length n (log2 scale)")
    _write_table(table, drawn, names)


def _line(ax: Axes, line: Series, column: str) -> None:
    n, value = line.rows["seq_len"].to_numpy(dtype=float), line.rows[column].to_numpy(dtype=float)
    how = {**line.look.line, "markevery": len(n) // _MARKS or None}
    drawn = ax.plot(n, np.where(value > 0, value, np.nan), lw=1.2, markersize=4.2, alpha=0.9, **how)
    mark(drawn, line.rows.index[value > 0], main=column == "time_median_s")
    if column == "time_median_s":
        ends = line.rows[["time_ci_low_s", "time_ci_high_s"]].to_numpy(dtype=float)
        band = ax.fill_between(n, ends[:, 0], ends[:, 1], color=line.look.colour, alpha=0.15, lw=0)
        mark(band, line.rows.index)


def _stops(drawn: Sequence[Series]) -> dict[tuple[int, str], list[Series]]:
    stops: dict[tuple[int, str], list[Series]] = {}
    for line in drawn:
        if line.stopped:
            stops.setdefault(line.stopped, []).append(line)
    return dict(sorted(stops.items()))


def _mark_stop(ax: Axes, inches: tuple[float, float], row: int, n: int, status: str, stopped: Sequence[Series]) -> None:
    wide, tall = inches
    low, high = np.log(ax.get_xlim())
    x, y = (math.log(n) - low) / (high - low), 1 - _ROW * (row + 0.6) / tall
    colour = stopped[0].look.colour if len(stopped) == 1 else palette().ink
    ax.plot([x], [y], "x", transform=ax.transAxes, markersize=5, markeredgewidth=1.5, color=colour)
    to_left = x >= 0.5
    words = f"{status}: {', '.join(line.name for line in stopped)}"
    text = shorten(words, (x if to_left else 1 - x) * wide - 0.15, SMALL_SIZE)
    at = x + (-0.08 if to_left else 0.08) / wide
    box = {"facecolor": palette().page, "edgecolor": "none", "pad": 0.8}  # so that the grid does not strike it out
    side = "right" if to_left else "left"
    ax.text(at, y, text, transform=ax.transAxes, fontsize=SMALL_SIZE, va="center", ha=side, bbox=box)


def _write_table(page: Page, drawn: Sequence[Series], names: float) -> None:
    ax, width = on_all(page), page.right - page.left
    faint: dict[str, Any] = {"fontsize": SMALL_SIZE, "color": palette().faint, "va": "center"}
    columns = [(column, names + _POWERS * place) for place, column in enumerate(_measured(drawn), start=1)]
    y = page.top - page.bottom - 0.06
    ax.text((names + columns[-1][1]) / 2 + 0.15, y, "power of n", ha="center", **faint)
    y -= 0.155
    for column, at in columns:
        ax.text(at, y, "time" if column == "time_median_s" else "memory", ha="right", **faint)
    y -= 0.1
    ax.add_line(Line2D([0, width], [y, y], color=palette().line, lw=0.8))
    step = min(0.2, max(0.13, (y - 0.2) / _rows(drawn, names, width)))
    y += step / 2 - 0.06
    for line in drawn:
        y -= step
        long = _is_long(line, names)
        how = {"lw": 1.2, **line.look.line}
        written = write_entry(ax, y, line.name, how, right=width if long else names, step=step)
        mark(written, line.rows.index)
        y -= step * (len(written) - 2 + long)
        for column, at in columns:
            power, half, claim = line.power(column), line.half(column), line.claimed(column)
            text = "–" if math.isnan(power) else f"{power + 0.0:.2f}".replace("-0.00", "0.00")
            text += f" ±{half:.2f}" if half >= 0.005 else ""
            text += f" / {claim:g}" if math.isfinite(claim) else ""
            weight = "bold" if line.is_above(column) else "normal"
            said = ax.text(at, y, text, fontsize=SMALL_SIZE, va="center", ha="right", fontweight=weight)
            mark(said, line.rows.index)
