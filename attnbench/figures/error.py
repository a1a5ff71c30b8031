"""Error against a method's budget (features, rank, window) and against the sharpness of the attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnbench.figures.error_lines import Curve, Panel, at_one_length, panels_of
from attnbench.figures.kit.legend import STEP, count_lines, on_all, write_entry
from attnbench.figures.kit.page import NothingToDraw, Page, narrow, new_page, stacked, text_width, wrap
from attnbench.figures.kit.palette import palette
from attnbench.figures.kit.sheets import COLUMN
from attnbench.figures.kit.style import SMALL_SIZE, TEXT_SIZE, Look, in_style, looks, mark
from attnbench.figures.kit.ticks import log_axis, padded, plain
from attnbench.measure.status import Status
from attnbench.results.frame.agreement import ROUNDING
from attnbench.results.frame.settings import PANELS, compared, of_length, only_length, settings, without_room
from attnbench.results.frame.words import bare, failures, own_form_note, where
from attnbench.units import format_number

NEEDS = "errors at two options or logit_std"
_TRIVIAL = "answering mean(V)"
_TICKS = 9
_HALF = 0.18
"""Half the width of a column for inputs at the edge of the axis, in powers of two."""


@in_style
def draw_error(
    frame: pd.DataFrame, *, n: int | None = None, inputs: str | None = None, option: str | None = None
) -> Figure:
    """Draw error against a numeric option of each variant, and against the logits' standard deviation, in two panels.

    Inputs without such a number, those of a trained model say, have columns at the edge of the second panel. Lines show
    mean(V) and the oracles. A note names exact methods, other operators and unfitted methods, which are left out. Rows
    that were measured differently get separate panels.

    Defaults: ``n`` is the longest of the lengths with most measured rows, ``inputs`` of the first panel those with most
    rows, ``option`` each variant's most varied number. Raises UsageError if one of these has no rows, and NothingToDraw
    without an approximation, or with its error at one setting only.
    """
    every = of_length(compared(frame), n, "error rows")
    found = settings(every, {"level": ("operator",)})
    shown = [(setting.about, at_one_length(setting)) for setting in found[:PANELS]]
    panels = [panel for about, rows in shown for panel in panels_of(about, rows, inputs, option)]
    if not panels:
        raise NothingToDraw("; ".join(failures(every)) or f"needs {NEEDS}")
    rows = pd.concat([rows for _, rows in shown])
    notes = [
        *_left_out(rows[(rows["status"] == Status.OK) & np.isfinite(rows["rel_error"])], panels),
        own_form_note(rows["label"]),
        "Relative error of the output against exact attention in float64; bars: standard deviation over draws. A "
        "method above the line of mean(V) is no better than answering every query with the average of the values.",
        "Right of the upright line: other inputs, such as those of a trained model."
        * any(panel.beside for panel in panels),
        *(f"Not drawn — {line}" for line in failures(rows, at_n=False)),
        without_room(found),
    ]
    return _draw(panels, where(rows, only_length(rows)), notes)


def _left_out(ok: pd.DataFrame, panels: Sequence[Panel]) -> list[str]:
    words = {"exact": "exact up to rounding", "distance": "other operators", "learned": "no error before fitting"}
    drawn = {"mean-value", *(line.variant for panel in panels for line in panel.lines)}
    single = ok[(ok["error_kind"] == "approximation") & (ok["rel_error"] >= ROUNDING) & ~ok["variant"].isin(drawn)]
    points = single[["label", "inputs", "rel_error"]].itertuples(index=False)
    said = [f"{label} ({format_number(error)} on {inputs})" for label, inputs, error in points]
    parts = [f"at one setting, which makes no line: {', '.join(said)}"] if said else []
    for kind, word in words.items():
        here = ok["error_kind"] == kind
        if kind == "exact":
            here |= (ok["error_kind"] == "approximation") & (ok["rel_error"] < ROUNDING)
        # A variant appears by name alone if none of its settings is drawn.
        whole = ~ok["variant"].isin(ok.loc[~here, "variant"])
        names = list(dict.fromkeys(ok["label"].where(~whole, list(map(bare, ok["variant"], ok["label"])))[here]))
        if names:
            parts.append(f"{word}: {', '.join(names)}")
    return [f"Left out — {'; '.join(parts)}."] if parts else []


def _draw(panels: Sequence[Panel], about: Sequence[str], notes: Sequence[str]) -> Figure:
    names = [_TRIVIAL, *(line.name for panel in panels for line in panel.lines)]
    keys = min(2.8, max(text_width(name, SMALL_SIZE) for name in names) + 0.56)
    counts = [_key_lines(panel, COLUMN - 0.3 if narrow() else keys) for panel in panels]
    below = [STEP * count + 0.2 if narrow() else 0.0 for count in counts]
    rooms = [
        _axis(panel) + (1.9 + key if narrow() else max(1.7, 0.14 * (count - 2)))
        for panel, key, count in zip(panels, below, counts, strict=True)
    ]
    page = new_page(_title(panels), about, notes, room=stacked(rooms, [panel.heading for panel in panels]))
    look = looks((line.name, line.family) for panel in panels for line in panel.lines)
    parts = page.parts([panel.heading for panel in panels], rooms)
    for part, panel, key in zip(parts, panels, below, strict=True):
        drawn = [(line, _how(line, look[line.name])) for line in panel.lines]
        chart, under = part.split(key)
        left, bottom = chart.left + 0.66, chart.bottom + _axis(panel)
        right, tall = chart.right - (0.1 if narrow() else keys + 0.1), chart.top - bottom
        _panel(chart.axes(left, bottom, right - left, tall), panel, drawn)
        beside = replace(part, left=right + 0.1, bottom=bottom, top=bottom + tall + 0.1)
        _write_key(under if narrow() else beside, panel, drawn)
    return page.figure


def _title(panels: Sequence[Panel]) -> str:
    lines = [(line, panel.said) for panel in panels for line in panel.lines if line.family != "reference"]
    found = [(error, line.name, said) for line, said in lines for error in line.y]
    found += [(error, line.name, f"inputs {at}") for line, _ in lines for at, (error, _) in line.beside.items()]
    if not found:
        return "Approximation error"
    error, name, inputs = min(found)
    return f"Nearest to exact attention: {name}, with an error of {format_number(error, 2)} on {inputs}"


def _axis_label(panel: Panel) -> list[str]:
    return wrap(panel.x_label, 2.3 if narrow() else 5.0, TEXT_SIZE)


def _axis(panel: Panel) -> float:
    return 0.31 + 0.15 * len(_axis_label(panel))


def _how(line: Curve, look: Look) -> dict[str, Any]:
    """Level lines, which do not depend on the horizontal axis, have no markers."""
    return look.line if np.isfinite(line.x).any() else {**look.line, "marker": ""}


def _trivial() -> dict[str, Any]:
    return {"color": palette().ink, "lw": 1.6, "ls": ":", "zorder": 3}


def _panel(ax: Axes, panel: Panel, drawn: Sequence[tuple[Curve, dict[str, Any]]]) -> None:
    values = {value for line in panel.lines for value in line.x if math.isfinite(value)}
    zero = min((value for value in values if value), default=2.0) / 2  # its place on a log scale
    x = sorted(value or zero for value in values)
    y = [value for line in panel.lines for value in (*line.y, *(error for error, _ in line.beside.values()))]
    apart = max(0.3 * math.log2(x[-1] / x[0]), 3 * _HALF) if panel.beside else 0.0
    columns = {inputs: x[-1] * 2 ** (apart * place) for place, inputs in enumerate(panel.beside, start=1)}
    names = {at: inputs for inputs, at in columns.items()}
    told = {zero: "0", **names}
    ticks = [*(x if len(x) <= _TICKS else x[:: -(-len(x) // _TICKS)]), *names]
    limits = padded([*x, *names], share=0.07 if names else 0.04)
    log_axis(ax, "x", limits, at=ticks, most=len(ticks), text=lambda value: told.get(value) or plain(value))
    log_axis(
        ax, "y", padded([*y, *panel.trivial.values(), *panel.beside.values()], share=0.07, least=4), base=10, most=6
    )
    ax.set_xlabel("\n".join(_axis_label(panel)))
    ax.set_ylabel("relative error (log scale)")
    ax.grid(axis="both")
    for place, (line, how) in enumerate(drawn):
        if not any(math.isfinite(value) for value in line.x):
            mark(ax.axhline(line.y[0], **how), line.rows, main=True)
            continue
        order = np.argsort(line.x, kind="stable")
        at, error = np.asarray([value or zero for value in line.x])[order], np.asarray(line.y)[order]
        std = np.nan_to_num(np.asarray(line.std, dtype=float)[order])
        # On a log axis a bar down to zero would never end.
        down = np.minimum(std, error * 0.9)
        curve, _, bars = ax.errorbar(at, error, yerr=np.vstack([down, std]), elinewidth=0.8, lw=1.3, **how)
        mark(curve, [line.rows[place] for place in order], main=True)
        mark(bars, line.rows)
        for inputs, (value, deviation) in line.beside.items():
            up = np.nan_to_num(deviation)
            bar = [[min(up, value * 0.9)], [up]]
            aside = columns[inputs] * 2 ** (_HALF * (2 * (place + 1) / (len(drawn) + 1) - 1))
            ax.errorbar([aside], [value], yerr=bar, elinewidth=0.8, **{**how, "linestyle": ""})
    if len(panel.trivial) == 1:
        ax.axhline(next(iter(panel.trivial.values())), **_trivial())
    else:
        known = sorted((std, error) for std, error in panel.trivial.items() if std > 0)
        ax.plot([std for std, _ in known], [error for _, error in known], **_trivial())
    if columns:
        ax.axvline(math.sqrt(x[-1] * columns[next(iter(columns))]), color=palette().faint, lw=0.8)
    for inputs, middle in columns.items():
        ax.hlines(panel.beside[inputs], middle * 2**-_HALF, middle * 2**_HALF, **{**_trivial(), "color": palette().ink})


def _key_lines(panel: Panel, width: float) -> int:
    return len(wrap(panel.said, width, SMALL_SIZE)) + count_lines([line.name for line in panel.lines], width) + 1


def _write_key(page: Page, panel: Panel, drawn: Sequence[tuple[Curve, dict[str, Any]]]) -> None:
    ax, width, height = on_all(page), page.right - page.left, page.top - page.bottom
    rows: list[tuple[float, str, dict[str, Any], Sequence[object]]] = []
    for one, how in drawn:
        last = int(np.nanargmax(one.x)) if np.isfinite(one.x).any() else 0
        rows.append((one.y[last], one.name, how, one.rows))
    if panel.trivial:
        rows.append((max(panel.trivial.values()), _TRIVIAL, _trivial(), ()))
    rows.sort(key=lambda row: -row[0])
    y, step = height - 0.08, min(STEP, (height - 0.1) / (_key_lines(panel, width) - 0.5))
    for line in wrap(panel.said, width, SMALL_SIZE):
        ax.text(0, y, line, fontsize=SMALL_SIZE, color=palette().faint, va="center")
        y -= step
    for _, name, how, drawn_rows in rows:
        written = write_entry(ax, y, name, how, step=step)
        mark(written, drawn_rows)
        y -= step * (len(written) - 1)
