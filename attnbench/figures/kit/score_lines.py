"""Lines of scores over steps or over bytes, in stacked panels with their names at the right or below."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from attnbench.figures.kit.legend import NAMES, STEP, count_lines, on_all, write_entry
from attnbench.figures.kit.page import Page, narrow, new_page, shorten, stacked, text_width
from attnbench.figures.kit.palette import palette
from attnbench.figures.kit.sheets import COLUMN
from attnbench.figures.kit.style import SMALL_SIZE, Look, looks
from attnbench.figures.kit.ticks import linear_ticks, plain
from attnbench.results.frame.scored import Problem
from attnbench.results.intervals import Summary

_AXIS = 0.46


@dataclass(frozen=True)
class ScoreLine:
    """One line: its name in the key, and the mean at each place."""

    name: str
    family: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    """``low`` and ``high`` are the ends of the interval drawn around the mean."""
    single: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...] = ()
    """x and y of the thin lines behind it, one for each seed."""


@dataclass(frozen=True)
class ScorePanel:
    """The lines of one problem."""

    heading: str
    lines: tuple[ScoreLine, ...]
    levels: tuple[tuple[str, float], ...]
    """Name and height of the level lines: chance is dotted, identity dashed."""


def ends_of(part: Summary) -> tuple[float, float]:
    """The ends of its bar; of two seeds their scores, since their t-interval would span the whole axis."""
    scores = list(part.by_seed.values())
    if len(scores) == 2:
        return min(scores), max(scores)
    return part.ends or (part.over_seeds.mean, part.over_seeds.mean)


def line_of(name: str, parts: Sequence[tuple[float, Summary]]) -> ScoreLine:
    """A line through the means of scores, each at its place, with their bars."""
    low, high = zip(*(ends_of(part) for _, part in parts), strict=True)
    mean = tuple(part.over_seeds.mean for _, part in parts)
    return ScoreLine(name, parts[0][1].family, tuple(x for x, _ in parts), mean, low, high)


def bars(drawn: Iterable[Problem]) -> str:
    """The note on the bars."""
    pair = any(len(part.by_seed) == 2 for one in drawn for part in one.parts)
    return (
        f"Bars: 95 % t-intervals over seeds, of one seed over test examples{', of two from one to the other' * pair}."
    )


def draw_lines(
    title: str,
    about: Sequence[str],
    notes: Sequence[str],
    panels: Sequence[ScorePanel],
    y_label: str,
    scale: Callable[[Axes, ScorePanel], None],
    draw: Callable[[Axes, ScoreLine, Look], None],
) -> Figure:
    """Draw a panel a problem, all with one vertical scale; ``scale`` sets the horizontal one, ``draw`` draws a line."""
    look = looks((line.name, line.family) for panel in panels for line in panel.lines)
    keys = min(2.6, max(text_width(name, SMALL_SIZE) for name in look) + 0.56)
    wide = COLUMN - 0.3 if narrow() else keys - 0.02
    tall = [STEP * (count_lines([line.name for line in one.lines], wide) + len(one.levels)) for one in panels]
    below = [key + 0.2 if narrow() else 0.0 for key in tall]
    rooms = [_AXIS + (2.2 + key if narrow() else max(2.0, key - 0.2)) for key in tall]
    headings = [panel.heading for panel in panels]
    page = new_page(title, about, notes, height=2.0, room=stacked(rooms, headings))
    every = [value for panel in panels for line in panel.lines for value in (*line.low, *line.high, *line.y)]
    every += [value for panel in panels for line in panel.lines for _, y in line.single for value in y]
    every += [value for panel in panels for _, value in panel.levels]
    extra = 0.05 * (max(every) - min(every)) or 0.05
    limits = (min(every) - extra, max(every) + extra)
    for part, panel, key in zip(page.parts(headings, rooms), panels, below, strict=True):
        chart, under = part.split(key) if key else (part, part)
        left, bottom = chart.left + 0.56, chart.bottom + _AXIS
        right = chart.right - (0.1 if narrow() else keys + 0.1)
        ax = chart.axes(left, bottom, right - left, chart.top - bottom)
        ax.set_ylim(*limits)
        ax.set_yticks([tick for tick in linear_ticks(*limits) if 0 <= tick <= 1])
        ax.set_ylabel(y_label)
        ax.grid(axis="both")
        scale(ax, panel)
        for turn, (_, value) in enumerate(panel.levels):
            ax.axhline(value, **_level(turn))
        for line in panel.lines:
            draw(ax, line, look[line.name])
        _write_key(under if narrow() else replace(part, left=right + 0.12, bottom=bottom - 0.3), panel, look)
    return page.figure


def least_last(line: ScoreLine) -> tuple[float, float, str]:
    """Sort key for lines with the smallest last value in front; those that end before the others come behind."""
    return -line.x[-1], line.y[-1], line.name


def at_the_end(panel: ScorePanel) -> list[tuple[float, str]]:
    """The last value and the name of each line that reaches the panel's last place: no other is compared there."""
    end = max(line.x[-1] for line in panel.lines)
    return [(line.y[-1], line.name) for line in panel.lines if line.x[-1] == end]


def draw_plain(ax: Axes, line: ScoreLine, look: Look) -> None:
    """A line with a small marker at each value."""
    ax.plot(line.x, line.y, lw=1.4, markersize=3.4, alpha=0.95, **look.line)


def draw_with_bars(ax: Axes, line: ScoreLine, look: Look) -> None:
    """A line of means with a bar at each."""
    ax.vlines(line.x, line.low, line.high, color=look.colour, lw=0.9, zorder=1.8)
    ax.plot(line.x, line.y, lw=1.4, markersize=5, alpha=0.95, **look.line)


def linear_x(ax: Axes, last: float, label: str) -> None:
    """Give the axes a plain scale from 0 to a little beyond ``last``."""
    ax.set_xlim(0, 1.02 * last)
    ticks = linear_ticks(0, 1.02 * last)
    ax.set_xticks(ticks, [plain(tick) for tick in ticks])
    ax.set_xlabel(label)


def _level(turn: int) -> dict[str, Any]:
    colour = palette().family("reference") if turn else palette().ink
    return {"color": colour, "lw": 1.1, "ls": "--" if turn else ":", "zorder": 1.4}


def _write_key(page: Page, panel: ScorePanel, look: dict[str, Look]) -> None:
    ax, width, y = on_all(page), page.right - page.left, page.top - page.bottom - 0.06
    for line in panel.lines:
        y -= STEP * (len(write_entry(ax, y, line.name, {"lw": 1.3, **look[line.name].line})) - 1)
    for turn, (name, _) in enumerate(panel.levels):
        ax.add_line(Line2D([0, 0.4], [y, y], **_level(turn)))
        ax.text(NAMES, y, shorten(name, width - NAMES, SMALL_SIZE), fontsize=SMALL_SIZE, va="center", style="italic")
        y -= STEP
