"""Times as multiples of a variant's that nobody changed: of the whole run, or cell by cell for another machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from attnbench.decision.join import Pair
from attnbench.decision.key import Key
from attnbench.decision.measured import MeasuredRun
from attnbench.errors import UsageError, did_you_mean
from attnbench.record import Record
from attnbench.status import Status


def ratios_of_times(pairs: Sequence[Pair]) -> list[float]:
    """New median over old median of each pair that has both."""
    return [
        pair.new.time_median_s / pair.old.time_median_s
        for pair in pairs
        if pair.old and pair.new and pair.old.time_median_s and pair.new.time_median_s
    ]


def drift(pairs: Sequence[Pair], variant: str) -> float:
    """How much slower the rows of ``variant``, by name or label, are now: the median of their ratios.

    Raises:
        UsageError: no pair of this variant has two times; the message lists variants that have.
    """
    ratios = ratios_of_times([pair for pair in pairs if _is(pair.shown, variant)])
    if not ratios:
        known = list(dict.fromkeys(pair.shown.variant for pair in pairs if ratios_of_times([pair])))
        hint = did_you_mean(variant, known) or f"; there are {', '.join(known) or 'none'}"
        raise UsageError(f"--relative-to {variant!r}: no variant of this name was timed in both runs{hint}")
    return median(ratios)


def over(run: MeasuredRun, variant: str) -> MeasuredRun:
    """The run with every time divided by that of ``variant`` in the same circumstances, and nothing else in it.

    The interval of such a ratio reaches as far as the intervals of both times allow. Keys lose what is the machine's:
    threads and the state of the process.

    Raises:
        UsageError: ``variant`` was timed nowhere in this run.
    """
    rows = {_anywhere(key): row for key, row in run.rows.items() if row.status is Status.OK and row.time_median_s}
    reference = {_circumstances(key): row for key, row in rows.items() if _is(row, variant)}
    if not reference:
        raise UsageError(f"--relative-to {variant!r}: {run.path} has no time of this variant; name another one")
    found = {
        key: _divided(row, reference[_circumstances(key)])
        for key, row in rows.items()
        if _circumstances(key) in reference and not _is(row, variant)
    }
    return replace(run, rows=found, samples={})


def _is(row: Record, variant: str) -> bool:
    return variant in (row.variant, row.label)


def _anywhere(key: Key) -> Key:
    return replace(key, threads=None, process="")


def _circumstances(key: Key) -> Key:
    return replace(key, variant="", options="")


def _divided(row: Record, by: Record) -> Record:
    assert row.time_median_s
    assert by.time_median_s
    ends = by.time_ci_low_s, by.time_ci_high_s, row.time_ci_low_s, row.time_ci_high_s
    low, high = None, None
    if all(ends):
        by_low, by_high, row_low, row_high = (float(end or 0.0) for end in ends)
        low, high = row_low / by_high, row_high / by_low
    return replace(
        row,
        time_median_s=row.time_median_s / by.time_median_s,
        time_ci_low_s=low,
        time_ci_high_s=high,
        time_rounds=min(row.time_rounds or 1, by.time_rounds or 1),
    )
