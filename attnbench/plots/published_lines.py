"""The Nyströmformer paper's own times and memory over the length, drawn beside a run but never on its axes."""

from __future__ import annotations

from importlib.resources import files

import pandas as pd
from matplotlib.lines import Line2D

from attnbench.plots.page import Page, shorten, wrap
from attnbench.plots.palette import palette
from attnbench.plots.style import SMALL_SIZE, looks
from attnbench.plots.ticks import length, log_axis, padded, plain

_SOURCE = (
    "Xiong et al. 2021, arXiv:2102.03902, table 1: one instance through one self-attention module. Other hardware and "
    "other code: compare slopes and where lines cross, not heights."
)
_HEAD = 0.62
"""Inches above the panels for their title and source."""
_NAMES = 1.5


def read_nystromformer() -> pd.DataFrame:
    """Table 1 of Xiong et al. 2021, arXiv:2102.03902, as printed: megabytes and milliseconds of five models."""
    with (files("attnbench.plots") / "published_nystromformer.csv").open(encoding="utf-8") as file:
        return pd.read_csv(file)


def draw_lines(page: Page, left: float) -> None:
    """Draw two panels, time above memory, in the room to the right of ``left``."""
    table = read_nystromformer()
    look = looks(zip(table["model"], table["family"], strict=True))
    right, width = page.right, page.right - left
    box = page.blank(left, page.top - _HEAD, width, _HEAD)
    box.text(0, _HEAD - 0.08, "The Nyströmformer paper's own measurements", va="center", fontsize=8.5)
    for row, line in enumerate(wrap(_SOURCE, width, SMALL_SIZE)):
        box.text(0, _HEAD - 0.22 - 0.14 * row, line, va="center", fontsize=SMALL_SIZE, color=palette().faint)
    top, bottom = page.top - _HEAD - 0.05, page.bottom + 0.42
    tall = (top - bottom - 0.18) / 2
    lengths = sorted(table["n"].unique())
    for place, (column, name) in enumerate((("time_ms", "time (ms)"), ("memory_mb", "memory (MB)"))):
        ax = page.axes(left + 0.6, bottom + (1 - place) * (tall + 0.18), width - 0.6 - _NAMES, tall)
        log_axis(ax, "x", padded(lengths, share=0.04), at=lengths, text=length, most=6)
        log_axis(ax, "y", padded(table[column], share=0.05), base=10, text=plain, most=6)
        ax.set_ylabel(name)
        ax.grid(axis="both")
        for model, part in table.groupby("model", sort=False):
            ax.plot(part["n"], part[column], lw=1.2, markersize=4.2, **look[str(model)].line)
        ax.tick_params(labelbottom=place == 1)
    ax.set_xlabel("length n (log2 scale)")
    names = page.blank(right - _NAMES + 0.1, bottom, _NAMES - 0.1, top - bottom)
    for row, model in enumerate(look):
        y = top - bottom - 0.08 - 0.17 * row
        names.add_line(Line2D([0, 0.12, 0.24], [y, y, y], markevery=[1], markersize=4.2, lw=1.2, **look[model].line))
        names.text(0.3, y, shorten(model, _NAMES - 0.4, SMALL_SIZE), fontsize=SMALL_SIZE, va="center")
