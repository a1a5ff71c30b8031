"""The figure of ``attnbench match``: error or score over time or memory, the budget as a line."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnbench.figures.kit.legend import key_beside, write_wrapped
from attnbench.figures.kit.page import NothingToDraw, narrow
from attnbench.figures.kit.palette import palette
from attnbench.figures.kit.style import Look, in_style, look
from attnbench.figures.kit.ticks import COSTS, linear_ticks, log_axis, padded, plain
from attnbench.measure.status import Status
from attnbench.results.frame.agreement import ROUNDING
from attnbench.results.frame.contenders import pareto
from attnbench.results.frame.marks import NO_ERROR, OWN_FORM
from attnbench.results.frame.words import own_form_note, reason_of

_NAMED = {"error": "an error", "score": "a score"}
_PALE = 0.3


@in_style
def draw_frontier(frame: pd.DataFrame, *, title: str, about: str = "") -> Figure:
    """Draw each variant's settings and a line through the unbeaten ones.

    Up is the score if the budget is a score, else the error, with exact methods at the lower edge. Across is memory if
    that is the budget, else time. ``frame`` has the rows of ``Match.to_rows()``, ``title`` is ``Match.headline()``, and
    ``about`` goes under it. Raises NothingToDraw if no setting has both an error or score and a cost.
    """
    target, budget = str(frame["target"].iloc[0]), float(frame["budget"].iloc[0])
    column = "peak_bytes" if target == "memory" else "time_median_s"
    up = "score" if target == "score" else "error"
    known = frame[up].notna() & frame[column].notna() & (frame["status"] == Status.OK)
    if not known.any():
        raise NothingToDraw(f"no setting has both {_NAMED[up]} and a {COSTS[column][0]}")
    if up == "error" and not (frame.loc[known, "error"] >= ROUNDING).any():
        raise NothingToDraw("every setting equals softmax attention")
    drawn = frame[known].assign(
        name=frame["variant"]
        + np.where(frame["own_form"].fillna("") != "", OWN_FORM, "")
        + np.where(frame["error_kind"] == "distance", NO_ERROR, "")
    )
    colours = palette().sequence
    names = list(dict.fromkeys(drawn["name"]))
    hows = {name: look(colours[turn % len(colours)], turn // len(colours)) for turn, name in enumerate(names)}
    said = {name: _said(drawn[drawn["name"] == name]) for name in names}
    notes = ["Pale: settings that another setting of the same variant beats in both. Rings: the settings chosen."]
    if up == "error" and (drawn["error"] < ROUNDING).any():
        notes.append("At the lower edge: equal to softmax attention up to rounding.")
    if any(name.endswith(NO_ERROR) for name in names):
        notes.append("* another operator: its distance from softmax attention is not an error.")
    notes += _not_drawn(frame, drawn, up)
    notes += [own_form_note(name.removesuffix(NO_ERROR) for name in names), *_failures(frame)]
    page, key = key_beside((title, about), notes, names, said, 3.6)
    left, right = page.left + 0.6, page.right
    ax = page.axes(left, page.bottom + 0.45, right - left, page.top - page.bottom - 0.5)
    _scale_across(ax, [*drawn[column], *([budget] if target in ("memory", "time") else [])], column)
    (_scale_scores if up == "score" else _scale_errors)(ax, drawn, budget if target == up else None)
    draw = ax.axhline if target == up else ax.axvline
    draw(budget, color=palette().ink, linewidth=1.0, linestyle=(0, (4, 2.5)), alpha=0.7, zorder=1.5, label="budget")
    for name in names:
        _settings(ax, drawn[drawn["name"] == name].sort_values(column), column, up, hows[name])
    write_wrapped(key, hows, said)
    return page.figure


def _scale_across(ax: Axes, costs: Sequence[float], column: str) -> None:
    name, text, base = COSTS[column]
    log_axis(ax, "x", padded(costs), base=base, text=text, most=5 if narrow() else 8)
    ax.grid(axis="both")
    ax.set_xlabel(f"{name} (log{base} scale)")


def _scale_errors(ax: Axes, drawn: pd.DataFrame, budget: float | None) -> None:
    errors = drawn.loc[drawn["error"] >= ROUNDING, ["error", "error_low", "error_high"]].to_numpy(dtype=float).ravel()
    errors = errors[errors >= ROUNDING]
    errors = errors if budget is None else np.append(errors, budget)
    log_axis(ax, "y", padded(errors, share=0.12), base=10, text=plain)
    ax.set_ylabel("relative error (log10 scale)")


def _scale_scores(ax: Axes, drawn: pd.DataFrame, budget: float | None) -> None:
    scores = drawn[["score", "score_low", "score_high"]].to_numpy(dtype=float).ravel()
    every = [float(score) for score in scores if np.isfinite(score)] + ([] if budget is None else [budget])
    extra = 0.06 * (max(every) - min(every)) or 0.05
    limits = min(every) - extra, max(every) + extra
    ax.set_ylim(*limits)
    ax.set_yticks([tick for tick in linear_ticks(*limits) if 0 <= tick <= 1])
    ax.set_ylabel("score, mean over seeds")


def _settings(ax: Axes, rows: pd.DataFrame, column: str, up: str, how: Look) -> None:
    x, y = rows[column].to_numpy(dtype=float), rows[up].to_numpy(dtype=float)
    low, high = (rows[f"{up}_{end}"].to_numpy(dtype=float) for end in ("low", "high"))
    floor = ax.get_ylim()[0]
    exact = (y < ROUNDING) & (up == "error")
    y = np.where(exact, floor, y)
    best = sorted(pareto((-x).tolist(), (y if up == "score" else -y).tolist()), key=lambda place: x[place])
    rest = [place for place in range(len(x)) if place not in best]
    for places, alpha in ((best, 1.0), (rest, _PALE)):
        for place in places:
            if not exact[place] and high[place] > low[place]:
                ends = [max(low[place], floor), high[place]]
                ax.plot([x[place]] * 2, ends, color=how.colour, linewidth=0.8, alpha=alpha, zorder=2)
    ax.plot(x[best], y[best], zorder=3, clip_on=False, **how.line)
    if rest:
        ax.plot(x[rest], y[rest], zorder=2.5, alpha=_PALE, **{**how.line, "linestyle": "none"})
    chosen = rows["chosen"].to_numpy(dtype=bool)
    if chosen.any():
        circle = ax.scatter(x[chosen], y[chosen], s=90, facecolor="none", edgecolor=how.colour, linewidth=1.4, zorder=4)
        circle.set_clip_on(False)


def _said(rows: pd.DataFrame) -> str:
    chosen = rows[rows["chosen"].astype(bool)]
    if chosen.empty:
        return "budget not met"
    row = chosen.iloc[0]
    return f"{row['knob']}={int(row['value'])}" if row["knob"] and pd.notna(row["value"]) else "as it stands"


def _not_drawn(frame: pd.DataFrame, drawn: pd.DataFrame, up: str) -> list[str]:
    ran = frame.loc[frame["status"] == Status.OK, "variant"]
    missing = [str(name) for name in dict.fromkeys(ran) if name not in set(drawn["variant"])]
    return [f"Without {_NAMED[up]}, and not drawn: {', '.join(missing)}."] if missing else []


def _failures(frame: pd.DataFrame) -> list[str]:
    failed = frame[frame["status"] != Status.OK]
    lines = []
    for (variant, status), part in failed.groupby(["variant", "status"], sort=False):
        values = ", ".join(f"{value:.0f}" for value in part["value"] if pd.notna(value))
        where = f" at {part['knob'].iloc[0]} = {values}" if values else ""
        lines.append(f"{variant}: {status}{where}{reason_of(part)}")
    return lines
