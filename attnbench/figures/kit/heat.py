"""Coloured tables: one number in each cell, blue if the method wins and red if it loses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, to_rgba
from matplotlib.patches import Rectangle

from attnbench.figures.kit.page import Page, narrow, shorten
from attnbench.figures.kit.palette import palette
from attnbench.figures.kit.style import SMALL_SIZE

_LEAST = 6.0
"""Size of the smallest letters in a figure of column width, in points: a printed column cannot be enlarged."""


@dataclass(frozen=True)
class Heat:
    """The cells of a coloured table, from the top left."""

    gain: np.ndarray
    """(rows, columns); the logarithm of the factor by which the method wins, NaN for a cell without a number."""
    texts: Sequence[Sequence[str]]
    row_names: Sequence[str]
    column_names: Sequence[str]
    unsure: np.ndarray | None = None
    """True if the sign of the gain is uncertain; the text is then in italics."""


def draw_heat(ax: Axes, inches: tuple[float, float], heat: Heat, limit: float) -> None:
    """Draw a coloured table in ``inches`` (width, height); the colour is full at the gain ``limit``."""
    gain, texts = heat.gain, heat.texts
    rows, columns = gain.shape
    colours = matplotlib.colormaps[palette().diverging]
    norm = Normalize(-limit, limit, clip=True)
    # As large as the longest number allows (a digit is about 0.64 of its size wide); each word has a size of its own.
    cell = (inches[0] / columns * 72, inches[1] / rows * 72)
    numbers = [texts[i][j] for i in range(rows) for j in range(columns) if math.isfinite(gain[i, j])]
    size = min((_fitting(text, cell) for text in numbers), default=SMALL_SIZE)
    for i in range(rows):
        for j in range(columns):
            known = math.isfinite(gain[i, j])
            colour = colours(norm(gain[i, j])) if known else to_rgba(palette().band)
            ax.add_patch(Rectangle((j, i), 1, 1, facecolor=colour, edgecolor=palette().page, linewidth=0.8))
            text, fitting = (texts[i][j], size) if known else _word(texts[i][j], cell)
            if fitting < (_LEAST if narrow() else 4.5):
                continue
            dark = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] < 0.55
            slant = "italic" if heat.unsure is not None and heat.unsure[i, j] else "normal"
            ink = ("white" if dark else "#222222") if known else palette().faint
            ax.text(j + 0.5, i + 0.5, text, fontsize=fitting, ha="center", va="center", color=ink, fontstyle=slant)
    ax.set_xlim(0, columns)
    ax.set_ylim(rows, 0)
    ax.set_xticks(np.arange(columns) + 0.5, [shorten(name, 1.2, SMALL_SIZE) for name in heat.column_names])
    ax.set_yticks(np.arange(rows) + 0.5, [shorten(name, 1.2, SMALL_SIZE) for name in heat.row_names])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def _fitting(text: str, cell: tuple[float, float]) -> float:
    lines = text.split("\n")
    return min(
        SMALL_SIZE + 0.5, 0.92 * cell[0] / (0.64 * max(map(len, lines), default=1) or 1), 0.75 * cell[1] / len(lines)
    )


def _word(text: str, cell: tuple[float, float]) -> tuple[str, float]:
    size = _fitting(text, cell)
    return (text, size) if size >= (_LEAST if narrow() else 5) or not text else ("×", _fitting("×", cell))


def draw_colour_key(page: Page, bottom: float, limit: float, name: str, text: Callable[[float], str]) -> None:
    """Draw a bar of the colours with five marks, at the left of the page; ``text`` puts a gain into words."""
    ax = page.axes(page.left + 0.3, bottom, 2.5 if narrow() else 2.6, 0.11)
    ramp = np.linspace(-limit, limit, 61)
    colours = matplotlib.colormaps[palette().diverging](Normalize(-limit, limit)(ramp))
    for at, colour in zip(ramp, colours, strict=True):
        ax.add_patch(Rectangle((at - limit / 60, 0), limit - at + limit / 60, 1, facecolor=colour, lw=0))  # no seams
    ax.set_xlim(-limit, limit)
    ax.set_ylim(0, 1)
    marks = [-limit, -limit / 2, 0.0, limit / 2, limit]
    ax.set_xticks(marks, [text(mark) for mark in marks])
    ax.set_yticks([])
    ax.tick_params(length=2, pad=2)
    ax.spines[:].set_visible(False)
    if narrow():
        ax.text(0.5, 1.6, name, transform=ax.transAxes, fontsize=SMALL_SIZE, va="bottom", ha="center")
    else:
        ax.text(1.04, 0.5, name, transform=ax.transAxes, fontsize=SMALL_SIZE, va="center")
