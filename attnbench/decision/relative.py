"""Times as multiples of a variant's that nobody changed: of the whole run, or cell by cell for another machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from attnbench.decision.join import Pair
from attnbench.decision.key import Key
from attnbench.decision.measured import MeasuredRun, Visits
from attnbench.errors import UsageError, did_you_mean
from attnbench.record import Record
from attnbench.status import Status


def unchanged(pairs: Sequence[Pair], variant: str) -> list[Pair]:
    """The pairs of ``variant``, by name or label, that have two times.

    Raises:
        UsageError: no pair of this variant has two times; the message lists variants that have.
    """
    timed = [pair for pair in pairs if pair.times]
    found = [pair for pair in timed if _is(pair.shown, variant)]
    if not found:
        known = list(dict.fromkeys(pair.shown.variant for pair in timed))
        hint = did_you_mean(variant, known) or f"; there are {', '.join(known) or 'none'}"
        raise UsageError(f"--relative-to {variant!r}: no variant of this name was timed in both runs{hint}")
    return found


def over(run: MeasuredRun, variant: str) -> MeasuredRun:
    """The run with every time divided by that of ``variant`` in the same circumstances, and nothing else in it.

    Of each round the two times are divided, since one process measured both. Keys lose what is the machine's: threads
    and the state of the process.

    Raises:
        UsageError: ``variant`` was timed nowhere in this run.
    """
    rows = {_anywhere(key): row for key, row in run.rows.items() if row.status is Status.OK and row.time_median_s}
    reference = {_circumstances(key): row for key, row in rows.items() if _is(row, variant)}
    if not reference:
        raise UsageError(f"--relative-to {variant!r}: {run.path} has no time of this variant; name another one")
    found, visits = {}, {}
    for key, row in rows.items():
        by = reference.get(_circumstances(key))
        if by is not None and not _is(row, variant):
            found[key], visits[row.cell_id] = _divided(row, by), _over(run.visits[row.cell_id], run.visits[by.cell_id])
    return replace(run, rows=found, visits=visits)


def _is(row: Record, variant: str) -> bool:
    return variant in (row.variant, row.label)


def _anywhere(key: Key) -> Key:
    return replace(key, threads=None, process="")


def _circumstances(key: Key) -> Key:
    return replace(key, variant="", options="")


def _divided(row: Record, by: Record) -> Record:
    assert row.time_median_s
    assert by.time_median_s
    return replace(row, time_median_s=row.time_median_s / by.time_median_s, time_ci_low_s=None, time_ci_high_s=None)


def _over(one: Visits, by: Visits) -> Visits:
    seconds = {round_: time / by.seconds[round_] for round_, time in one.seconds.items() if round_ in by.seconds}
    without = {0: median(one.seconds.values()) / median(by.seconds.values())}  # one visit has no interval
    return Visits(seconds or without, one.slower - by.slower, one.doubt + by.doubt)
