"""Place names beside circles so that they cover nothing: no other name, no circle, no line, no error bar.

Boxes are arrays ``(..., 4)``: left, bottom, right, top. Segments are ``(..., 4)``: x and y of one end, then of the
other. Shapes broadcast. Lengths are in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.text import Text

from attnbench.figures.kit.palette import palette
from attnbench.figures.kit.style import SMALL_SIZE

_STEP = 3.0
_NEAR = 90.0
"""Pixels around a circle that are searched for a place first."""
_CLEAR = 2.0
"""Pixels that stay free around a name."""
_TOUCHING = 6.0
"""Up to this many pixels from its circle, a name needs no leader line."""
_ROUNDS = 16
_BLOCKED, _LEADER, _CROSSING = 1e4, 12.0, 10.0
"""Costs, as pixels of distance: of covering something, of a leader line, of each line that the leader crosses."""
_AT_ONCE = 1000
_ALONG = 60.0
"""One pixel away from the line that is named costs as much as this many pixels to the right."""
_LEADS = (0.5, 0.1, 0.9)
"""Ends of the leader line of words above or below a level line, as shares of their width, preferred first."""
_SIDES = np.array([(0, 1), (1, 1), (-1, 1), (0, -1), (1, -1), (-1, -1), (1, 0), (-1, 0)], dtype=float)
_CORNER = np.where(np.abs(_SIDES).sum(axis=1, keepdims=True) == 2, 0.72, 1.0)
"""Share of the radius that a name keeps from the centre along each axis; at a corner it may come nearer."""

_ROUNDING = 1e-9
"""A line along a side of a box is inside, wherever rounding puts it."""


@dataclass(frozen=True)
class _Taken:
    """Obstacles of names, in pixels."""

    frame: np.ndarray
    segments: np.ndarray
    circles: np.ndarray
    boxes: np.ndarray

    def cost(self, boxes: np.ndarray) -> np.ndarray:
        wide = boxes + _CLEAR * np.array([-1, -1, 1, 1])
        outside = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) - _common_area(boxes, self.frame)
        on_lines = _length_inside(self.segments, wide[:, None]).sum(axis=1)
        on_circles = (self.circles[:, 2] - _distance(self.circles[:, :2], wide[:, None])).clip(0).sum(axis=1)
        on_boxes = _common_area(wide[:, None], self.boxes).sum(axis=1)
        return _blocked(np.asarray(outside.round(3) + on_lines + on_circles + on_boxes))

    def leader_cost(self, leaders: np.ndarray) -> np.ndarray:
        discs = np.column_stack([self.circles[:, :2] - self.circles[:, 2:], self.circles[:, :2] + self.circles[:, 2:]])
        on_circles = 2 * _length_inside(leaders[:, None], discs).sum(axis=1)
        crossed = _CROSSING * _crossing(leaders[:, None], self.segments).sum(axis=1)
        return np.asarray(_blocked(_length_inside(leaders[:, None], self.boxes).sum(axis=1)) + on_circles + crossed)


def place_labels(
    ax: Axes, names: Sequence[str], x: Sequence[float], y: Sequence[float], radii: Sequence[float]
) -> list[Text]:
    """Write each name near its circle (x, y in data units, radii in points), with a line to it if it is far.

    An empty name leaves its circle without one. Returns the other names.

    Call it last: limits, figure size and all obstacles must be final.
    """
    named = [place for place, name in enumerate(names) if name]
    if not named:
        return []
    dpi = _settled(ax).dpi
    circles = np.column_stack([ax.transData.transform(np.column_stack([x, y])), np.asarray(radii) * dpi / 72])
    taken = _taken(ax, circles)
    texts = [
        ax.text(a, b, name, fontsize=SMALL_SIZE, zorder=6, ha="center", va="center")
        for a, b, name in ((x[place], y[place], names[place]) for place in named)
    ]
    sizes = np.array([_extent(text)[2:] - _extent(text)[:2] for text in texts])
    boxes, leaders = _Search(circles[named], sizes, taken).best()
    to_data = ax.transData.inverted()
    for text, box, leader in zip(texts, boxes, leaders, strict=True):
        text.set_position(tuple(to_data.transform((box[:2] + box[2:]) / 2)))
        if np.hypot(*(leader[2:] - leader[:2])) > _TOUCHING:
            _draw_leader(ax, to_data.transform(leader.reshape(2, 2)))
    return texts


def write_along(ax: Axes, words: str, y: float) -> None:
    """Write ``words`` at the free place nearest to the level line at ``y`` (data units), as far left as possible."""
    _settled(ax)
    taken = _taken(ax, _circles(ax))
    text = ax.text(0, 0, words, fontsize=SMALL_SIZE, style="italic", zorder=6, ha="left", va="bottom")
    size = _extent(text)[2:] - _extent(text)[:2]
    at = ax.transData.transform((ax.get_xlim()[0], y))[1]
    lefts = np.arange(taken.frame[0] + _CLEAR, taken.frame[2] - size[0], _STEP)
    gaps = np.arange(_CLEAR + 1, taken.frame[3] - taken.frame[1], _STEP)
    bottoms = np.concatenate([at + gaps, at - gaps - size[1]])
    bottoms = bottoms[(bottoms >= taken.frame[1]) & (bottoms + size[1] <= taken.frame[3])]
    corners = np.stack(np.meshgrid(lefts, bottoms), axis=-1).reshape(-1, 2)
    leads = np.repeat(_LEADS, len(corners)) * size[0] + np.tile(corners[:, 0], len(_LEADS))
    corners = np.tile(corners, (len(_LEADS), 1))
    boxes = np.column_stack([corners, corners + size])
    gap = np.maximum(corners[:, 1] - at, at - corners[:, 1] - size[1])
    below = corners[:, 1] < at
    near = np.clip(at, boxes[:, 1] - _CLEAR, boxes[:, 3] + _CLEAR)
    leaders = np.column_stack([leads, np.full(len(leads), at), leads, near])
    on_words = _blocked(_length_inside(leaders[:, None], taken.boxes).sum(axis=1)) * (gap > _TOUCHING)
    best = _cheapest(taken, boxes, _ALONG * (gap + below), corners[:, 0] - taken.frame[0], on_words)
    to_data = ax.transData.inverted()
    text.set_position(tuple(to_data.transform(corners[best])))
    if gap[best] > _TOUCHING:
        _draw_leader(ax, to_data.transform(leaders[best].reshape(2, 2)))


def _cheapest(taken: _Taken, boxes: np.ndarray, *costs: np.ndarray) -> int:
    alone = sum(costs, np.zeros(len(boxes)))
    order = np.argsort(alone, kind="stable")
    least, best = np.inf, -1
    for some in np.array_split(order, -(-len(order) // _AT_ONCE)):
        if alone[some[0]] > least:
            break
        total = taken.cost(boxes[some]) + alone[some]
        first = np.lexsort((some, total))[0]
        least, best = min((least, best), (float(total[first]), int(some[first])))
    return best


def _draw_leader(ax: Axes, ends: np.ndarray) -> None:
    ax.plot(*ends.T, color=palette().faint, lw=0.6, zorder=5, solid_capstyle="butt")


class _Search:
    """Search for the cheapest place of each name, given the places of the others, until none moves."""

    def __init__(self, circles: np.ndarray, sizes: np.ndarray, taken: _Taken) -> None:
        self.circles, self.sizes, self.taken = circles, sizes, taken
        self.places = [self._places(i, _NEAR) for i in range(len(sizes))]
        self.chosen: dict[int, int] = {}
        self.far: set[int] = set()

    def best(self) -> tuple[np.ndarray, np.ndarray]:
        free = [int((costs < _BLOCKED).sum()) for _, _, costs in self.places]
        order = sorted(range(len(free)), key=lambda i: (free[i], i))  # the name with the fewest choices goes first
        for _ in range(_ROUNDS):
            before = dict(self.chosen)
            for i in order:
                self._choose(i)
            if self.chosen == before:
                break
        boxes, leaders = self._others(-1)
        back = np.argsort(list(self.chosen))
        return boxes[back], leaders[back]

    def _choose(self, i: int) -> None:
        costs = self._costs(i)
        if costs.min() >= _BLOCKED and i not in self.far:
            self.far.add(i)
            self.places[i] = self._places(i, np.inf)
            costs = self._costs(i)
        self.chosen[i] = int(np.argmin(costs))

    def _others(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        chosen = [(self.places[j][0][k], self.places[j][1][k]) for j, k in self.chosen.items() if j != i]
        return (
            np.array([box for box, _ in chosen]).reshape(-1, 4),
            np.array([leader for _, leader in chosen]).reshape(-1, 4),
        )

    def _costs(self, i: int) -> np.ndarray:
        boxes, leaders, costs = self.places[i]
        other_boxes, other_leaders = self._others(i)
        wide = boxes + _CLEAR * np.array([-4, -1, 4, 1])  # two names in a row would read as one
        covered = _common_area(wide[:, None], other_boxes).sum(axis=1)
        covered += _length_inside(other_leaders, wide[:, None]).sum(axis=1)
        covered += _length_inside(leaders[:, None], other_boxes).sum(axis=1)
        crossed = _crossing(leaders[:, None], other_leaders).sum(axis=1)
        return np.asarray(costs + _blocked(covered) + 4 * _CROSSING * crossed)

    def _places(self, i: int, reach: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Boxes around one circle, the lines to them, and the cost of each before the other names are placed."""
        centre, radius = self.circles[i, :2], self.circles[i, 2]
        half, frame = self.sizes[i] / 2, self.taken.frame
        low = np.maximum(centre - radius - reach - half, frame[:2] + half)
        high = np.minimum(centre + radius + reach + half, frame[2:] - half)
        grid = np.stack(np.meshgrid(*(np.arange(a, b + 1, _STEP) for a, b in zip(low, high, strict=True))), axis=-1)
        touching = centre + _SIDES * (radius * _CORNER + half + _CLEAR + 0.5)
        middles = np.concatenate([touching, grid.reshape(-1, 2)])
        boxes = np.column_stack([middles - half, middles + half])
        near = np.clip(centre, boxes[:, :2], boxes[:, 2:])
        gap = np.hypot(*(near - centre).T)
        toward = (near - centre) / np.maximum(gap, 1e-9)[:, None]
        leaders = np.column_stack([centre + toward * np.minimum(radius, gap)[:, None], near - _CLEAR * toward])
        gap = gap - radius
        others = np.delete(self.circles, i, axis=0)
        strange = _distance(others[:, :2], boxes[:, None]) - others[:, 2]
        # A name between two circles could belong to either.
        unclear = (gap[:, None] + 4 * _CLEAR - strange).clip(0).sum(axis=1)
        far = gap > _TOUCHING
        alone = replace(self.taken, circles=others)
        costs = self.taken.cost(boxes) + gap.clip(0) + 0.03 * np.abs(middles[:, 0] - centre[0])
        costs += np.where(far, _LEADER + alone.leader_cost(leaders), unclear)
        return boxes, leaders, costs


