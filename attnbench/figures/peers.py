"""Variants and public packages of the same method: ratios of time and memory, and the machine's limit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnbench.figures.kit.page import NothingToDraw, new_page, only_on_a_page, shorten
from attnbench.figures.kit.palette import palette
from attnbench.figures.kit.style import SMALL_SIZE, in_style
from attnbench.figures.kit.ticks import halves, length, log_axis, padded
from attnbench.measure.status import Status
from attnbench.results.frame.settings import SAME, check_length, records, timed
from attnbench.results.frame.words import difference, failures, own_form_note, where
from attnbench.text import quantity

NEEDS = "a variant beside a public package"
PREFIX = "peer."
PASSES = {
    "forward": "forward",
    "training": "training step",
    "backward": "backward",
    "decode": "one token",
    "stepwise": "token by token",
    "generate": "prompt and new tokens",
}

_BAR = 0.085
_ROW = 0.29  # inches, for two lines of text
_NAMES = 2.55
_GAP = 0.17


Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PeerPair:
    """A variant's numbers over a peer's at one length and pass; NaN if one of them has no number."""

    variant: str
    peer: str
    told: str
    """Words that distinguish this pair from others with the same labels: ``causal, bfloat16``."""
    n: int
    pass_: str
    time: float
    low: float
    """Lower end of the 95 % interval of ``time``; ``high`` is the upper end."""
    high: float
    least: float
    peak: float
    limit: float
    above_floor: float

    @property
    def names(self) -> tuple[str, str]:
        return ", ".join(part for part in (self.variant, self.told) if part), self.peer


def pairs(frame: pd.DataFrame) -> list[PeerPair]:
    """Each row of a variant ``peer.NAME`` or ``peer.NAME.PACKAGE``, paired with NAME's in the same circumstances."""
    sides = _alike(frame)
    return [_pair(mine, peer, told) for (mine, peer), told in zip(sides, _told(sides), strict=True)]


def _alike(frame: pd.DataFrame) -> list[tuple[Row, Row]]:
    return [(mine, peer) for mine, peer in _sides(frame) if mine["process"] == peer["process"]]


def _told(sides: Sequence[tuple[Row, Row]]) -> list[str]:
    words = ["causal" if mine["causal"] else "" for mine, _ in sides]
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, (mine, peer) in enumerate(sides):
        groups.setdefault((str(mine["label"]), str(peer["label"]), words[i]), []).append(i)
    for places in groups.values():
        rows = [sides[i][0] for i in places]
        keys = [key for key in (*SAME, "inputs") if key in rows[0] and key not in ("suite", "pass", "causal")]
        table = [tuple(None if row[key] != row[key] else row[key] for key in keys) for row in rows]  # NaN equals NaN
        apart = list(dict.fromkeys(table))
        names = dict(zip(apart, difference(pd.DataFrame(apart, columns=keys)), strict=True))
        for i, key in zip(places, table, strict=True):
            words[i] = ", ".join(part for part in (words[i], names[key][0]) if part)
    return words


def left_out(frame: pd.DataFrame) -> list[str]:
    """Lines on why ratios are missing: rows without a number, and sides that ran in different processes."""
    lines = [f"Not measured — {line}" for line in failures(_of_pairs(frame).query("time_median_s.isna()"))]
    for mine, peer in _sides(frame):
        processes = mine["process"], peer["process"]
        if mine["status"] == peer["status"] == Status.OK and len(set(processes)) == 2:
            what = f"{mine['label']} and {peer['label']} (n = {mine['seq_len']}, {PASSES[peer['pass']]})"
            lines.append(f"Not comparable — {what}: measured in processes {' and '.join(processes)}")
    return lines


def _of_pairs(frame: pd.DataFrame) -> pd.DataFrame:
    rows = timed(frame)
    packages = rows["variant"].str.startswith(PREFIX)
    named = rows["variant"].str.removeprefix(PREFIX).str.partition(".")[0]
    return rows[packages | rows["variant"].isin(named[packages])]


def _sides(frame: pd.DataFrame) -> Iterator[tuple[Row, Row]]:
    keys = [*(key for key in SAME if key != "process" and key in frame), "inputs", "seq_len", "kv_len"]
    rows = records(timed(frame))
    own: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        own.setdefault((row["variant"], *(row[key] for key in keys)), []).append(row)
    for row in rows:
        if str(row["variant"]).startswith(PREFIX):
            name = str(row["variant"]).removeprefix(PREFIX).partition(".")[0]
            for mine in own.get((name, *(row[key] for key in keys)), []):
                yield mine, row


def ratio_of(over: Row, under: Row) -> tuple[float, float, float]:
    """The ratio of the medians of two rows, and its interval; NaN if a time is missing or 0.

    The half-widths of logarithms add up like independent errors (Zou and Donner 2008, doi:10.1002/sim.3095).
    """
    a, a_low, a_high = (over[name] for name in TIMES)
    b, b_low, b_high = (under[name] for name in TIMES)
    ratio = _over(a, b)
    down, up = math.hypot(_log(a, a_low), _log(b_high, b)), math.hypot(_log(a_high, a), _log(b, b_low))
    return ratio, ratio * math.exp(-down), ratio * math.exp(up)


TIMES = ("time_median_s", "time_ci_low_s", "time_ci_high_s")


