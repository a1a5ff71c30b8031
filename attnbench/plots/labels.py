"""Names beside circles that cover neither each other nor the circles (adjustText does the pushing)."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox, Transform

from attnbench.plots.style import FAINT, INK, SMALL_SIZE

_FORCES: tuple[dict[str, Any], ...] = (
    {"force_explode": (0, 0), "force_text": (0.2, 0.4), "force_static": (0.15, 0.3), "expand": (1.0, 1.0)},
    {"force_explode": (0, 0), "force_text": (0.5, 0.7), "force_static": (0.3, 0.5), "expand": (1.01, 1.03)},
    {"force_explode": (0.1, 0.4), "force_text": (0.2, 0.4), "force_static": (0.15, 0.3), "expand": (1.03, 1.1)},
    {"force_explode": (0.3, 0.9), "force_text": (0.5, 0.7), "force_static": (0.3, 0.5), "expand": (1.01, 1.03)},
    {"force_explode": (0.6, 1.5), "force_text": (0.6, 0.9), "force_static": (0.3, 0.6), "expand": (1.02, 1.05)},
)
"""For adjustText, gentle first: the first try without an overlap is taken, else the one with the least."""
_ROUNDS = 80
_SIDES = ((0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (-1, 1), (1, -1), (-1, -1))


def place_labels(
    ax: Axes,
    names: Sequence[str],
    x: Sequence[float],
    y: Sequence[float],
    radii: Sequence[float],
    *,
    taken: Sequence[Bbox] = (),
    size: float = SMALL_SIZE,
) -> list[Text]:
    """Write each name near its circle. Call it last: limits and figure size must be final.

    Args:
        x, y: centres in data units.
        radii: of the circles, in points.
        taken: boxes in display pixels that stay free.
    """
    figure = ax.get_figure(root=True)
    assert isinstance(figure, Figure)
    figure.draw_without_rendering()
    centres = ax.transData.transform(np.column_stack([x, y])) if len(names) else np.empty((0, 2))
    to_data = ax.transData.inverted()
    pixels = np.asarray(radii) * figure.dpi / 72
    # The square of a circle's own area: a name may cut its corners.
    circles = [Bbox([c - r * 0.88, c + r * 0.88]) for c, r in zip(centres, pixels, strict=True)]
    blocks = [box.transformed(to_data) for box in (*circles, *taken)]
    texts = [
        ax.text(a, b, name, fontsize=size, color=INK, zorder=6, ha="center", va="center")
        for a, b, name in zip(x, y, names, strict=True)
    ]
    sides = _sides(texts, centres, pixels)
    starts = _roomiest(ax, sides, circles, taken)
    goals: dict[str, Any] = {"target_x": list(x), "target_y": list(y), "avoid_self": False, "prevent_crossings": False}
    best: tuple[float, list[Bbox]] = (math.inf, [])
    for forces in (None, *_FORCES):
        for text, start in zip(texts, starts, strict=True):
            _move(text, start, to_data)
        if forces is not None:
            # A limit on rounds, not on time: a busy machine must not move a label.
            _push(texts, objects=blocks, ax=ax, iter_lim=_ROUNDS, pull_threshold=60, **goals, **forces)
        cost = clutter(ax, texts, circles, taken)
        if cost < best[0]:
            best = (cost, [text.get_window_extent() for text in texts])
        if cost == 0:
            break
    for text, box in zip(texts, _settled(best[1], sides, circles, taken, ax), strict=True):
        _move(text, box, to_data)
    _leaders(ax, texts, centres, pixels)
    return texts


def _push(texts: Sequence[Text], *, ax: Axes, **how: Any) -> None:
    from adjustText import adjust_text  # brings a large part of scipy along, and few pages need it

    page = ax.figure
    page.set_visible(False)  # else it is drawn each time, of which nothing but the names has changed
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # adjustText logs through a deprecated call
            logging.getLogger("adjustText").setLevel(logging.ERROR)
            adjust_text(texts, ax=ax, **how)
    finally:
        page.set_visible(True)


def _move(text: Text, box: Bbox, to_data: Transform) -> None:
    x, y = to_data.transform(((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2))
    text.set_position((float(x), float(y)))


def _sides(texts: Sequence[Text], centres: np.ndarray, radii: np.ndarray) -> list[list[Bbox]]:
    """For each text the eight places that touch its circle, above first."""
    places = []
    for text, centre, radius in zip(texts, centres, radii, strict=True):
        box = text.get_window_extent()
        half = np.array([box.width, box.height]) / 2
        middles = [centre + np.array(s) * (radius * (0.72 if all(s) else 1.0) + half + 2) for s in _SIDES]
        places.append([Bbox([middle - half, middle + half]) for middle in middles])
    return places


def _roomiest(ax: Axes, sides: Sequence[Sequence[Bbox]], circles: Sequence[Bbox], taken: Sequence[Bbox]) -> list[Bbox]:
    """Where to start from: for one name after the other, the side of its circle with most room; three times over."""
    placed: list[Bbox] = []
    for turn in range(3 * len(sides)):
        i = turn % len(sides)
        others = _edges([*_strangers(circles, i), *taken, *placed[:i], *placed[i + 1 :]])
        costs = [round(_cost(box, others, ax), 3) for box in sides[i]]
        placed[i : i + 1] = [sides[i][costs.index(min(costs))]]
    return placed


def _settled(
    boxes: Sequence[Bbox], sides: Sequence[Sequence[Bbox]], circles: Sequence[Bbox], taken: Sequence[Bbox], ax: Axes
) -> list[Bbox]:
    """Bring back to its circle every name that was pushed further than it had to be."""
    settled = list(boxes)
    for i, places in enumerate(sides):
        others = _edges([*_strangers(circles, i), *taken, *settled[:i], *settled[i + 1 :]])
        settled[i] = next((place for place in places if _cost(place, others, ax) == 0), settled[i])
    return settled


def _strangers(circles: Sequence[Bbox], own: int) -> list[Bbox]:
    """The other circles, grown: a name that touches one of them would seem to belong to it."""
    return [circle.padded(4) for i, circle in enumerate(circles) if i != own]


def clutter(ax: Axes, texts: Sequence[Text], circles: Sequence[Bbox], taken: Sequence[Bbox] = ()) -> float:
    """Square pixels in which texts cover each other, circles or reserved boxes, or leave the axes."""
    boxes = [text.get_window_extent() for text in texts]
    others = _edges([*boxes, *taken, *circles])
    return round(sum(_cost(box, others[i + 1 :], ax) for i, box in enumerate(boxes)), 3)


def _edges(boxes: Sequence[Bbox]) -> np.ndarray:
    """Left, bottom, right and top of each box, ``(boxes, 4)``."""
    return np.array([box.extents for box in boxes]).reshape(-1, 4)


def _cost(box: Bbox, others: np.ndarray, ax: Axes) -> float:
    outside = box.width * box.height - _common(box, _edges([ax.get_window_extent()]))
    return _common(box, others) + max(round(outside, 3), 0.0)


def _common(box: Bbox, others: np.ndarray) -> float:
    """Square pixels that a box shares with each of the others, added up."""
    left, bottom, right, top = others.T
    width = np.minimum(right, box.x1) - np.maximum(left, box.x0)
    height = np.minimum(top, box.y1) - np.maximum(bottom, box.y0)
    return float(np.sum(width.clip(0) * height.clip(0)))


def _leaders(ax: Axes, texts: Sequence[Text], centres: np.ndarray, radii: np.ndarray) -> None:
    """A thin line from each name to its circle, where the two do not touch."""
    to_data = ax.transData.inverted()
    for text, centre, radius in zip(texts, centres, radii, strict=True):
        box = text.get_window_extent()
        near = np.clip(centre, [box.x0, box.y0], [box.x1, box.y1])
        away = near - centre
        distance = float(np.hypot(*away))
        if distance > radius + 6:
            (x0, y0), (x1, y1) = to_data.transform([centre + away / distance * radius, near])
            ax.plot([x0, x1], [y0, y1], color=FAINT, lw=0.6, zorder=5, solid_capstyle="butt")
