"""The figure of ``attnbench history``: one measure of each cell over the runs, with its changes."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from attnbench.figures.kit.legend import key_beside, write_wrapped
from attnbench.figures.kit.page import NothingToDraw, narrow
from attnbench.figures.kit.palette import palette
from attnbench.figures.kit.style import in_style, looks
from attnbench.figures.kit.ticks import log_axis, padded, plain, trimmed
from attnbench.results.measurements import day
from attnbench.text import quantity
from attnbench.units import format_bytes, format_seconds

_MOST = 8
"""Most lines; those with changes come first."""


@in_style
def draw_history(frame: pd.DataFrame, metric: str, *, unit: str = "s", about: str = "") -> Figure:
    """Draw the values of each cell over the runs in their order, with a ring where something changed.

    ``frame`` has the rows of ``History.to_rows()``; ``unit`` of times is s, or the variant that they are divided by.
    Raises NothingToDraw if no cell has two values above 0.
    """
    frame = frame[frame[metric].astype(float) > 0]
    cells = [part for _, part in frame.groupby("cell", sort=False) if len(part) > 1]
    if not cells:
        raise NothingToDraw(f"no cell has a {metric} in two runs")
    cells.sort(key=lambda part: not (part["change"] != "").any())
    shown = pd.concat(cells[:_MOST])
    changes = shown[shown["change"] != ""]
    runs = frame[["began", "run"]].drop_duplicates().sort_values(["began", "run"]).reset_index(drop=True)
    places = {run: place for place, run in enumerate(runs["run"])}
    hows = looks(zip(shown["cell"], shown["family"], strict=True))
    said = {
        str(cell): "; ".join(f"{change} on {day(began)}" for change, began in part[["change", "began"]].to_numpy())
        for cell, part in changes.groupby("cell", sort=False)
    }
    notes = ["A ring: from here on it is another value, beyond the joint 95 % interval of all cells and runs."]
    notes += [f"Without room: {len(cells) - _MOST} more cells."] if len(cells) > _MOST else []
    count = sum(int((part["change"] != "").sum()) for part in cells)
    title = f"{quantity(count, 'change')} of {metric} in {len(runs)} runs"
    page, key = key_beside((title, about), notes, hows, said, 3.4)
    left, right = page.left + 0.7, page.right
    ax = page.axes(left, page.bottom + 0.45, right - left, page.top - page.bottom - 0.45)
    text = {"time": format_seconds, "memory": format_bytes}.get(metric, plain) if unit == "s" else plain
    log_axis(ax, "y", padded(shown[metric].astype(float)), base=10, text=lambda value: trimmed(text(value)))
    for cell, part in shown.groupby("cell", sort=False):
        x = part["run"].map(places)
        ax.plot(x, part[metric].astype(float), **hows[str(cell)].line)
        rings = part["change"] != ""
        ax.plot(x[rings], part[metric][rings].astype(float), "o", markersize=11, fillstyle="none", color=palette().ink)
    ax.set_xlim(-0.5, len(runs) - 0.5)
    at = list(range(0, len(runs), -(-len(runs) // (3 if narrow() else 6))))
    ax.xaxis.set_major_locator(FixedLocator(at))
    ax.xaxis.set_major_formatter(FixedFormatter([day(runs["began"][place]) for place in at]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.grid(axis="y")
    ax.set_xlabel("run, in the order of time")
    ax.set_ylabel(metric if unit == "s" else f"{metric} over that of {unit}")
    write_wrapped(key, hows, said)
    return page.figure
