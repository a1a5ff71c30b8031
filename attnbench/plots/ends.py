"""Names at the right ends of lines, moved up and down until none covers another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from attnbench.plots.page import shorten, text_width
from attnbench.plots.style import SMALL_SIZE

LINE = 0.145
"""Inches from one name to the next."""
_GAP = 0.14
"""Inches from the axes to the names."""
_WIDEST = 1.6
"""Inches that a name may take."""


def room_for(names: Sequence[str]) -> float:
    """Inches that the names need to the right of their axes."""
    return _GAP + 0.16 + min(_WIDEST, max((text_width(name, SMALL_SIZE) for name in names), default=0.0))


def name_ends(ax: Axes, names: Sequence[str], colours: Sequence[str], x: Sequence[float], y: Sequence[float]) -> None:
    """Write each name to the right of the axes, near the end (x, y) of its line, and join the two in its colour.

    Call it last: limits and figure size must be there.
    """
    figure = ax.get_figure(root=True)
    assert figure is not None
    wide, tall = ax.get_position().size * figure.get_size_inches()
    ends = ax.transAxes.inverted().transform(ax.transData.transform(np.column_stack([x, y])))
    order = np.argsort(ends[:, 1], kind="stable")
    for place, height in zip(order, spread(ends[order, 1], LINE / tall), strict=True):
        ax.annotate(
            shorten(names[place], _WIDEST, SMALL_SIZE),
            xy=(x[place], y[place]),
            xytext=(1 + _GAP / wide, height),
            textcoords="axes fraction",
            va="center",
            color=colours[place],
            fontsize=SMALL_SIZE,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colours[place], "lw": 0.6, "shrinkA": 1, "shrinkB": 3},
        )


def spread(wanted: np.ndarray, gap: float) -> np.ndarray:
    """Heights at least ``gap`` apart and nearest, in squares, to the rising ``wanted``, between 0 and 1 if they fit.

    What is left after i·gap is taken from the i-th height must not fall: neighbours that do are pooled into their mean.
    """
    steps = gap * np.arange(len(wanted))
    pools: list[list[float]] = []
    for value in wanted - steps:
        pools.append([value])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    level = np.concatenate([np.full(len(pool), np.mean(pool)) for pool in pools])
    return np.asarray(np.clip(level, 0, max(0.0, 1 - steps[-1])) + steps)
