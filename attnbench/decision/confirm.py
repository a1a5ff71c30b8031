"""Ask again before the gate is closed: cells that seem slower are visited more often, then judged anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnbench.decision.decide import Decision, Question, decide
from attnbench.decision.measured import MeasuredRun, load

if TYPE_CHECKING:
    from attnbench.run.runner import Watcher


def doubtful(decision: Decision) -> list[str]:
    """Ids of the new run's cells whose time fails: more rounds may show that it was chance."""
    failed = [one.pair.new for one in decision.failures if one.measure == "time"]
    return list(dict.fromkeys(row.cell_id for row in failed if row is not None))


def confirm(
    cells: Sequence[str],
    new: MeasuredRun,
    olds: Sequence[MeasuredRun],
    question: Question,
    rounds: int,
    *,
    plugins: Sequence[str] = (),
    watcher: Watcher | None = None,
) -> tuple[MeasuredRun, Decision]:
    """Measure ``rounds`` more rounds of ``cells`` in the new run's folder; the run as it is then, and what it says.

    Raises:
        UsageError: the run cannot go on here (see :func:`attnbench.run.again.more_rounds`).
        StoreError and its kinds: its folder cannot be written or is locked.
        CorruptResults: it is damaged.
    """
    from attnbench.run.again import more_rounds

    more_rounds(new.path, cells, rounds, plugins=plugins, watcher=watcher)
    again = load(new.path)
    return again, decide(again, olds, question)
