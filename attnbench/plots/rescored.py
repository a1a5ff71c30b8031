"""The Long Range Arena's scores as printed, and as others repeated them; never on one axis with a run's own scores."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files

import pandas as pd

from attnbench.plots.page import Page, shorten, wrap
from attnbench.plots.palette import palette
from attnbench.plots.published import read_published
from attnbench.plots.style import SMALL_SIZE, TEXT_SIZE
from attnbench.plots.ticks import linear_ticks

PAPER = "Tay et al. 2020, arXiv:2011.04006"
TASKS = {
    "listops": "ListOps",
    "text": "Text",
    "retrieval": "Retrieval",
    "image": "Image",
    "pathfinder": "Pathfinder",
    "average": "mean of five",
}
"""Column -> heading; the average is the one that each source prints."""
_SAID = (
    "Accuracy in %, upright: the same table's softmax. Other models, data and budgets than the run's, of which nothing "
    "may be read off here. The paper took one seed and a size for each model on two of the tasks; the other two tables "
    "train all in one small encoder of 2 layers, 2 heads × 32, the second of them with three seeds."
)
_ROW, _GROUP, _AXIS, _HEAD = 0.152, 0.3, 0.22, 0.75
_NAMES = 1.75


def read_rescored() -> pd.DataFrame:
    """Scores (%) on the Long Range Arena's tasks from two later papers, which trained all models anew in PyTorch.

    There are fourteen rows. ``source`` names the paper, ``setting`` the size of the method there, and ``variant`` our
    variant of that name; it is empty if there is none. ``average`` is the mean of the five tasks.
    """
    with (files("attnbench.plots") / "rescored.csv").open(encoding="utf-8") as file:
        return pd.read_csv(file, keep_default_na=False, na_values=[])


def tables() -> Iterator[tuple[str, pd.DataFrame]]:
    """Each source with its rows, the best average first; the Long Range Arena paper comes first."""
    paper = read_published().assign(source=PAPER, setting="")
    every = pd.concat([paper, read_rescored()])
    for source, rows in every.groupby("source", sort=False):
        yield str(source), rows.sort_values("average", ascending=False, kind="stable")


def rescored_height() -> float:
    """Height that :func:`draw_rescored` needs, in inches."""
    return _HEAD + _AXIS + sum(_GROUP + _ROW * len(rows) for _, rows in tables())


def draw_rescored(page: Page) -> None:
    """Draw a row for each model of each source, and a small panel for each task."""
    wide = page.right - page.left
    page.write(
        page.left,
        page.top - 0.02,
        "Long Range Arena, published scores",
        va="top",
        fontsize=TEXT_SIZE,
        fontweight="bold",
    )
    for turn, line in enumerate(wrap(_SAID, wide, SMALL_SIZE)):
        page.write(page.left, page.top - 0.24 - 0.15 * turn, line, va="top", color=palette().faint)
    column = (wide - _NAMES) / len(TASKS)
    every = pd.concat([rows for _, rows in tables()])
    top = page.top - _HEAD
    for source, rows in tables():
        last = source == every["source"].iloc[-1]
        page.write(page.left, top - _GROUP + 0.04, source, va="bottom", color=palette().faint)
        top -= _GROUP
        tall = _ROW * len(rows)
        names = page.blank(page.left, top - tall, _NAMES, tall)
        for place, (model, setting) in enumerate(rows[["model", "setting"]].itertuples(index=False)):
            name = shorten(f"{model} ({setting})" if setting else model, _NAMES - 0.1, SMALL_SIZE)
            names.text(_NAMES - 0.08, tall - _ROW * (place + 0.5), name, fontsize=SMALL_SIZE, va="center", ha="right")
        for turn, (task, heading) in enumerate(TASKS.items()):
            left = page.left + _NAMES + turn * column
            if source == PAPER:
                page.write(left + (column - 0.1) / 2, top + 0.04, heading, ha="center", va="bottom")
            ax = page.axes(left, top - tall, column - 0.1, tall)
            low, high = float(every[task].min()), float(every[task].max())
            extra = 0.08 * (high - low)
            ax.set_xlim(low - extra, high + extra)
            ax.set_ylim(len(rows) - 0.5, -0.5)
            ax.set_yticks([])
            ax.set_xticks(linear_ticks(low, high, most=3))
            ax.grid(axis="x")
            ax.tick_params(labelbottom=last, length=2 if last else 0)
            ax.spines["left"].set_visible(False)
            exact = rows.loc[rows["variant"] == "softmax", task]
            for value in exact:
                ax.axvline(value, color=palette().family("exact"), lw=0.9, alpha=0.6, zorder=1.4)
            colours = [palette().family(family) for family in rows["family"]]
            ax.scatter(rows[task], range(len(rows)), s=17, color=colours, zorder=3)
        top -= tall
