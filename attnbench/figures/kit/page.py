"""A figure's page: heading, footnotes, and the room between them, in inches, so that text never overlaps a panel."""

from __future__ import annotations

import functools
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

from attnbench.errors import ResultsError, UsageError, did_you_mean
from attnbench.figures.kit.palette import is_inline, palette
from attnbench.figures.kit.sheets import COLUMN
from attnbench.figures.kit.style import BESIDE, CAPTIONS, SMALL_SIZE, TEXT_SIZE, TITLE_SIZE, Caption
from attnbench.text import one_line

_MARGIN = 0.14
_INLINE = 0.08
"""Inches around the panels of a figure inside a page, on both sides together."""
_HEADING, _LINE, _GAP = 0.3, 0.15, 0.16
"""Inches above a panel for its heading, for each further line of the heading, and between panels."""
_BOLD = 0.88
WIDTHS = ("page", "column")
NARROW_ROOM = 2.5
"""Height of a panel in a figure for one column, without its key: with the title it is no taller than a sheet."""
_NARROW_HEAD = 2
"""Most lines of a subtitle in a figure for one column; its notes have all."""
_CAPTION = 3
_WIDTH: ContextVar[str] = ContextVar("width", default="page")


def narrow() -> bool:
    """True if figures are drawn for one column: keys below panels, panels below each other, text of the same size."""
    return _WIDTH.get() == "column"


@contextmanager
def laid_out(width: str) -> Iterator[None]:
    """Draw figures for this width; UsageError if it is unknown."""
    if width not in WIDTHS:
        raise UsageError(f"unknown width {width!r}{did_you_mean(width, WIDTHS) or '; there are: page, column'}")
    token = _WIDTH.set(width)
    try:
        yield
    finally:
        _WIDTH.reset(token)


def only_on_a_page(what: str) -> None:
    """Raise UsageError if a figure that needs a page is drawn for one column."""
    if narrow():
        raise UsageError(f"{what} is too wide for one column; draw it without --width column")


class NothingToDraw(ResultsError):
    """The rows have nothing that the figure shows; the message says why."""


@dataclass(frozen=True)
class Page:
    """A figure with its heading and notes, and the room left between them, in inches from the lower left corner."""

    figure: Figure
    left: float
    bottom: float
    right: float
    top: float

    def axes(self, left: float, bottom: float, width: float, height: float) -> Axes:
        w, h = self.figure.get_size_inches()
        return self.figure.add_axes((left / w, bottom / h, width / w, height / h))

    def write(self, x: float, y: float, text: str, **how: Any) -> None:
        w, h = self.figure.get_size_inches()
        self.figure.text(x / w, y / h, text, **{"fontsize": SMALL_SIZE, **how})

    def write_heading(self, text: str) -> None:
        """Write bold text at the top left."""
        self.write(self.left, self.top - 0.02, text, va="top", fontsize=TEXT_SIZE, fontweight="bold")

    def parts(self, headings: Sequence[str], rooms: Sequence[float]) -> list[Page]:
        if len(headings) == 1:
            return [self]
        spare = (self.top - self.bottom - stacked(rooms, headings)) / sum(rooms)
        pages, top = [], self.top
        for heading, room in zip(headings, rooms, strict=True):
            replace(self, top=top).write_heading("\n".join(_heading(heading)))
            top -= heading_height(heading)
            bottom = top - room * (1 + spare)
            pages.append(replace(self, bottom=bottom, top=top))
            top = bottom - _GAP
        return pages

    def split(self, below: float) -> tuple[Page, Page]:
        """Two pages: the room above the lowest ``below`` inches, and these without a gap at their top."""
        return replace(self, bottom=self.bottom + below), replace(self, top=self.bottom + below - 0.1)

    def blank(self, left: float, bottom: float, width: float, height: float) -> Axes:
        ax = self.axes(left, bottom, width, height)
        ax.set_axis_off()
        ax.set_xlim(0, width)
        ax.set_ylim(0, height)
        return ax


