"""``--shard I/K``: one of K parts of a suite, so that K machines measure it together.

Each machine computes the split for itself, from the cells alone: not from threads, torch or measurements.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from attnbench.contract.spec import Spec
from attnbench.errors import UsageError
from attnbench.suite.cell import Cell, ModelSize, Training

MOST = 10_000
_WRITTEN = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")
_PER_SECOND = 2**17
"""Tokens that one layer processes in a second, roughly; only proportions matter."""
_CALLS = 20
"""Calls of a timed cell, or of one whose error is measured, roughly."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Part ``index``, from 0, of ``of`` parts."""

    index: int
    of: int

    def __str__(self) -> str:
        return f"{self.index}/{self.of}"


def parse_shard(text: str) -> Shard:
    """``0/4`` is the first of four. Raises UsageError: not two numbers, or there is no such part."""
    match = _WRITTEN.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--shard {text[:40]!r} is not I/K; write 0/4 for the first of four parts")
    shard = Shard(int(match[1]), int(match[2]))
    if not 1 <= shard.of <= MOST:
        raise UsageError(f"--shard {shard}: a suite has 1 to {MOST} shards; write 0/4 for the first of four")
    if shard.index >= shard.of:
        raise UsageError(f"--shard {shard}: shards count from 0, so the last one is {shard.of - 1}/{shard.of}")
    return shard


def comparison_group(cell: Cell) -> Cell:
    """A cell that stands for all that differ from ``cell`` by the variant alone, in whatever sweep.

    Trainings that differ by seed, learning rate or weight decay are in one group as well: validation chooses among
    rates over seeds, and their scores share a column (see :data:`attnbench.results.trainings.ALIKE`). So are the tests
    of one training at several lengths.
    """
    anybody = replace(cell, suite="", sweep="", variant=Spec("any"), measure=(), error_draws=0, fit=0, test_len=None)
    if cell.training is None:
        return anybody
    model, rules = cell.model or ModelSize(), cell.training
    return replace(
        anybody,
        seed=0,
        model=ModelSize(layers=model.layers, ffn=model.ffn, positions=model.positions),
        training=Training(rules.steps, protocol=rules.protocol, pretrain_steps=rules.pretrain_steps),
    )


def weight(cell: Cell) -> float:
    """A rough number of seconds: one, and more for many tokens or steps of training."""
    steps = cell.training.steps + cell.training.pretrain_steps if cell.training else _CALLS
    layers = cell.model.layers if cell.model else 1
    return 1 + steps * cell.shape.B * cell.shape.N * layers / _PER_SECOND


def groups(cells: Iterable[Cell]) -> list[list[Cell]]:
    """The cells grouped with those that they are compared with, in their order."""
    found: dict[Cell, list[Cell]] = {}
    for cell in cells:
        found.setdefault(comparison_group(cell), []).append(cell)
    return list(found.values())


def part(cells: Sequence[Cell], shard: Shard) -> list[Cell]:
    """The cells of one shard, in their order; none where there are more shards than groups.

    Heavy groups are dealt first, each to the shard with the least so far, so that the fullest shard exceeds the mean by
    one group at most.
    """
    dealt, loads = list[Cell](), [0.0] * shard.of
    for group in sorted(groups(cells), key=lambda group: -sum(map(weight, group))):
        lightest = loads.index(min(loads))
        loads[lightest] += sum(map(weight, group))
        dealt += group if lightest == shard.index else []
    chosen = set(dealt)
    return [cell for cell in cells if cell in chosen]
