"""The order in which the cells of a round are visited."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import chain
from operator import attrgetter

from attnbench.cell import Cell
from attnbench.shape import Shape

_ALL_BUT_SHAPE = attrgetter(*(field.name for field in fields(Cell) if field.name != "shape"))
_ALL_BUT_LENGTH = attrgetter(*(field.name for field in fields(Shape) if field.name not in ("seq_len", "kv_len")))
_ALL_BUT_VARIANT = attrgetter(*(field.name for field in fields(Cell) if field.name != "variant"))


def family(cell: Cell) -> tuple[object, ...]:
    """Everything about a cell but its length."""
    return _ALL_BUT_SHAPE(cell), _ALL_BUT_LENGTH(cell.shape)


def in_order(cells: Sequence[Cell], seed: str) -> Iterator[Cell]:
    """Cells in random order, but those that differ by variant alone in a row, in the same minute of the machine.

    Shorter lengths of the same thing come first, so that a failure can stand for the longer ones.
    """
    beside: dict[object, list[Cell]] = {}
    for cell in random.Random(seed).sample(list(cells), len(cells)):
        beside.setdefault(_ALL_BUT_VARIANT(cell), []).append(cell)
    waiting: dict[object, list[Cell]] = {}
    for cell in sorted(cells, key=lambda one: one.shape.N):
        waiting.setdefault(family(cell), []).append(cell)
    for cell in chain.from_iterable(beside.values()):
        yield waiting[family(cell)].pop(0)
