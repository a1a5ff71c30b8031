"""Fewer cases than all: one fault in a hundred needs three particular values at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases in which every value of every axis meets every value of every other, in the order of all combinations."""
    left = list(product(*(range(len(axis)) for axis in axes)))
    unmet = {pair for case in left for pair in _pairs(case)}
    chosen = []
    while unmet:
        best = max(left, key=lambda case: len(unmet.intersection(_pairs(case))))
        unmet.difference_update(_pairs(best))
        chosen.append(best)
    return [tuple(axis[i] for axis, i in zip(axes, case, strict=True)) for case in sorted(chosen)]


def _pairs(case: tuple[int, ...]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    return list(combinations(enumerate(case), 2))
