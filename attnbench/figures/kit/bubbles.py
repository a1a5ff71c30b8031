"""Circles with areas for memory, the front of the unbeaten ones, and the keys of the chart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from attnbench.figures.kit.legend import on_all
from attnbench.figures.kit.page import Page, narrow, shorten, text_width
from attnbench.figures.kit.palette import palette
from attnbench.figures.kit.sheets import COLUMN
from attnbench.figures.kit.style import SMALL_SIZE, mark

LARGEST = 560.0
"""Area of the largest circle, in square points: 0.37 inches across."""
SMALLEST = 5.0
_STEP = 0.165
"""Inches from a line of a key to the next."""
_HALF, _NUMBER = COLUMN / 2 - 0.14, 0.24
"""Width of half a column, and of a number in front of its name, in inches."""
FRONT = "Pareto front"


def draw_circles(ax: Axes, points: pd.DataFrame, largest: float) -> list[float]:
    """Draw a circle for each row, dashed and empty if its memory is unknown; return the radii in points."""
    radii = []
    columns = points[["label", "family", "x", "at", "memory"]].assign(row=points.get("row"))  # published ones have none
    for label, family, x, at, memory, row in columns.itertuples(index=False):
        colour = palette().family(family)
        known = memory > 0 and math.isfinite(memory)
        size = max(memory / largest * LARGEST, SMALLEST) if known else 60.0
        circle = ax.scatter(
            [x],
            [at],
            s=size,
            facecolor=(colour, 0.5) if known else "none",
            edgecolor=colour,
            linewidth=1.0,
            linestyle="-" if known else (0, (2, 1.5)),
            label=label,
            clip_on=False,
            zorder=4 - size / (2 * LARGEST),  # small circles in front
        )
        mark(circle, [row], main=True)
        radii.append(math.sqrt(size / math.pi))
    return radii


def draw_front(ax: Axes, x: np.ndarray, at: np.ndarray, low: float) -> None:
    """Draw steps through points in the order of :func:`pareto`, from ``low`` below the fastest up to the best."""
    corners = [(x[0], low), *zip(x, at, strict=True)]
    turns = [(left, down) for (_, down), (left, _) in pairwise(corners)]
    steps = [place for both in zip(corners, turns, strict=False) for place in both] + [corners[-1]]
    ax.plot(
        *zip(*steps, strict=True), color=palette().ink, lw=1.0, ls=(0, (4, 2.5)), alpha=0.55, zorder=1.5, label=FRONT
    )


def draw_keys(page: Page, families: Sequence[str], largest: float, title: str, sizes: Mapping[float, str]) -> None:
    """Draw the keys: a colour for each family, then three circles with the memory they stand for."""
    height = page.top - page.bottom
    ax = on_all(page)
    x, y = 0.0, height - 0.08

    def write(text: str, indent: float, colour: str = palette().ink) -> None:
        ax.text(x + indent, y, text, fontsize=SMALL_SIZE, color=colour, va="center")

    write("family", 0, palette().faint)
    for family in _shown(families):
        y -= _STEP
        colour = palette().family(family)
        ax.scatter([0.07], [y], s=40, facecolor=(colour, 0.5), edgecolor=colour)
        write(family or "not known", 0.2)
    if narrow():
        x, y = (page.right - page.left) / 2, height - 0.08
    else:
        y -= 0.3
    for line in title.split("\n"):
        write(line, 0, palette().faint)
        y -= 0.14
    for value, text in sizes.items():
        radius = math.sqrt(max(value / largest * LARGEST, SMALLEST) / math.pi) / 72
        y -= max(radius, 0.06) + 0.04
        ax.scatter(
            [x + 0.19],
            [y],
            s=max(value / largest * LARGEST, SMALLEST),
            facecolor=(palette().faint, 0.25),
            edgecolor=palette().faint,
        )
        write(text, 0.46)
        y -= max(radius, 0.06)


def keys_height(families: Sequence[str], names: Sequence[str]) -> float:
    """Height of the keys in a figure of column width, in inches, with numbered names below them."""
    short = [name for name in names if not is_long(name)]
    return max(0.35 + _STEP * len(_shown(families)), 1.3) + _STEP * (-(-len(short) // 2) + len(names) - len(short))


def is_long(name: str) -> bool:
    """True if half a column is too narrow for a numbered name."""
    return text_width(name, SMALL_SIZE) > _HALF - _NUMBER - 0.05


def draw_numbers(page: Page, names: Mapping[str, str]) -> None:
    """Write names after their numbers at the foot of the page, in two columns; the long ones come last and have one."""
    ax, few = on_all(page), sum(not is_long(name) for name in names.values())
    rows = -(-few // 2)
    for place, (number, name) in enumerate(names.items()):
        column, row = divmod(place, rows) if place < few else (0, rows + place - few)
        x, y = _HALF * column + _NUMBER, _STEP * (rows + len(names) - few - row - 0.5)
        ax.text(x - 0.06, y, number, fontsize=SMALL_SIZE, va="center", ha="right", fontweight="bold")
        ax.text(x, y, shorten(name, page.right - page.left - x, SMALL_SIZE), fontsize=SMALL_SIZE, va="center")


def _shown(families: Sequence[str]) -> list[str]:
    shown = [one for one in palette().families if one in families]
    return shown + sorted({*families} - palette().families.keys())


def round_sizes(largest: float) -> list[float]:
    """Three sizes for the key: the largest power of two up to ``largest``, a quarter and a sixteenth of it."""
    if not (largest > 0 and math.isfinite(largest)):
        return []
    top = 2.0 ** math.floor(math.log2(largest))
    return [top, top / 4, top / 16]