def _pair(mine: Row, peer: Row, told: str) -> PeerPair:
    time, low, high = ratio_of(mine, peer)
    return PeerPair(
        variant=str(mine["label"]),
        peer=str(peer["label"]),
        told=told,
        n=int(mine["seq_len"]),
        pass_=str(mine["pass"]),
        time=time,
        low=low,
        high=high,
        least=_over(mine["time_min_s"], peer["time_min_s"]),
        peak=_over(mine["peak_bytes"], peer["peak_bytes"]),
        limit=_over(mine["floor_s"], peer["time_median_s"]),
        above_floor=_over(mine["time_median_s"], mine["floor_s"]),
    )


def _over(a: Any, b: Any) -> float:
    a, b = (math.nan if one is None else float(one) for one in (a, b))
    return a / b if a > 0 and b > 0 else math.nan


def _log(a: Any, b: Any) -> float:
    return math.log(_over(a, b))


@in_style
def draw_peers(frame: pd.DataFrame, *, n: int | None = None) -> Figure:
    """Draw bars of variant over peer at each length (or at ``n``): time and peak memory, a panel for each pass.

    Raises UsageError if no pair was measured at this length, and NothingToDraw without any pair.
    """
    found = pairs(frame)
    lengths = sorted({pair.n for pair in found})
    check_length(n if found else None, lengths, "pair")
    lengths = lengths if n is None else [n]
    found = [pair for pair in found if pair.n in lengths and (math.isfinite(pair.time) or math.isfinite(pair.peak))]
    names = list(dict.fromkeys(pair.names for pair in found))
    if not names:
        raise NothingToDraw(f"needs {NEEDS}; measure one with: make peers")
    only_on_a_page("peers")
    panels = [
        (f"{what}\n{PASSES[pass_]}", what, [pair for pair in found if pair.pass_ == pass_])
        for what in ("time", "peak memory")
        for pass_ in PASSES
        if any(pair.pass_ == pass_ for pair in found)
    ]
    rows = timed(frame)
    rows = rows[rows["seq_len"].isin(lengths)]
    about = where(pd.DataFrame([mine for mine, _ in _alike(rows)]))
    notes = [
        own_form_note(pair.variant for pair in found),
        f"Bars: variant over package{', from top to bottom' * (len(lengths) > 1)} at n = "
        f"{', '.join(map(length, lengths))}; left of 1 the variant takes less. Thin lines: 95 % intervals. Upright "
        "strokes: the ratio if the variant ran at the full matmul, exponential and copy rates of this machine.",
        *left_out(rows),
    ]
    tall = max(_ROW, (len(lengths) + 1.4) * _BAR)
    faster, slower = sum(pair.high < 1 for pair in found), sum(pair.low > 1 for pair in found)
    told = f"the variant is faster than the package in {faster}, slower in {slower}"
    title = f"Of {quantity(len(found), 'comparison')} {told}"
    page = new_page(title, about, notes, height=2.0, room=len(names) * tall + 0.75)
    left, bottom, top = page.left + _NAMES, page.bottom + 0.3, page.top - 0.4
    wide = (page.right - left - _GAP * (len(panels) - 1)) / len(panels)
    ends: dict[str, list[float]] = {}
    axes = [page.axes(left + place * (wide + _GAP), bottom, wide, top - bottom) for place in range(len(panels))]
    for ax, (title, what, part) in zip(axes, panels, strict=True):
        ax.set_title(title, loc="left", pad=3)
        ends.setdefault(what, [1.0]).extend(_draw(ax, part, what, names, lengths))
    for ax, (_, what, _) in zip(axes, panels, strict=True):
        log_axis(ax, "x", padded(ends[what]), base=2, text=halves, most=3)
    height = (top - bottom) / len(names)
    for place, (variant, peer) in enumerate(names):
        y = top - (place + 0.5) * height
        for text, up, colour in ((variant, 0.065, palette().ink), (peer, -0.065, palette().faint)):
            page.write(
                left - 0.1, y + up, shorten(text, _NAMES - 0.12, SMALL_SIZE), ha="right", va="center", color=colour
            )
    return page.figure


def _draw(
    ax: Axes, part: Sequence[PeerPair], what: str, names: Sequence[tuple[str, str]], lengths: Sequence[int]
) -> list[float]:
    values = []
    for pair in part:
        ratio = pair.time if what == "time" else pair.peak
        if not math.isfinite(ratio):
            continue
        rank = lengths.index(pair.n)
        y = names.index(pair.names) + (rank - (len(lengths) - 1) / 2) / (len(lengths) + 1.4)
        tall = 0.86 / (len(lengths) + 1.4)
        shade = 0.4 + 0.6 * (rank + 1) / len(lengths)
        ax.barh(y, ratio - 1, left=1, height=tall, color=palette().sequence[ratio >= 1], alpha=shade, linewidth=0)
        values.append(ratio)
        if what == "time":
            if math.isfinite(pair.low) and math.isfinite(pair.high):
                ax.plot([pair.low, pair.high], [y, y], color=palette().ink, linewidth=0.8)
                values += [pair.low, pair.high]
            if math.isfinite(pair.limit):
                ax.plot([pair.limit] * 2, [y - tall / 2, y + tall / 2], color=palette().ink, linewidth=1.2)
                values.append(pair.limit)
    ax.axvline(1, color=palette().faint, linewidth=0.8)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_yticks(np.arange(len(names) + 1) - 0.5, [])
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y")
    return values
