"""Pair the rows of a new run with rows of older runs that measured the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from attnbench.measure.status import Status
from attnbench.results.key import Key
from attnbench.results.measurements import MeasuredRun, Visits
from attnbench.results.record import Record


@dataclass(frozen=True, slots=True)
class RowPair:
    """A measurement and its two rows; None for a missing row."""

    key: Key
    """Key of the new row; of the old row if there is no new one."""
    old: Record | None
    new: Record | None
    old_visits: tuple[Visits, ...] = ()
    new_visits: tuple[Visits, ...] = ()

    @property
    def times(self) -> tuple[float, float] | None:
        """The old and the new time of a finding's ratio; None if a side has none.

        A time is the geometric mean over visits, and over old runs. A CUDA graph and a call of the host have no ratio.
        """
        if not (self.old_visits and self.new_visits) or self.withheld:
            return None
        old, new = (
            math.exp(fmean(fmean(map(math.log, one.seconds.values())) for one in side))
            for side in (self.old_visits, self.new_visits)
        )
        return old, new

    @property
    def disturbed(self) -> list[str]:
        """Sides without a time, since threads were kept waiting for a core: ``before``, ``now``."""
        rows = (("before", self.old), ("now", self.new))
        return [when for when, row in rows if row and row.status is Status.DISTURBED]

    @property
    def withheld(self) -> str:
        """The reason against a ratio of two times; empty without one."""
        if self.disturbed:
            return f"withheld: the machine was busy {' and '.join(self.disturbed)}; the same command measures it anew"
        old, new = (row.launched or "eager" if row else "" for row in (self.old, self.new))
        return f"{old} before, {new} now: times of two things" if self.old and self.new and old != new else ""

    @property
    def rounds(self) -> int:
        return min(sum(len(one.seconds) for one in side) for side in (self.old_visits, self.new_visits))

    @property
    def shown(self) -> Record:
        row = self.new or self.old
        assert row is not None
        return row


def join(new: MeasuredRun, olds: Sequence[MeasuredRun]) -> list[RowPair]:
    """A pair for every key: first those of the new run in its order, then those that only older runs have.

    Rows with the same label are a pair if no row has the same options, which may be new or have another default since.
    """
    before = _pooled(olds)
    by_label = {_by_label(key, row): key for key, row in before.items() if key not in new.rows}
    pairs = []
    for key, row in new.rows.items():
        known = key if key in before else by_label.pop(_by_label(key, row), None)
        old = before.pop(known) if known else None
        pairs.append(RowPair(key, old, row, _visits(olds, known), _visits([new], key)))
    return [*pairs, *(RowPair(key, row, None) for key, row in before.items())]


def in_turn(pair: RowPair) -> RowPair:
    """The pair of runs that took turns: each new visit is put beside the same old time, by its round's own ratio."""
    if not (pair.old_visits and pair.new_visits):
        return pair
    (old,), (new,) = pair.old_visits, pair.new_visits
    ratios = {i: new.seconds[i] / old.seconds[i] for i in old.seconds if i in new.seconds}
    middle = math.exp(fmean(math.log(old.seconds[i]) for i in ratios or old.seconds))
    now = replace(new, seconds={i: middle * ratio for i, ratio in ratios.items()})
    before = replace(old, seconds=dict.fromkeys(ratios, middle))
    return replace(pair, old_visits=(before,) if ratios else (), new_visits=(now,))


def _visits(runs: Sequence[MeasuredRun], key: Key | None) -> tuple[Visits, ...]:
    rows = [(run, run.rows[key]) for run in runs if key in run.rows] if key else []
    return tuple(run.visits[row.cell_id] for run, row in rows if row.cell_id in run.visits)


def _by_label(key: Key, row: Record) -> Key:
    return key.but(options=row.label)


def _pooled(runs: Sequence[MeasuredRun]) -> dict[Key, Record]:
    found: dict[Key, Record] = {}
    for key, row in (item for run in runs for item in run.rows.items()):
        if key not in found or (found[key].status is not Status.OK and row.status is Status.OK):
            found[key] = row
    return found


def ratios_of_times(pairs: Sequence[RowPair]) -> list[float]:
    """New time over old time of each pair that has both."""
    return [times[1] / times[0] for pair in pairs if (times := pair.times)]
