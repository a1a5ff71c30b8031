"""Ask again before the gate is closed: cells that seem slower are visited more often, then judged by that alone.

A look at the rounds that made a cell seem slower would be no second one. So new rounds decide, in fresh processes: a
cell is slower only if both looks say so, each with joint intervals, so that no more gates are closed by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from attnbench.decision.decide import REFERENCE, Decision, decide, ordered
from attnbench.decision.judge import Finding
from attnbench.decision.measured import MeasuredRun, load

if TYPE_CHECKING:
    from attnbench.run.runner import Watcher


def doubtful(decision: Decision) -> list[str]:
    """Ids of the new run's cells whose time fails: more rounds may show that it was chance."""
    failed = [one.pair.new for one in decision.failures if one.measure == "time"]
    return list(dict.fromkeys(row.cell_id for row in failed if row is not None))


def confirm(
    first: Decision,
    new: MeasuredRun,
    olds: Sequence[MeasuredRun],
    rounds: int,
    *,
    plugins: Sequence[str] = (),
    watcher: Watcher | None = None,
) -> Decision:
    """Measure ``rounds`` more rounds of ``cells`` in the new run's folder, and judge their times by these alone.

    Raises:
        UsageError: the run cannot go on here (see :func:`attnbench.run.again.more_rounds`).
        StoreError and its kinds: its folder cannot be written or is locked.
        CorruptResults: it is damaged.
    """
    from attnbench.run.again import more_rounds

    cells = doubtful(first)
    more_rounds(new.path, cells, rounds, plugins=plugins, watcher=watcher)
    again = _only_new(load(new.path), new, cells, first.question.relative_to or REFERENCE)
    second = decide(again, olds, replace(first.question, measures=("time",), missing="ignore"))
    looks = {one.pair.key: one for one in second.findings if one.measure == "time"}
    findings = [_of_both(one, looks.get(one.pair.key)) for one in first.findings]
    return replace(first, findings=ordered(findings))


def _only_new(again: MeasuredRun, before: MeasuredRun, cells: Sequence[str], reference: str) -> MeasuredRun:
    """The run with ``cells`` in their new rounds alone, and with what times may be divided by."""
    rows = {
        key: row for key, row in again.rows.items() if row.cell_id in cells or reference in (row.variant, row.label)
    }
    samples = {
        cell_id: {round_: taken for round_, taken in rounds.items() if round_ not in before.samples.get(cell_id, {})}
        for cell_id, rounds in again.samples.items()
        if cell_id in cells
    }
    return replace(again, rows=rows, samples={**again.samples, **samples})


def _of_both(first: Finding, second: Finding | None) -> Finding:
    """The second look at a time that seemed slower; the first at all else."""
    if second is None or first.measure != "time" or not first.is_worse:
        return first
    said = "seemed slower, and is in new rounds" if second.is_worse else "seemed slower, and is not in new rounds"
    return replace(second, note="; ".join(filter(None, [said, second.note])))
