"""What speaks against a verdict: other programs had the cores, a time is impossible, or medians contradict a ratio."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from attnbench.measure.statistics import SAME_BAND, Ratio, median, median_interval
from attnbench.run.length import Length
from attnbench.units import format_seconds

BUSY = 0.25
"""Other programs may take this share of the cores that the threads need without being in the way."""
FALL = 0.8
"""Twice the length in less than this share of the time is impossible."""


def busy(visit: Length, threads: int, cores: int) -> str:
    """Why the machine was too busy to compare anything, in a few words; empty where it was not.

    Args:
        threads: how many the measuring process has.
        cores: how many the whole machine has, on all of which the load of other programs is counted.
    """
    others = [pairs.others for pairs in visit.pairs if pairs.others is not None] or [visit.others or 0.0]
    needed, load = min(threads, cores), median(others)
    if needed + load - cores > BUSY * needed:
        return f"{load:.1f} of {cores} cores"
    disturbed, taken = (sum(getattr(pairs, name) for pairs in visit.pairs) for name in ("disturbed", "taken"))
    return f"{disturbed} of {taken} turns disturbed" if 2 * disturbed > taken else ""


class Doubts:
    """What speaks against the times of a comparison, by its lengths and variants."""

    def __init__(
        self, lengths: Sequence[int], visits: Sequence[Length], threads: int, *, on_cpu: bool, decoding: bool
    ) -> None:
        self._visits, self._threads = visits, threads
        cores = os.cpu_count() or 1
        self.busy = [busy(visit, threads, cores) if on_cpu else "" for visit in visits]
        """How busy the machine was, in words, at each place of the lengths; empty where it was not."""
        # A decoding step may take the same time at every length, so that a quicker core alone can make it fall.
        self._falls = {} if decoding else _falls(lengths, visits)

    def at(self, place: int, variants: Sequence[int]) -> str:
        """Why no time of these variants is believed at this place of the lengths; empty where they are."""
        return next((self._falls[place, one] for one in variants if (place, one) in self._falls), "")

    def warnings(self, labels: Sequence[str]) -> list[str]:
        """One line for each kind of doubt, with the remedy."""
        said = []
        if any(self.busy):
            how = next(filter(None, self.busy))
            remedy = "try --threads 1" if self._threads > 1 else "close other programs"
            said.append(f"the machine is busy ({how}); times may be wrong by a factor; {remedy}")
        stopped = sum(pairs.stopped for visit in self._visits for pairs in visit.pairs)
        if stopped:
            said.append(f"{stopped} turns left out: the measuring process was stopped meanwhile")
        for variant, text in dict.fromkeys((variant, text) for (_, variant), text in self._falls.items()):
            said.append(f"{labels[variant]} took {text}: impossible; run it again on a quiet machine")
        return said


def contradicted(ratio: Ratio, a: float, b: float) -> str:
    """Why a ratio cannot stand beside two medians, in seconds; empty where it can."""
    if ratio.joint is None:
        return ""
    low, high = ratio.joint
    beyond = abs(math.log(a / b) - math.log(min(max(a / b, low), high))) > SAME_BAND
    if beyond or {"faster": a >= b, "slower": a <= b}.get(ratio.verdict, False):
        return f"its medians have a ratio of {a / b:.3g}, its pairs one of {ratio.estimate:.3g}"
    return ""


def _falls(lengths: Sequence[int], visits: Sequence[Length]) -> dict[tuple[int, int], str]:
    """Where the time of a variant falls although the length doubles: a text by place and variant, for both lengths.

    Nobody can tell which of the two times is wrong.
    """
    found = {}
    for variant in {one for visit in visits for one in visit.records}:
        times = [[t for one in visit.times for t in one.get(variant, [])] for visit in visits]
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
