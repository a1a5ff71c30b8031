"""Rectangles and line segments as arrays, and how much of one lies in the other.

Boxes are ``(..., 4)``: left, bottom, right, top. Segments are ``(..., 4)``: x and y of one end, then of the other.
Shapes broadcast. Lengths have the unit of the numbers given, pixels here.
"""

from __future__ import annotations

import numpy as np


def common_area(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Area that boxes share."""
    width = np.minimum(a[..., 2], b[..., 2]) - np.maximum(a[..., 0], b[..., 0])
    height = np.minimum(a[..., 3], b[..., 3]) - np.maximum(a[..., 1], b[..., 1])
    return np.asarray(width.clip(0) * height.clip(0))


def length_inside(segments: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Length of the part of a segment that lies in a box (Liang and Barsky 1984)."""
    first, last = 0.0, 1.0
    for axis in (0, 1):
        start, step = segments[..., axis], segments[..., axis + 2] - segments[..., axis]
        # A segment parallel to a side is inside along its whole length, or nowhere.
        slope = np.where(step == 0, 1e-12, step)
        one, other = (boxes[..., axis] - start) / slope, (boxes[..., axis + 2] - start) / slope
        first, last = np.maximum(first, np.minimum(one, other)), np.minimum(last, np.maximum(one, other))
    whole = np.hypot(segments[..., 2] - segments[..., 0], segments[..., 3] - segments[..., 1])
    return np.asarray(np.clip(last - first, 0, None) * whole)


def crossing(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whether two segments cross."""

    def side(of: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.asarray((of[..., 2] - of[..., 0]) * (y - of[..., 1]) - (of[..., 3] - of[..., 1]) * (x - of[..., 0]))

    apart = side(a, b[..., 0], b[..., 1]) * side(a, b[..., 2], b[..., 3]) < 0
    return np.asarray(apart & (side(b, a[..., 0], a[..., 1]) * side(b, a[..., 2], a[..., 3]) < 0))


def distance(points: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Distance from a point ``(..., 2)`` to the nearest point of a box; zero inside."""
    away = np.maximum(boxes[..., :2] - points, points - boxes[..., 2:]).clip(0)
    return np.asarray(np.hypot(away[..., 0], away[..., 1]))
