"""The Linformer paper's own table of what it saves, drawn beside a run but never in its tables."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import pandas as pd

from attnbench.plots.heat import Heat, draw_heat
from attnbench.plots.page import Page, wrap
from attnbench.plots.palette import palette
from attnbench.plots.style import SMALL_SIZE
from attnbench.plots.ticks import length, plain

_SOURCE = (
    "Wang et al. 2020, arXiv:2006.04768, table 3: inference on a V100 of 16 GB, over the standard Transformer. Memory "
    "is the ratio of the largest batches that fit. Other hardware and other code."
)
_HEAD = 0.62
"""Inches above the tables for their title and source."""


def read_linformer() -> pd.DataFrame:
    """Table 3 of Wang et al. 2020, arXiv:2006.04768, as printed: factors saved by length and rank."""
    with (files("attnbench.plots") / "published_linformer.csv").open(encoding="utf-8") as file:
        return pd.read_csv(file)


def draw_ratios(page: Page, left: float, limit: float) -> None:
    """Draw two tables side by side in the room to the right of ``left``.

    Args:
        limit: log2 of the factor at which the colour is full.
    """
    table = read_linformer()
    width = page.right - left
    box = page.blank(left, page.top - _HEAD, width, _HEAD)
    box.text(0, _HEAD - 0.08, "The Linformer paper's own measurements", va="center", fontsize=8.5)
    for row, line in enumerate(wrap(_SOURCE, width, SMALL_SIZE)):
        box.text(0, _HEAD - 0.22 - 0.14 * row, line, va="center", fontsize=SMALL_SIZE, color=palette().faint)
    lengths, ranks = sorted(table["n"].unique()), sorted(table["rank"].unique())
    names = [length(n) for n in lengths], [plain(rank) for rank in ranks]
    gap, bottom = 0.62, page.bottom + 0.36
    wide, tall = (width - 0.5 - gap) / 2, page.top - _HEAD - bottom - 0.3
    for place, (column, title) in enumerate((("time_saved", "speed-up"), ("memory_saved", "memory saving"))):
        factors = table.pivot_table(column, "n", "rank").reindex(index=lengths, columns=ranks).to_numpy(dtype=float)
        texts = [["–" if np.isnan(one) else f"{plain(one)}×" for one in row] for row in factors]
        ax = page.axes(left + 0.5 + place * (wide + gap), bottom, wide, tall)
        draw_heat(ax, (wide, tall), Heat(np.log2(factors), texts, *names), limit)
        ax.set_title(title, loc="left", pad=4)
        ax.set_xlabel("rank k")
        ax.set_ylabel("length n")
