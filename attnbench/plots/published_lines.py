"""Times and memory over the length that somebody else published, drawn beside a run but never on its axes."""

from __future__ import annotations

from pathlib import Path

from matplotlib.lines import Line2D

from attnbench.plots.page import Page, shorten, wrap
from attnbench.plots.palette import palette
from attnbench.plots.points import VALUES, Points
from attnbench.plots.style import SMALL_SIZE, Look, look, looks
from attnbench.plots.ticks import length, log_axis, padded, plain

NYSTROMFORMER = Path(__file__).with_name("published_nystromformer.csv")
"""Table 1 of Xiong et al. 2021, arXiv:2102.03902, as printed: megabytes and milliseconds of five models."""
_COMPARE = "Other hardware and other code: compare slopes and where lines cross, not heights."
_NAMES, _GAP = 1.5, 0.18


def draw_lines(page: Page, left: float, points: Points) -> None:
    """Draw a panel for each column of values, one above the other, in the room to the right of ``left``."""
    table = points.table
    looks_of = _looks(points)
    right, width = page.right, page.right - left
    said = wrap(f"{points.source}. Read: {points.read}. {_COMPARE}", width, SMALL_SIZE)
    head = 0.34 + 0.14 * len(said)
    box = page.blank(left, page.top - head, width, head)
    box.text(0, head - 0.08, shorten(points.title, width, 8.5), va="center", fontsize=8.5)
    for row, line in enumerate(said):
        box.text(0, head - 0.22 - 0.14 * row, line, va="center", fontsize=SMALL_SIZE, color=palette().faint)
    top, bottom = page.top - head - 0.05, page.bottom + 0.42
    columns = [column for column in VALUES if column in table]
    tall = (top - bottom - _GAP * (len(columns) - 1)) / len(columns)
    lengths = sorted(table["n"].unique())
    for place, column in enumerate(reversed(columns)):
        ax = page.axes(left + 0.6, bottom + place * (tall + _GAP), width - 0.6 - _NAMES, tall)
        log_axis(ax, "x", padded(lengths, share=0.04), at=lengths, text=length, most=6)
        log_axis(ax, "y", padded(table[column], share=0.05), base=10, text=plain, most=6)
        ax.set_ylabel(VALUES[column])
        ax.grid(axis="both")
        for model, part in table.dropna(subset=column).sort_values("n").groupby("model", sort=False):
            ax.plot(part["n"], part[column], lw=1.2, markersize=4.2, **looks_of[str(model)].line)
        ax.tick_params(labelbottom=place == 0)
        if place == 0:
            ax.set_xlabel("length n (log2 scale)")
    names = page.blank(right - _NAMES + 0.1, bottom, _NAMES - 0.1, top - bottom)
    for row, model in enumerate(looks_of):
        y = top - bottom - 0.08 - 0.17 * row
        names.add_line(
            Line2D([0, 0.12, 0.24], [y, y, y], markevery=[1], markersize=4.2, lw=1.2, **looks_of[model].line)
        )
        names.text(0.3, y, shorten(model, _NAMES - 0.4, SMALL_SIZE), fontsize=SMALL_SIZE, va="center")


def _looks(points: Points) -> dict[str, Look]:
    """Model -> look: by family where the file has families, else by order."""
    table, colours = points.table, palette().sequence
    if "family" in table:
        return looks(zip(table["model"], table["family"], strict=True))
    return {model: look(colours[turn % len(colours)], turn) for turn, model in enumerate(table["model"].unique())}
