"""Heights of the points in the bubble plot: a scale for those with a number, a band for each kind without one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator

from attnbench.figures.kit.page import narrow, text_width
from attnbench.figures.kit.palette import palette
from attnbench.figures.kit.style import SMALL_SIZE, TEXT_SIZE
from attnbench.figures.kit.ticks import padded, plain, power_ticks

_NAMES = {
    "exact": "exact up\nto rounding",
    "missing": "not\nmeasured",
    "learned": "learned: no\nerror before\nfitting",
    "other": "another\noperator",
}
_NARROW_NAMES = _NAMES | {"learned": "not\nfitted"}
_ROW = 0.3
_FLOOR, _CEILING = 1e-6, 100.0
"""Errors beyond these limits are drawn at the edge, with their value after the name."""


@dataclass(frozen=True)
class BandLayout:
    """Points with their height ``at`` in inches, and the contents of the vertical axis."""

    points: pd.DataFrame
    ticks: list[tuple[float, str]]
    strips: list[tuple[float, float]]
    """Lower and upper edge of each band, in inches."""
    scale: tuple[float, float]
    """Lower and upper end of the scale between the bands, in inches."""
    height_of: Callable[[float], float]
    """Value -> inches."""


def arrange(
    points: pd.DataFrame,
    place: Callable[[float], float],
    height: float,
    *,
    log: bool,
    down: bool = False,
    also: Sequence[float] = (),
    within: tuple[float, float] = (-math.inf, math.inf),
) -> BandLayout:
    """Give each point (label, name, kind, x, y) a height.

    Args:
        place: x -> inches, to see which names in a band would collide.
        height: of the axes, in inches.
        log: y is an error, best at zero, on an inverted log scale; otherwise the scale is linear.
        down: less is better on a linear scale too.
        within: range of possible values, for the ticks of a linear scale.
    """
    kinds = {kind: points[points["kind"] == kind].sort_values(["x", "label"]) for kind in dict.fromkeys(points["kind"])}
    scaled = kinds.pop("measured", points.iloc[:0])
    rows = {kind: _rows(part, place) for kind, part in kinds.items()}
    said = _NARROW_NAMES if narrow() else _NAMES
    tall = {
        kind: max(_ROW * (1 + max(turn)) + 0.14, 0.15 * said[kind].count("\n") + 0.2) for kind, turn in rows.items()
    }
    if tall and (scaled.empty or sum(tall.values()) > 0.6 * height):
        # Without a scale the bands share all the room; with one, many bands leave it two fifths.
        share = (1.0 if scaled.empty else 0.6) * height / sum(tall.values())
        tall = {kind: share * one for kind, one in tall.items()}
    low, high = 0.0, height
    placed, ticks, strips = [], [], []
    for kind in ("exact", "other", "learned", "missing"):
        if kind not in kinds:
            continue
        start = high - tall[kind] if kind == "exact" else low
        step = tall[kind] / (1 + max(rows[kind]))
        placed.append(kinds[kind].assign(at=[start + step * (row + 0.5) for row in rows[kind]]))
        ticks.append((start + tall[kind] / 2, said[kind]))
        strips.append((start, start + tall[kind]))
        low, high = (low, start) if kind == "exact" else (start + tall[kind], high)
    height_of, marks = _scale([*scaled["y"], *also], low, high, log=log, down=down, within=within)
    if len(scaled):
        beyond = [log and not _FLOOR <= value <= _CEILING for value in scaled["y"]]
        names = [f"{n} ({v:.2g})" if far else n for n, v, far in zip(scaled["name"], scaled["y"], beyond, strict=True)]
        placed.append(scaled.assign(at=[height_of(value) for value in scaled["y"]], name=names))
        ticks += [tick for tick in marks if not narrow() or low + 0.06 < tick[0] < high - 0.06]  # beside a band's name
    return BandLayout(pd.concat(placed, ignore_index=True), ticks, strips, (low, high), height_of)


def _rows(points: pd.DataFrame, place: Callable[[float], float]) -> list[int]:
    """A row for each point, in the order of x, so that names in one row do not collide."""
    ends = [-math.inf] * 4
    turns = []
    for x, name in zip(points["x"], points["name"], strict=True):
        at, half = place(x), 0.5 * text_width(name, SMALL_SIZE) + 0.1
        free = [row for row, end in enumerate(ends) if end <= at - half]
        turns.append(free[0] if free else int(np.argmin(ends)))
        ends[turns[-1]] = at + half
    return turns


def _scale(
    values: Sequence[float], low: float, high: float, *, log: bool, down: bool, within: tuple[float, float]
) -> tuple[Callable[[float], float], list[tuple[float, str]]]:
    reached = np.asarray(values, dtype=float)
    if log:
        bottom, top = padded(np.clip(reached, _FLOOR, _CEILING), share=0.1, least=3.0)

        def height_of(value: float) -> float:
            share = math.log(bottom / min(max(value, bottom), top)) / math.log(bottom / top)
            return high - share * (high - low)

        return height_of, [(height_of(tick), plain(tick)) for tick in power_ticks(bottom, top, 10)]
    finite = reached[np.isfinite(reached)]
    bottom, top = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    extra = 0.1 * (top - bottom) or 0.05 * abs(top) or 0.5
    bottom, top = bottom - extra, top + extra

    def linear(value: float) -> float:
        share = (value - bottom) / (top - bottom)
        return low + (1 - share if down else share) * (high - low)

    marks = [round(float(tick), 12) for tick in MaxNLocator(6).tick_values(bottom, top)]
    marks = [tick for tick in marks if max(bottom, within[0]) <= tick <= min(top, within[1])]
    return linear, [(linear(tick), plain(tick)) for tick in marks]


def draw_bands(ax: Axes, layout: BandLayout, height: float, y_label: str, width: float) -> None:
    """Draw grey strips, ticks and the label of the scale; the axes' vertical unit is the inch."""
    ax.set_ylim(0, height)
    for start, end in layout.strips:
        ax.axhspan(start, end, color=palette().band, lw=0, zorder=0)
        for edge in (start, end):
            if 0 < edge < height:
                ax.axhline(edge, color=palette().line, lw=0.8, zorder=1)
    ax.yaxis.set_major_locator(FixedLocator([at for at, _ in layout.ticks]))
    ax.yaxis.set_major_formatter(FixedFormatter([text for _, text in layout.ticks]))
    ax.tick_params(axis="y", length=0)
    low, high = layout.scale
    if (layout.points["kind"] == "measured").any():
        half = max(text_width(line, TEXT_SIZE) for line in y_label.split("\n")) / 2
        fitting = min(half, height / 2)  # the heading is above
        ax.set_ylabel(y_label, fontsize=TEXT_SIZE * fitting / half)
        middle = min(max((low + high) / 2, fitting), height - fitting)
        ax.yaxis.set_label_coords((-0.74 if "\n" in y_label else -0.76) / width, middle / height)
