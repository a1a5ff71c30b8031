"""Why a verdict is withheld: other programs had the cores, or a time is impossible."""

from __future__ import annotations

import os
from collections.abc import Sequence

from attnbench.measure.statistics import median, median_interval
from attnbench.run.length import Length
from attnbench.run.pairs import Pairs
from attnbench.units import format_seconds

BUSY = 0.25
"""Other programs may take this share of the cores that the threads need without a verdict being withheld."""
FALL = 0.8
"""Twice the length in less than this share of the time is impossible."""


def busy(pairs: Pairs, threads: int, cores: int) -> str:
    """Why the machine was too busy to compare anything, in a few words; empty where it was not.

    Args:
        threads: how many the measuring process has.
        cores: how many the whole machine has, on all of which the load of other programs is counted.
    """
    if crowded := too_few_left(pairs.others, threads, cores):
        return crowded
    if 2 * pairs.disturbed > pairs.taken:
        return f"{pairs.disturbed} of {pairs.taken} turns disturbed"
    return ""


def too_few_left(others: float | None, threads: int, cores: int) -> str:
    """How many cores other programs had, in words; empty where enough were left for the threads."""
    needed = min(threads, cores)
    lacked = others is not None and needed + others - cores > BUSY * needed
    return f"{others:.1f} of {cores} cores" if lacked else ""


def _busy_at(visit: Length, threads: int, cores: int) -> str:
    return busy(visit.pairs, threads, cores) if visit.pairs else too_few_left(visit.others, threads, cores)


class Doubts:
    """What speaks against the times of a comparison, by its lengths and variants."""

    def __init__(
        self, lengths: Sequence[int], visits: Sequence[Length], threads: int, *, on_cpu: bool, decoding: bool
    ) -> None:
        self._visits, self._threads = visits, threads
        cores = os.cpu_count() or 1
        self._busy = [_busy_at(visit, threads, cores) if on_cpu else "" for visit in visits]
        # A decoding step may take the same time at every length, so that a quicker core alone can make it fall.
        self._falls = {} if decoding else _falls(lengths, visits)

    def at(self, place: int, variants: Sequence[int]) -> str:
        """Why the verdict on these variants is withheld at this place of the lengths; empty where it is not."""
        if self._busy[place]:
            return f"the machine was busy ({self._busy[place]})"
        return next((self._falls[place, one] for one in variants if (place, one) in self._falls), "")

    def warnings(self, labels: Sequence[str]) -> list[str]:
        """One line for each kind of doubt, with the remedy."""
        said = []
        if any(self._busy):
            how = next(filter(None, self._busy))
            remedy = "try --threads 1" if self._threads > 1 else "close other programs"
            said.append(f"the machine is busy ({how}); times may be wrong by a factor; {remedy}")
        stopped = sum(visit.pairs.stopped for visit in self._visits if visit.pairs)
        if stopped:
            said.append(f"{stopped} turns left out: the measuring process was stopped meanwhile")
        for variant, text in dict.fromkeys((variant, text) for (_, variant), text in self._falls.items()):
            said.append(f"{labels[variant]} took {text}: impossible; run it again on a quiet machine")
        return said


def _falls(lengths: Sequence[int], visits: Sequence[Length]) -> dict[tuple[int, int], str]:
    """Where the time of a variant falls although the length doubles: a text by place and variant, for both lengths.

    Nobody can tell which of the two times is wrong.
    """
    found = {}
    for variant in {one for visit in visits for one in visit.times}:
        times = [visit.times.get(variant, []) for visit in visits]
        intervals = [median_interval(one) for one in times]
        for longer, after in enumerate(intervals):
            halves = (i for i in range(longer) if 2 * lengths[i] <= lengths[longer] and intervals[i])
            shorter = max(halves, key=lambda i: lengths[i], default=None)
            before = None if shorter is None else intervals[shorter]
            if shorter is not None and before and after and after[1] < FALL * before[0]:
                fell = (f"{format_seconds(median(times[i]))} at n = {lengths[i]}" for i in (shorter, longer))
                text = " but ".join(fell)
                found[shorter, variant] = found[longer, variant] = text
    return found