def stacked(rooms: Sequence[float], headings: Sequence[str]) -> float:
    """Height in inches that panels with ``rooms`` and their headings need."""
    if len(rooms) == 1:
        return rooms[0]
    return sum(rooms) + sum(map(heading_height, headings)) + _GAP * (len(rooms) - 1)


def heading_height(heading: str) -> float:
    """Height in inches of a heading between panels."""
    return _HEADING + _LINE * (len(_heading(heading)) - 1)


def narrow_room(heading: str) -> float:
    """Height of a panel in a figure for one column: with the title and its own heading it is no taller than a sheet."""
    return NARROW_ROOM + 0.4 - heading_height(heading)


def _heading(text: str) -> list[str]:
    return wrap(text, _BOLD * ((COLUMN if narrow() else 8.0) - 2 * _MARGIN), TEXT_SIZE) or [""]


def new_page(
    title: str,
    subtitle: Sequence[str],
    notes: Sequence[str],
    *,
    width: float = 8.0,
    height: float = 6.0,
    room: float = 0.0,
) -> Page:
    """Start a figure: title, grey subtitle and footnotes, wrapped to the width.

    The caption has the first notes, in three lines at most; the figure's text file has all.

    Args:
        width, height: inches; the page grows if heading and notes leave less than ``room``. A column has a fixed width,
            and only the height that it needs.
        room: inches of height for the panels.
    """
    if narrow():
        width, height = COLUMN, 0.0
    if is_inline():  # the page writes the words
        figure = Figure(figsize=(width, room + _INLINE))
        FigureCanvasAgg(figure)
        CAPTIONS[figure] = Caption(title, [text for text in subtitle if text], [text for text in notes if text])
        return Page(figure, _INLINE / 2, _INLINE / 2, width - _INLINE / 2, room + _INLINE / 2)
    inside = width - 2 * _MARGIN
    head = [line for text in subtitle for line in wrap(text, inside, TEXT_SIZE)]
    size = TITLE_SIZE - 2.5 * narrow()
    whole, title = title, _fitted(title, inside, size)
    notes = [text for text in (*notes, whole * title.endswith("…")) if text]
    if narrow() and len(head) > _NARROW_HEAD:
        notes += [text for text in subtitle if text]
        head = [*head[: _NARROW_HEAD - 1], shorten(f"{head[_NARROW_HEAD - 1]} …", inside, TEXT_SIZE)]
    foot = _caption([wrap(text, inside, SMALL_SIZE) for text in notes])
    head_step, foot_step = TEXT_SIZE * 1.35 / 72, SMALL_SIZE * 1.35 / 72
    below_title = 0.36 + title.count("\n") * size * 1.2 / 72
    above = below_title + head_step * len(head) + 0.1
    below = 0.08 + foot_step * len(foot) + (0.06 if foot else 0)
    height = max(height, above + below + room)
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    CAPTIONS[figure] = Caption(title, subtitle, notes)

    def write(text: str, y: float, **how: Any) -> None:
        figure.text(_MARGIN / width, y / height, text, ha="left", va="top", **how)

    write(title, height - 0.1, fontsize=size, fontweight="bold")
    for row, line in enumerate(head):
        write(line, height - below_title - row * head_step, fontsize=TEXT_SIZE, color=palette().faint)
    for row, line in enumerate(foot):
        write(line, 0.08 + foot_step * (len(foot) - row) - 0.02, fontsize=SMALL_SIZE, color=palette().faint)
    return Page(figure, _MARGIN, below, width - _MARGIN, height - above)


