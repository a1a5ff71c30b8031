"""Fewer cases than all: one fault in a hundred needs three particular values at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import combinations, product
from typing import Any

Case = tuple[Hashable, ...]
"""For each axis a value, or what stands for it."""


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases in which every value of every axis meets every value of every other, in the order of all combinations."""
    chosen = covering(list(product(*(range(len(axis)) for axis in axes))))
    return [tuple(axis[i] for axis, i in zip(axes, case, strict=True)) for case in chosen]


def covering(cases: Sequence[Case]) -> list[Case]:
    """Some of the cases, in their order, in which all values meet that meet in any of them."""
    pairs = {case: frozenset(combinations(enumerate(case), 2)) for case in cases}
    unmet = frozenset[Any]().union(*pairs.values())
    chosen = set()
    while unmet:
        best = max(pairs, key=lambda case: len(unmet & pairs[case]))
        unmet -= pairs[best]
        chosen.add(best)
    return [case for case in pairs if case in chosen]


def each_once(cases: Sequence[Case]) -> list[Case]:
    """Some of the cases, in their order, in which every value is there, and none much more often than it must be."""
    left, chosen = {part for case in cases for part in enumerate(case)}, set()
    used = Counter[tuple[int, Hashable]]()

    def use(case: Case) -> tuple[int, int]:
        return len(left.intersection(enumerate(case))), -sum(used[part] for part in enumerate(case))

    while left:
        best = max(cases, key=use)
        left -= set(enumerate(best))
        used.update(enumerate(best))
        chosen.add(best)
    return [case for case in cases if case in chosen]
