"""Keys of figures: a piece of each line, and its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from attnbench.figures.kit.page import NARROW_ROOM, Page, narrow, new_page, shorten, text_width, wrap
from attnbench.figures.kit.palette import palette
from attnbench.figures.kit.sheets import COLUMN
from attnbench.figures.kit.style import SMALL_SIZE, Look

KEY = 1.9
NAMES = 0.46
"""Inches from the left edge of a key to its names."""
STEP = 0.17
"""Inches from one line of a key to the next."""
_LINE, _GAP = 0.14, 0.05


def on_all(page: Page) -> Axes:
    """Axes without frame over a whole page, in units of inches."""
    return page.blank(page.left, page.bottom, page.right - page.left, page.top - page.bottom)


def write_entry(
    ax: Axes, y: float, name: str, how: Mapping[str, Any], *, right: float | None = None, step: float = STEP
) -> list[Artist]:
    """Draw and return a piece of a line (``how``: of ``Line2D``) and each line of its name, which ends at ``right``."""
    lines = name_lines(name, ax.get_xlim()[1] if right is None else right)
    texts = [ax.text(NAMES, y - step * row, line, fontsize=SMALL_SIZE, va="center") for row, line in enumerate(lines)]
    piece = Line2D([0, 0.2, 0.4], [y, y, y], markevery=[1], **{"markersize": 4.2, **how})
    return [ax.add_line(piece), *texts]


def name_lines(name: str, width: float) -> list[str]:
    """The lines of a name beside its piece, in a key of this width; one line even if the name is empty."""
    room = width - NAMES
    fits = text_width(name, SMALL_SIZE) <= room + 1e-6
    return [shorten(name, room, SMALL_SIZE)] if fits else wrap(name, room, SMALL_SIZE)


def count_lines(names: Iterable[str], width: float) -> int:
    """The lines that names take in a key of this width."""
    return sum(len(name_lines(name, width)) for name in names)


def write_wrapped(page: Page, hows: Mapping[str, Look], said: Mapping[str, str]) -> None:
    """Write names in as many lines as they need, in their order, with ``said`` under each."""
    ax, y, width = on_all(page), page.top - page.bottom - 0.1, page.right - page.left
    for name, how in hows.items():
        y -= _LINE * (len(write_entry(ax, y, name, {"markersize": 4.5, **how.line}, step=_LINE)) - 1)
        for line in name_lines(said[name], width) if name in said else ():
            ax.text(NAMES, y, line, fontsize=SMALL_SIZE, va="center", color=palette().faint)
            y -= _LINE
        y -= _GAP


def key_beside(
    words: tuple[str, str], notes: Sequence[str], names: Iterable[str], said: Mapping[str, str], tall: float
) -> tuple[Page, Page]:
    """A new page's room for a drawing, and that for :func:`write_wrapped`: at its right, or below it in one column.

    ``words``: title and subtitle. ``tall``: inches of the drawing on a page.
    """
    key = wrapped_height(names, said) if narrow() else 0.0
    room = NARROW_ROOM + key if narrow() else max(tall, wrapped_height(names, said, KEY - 0.15))
    title, about = words
    whole = new_page(title, [about] if about else [], notes, room=room)
    page, under = whole.split(key)
    right = page.right - (0.1 if narrow() else KEY)
    return replace(page, right=right), under if narrow() else replace(page, left=right + 0.15)


def wrapped_height(names: Iterable[str], said: Mapping[str, str], width: float = COLUMN - 0.3) -> float:
    """Height that :func:`write_wrapped` needs, in inches; in a figure of column width by default."""
    texts = [*names, *said.values()]
    return 0.25 + _GAP * (len(texts) - len(said)) + _LINE * count_lines(texts, width)