def _caption(notes: Sequence[Sequence[str]]) -> list[str]:
    if sum(map(len, notes)) <= _CAPTION:
        return [line for lines in notes for line in lines]
    shown = 0
    while sum(map(len, notes[: shown + 1])) < _CAPTION:
        shown += 1
    if not shown:  # the meaning of the marks comes first
        return [*notes[0][: _CAPTION - 1], f"… the rest: {BESIDE}"]
    more = f"{len(notes) - shown} more note{'s' * (len(notes) - shown > 1)}"
    return [*(line for lines in notes[:shown] for line in lines), f"… {more}: {BESIDE}"]


def retitle(figure: Figure, title: str) -> None:
    """Give a figure made by :func:`new_page` another title."""
    text = figure.texts[0]
    inside = figure.get_size_inches()[0] - 2 * _MARGIN
    text.set_text(_fitted(title, inside, float(text.get_fontsize()), text.get_text().count("\n")))


def _fitted(title: str, width: float, size: float, more: int = 1) -> str:
    lines = wrap(title, _BOLD * width, size) or [""]
    return "\n".join([*lines[:more], *([shorten(" ".join(lines[more:]), _BOLD * width, size)] if lines[more:] else [])])


def winners(panels: Sequence[Sequence[tuple[float, str]]], *, largest: bool = True) -> str:
    """The best (value, name) of each panel, as :func:`counted`; within 0.005, or 0.5 % of the least, all are best."""
    best = [(max if largest else min)(panel)[0] for panel in panels]
    near = [
        [name for value, name in panel if abs(value - top) <= 0.005 * (1 if largest else top)]
        for top, panel in zip(best, panels, strict=True)
    ]
    return counted([name for names in near for name in names], len(panels))


def counted(names: Iterable[str], of: int) -> str:
    """``softmax``, or out of several panels ``softmax (3 of 4), linear (1 of 4)``, three names at most."""
    said = [f"{name} ({count} of {of})" if of > 1 else name for name, count in Counter(names).most_common()]
    return ", ".join(said[:3]) + (f" and {len(said) - 3} more" if len(said) > 3 else "")


def no_room(headings: Sequence[str], most: int) -> str:
    """A note on the panels beyond ``most``, which are not drawn."""
    return f"Not drawn, for want of room: {', '.join(headings[most:])}." if headings[most:] else ""


@functools.lru_cache(maxsize=4096)
def text_width(text: str, size: float) -> float:
    """Width of a line in the figures' font, in inches."""
    with warnings.catch_warnings(), matplotlib.rc_context({"text.hinting": "none"}):  # as figures are drawn
        warnings.simplefilter("ignore")  # a glyph that the font lacks
        font = FontProperties(family=["DejaVu Sans"], size=size)
        width, _, _ = _ruler().get_text_width_height_descent(text, font, False)
    return float(width) / 100


@functools.cache
def _ruler() -> Any:
    return RendererAgg(100, 100, 100)  # type: ignore[no-untyped-call]  # matplotlib is partly typed


def shorten(text: str, width: float, size: float) -> str:
    """One printable line, cut with … if it is wider than ``width`` inches."""
    text = one_line(text, 400)
    if text_width(text, size) <= width + 1e-6:  # text that was made to fit may be wider by rounding
        return text
    while text and text_width(text + "…", size) > width:
        text = text[: -max(1, len(text) // 20)]
    return text.rstrip() + "…"


def wrap(text: str, width: float, size: float) -> list[str]:
    """Printable lines a little narrower than ``width`` inches: some viewers draw text wider.

    They are broken at spaces, and a word that is wider than a line after its commas and colons.
    """
    width *= 0.96
    lines: list[str] = []
    for word in one_line(text, 4000).split(" "):
        for turn, piece in enumerate([word] if text_width(word, size) <= width else re.split("(?<=[,:])", word)):
            joined = f"{lines[-1]}{' ' * (turn == 0)}{piece}" if lines else piece
            lines[-1:] = [joined] if text_width(joined, size) <= width else [*lines[-1:], shorten(piece, width, size)]
    return [line for line in lines if line]