def _blocked(covered: np.ndarray) -> np.ndarray:
    return np.where(covered > 1e-6, _BLOCKED + covered, 0.0)


def _settled(ax: Axes) -> Figure:
    """The figure with the limits of these axes computed; a whole layout takes ten times as long and moves nothing."""
    figure = ax.get_figure(root=True)
    assert isinstance(figure, Figure)
    ax.get_xlim()
    ax.get_ylim()
    ax.apply_aspect()
    return figure


def _extent(text: Text) -> np.ndarray:
    return np.array(text.get_window_extent().extents)


def _taken(ax: Axes, circles: np.ndarray) -> _Taken:
    segments = [np.empty((0, 4))]
    for line in ax.get_lines():
        points = np.asarray(line.get_transform().transform(line.get_xydata()))
        segments.append(np.column_stack([points[:-1], points[1:]]))
    frame = np.array(ax.get_window_extent().extents) + _CLEAR * np.array([1, 1, -1, -1])
    texts = np.array([_extent(text) for text in ax.texts if text.get_text()])
    return _Taken(frame, np.concatenate(segments), circles.reshape(-1, 3), texts.reshape(-1, 4))


def _circles(ax: Axes) -> np.ndarray:
    found = [
        (*ax.transData.transform(drawn.get_offsets())[0], np.sqrt(drawn.get_sizes()[0] / np.pi) * drawn.figure.dpi / 72)
        for drawn in ax.collections
        if isinstance(drawn, PathCollection)
    ]
    return np.array(found)


