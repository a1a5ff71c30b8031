"""Rectangles and line segments as arrays, and how much of one lies in the other.

Boxes are ``(..., 4)``: left, bottom, right, top. Segments are ``(..., 4)``: x and y of one end, then of the other.
Shapes broadcast. Lengths have the unit of the numbers given, pixels here.
"""

from __future__ import annotations

import numpy as np

_ROUNDING = 1e-9
"""A line along a side of a box is inside, wherever rounding puts it."""


def common_area(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Area that boxes share."""
    width = np.minimum(a[..., 2], b[..., 2]) - np.maximum(a[..., 0], b[..., 0])
    height = np.minimum(a[..., 3], b[..., 3]) - np.maximum(a[..., 1], b[..., 1])
    return np.asarray(width.clip(0) * height.clip(0))


def length_inside(segments: np.ndarray, boxes: np.ndarray) -> np.ndarray:
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


def crossing(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whether two segments cross."""
    near, (a, b) = _near(a, b, _around(b))

    def side(of: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.asarray((of[..., 2] - of[..., 0]) * (y - of[..., 1]) - (of[..., 3] - of[..., 1]) * (x - of[..., 0]))

    apart = side(a, b[..., 0], b[..., 1]) * side(a, b[..., 2], b[..., 3]) < 0
    crossed = np.zeros(near.shape, dtype=bool)
    crossed[near] = apart & (side(b, a[..., 0], a[..., 1]) * side(b, a[..., 2], a[..., 3]) < 0)
    return crossed


def _near(segments: np.ndarray, others: np.ndarray, boxes: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Where a segment may meet the other thing, which lies in a box; and these segments and others, one by one.

    Most of thousands of places are far from most lines.
    """
    around = _around(segments) + np.array([-_ROUNDING, -_ROUNDING, _ROUNDING, _ROUNDING])
    near = (around[..., 0] <= boxes[..., 2]) & (boxes[..., 0] <= around[..., 2])
    near &= (around[..., 1] <= boxes[..., 3]) & (boxes[..., 1] <= around[..., 3])
    return near, [np.broadcast_to(one, (*near.shape, 4))[near] for one in (segments, others)]


def _around(segments: np.ndarray) -> np.ndarray:
    """The smallest box around each segment."""
    ends = segments[..., :2], segments[..., 2:]
    return np.concatenate([np.minimum(*ends), np.maximum(*ends)], axis=-1)


def distance(points: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Distance from a point ``(..., 2)`` to the nearest point of a box; zero inside."""
    x, y = (
        np.maximum(np.maximum(boxes[..., axis] - points[..., axis], points[..., axis] - boxes[..., axis + 2]), 0)
        for axis in (0, 1)
    )
    return np.asarray(np.hypot(x, y))
