"""Rows of a new run beside the rows of older ones that measured the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from attnbench.decision.key import Key
from attnbench.decision.measured import MeasuredRun, Visits
from attnbench.decision.pace import with_times_of
from attnbench.record import Record
from attnbench.status import Status


@dataclass(frozen=True, slots=True)
class Pair:
    """What was measured, and its rows; None where a side has none."""

    key: Key
    """Key of the new row; of the old row if there is no new one."""
    old: Record | None
    new: Record | None
    old_visits: tuple[Visits, ...] = ()
    """Visits of each old run, at one speed of the machine; empty if times are as measured."""
    new_visits: tuple[Visits, ...] = ()

    @property
    def shown(self) -> Record:
        """The row that names the cell: the new one where there is one."""
        row = self.new or self.old
        assert row is not None
        return row


def join(new: MeasuredRun, olds: Sequence[MeasuredRun]) -> list[Pair]:
    """A pair for every key: first those of the new run in its order, then those that only older runs have.

    A variant that got an option since, or another default, is the same variant if it is written the same: where no row
    has the very same options, those with the same label make the pair.
    """
    before = _pooled(olds)
    by_label = {_by_label(key, row): key for key, row in before.items() if key not in new.rows}
    pairs = []
    for key, row in new.rows.items():
        known = key if key in before else by_label.pop(_by_label(key, row), None)
        old = before.pop(known) if known else None
        pairs.append(Pair(key, old, row, _visits(olds, known), _visits([new], key)))
    return [*pairs, *(Pair(key, row, None) for key, row in before.items())]


def _visits(runs: Sequence[MeasuredRun], key: Key | None) -> tuple[Visits, ...]:
    rows = [(run, run.rows[key]) for run in runs if key in run.rows] if key else []
    return tuple(run.visits[row.cell_id] for run, row in rows if row.cell_id in run.visits)


def _by_label(key: Key, row: Record) -> Key:
    return replace(key, options=row.label)


def _pooled(runs: Sequence[MeasuredRun]) -> dict[Key, Record]:
    """A row for each key that any of the runs has."""
    keys = dict.fromkeys(key for run in runs for key in run.rows)
    return {key: _as_one([(run, run.rows[key]) for run in runs if key in run.rows]) for key in keys}


def _as_one(found: Sequence[tuple[MeasuredRun, Record]]) -> Record:
    """The first row that is ok, with the time of all rounds together; the first row if none is ok."""
    ok = [(run, row) for run, row in found if row.status is Status.OK]
    if not ok:
        return found[0][1]
    rounds = [(run, row) for run, row in ok if row.time_median_s is not None and row.cell_id in run.samples]
    return _with_all_rounds(ok[0][1], rounds) if len(rounds) > 1 else ok[0][1]


def _with_all_rounds(first: Record, found: Sequence[tuple[MeasuredRun, Record]]) -> Record:
    return with_times_of(first, [taken for run, row in found for _, taken in sorted(run.samples[row.cell_id].items())])