def _common_area(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    width = np.minimum(a[..., 2], b[..., 2]) - np.maximum(a[..., 0], b[..., 0])
    height = np.minimum(a[..., 3], b[..., 3]) - np.maximum(a[..., 1], b[..., 1])
    return np.asarray(width.clip(0) * height.clip(0))


def _length_inside(segments: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Length of the part of a segment that lies in a box (Liang and Barsky 1984)."""
    near, (segments, boxes) = _near(segments, boxes, boxes)
    first, last = 0.0, 1.0
    for axis in (0, 1):
        start, step = segments[..., axis], segments[..., axis + 2] - segments[..., axis]
        # A segment parallel to a side is inside along its whole length, or nowhere.
        slope = np.where(step == 0, 1e-12, step)
        one, other = (boxes[..., axis] - start) / slope, (boxes[..., axis + 2] - start) / slope
        first, last = np.maximum(first, np.minimum(one, other)), np.minimum(last, np.maximum(one, other))
    whole = np.hypot(segments[..., 2] - segments[..., 0], segments[..., 3] - segments[..., 1])
    length = np.zeros(near.shape)
    length[near] = np.clip(last - first, 0, None) * whole
    return length


def _crossing(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    near, (a, b) = _near(a, b, _around(b))

    def side(of: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.asarray((of[..., 2] - of[..., 0]) * (y - of[..., 1]) - (of[..., 3] - of[..., 1]) * (x - of[..., 0]))

    apart = side(a, b[..., 0], b[..., 1]) * side(a, b[..., 2], b[..., 3]) < 0
    crossed = np.zeros(near.shape, dtype=bool)
    crossed[near] = apart & (side(b, a[..., 0], a[..., 1]) * side(b, a[..., 2], a[..., 3]) < 0)
    return crossed


def _near(segments: np.ndarray, others: np.ndarray, boxes: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Mask of segments that may meet the others, which lie in boxes; and both, one by one. Most are far apart."""
    around = _around(segments) + np.array([-_ROUNDING, -_ROUNDING, _ROUNDING, _ROUNDING])
    near = (around[..., 0] <= boxes[..., 2]) & (boxes[..., 0] <= around[..., 2])
    near &= (around[..., 1] <= boxes[..., 3]) & (boxes[..., 1] <= around[..., 3])
    return near, [np.broadcast_to(one, (*near.shape, 4))[near] for one in (segments, others)]


def _around(segments: np.ndarray) -> np.ndarray:
    ends = segments[..., :2], segments[..., 2:]
    return np.concatenate([np.minimum(*ends), np.maximum(*ends)], axis=-1)


def _distance(points: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Distance from a point ``(..., 2)`` to the nearest point of a box; zero inside."""
    x, y = (
        np.maximum(np.maximum(boxes[..., axis] - points[..., axis], points[..., axis] - boxes[..., axis + 2]), 0)
        for axis in (0, 1)
    )
    return np.asarray(np.hypot(x, y))
