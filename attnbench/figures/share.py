"""Attention's part of the time of a layer or a model, over the length."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnbench.figures.kit.legend import STEP, count_lines, on_all, write_entry
from attnbench.figures.kit.page import NothingToDraw, Page, narrow, new_page, stacked, text_width
from attnbench.figures.kit.palette import palette
from attnbench.figures.kit.sheets import COLUMN
from attnbench.figures.kit.style import SMALL_SIZE, Look, in_style, looks
from attnbench.figures.kit.ticks import length, log_axis, padded
from attnbench.figures.peers import TIMES, ratio_of
from attnbench.measure.status import Status
from attnbench.results.frame.settings import PANELS, SAME, Setting, records, settings, timed, without_room
from attnbench.results.frame.words import failures, own_form_note, short_names, where

NEEDS = "times of a layer or model at two lengths, beside identity or the operators alone"
IDENTITY = "identity"
"""The variant that returns the values: everything but attention is left."""
_NAMES = 2.95


@dataclass(frozen=True)
class TimeShare:
    """Attention's part of one label's time."""

    label: str
    family: str
    n: tuple[int, ...]
    part: np.ndarray
    """``(lengths,)``; noise may bring it below 0."""
    low: np.ndarray
    """Lower end of its 95 % interval; ``high`` is the upper end."""
    high: np.ndarray

    def half(self) -> float:
        """The least length from which attention is the larger part, interpolated on a log scale.

        0 if it already is at the shortest length, infinity if it is not at the longest.
        """
        above = self.part >= 0.5
        if not above[-1]:
            return math.inf
        last = max((place for place in range(len(above)) if not above[place]), default=-1)
        if last < 0:
            return 0.0
        a, b = self.part[last], self.part[last + 1]
        start, end = math.log(self.n[last]), math.log(self.n[last + 1])
        return math.exp(start + (end - start) * float((0.5 - a) / (b - a)))


_Panel = tuple[Setting, Sequence[TimeShare], str]
"""Rows that were measured alike, their shares, and how these were found."""


@in_style
def draw_share(frame: pd.DataFrame, *, whole: pd.DataFrame | None = None) -> Figure:
    """Draw each label's share of attention in the time of the layer or model.

    The rest is the time of the same layer or model with ``identity``; without one, attention is the operator's time
    times the layers, which may be any of the ``whole`` table. Raises NothingToDraw without a layer or model at two
    lengths with either.
    """
    rows = timed(frame)
    found = _panels(rows, rows if whole is None else timed(whole))
    if not found:
        raise NothingToDraw("; ".join(failures(rows)) or f"needs {NEEDS}")
    panels = found[:PANELS]
    shown = pd.concat([setting.rows for setting, _, _ in panels])
    names, hidden = short_names(shown[shown["label"].isin([one.label for _, shares, _ in panels for one in shares])])
    notes = [
        own_form_note(names),
        *dict.fromkeys(by for _, _, by in panels),
        "Bands: 95 % intervals, from those of both medians. Dotted: half of the time.",
        hidden,
        *(f"Not drawn — {line}" for line in failures(shown)),
        without_room([setting for setting, _, _ in found]),
    ]
    return _draw(panels, names, where(shown), notes)


def shares_of(rows: pd.DataFrame, others: pd.DataFrame) -> tuple[list[TimeShare], str]:
    """The known parts of each label of a layer or model (``rows``; operators are in ``others``), and the method."""
    ok = rows[(rows["status"] == Status.OK) & (rows["time_median_s"] > 0)]
    if ok.empty or ok["level"].iloc[0] == "operator":
        return [], ""
    like, ok = ok.iloc[0], ok[["variant", *_OF_LINES]]
    rest = ok[ok["variant"] == IDENTITY].drop_duplicates("seq_len", keep="last").set_index("seq_len")
    wholes = ok[ok["variant"] != IDENTITY]
    if len(rest) > 1:
        by = (
            "Attention: what a layer or model takes beyond the same one with identity, which returns the values and "
            "attends to nothing."
        )
        return _lines(wholes, lambda label: rest, remain=True), by
    alone = _alike(others, like)[_OF_LINES]
    by = "Attention: the time of the operator alone, once for each layer, over that of the layer or model."
    tables = {
        str(label): part.drop_duplicates("seq_len", keep="last").set_index("seq_len")
        for label, part in alone.groupby("label", sort=False)
    }
    return _lines(wholes, lambda label: tables.get(label), remain=False), by


_OF_LINES = ["label", "family", "seq_len", "layers", *TIMES]


def _alike(others: pd.DataFrame, like: pd.Series[Any]) -> pd.DataFrame:
    here = (others["level"] == "operator") & (others["status"] == Status.OK) & (others["time_median_s"] > 0)
    here &= others["kv_len"] == others["seq_len"]
    for column in SAME:
        if column in others and column not in ("level", "sweep", *_OF_MODELS):
            value = like[column]
            here &= (others[column].isna() if pd.isna(value) else others[column] == value).to_numpy()
    return others[here]


_OF_MODELS = ("layers", "ffn", "positions", "task", "protocol", "steps", "pretrain_steps")
"""Columns without a value for operators."""


def _lines(wholes: pd.DataFrame, beside: Callable[[str], pd.DataFrame | None], *, remain: bool) -> list[TimeShare]:
    found = []
    for label, part in wholes.groupby("label", sort=False):
        other = beside(str(label))
        if other is None:
            continue
        part = part.drop_duplicates("seq_len", keep="last").set_index("seq_len").sort_index()
        lengths = [n for n in part.index if n in other.index]
        if len(lengths) < 2:
            continue
        whole = part.loc[lengths]
        pairs = zip(records(other.loc[lengths]), records(whole), strict=True)
        ratio, low, high = np.array([ratio_of(*pair) for pair in pairs]).T
        if remain:
            ends = (1 - ratio, 1 - high, 1 - low)
        else:
            layers = whole["layers"].fillna(1.0).to_numpy(dtype=float)
            ends = (layers * ratio, layers * low, layers * high)
        found.append(TimeShare(str(label), str(part["family"].iloc[0]), tuple(int(n) for n in lengths), *ends))
    return found


def _panels(rows: pd.DataFrame, others: pd.DataFrame) -> list[_Panel]:
    prefer = {"level": ("model", "layer"), "pass": ("training", "forward")}
    found = settings(rows[rows["level"] != "operator"], prefer, also_same=("inputs", "layers", "ffn"))
    panels = [(setting, *shares_of(setting.rows, others)) for setting in found]
    return [panel for panel in panels if panel[1]]


def _draw(panels: Sequence[_Panel], names: Mapping[str, str], about: Sequence[str], notes: Sequence[str]) -> Figure:
    look = looks((one.label, one.family) for _, shares, _ in panels for one in shares)
    headings = [setting.about for setting, _, _ in panels]
    talls = [_key(shares, names)[1] for _, shares, _ in panels]
    rooms = [2.5 + tall if narrow() else max(3.0, tall + 0.4) for tall in talls]
    page = new_page(_title(panels[0][1], names), about, notes, room=stacked(rooms, headings))
    for part, (_, shares, _) in zip(page.parts(headings, rooms), panels, strict=True):
        _block(part, shares, names, look)
    return page.figure


def _title(shares: Sequence[TimeShare], names: Mapping[str, str]) -> str:
    longest = max(one.n[-1] for one in shares)
    above = [names[one.label] for one in shares if one.n[-1] == longest and one.part[-1] >= 0.5]
    return f"Attention is over half of the time at n = {length(longest)} with {', '.join(above) or 'no variant'}"


def _block(page: Page, shares: Sequence[TimeShare], names: Mapping[str, str], look: Mapping[str, Look]) -> None:
    key, tall = _key(shares, names)
    chart, under = page.split(tall + 0.05 if narrow() else 0.0)
    right = page.right - (0.1 if narrow() else key + 0.1)
    beside = under if narrow() else replace(page, left=right + 0.15)
    bottom = chart.bottom + 0.42
    _chart(chart.axes(chart.left + 0.6, bottom, right - chart.left - 0.6, chart.top - bottom), shares, look)
    box, y = on_all(beside), beside.top - beside.bottom - 0.1
    for one in sorted(shares, key=lambda one: -float(one.part[-1])):
        y -= STEP * (len(write_entry(box, y, _text(one, names), {"lw": 1.2, **look[one.label].line})) - 1)


def _key(shares: Sequence[TimeShare], names: Mapping[str, str]) -> tuple[float, float]:
    """Width and height of the names, in inches."""
    texts = [_text(one, names) for one in shares]
    key = min(_NAMES, max(text_width(text, SMALL_SIZE) for text in texts) + 0.58)
    return key, STEP * count_lines(texts, COLUMN - 0.3 if narrow() else key - 0.05) + 0.1


def _text(one: TimeShare, names: Mapping[str, str]) -> str:
    return f"{names[one.label]}: {_said(one)}"


def _said(one: TimeShare) -> str:
    half = one.half()
    if half == 0.0:
        return f"over half from {length(one.n[0])}"
    return f"under half to {length(one.n[-1])}" if math.isinf(half) else f"half at {half:.0f}"


def _chart(ax: Axes, shares: Sequence[TimeShare], look: Mapping[str, Look]) -> None:
    lengths = sorted({n for one in shares for n in one.n})
    least = min(float(one.part.min()) for one in shares)
    most = max(float(one.part.max()) for one in shares)
    log_axis(ax, "x", padded(lengths, share=0.04), at=lengths, text=length, most=6)
    ax.set_ylim(min(0.0, 1.1 * least), max(1.0, 1.05 * most))
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    ax.set_xlabel("length n (log2 scale)")
    ax.set_ylabel("part of the time")
    ax.grid(axis="both")
    ax.axhline(0.5, color=palette().ink, lw=1.2, ls=":")
    for one in shares:
        ax.plot(one.n, one.part, lw=1.2, markersize=4.2, alpha=0.9, **look[one.label].line)
        ax.fill_between(
            one.n, one.low, one.high, color=look[one.label].colour, alpha=0.12 if len(shares) < 7 else 0.05, lw=0
        )
