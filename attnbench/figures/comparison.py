"""The figure of ``attnbench compare``: times against length, and below ratios to the first variant, with crossovers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnbench.figures.kit.legend import key_beside, write_wrapped
from attnbench.figures.kit.page import NothingToDraw, wrap
from attnbench.figures.kit.palette import palette
from attnbench.figures.kit.style import TEXT_SIZE, Look, in_style, look
from attnbench.figures.kit.ticks import halves, length, log_axis, padded, plain, trimmed
from attnbench.results.frame.marks import OWN_FORM, by_host
from attnbench.results.frame.words import own_form_note, reason_of
from attnbench.units import format_seconds


@in_style
def draw_comparison(frame: pd.DataFrame, *, crossovers: Sequence[Mapping[str, Any]], about: str = "") -> Figure:
    """Draw median times with 95 % intervals, and each variant's ratio to the first one, with the crossover length.

    ``frame`` has the rows of ``Comparison.to_rows()``; ``about`` goes under the title. Raises NothingToDraw if no
    variant ran with the first at any length.
    """
    names = _names(frame)
    frame = frame.assign(a=frame["a"].map(names), b=frame["b"].map(names))
    base = frame["a"].iloc[0]
    beside = frame[(frame["a"] == base) & frame["ratio"].notna()]
    if beside.empty and (frame["verdict"] != "withheld").all():
        raise NothingToDraw("; ".join(_failures(frame)) or "no two variants ran at one length")
    labels = list(dict.fromkeys([base, *frame["a"], *frame["b"]]))
    colours = palette().sequence
    hows = {label: look(colours[turn % len(colours)], turn // len(colours)) for turn, label in enumerate(labels)}
    crossed = {names[one["b"]]: one for one in crossovers if names[one["a"]] == base and one["seq_len"] is not None}
    notes = [f"Bars and bands: 95 % intervals. Below the line at 1 a variant is faster than {base}."]
    notes += [own_form_note(names.values()), *_failures(frame), *_withheld(frame[frame["a"] == base])]
    notes += _launches(frame)
    if crossed:
        notes.append("Upright strips: intervals of the lengths from which on the other of the two is faster.")
    said = {label: f"crosses at {plain(round(one['seq_len']))}" for label, one in crossed.items()}
    page, key = key_beside((_title(frame, base, crossed), about), notes, labels, said, 3.6)
    tall = (page.top - page.bottom - 0.45 - 0.2) / 2
    over = wrap(f"time over that of {base}", tall, TEXT_SIZE)
    left, right = page.left + 0.55 + 0.15 * len(over), page.right
    upper = page.axes(left, page.bottom + 0.45 + tall + 0.2, right - left, tall)
    lower = page.axes(left, page.bottom + 0.45, right - left, tall)
    lengths = sorted(frame["seq_len"].unique())
    times = pd.concat([frame[f"{side}_time_{name}_s"] for side in "ab" for name in ("median", "ci_low", "ci_high")])
    log_axis(upper, "y", padded(times.astype(float)), base=10, text=lambda value: trimmed(format_seconds(value)))
    bounds = beside[["ratio", "ratio_ci_low", "ratio_ci_high"]].to_numpy(dtype=float).ravel()
    log_axis(lower, "y", padded(np.append(1 / bounds, 1.0)), base=2, text=halves)
    for ax in (upper, lower):
        log_axis(ax, "x", padded(lengths), at=lengths, text=length)
        ax.grid(axis="y")
    lower.axhline(1, color=palette().faint, linewidth=0.8)
    for label in labels:
        _times(upper, _of(frame, label), hows[label])
        if label != base:
            _ratio(lower, beside[beside["b"] == label].sort_values("seq_len"), hows[label], crossed.get(label))
    upper.set_ylabel("median time")
    upper.tick_params(labelbottom=False)
    lower.set_ylabel("\n".join(over))
    lower.set_xlabel("length n (log2 scale)")
    write_wrapped(key, hows, said)
    return page.figure


def _title(frame: pd.DataFrame, base: str, crossed: Mapping[str, Mapping[str, Any]]) -> str:
    said: dict[str, list[str]] = {}
    judged = frame[frame["ratio"].notna() | (frame["verdict"] == "withheld")]
    for label, rows in judged[judged["a"] == base].groupby("b", sort=False):
        verdicts = set(rows["verdict"])
        if str(label) in crossed:
            first = next((one for one in rows.sort_values("seq_len")["verdict"] if one in ("faster", "slower")), "")
            since = f"from n = {plain(round(crossed[str(label)]['seq_len']))} on"
            words = f"{since} faster than" if first == "slower" else f"overtaken {since} by"
        elif len(verdicts) == 1 and verdicts <= {"faster", "slower"}:
            words = f"{verdicts.pop()} than"
        elif verdicts & {"faster", "slower"}:
            words = "at some lengths " + " or ".join(sorted(verdicts & {"faster", "slower"})) + " than"
        else:
            words = "not told apart from"
        said.setdefault(words, []).append(str(label))
    return f"{base} is " + ", ".join(f"{words} {', '.join(labels)}" for words, labels in said.items())


def _names(frame: pd.DataFrame) -> dict[str, str]:
    sides = [frame[[side, f"{side}_own_form"]].to_numpy() for side in "ab"]
    return {label: label + OWN_FORM * bool(form) for side in sides for label, form in side}


def _sides(frame: pd.DataFrame, *names: str) -> pd.DataFrame:
    """The length, the label and the named columns of both sides of each pair, below each other."""
    columns = ["", *(f"_{name}" for name in names)]
    sides = (frame[["seq_len", *(side + column for column in columns)]] for side in "ab")
    return pd.concat(side.set_axis(["n", "label", *names], axis=1) for side in sides)


def _failures(frame: pd.DataFrame) -> list[str]:
    failed = _sides(frame, "status", "reason").query("status != 'ok'").drop_duplicates(["n", "label"])
    return [
        f"{label}: {status} at n = {', '.join(map(str, sorted(part['n'])))}{reason_of(part)}"
        for (label, status), part in failed.groupby(["label", "status"], sort=False)
    ]


def _launches(frame: pd.DataFrame) -> list[str]:
    rows = _sides(frame, "launched", "host_share").drop_duplicates(["n", "label"]).astype({"host_share": float})
    rows = rows[rows["launched"].isin(["graph", "eager"])]
    lines = [f"{how}: {', '.join(dict.fromkeys(part['label']))}." for how, part in rows.groupby("launched", sort=False)]
    most = rows.sort_values("host_share", ascending=False).drop_duplicates("label")
    said = [by_host(*one[1:]) + f" at n = {one[0]}." for one in most.to_numpy() if by_host(*one[1:])]
    return [*(f"Launch {line}" for line in lines), *said]


def _withheld(beside: pd.DataFrame) -> list[str]:
    lines, doubtful = [], beside[beside["verdict"] == "withheld"]
    for reason, part in doubtful.groupby("withheld", sort=False) if len(doubtful) else ():
        lengths = sorted(set(part["seq_len"]))
        some = len(part) < int(beside["seq_len"].isin(lengths).sum())
        on = f" on {', '.join(dict.fromkeys(part['b']))}" * some
        lines.append(f"No verdict{on} at n = {', '.join(map(str, lengths))}: {reason}.")
    return lines


def _of(frame: pd.DataFrame, label: str) -> pd.DataFrame:
    names = ("time_median_s", "time_ci_low_s", "time_ci_high_s")
    rows = _sides(frame, *names).query("label == @label").drop(columns="label")
    return rows.dropna(subset=["time_median_s"]).drop_duplicates("n").sort_values("n").astype(float)


def _times(ax: Axes, rows: pd.DataFrame, how: Look) -> None:
    middle = rows["time_median_s"]
    spread = [middle - rows["time_ci_low_s"].fillna(middle), rows["time_ci_high_s"].fillna(middle) - middle]
    ax.errorbar(rows["n"], middle, yerr=spread, capsize=2, elinewidth=0.8, **how.line)


def _ratio(ax: Axes, rows: pd.DataFrame, how: Look, crossed: Mapping[str, Any] | None) -> None:
    """Draw the variant's time over the first one's; the table has the inverse ratio."""
    n, ratio = rows["seq_len"].astype(float), 1 / rows["ratio"].astype(float)
    low, high = (1 / rows[f"ratio_ci_{end}"].astype(float) for end in ("high", "low"))
    ax.fill_between(n, low.fillna(ratio), high.fillna(ratio), color=how.colour, alpha=0.2, linewidth=0)
    ax.plot(n, ratio, **how.line)
    if crossed is not None:
        ends = [crossed["ci_low"] or n.min(), crossed["ci_high"] or n.max()]
        ax.axvline(crossed["seq_len"], color=how.colour, linewidth=0.8, linestyle=how.dashes, alpha=0.6, zorder=0)
        ax.axvspan(*ends, color=how.colour, alpha=0.08, linewidth=0, zorder=0)
