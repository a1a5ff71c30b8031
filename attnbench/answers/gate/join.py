"""Pair the rows of a new run with rows of older runs that measured the same."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
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

        A time is the geometric mean over visits, and over old runs. A CUDA graph and a call of the host have no ratio,
        nor has the one call of ``--quick``.
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
        old, new = (launch_of(row) if row else "" for row in (self.old, self.new))
        return f"{old} before, {new} now: times of two things" if self.old and self.new and old != new else ""

    @property
    def rounds(self) -> int:
        return min(sum(len(one.seconds) for one in side) for side in (self.old_visits, self.new_visits))

    @property
    def shown(self) -> Record:
        row = self.new or self.old
        assert row is not None
        return row


def launch_of(row: Record) -> str:
    """``--quick`` for a time of one call, or else how the calls reached the device: by the host if it is not said."""
    return "--quick" if row.quick else row.launched or "eager"


def join(new: MeasuredRun, olds: Sequence[MeasuredRun]) -> list[RowPair]:
    """A pair for every key: first those of the new run in its order, then those that only older runs have.

    Of older rows those count that were launched and timed as the new one was, if there are some.
    """
    before: dict[Key, list[tuple[MeasuredRun, Record]]] = {key: [] for key in new.rows}
    for run in olds:
        for key, row in _counterparts(run, new):
            before.setdefault(key, []).append((run, row))
    pairs = []
    for key, rows in before.items():
        now = new.rows.get(key)
        rows = [one for one in rows if now and launch_of(one[1]) == launch_of(now)] or rows
        old = next((row for _, row in rows if row.status is Status.OK), rows[0][1] if rows else None)
        pairs.append(RowPair(key, old, now, _visits(rows), _visits([(new, now)] if now else [])))
    return pairs


def _counterparts(run: MeasuredRun, new: MeasuredRun) -> Iterator[tuple[Key, Record]]:
    """Each row of an older run, with the key of the new row that measured the same, or with its own.

    Rows with the same label are a pair if no row has the same options, which may be new or have another default since.
    """
    by_label = {key.but(options=row.label): key for key, row in new.rows.items() if key not in run.rows}
    for key, row in run.rows.items():
        yield key if key in new.rows else by_label.pop(key.but(options=row.label), key), row


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


def _visits(rows: Iterable[tuple[MeasuredRun, Record]]) -> tuple[Visits, ...]:
    return tuple(run.visits[row.cell_id] for run, row in rows if row.cell_id in run.visits)


def ratios_of_times(pairs: Sequence[RowPair]) -> list[float]:
    """New time over old time of each pair that has both."""
    return [times[1] / times[0] for pair in pairs if (times := pair.times)]
