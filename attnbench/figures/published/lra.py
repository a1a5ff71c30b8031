"""Numbers of papers, drawn next to a run but never on its axes: Long Range Arena, Linformer, Nyströmformer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from attnbench.errors import UsageError
from attnbench.figures.kit.bubbles import draw_circles, draw_keys, round_sizes
from attnbench.figures.kit.heat import Heat, draw_heat
from attnbench.figures.kit.heights import arrange, draw_bands
from attnbench.figures.kit.labels import place_labels
from attnbench.figures.kit.page import Page, only_on_a_page, shorten, wrap
from attnbench.figures.kit.palette import palette
from attnbench.figures.kit.style import SMALL_SIZE, Look, look, looks
from attnbench.figures.kit.ticks import length, linear_ticks, log_axis, padded, plain
from attnbench.figures.published.point_file import VALUES, Points

_HERE = Path(__file__).parent
GB = 1e9
WIDE, OWN_ROOM = 13.6, 7.72
"""Width of a page with published numbers and a run's, and the room of the run's own, in inches."""
_SOURCE = (
    "Tay et al. 2020, arXiv:2011.04006, tables 1 and 2. Other hardware, other code, and scores instead of errors: "
    "compare the order of the methods, not the places of the circles."
)


def only_published(figure: str, overlay: str | None) -> None:
    """Raise UsageError for an overlay that does not exist, or on a page that is too narrow for one."""
    if overlay not in (None, "published"):
        raise UsageError(f"overlay must be published, not {overlay!r}")
    if overlay:
        only_on_a_page(f"{figure} with --overlay published")


def read_published() -> pd.DataFrame:
    """Table 1 (scores, %) and table 2 (speed, memory) of Tay et al. 2020, arXiv:2011.04006, as printed.

    ``relative_speed_4k`` is relative to the paper's Transformer; ``memory_gb_4k`` is per device, on 4×4 TPU v3 chips
    with a batch of 32. ``path_x`` is ``FAIL`` for all; ``note`` marks a printed number that looks like a slip.
    """
    return pd.read_csv(_HERE / "lra.csv", keep_default_na=False, na_values=[""], dtype={"path_x": str, "note": str})


def draw_published(page: Page, left: float) -> None:
    """Draw a separate panel, since hardware, code and vertical axis differ from those of the run."""
    table = read_published()
    columns = {"model": "label", "relative_speed_4k": "x", "average": "y"}
    points = table.rename(columns=columns).assign(
        name=table["model"], kind="measured", memory=table["memory_gb_4k"] * GB
    )
    left += 0.45
    right = page.right - 1.25
    width = right - left
    bottom = page.bottom + 0.42
    height = page.top - bottom - 0.62
    # Two of the eleven were not timed: they are in a strip at the left, at the height of their score.
    strip = 0.85
    limits = padded(points["x"], share=0.12)
    ratio = math.log(limits[1] / limits[0])
    limits = (limits[0] / math.exp(ratio * strip / (width - strip)), limits[1])
    edge = math.exp(math.log(limits[0]) + strip / width * math.log(limits[1] / limits[0]))
    points["x"] = points["x"].fillna(math.sqrt(limits[0] * edge))
    layout = arrange(points, lambda value: 0.0, height, log=False)
    ax = page.axes(left, bottom, width, height)
    log_axis(ax, "x", limits, at=[0.5, 1, 2, 4, 8])
    ax.set_xlim(*limits)
    ax.set_xlabel("speed relative to the Transformer at 4K (log2 scale)")
    draw_bands(ax, layout, height, "average score on the five tasks (%)", width)
    ax.yaxis.set_label_coords(-0.42 / width, 0.5)
    ax.axvspan(limits[0], edge, color=palette().band, lw=0, zorder=0)
    ax.axvline(edge, color=palette().line, lw=0.8)
    ax.text(
        math.sqrt(limits[0] * edge), 0.06, "speed not\npublished",
        ha="center", va="bottom", fontsize=SMALL_SIZE, color=palette().faint, linespacing=1.1,
    )  # fmt: skip
    largest = float(points["memory"].max())
    radii = draw_circles(ax, layout.points, largest)
    box = page.blank(left - 0.45, page.top - 0.62, page.right - left + 0.45, 0.62)
    box.text(0, 0.55, "The paper's own measurements, on TPUs, with its own implementations", va="center", fontsize=8.5)
    for row, line in enumerate(wrap(_SOURCE, page.right - left + 0.45, SMALL_SIZE)):
        box.text(0, 0.4 - 0.14 * row, line, va="center", fontsize=SMALL_SIZE, color=palette().faint)
    sizes = {size * GB: f"{size:g} GB" for size in round_sizes(largest / GB)}
    beside = replace(page, left=right + 0.14, top=page.top - 0.62)
    draw_keys(beside, list(table["family"]), largest, "memory per device\n(circle area)", sizes)
    drawn = layout.points
    place_labels(ax, list(drawn["name"]), list(drawn["x"]), list(drawn["at"]), radii)


_LINFORMER_SOURCE = (
    "Wang et al. 2020, arXiv:2006.04768, table 3: inference on a V100 of 16 GB, over the standard Transformer. Memory "
    "is the ratio of the largest batches that fit. Other hardware and other code."
)
_HEAD = 0.62
"""Inches above the tables for their title and source."""


def read_linformer() -> pd.DataFrame:
    """Table 3 of Wang et al. 2020, arXiv:2006.04768, as printed: factors saved by length and rank."""
    return pd.read_csv(_HERE / "linformer.csv")


def draw_ratios(page: Page, left: float, limit: float) -> None:
    """Draw two tables in the room to the right of ``left``; the colour is full at the factor 2**``limit``."""
    table = read_linformer()
    width = page.right - left
    box = page.blank(left, page.top - _HEAD, width, _HEAD)
    box.text(0, _HEAD - 0.08, "The Linformer paper's own measurements", va="center", fontsize=8.5)
    for row, line in enumerate(wrap(_LINFORMER_SOURCE, width, SMALL_SIZE)):
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


NYSTROMFORMER = _HERE / "nystromformer.csv"
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
    table, colours = points.table, palette().sequence
    if "family" in table:
        return looks(zip(table["model"], table["family"], strict=True))
    return {model: look(colours[turn % len(colours)], turn) for turn, model in enumerate(table["model"].unique())}


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
_RESCORED_SAID = (
    "Accuracy in %, upright: the same table's softmax. Other models, data and budgets than the run's, of which nothing "
    "may be read off here. The paper took one seed and a size for each model on two of the tasks; the other two tables "
    "train all in one small encoder of 2 layers, 2 heads × 32, the second of them with three seeds."
)
_ROW, _GROUP, _AXIS, _SCORES_HEAD = 0.152, 0.3, 0.22, 0.75
_MODELS = 1.75


def read_rescored() -> pd.DataFrame:
    """Scores (%) on the Long Range Arena's tasks from two later papers, which repeated all trainings in PyTorch.

    ``source`` names the paper, ``setting`` the method's size there, and ``variant`` our variant (empty without one).
    ``average`` is the mean of the five tasks.
    """
    return pd.read_csv(_HERE / "rescored.csv", keep_default_na=False, na_values=[])


def tables() -> Iterator[tuple[str, pd.DataFrame]]:
    """Each source with its rows, the best average first; the Long Range Arena paper comes first."""
    paper = read_published().assign(source=PAPER, setting="")
    every = pd.concat([paper, read_rescored()])
    for source, rows in every.groupby("source", sort=False):
        yield str(source), rows.sort_values("average", ascending=False, kind="stable")


def rescored_height() -> float:
    """Height that :func:`draw_rescored` needs, in inches."""
    return _SCORES_HEAD + _AXIS + sum(_GROUP + _ROW * len(rows) for _, rows in tables())


def draw_rescored(page: Page) -> None:
    """Draw a row for each model of each source, and a small panel for each task."""
    wide = page.right - page.left
    page.write_heading("Long Range Arena, published scores")
    for turn, line in enumerate(wrap(_RESCORED_SAID, wide, SMALL_SIZE)):
        page.write(page.left, page.top - 0.24 - 0.15 * turn, line, va="top", color=palette().faint)
    column = (wide - _MODELS) / len(TASKS)
    every = pd.concat([rows for _, rows in tables()])
    top = page.top - _SCORES_HEAD
    for source, rows in tables():
        last = source == every["source"].iloc[-1]
        page.write(page.left, top - _GROUP + 0.04, source, va="bottom", color=palette().faint)
        top -= _GROUP
        tall = _ROW * len(rows)
        names = page.blank(page.left, top - tall, _MODELS, tall)
        for place, (model, setting) in enumerate(rows[["model", "setting"]].itertuples(index=False)):
            name = shorten(f"{model} ({setting})" if setting else model, _MODELS - 0.1, SMALL_SIZE)
            names.text(_MODELS - 0.08, tall - _ROW * (place + 0.5), name, fontsize=SMALL_SIZE, va="center", ha="right")
        for turn, (task, heading) in enumerate(TASKS.items()):
            left = page.left + _MODELS + turn * column
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
