"""The time of one call: warm-up and first call apart, every sample kept, stopped by interval width only."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import sleep
from typing import TYPE_CHECKING, Any

from attnbench.measure.standstill import Moment, Standstill
from attnbench.measure.statistics import FEWEST, interquartile_range, interval_of_visit, interval_over_rounds, median
from attnbench.measure.stopwatch import ClockError, Stopwatch, WallClock

if TYPE_CHECKING:  # decisions summarise samples, and need no torch for it
    from attnbench.measure.yardstick import Mark, Pace

EVERY = 0.005
"""Least seconds of samples between readings."""
PATIENCE = 20
"""Most samples in a row that may be lost because the process is stopped again and again."""
WAITED = 0.01
"""Largest share of a clean sample that threads of the process may have waited for a core."""
WAITED_SLIGHTLY = 0.05
"""The same of samples that count if fewer than :data:`ENOUGH` are clean; intervals then reach down by as much."""
WAITED_FIRST = 0.1
"""The same of the first call, which wakes the threads and cannot be made again."""
TOLD = 0.1
"""Share of unclean samples above which a row has a warning; a few are on every machine."""
REST = 0.005
"""Seconds of rest after a sample in which threads waited."""
LONGEST_WAIT = 1.0
"""Seconds on unclean samples and rests after which a visit gives up."""
ENOUGH = 3
"""Fewest clean samples for a time, unless fewer were wanted."""
OVERHEAD = 5e-4
"""Largest share of a sample for looking at the clock: half a thousandth, since times for the size of batches include
it."""
FELL = 0.03
"""Share by which a card's clock may stand below the highest beside the samples of a cell."""
THROTTLES = {0x4: "power cap", 0x8: "slowdown by hardware", 0x20: "heat", 0x40: "heat", 0x80: "power brake"}
"""NVML's bits of throttling, and their words, without those for an idle card and chosen clocks."""

CLOSE_OTHERS = "close other programs and give the same command again, or measure with fewer --threads"


@dataclass(frozen=True, slots=True)
class TimingRules:
    """The rules for stopping. Times in seconds, over all rounds together."""

    min_time: float = 0.5
    max_time: float = 3.0
    min_samples: int = 20
    max_samples: int = 1000
    width: float = 0.02
    """Stop when the half width of the samples' interval is at most this share of the median; never on significance."""
    warmup_time: float = 0.2
    warmup_calls: int = 3
    shortest_sample: float = 1e-3
    """Calls are batched until a sample takes this long and far longer than looking at the clock."""
    rounds: int = 1
    quick: bool = False
    """One sample after the first call, no interval."""

    @classmethod
    def lasting(cls, min_time: float, most: float) -> TimingRules:
        """Between ``min_time`` and ``most`` times as long, after a warm-up that is shorter than either."""
        return cls(min_time=min_time, max_time=most * min_time, warmup_time=min(0.2, 0.4 * min_time))


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds per call, over ``calls`` calls; ``switches`` counts how often another process took the core."""

    seconds: float
    calls: int
    switches: int = 0
    stopped: bool = False
    """The process stood still meanwhile (see :mod:`attnbench.measure.standstill`), so this is not the call's time."""
    yardstick: tuple[float, float] | None = None
    """Seconds of the two pieces of :mod:`attnbench.measure.yardstick` beside it; None without a reading."""
    waited: float | None = None
    """Seconds for which threads of the process waited for a core, all together; None in samples of older versions."""
    sm_mhz: int | None = None
    """Clock of the card's multiprocessors beside it; None without a reading."""
    throttled: int = 0
    """NVML's bits of why the card throttled meanwhile, of :data:`THROTTLES`."""

    @property
    def clean(self) -> bool:
        """True if the time is this program's own: the process was not stopped, and its threads hardly waited."""
        return self.share_waited <= WAITED and not self.stopped

    @property
    def share_waited(self) -> float:
        """Share of its time for which threads waited; 0 or 1 in samples of older versions, by their switches."""
        whole = self.seconds * self.calls
        return float(self.switches > 1 + 50 * whole) if self.waited is None else self.waited / whole

    def to_json(self) -> dict[str, Any]:
        """The sample as it is stored."""
        row: dict[str, Any] = {"seconds": self.seconds, "calls": self.calls, "switches": self.switches}
        if self.waited is not None:
            row["waited"] = float(f"{self.waited:.4g}")
        if self.yardstick is not None:
            row["yardstick"] = [float(f"{one:.4g}") for one in self.yardstick]
        if self.sm_mhz is not None:
            row["sm_mhz"] = self.sm_mhz
        if self.throttled:
            row["throttled"] = self.throttled
        return {**row, "stopped": 1} if self.stopped else row


@dataclass(frozen=True, slots=True)
class Timing:
    """The samples of one round, in the order in which they were taken, and the first call, in seconds."""

    first_call_s: float | None
    """None if the process was stopped during the first call, or its threads waited for a tenth of it."""
    samples: tuple[Sample, ...] = field(default=())
    stopped: str = "width"
    """``width`` (narrow enough), ``budget`` (max_time or max_samples), ``quick``, ``busy`` (too few clean samples)."""


class OutputKeeper:
    """Makes the next of several calls each time it is called, and keeps its output."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self._next = iter(calls).__next__
        self.output: Any = None

    def __call__(self) -> None:
        self.output = self._next()()


class Paced:
    """Gives samples the two readings around them."""

    def __init__(self, pace: Pace | None) -> None:
        self._pace = pace
        self._before: Mark | None = pace.read(0.0) if pace else None
        self._since = 0.0
        """Seconds of samples since the last reading."""
        self._read = 0
        """Number of samples with a reading."""
        self.samples: list[Sample] = []
        """All samples until now; those since the last reading do not have theirs yet."""
        self.of_a_card = False
        """True if the samples have a card's clock."""

    def add(self, sample: Sample) -> None:
        """Take a sample; read if the last reading is long ago."""
        self.samples.append(sample)
        self._since += sample.seconds * sample.calls
        if self._pace is not None and self._since >= self._pace.apart:
            self.close()

    def close(self) -> None:
        """Read, for the samples that wait for it."""
        if self._pace is None or self._before is None or not self._since:
            return
        after = self._pace.read(self._since)
        beside = self._before.until(after)
        self.samples[self._read :] = [replace(sample, **beside) for sample in self.samples[self._read :]]
        self.of_a_card = "throttled" in beside
        self._before, self._since, self._read = after, 0.0, len(self.samples)


class Sampler:
    """Takes samples of one call, and marks those during which the process stood still."""

    def __init__(self, watch: Stopwatch, call: Callable[[], object]) -> None:
        self._watch, self._call, self._standstill = watch, call, Standstill()
        self._stopped = 0
        """Samples in a row during which the process was stopped."""

    def take(self, calls: int, call: Callable[[], object] | None = None) -> Sample:
        """Take one sample of ``calls`` calls, of ``call`` if it is given; raise ClockError as :func:`measure_time`."""
        start = Moment.now()
        seconds, switches = self._watch.time(call or self._call, calls)
        stopped = self._standstill.between(start, Moment.now(), calls)
        if not (math.isfinite(seconds) and seconds > 0):
            raise ClockError(f"the clock gave {seconds} s for {calls} call(s)")
        self._stopped = self._stopped + 1 if stopped else 0
        if self._stopped > PATIENCE:
            raise ClockError(f"the process was stopped in each of {self._stopped} samples; let it run")
        return Sample(seconds / calls, calls, switches, stopped, waited=self._standstill.waited)


class Disturbed(Exception):  # an outcome of the cell, not an error of ours
    """Threads of the process waited for a core in nearly all samples, so that no time can be given."""


def measure_time(
    call: Callable[[], object],
    rules: TimingRules,
    *,
    stopwatch: Stopwatch | None = None,
    pace: Pace | None = None,
    on_first: Callable[[Any], None] = lambda output: None,
) -> Timing:
    """Time ``call`` for one round of ``rules.rounds``; ``on_first`` gets the first output.

    ``pace`` is read before and after samples, never within one. Samples with a standstill or a wait for a core are kept
    but do not count. Others replace them, for :data:`LONGEST_WAIT` in all. Raises ClockError for a duration of zero,
    below zero or not finite, or if the process is stopped again and again.
    """
    watch = stopwatch or WallClock()
    sampler = Sampler(watch, call)
    with garbage_collection_off():
        kept = OutputKeeper([call])
        first = sampler.take(1, kept)
        on_first(kept.output)
        del kept
        is_own = not first.stopped and (first.waited or 0.0) <= WAITED_FIRST * first.seconds
        first_call_s = first.seconds if is_own else None
        calls = 1 if rules.quick else _warm_up(watch, sampler, rules, first)
        if pace:
            pace.begin(call, calls)
        paced, clean, disturbed, lost = Paced(pace), list[Sample](), 0, 0.0
        while True:
            sample = sampler.take(calls)
            paced.add(sample)
            if sample.clean:
                clean.append(sample)
            stopped = _stop(unslowed([one for one in paced.samples if one.clean]) if paced.of_a_card else clean, rules)
            if not sample.clean and not sample.stopped:
                disturbed, lost = disturbed + 1, lost + sample.seconds * sample.calls + REST
                if not stopped and disturbed >= FEWEST and lost > LONGEST_WAIT:
                    stopped = "busy"
            if stopped:
                paced.close()
                return Timing(first_call_s, tuple(paced.samples), stopped)
            if not sample.clean:
                sleep(REST)


def _warm_up(watch: Stopwatch, sampler: Sampler, rules: TimingRules, first: Sample) -> int:
    spent, calls_made, quickest = (0.0 if first.stopped else first.seconds), 1, math.inf
    calls = 1
    shortest = max(rules.shortest_sample, watch.cost() / OVERHEAD)
    enough = rules.warmup_time / rules.rounds
    while spent < enough or (calls_made < rules.warmup_calls and spent < 5 * enough):
        sample = sampler.take(calls)
        if sample.stopped:
            continue
        seconds = sample.seconds * calls
        quickest = min(quickest, sample.seconds)
        spent += seconds
        calls_made += calls
        if seconds < shortest:
            calls *= 2
    if math.isinf(quickest):
        quickest = first.seconds
    return max(1, math.ceil(shortest / quickest))


def counting(samples: Sequence[Sample], enough: int = ENOUGH) -> list[Sample]:
    """The clean samples; if they are not ``enough``, those whose threads waited slightly; none if these are not."""
    for most in (WAITED, WAITED_SLIGHTLY):
        found = [sample for sample in samples if sample.share_waited <= most and not sample.stopped]
        if len(found) >= min(enough, len(samples)):
            return found
    return []


def slowed(samples: Sequence[Sample]) -> list[bool]:
    """The samples that the card slowed: it throttled meanwhile, or its clock was :data:`FELL` below the highest of
    all."""
    highest = max((one.sm_mhz or 0 for one in samples), default=0)
    return [bool(one.throttled) or (one.sm_mhz or highest) < (1 - FELL) * highest for one in samples]


def unslowed(samples: Sequence[Sample]) -> list[Sample]:
    """The samples that the card did not slow; all if it slowed most: that is its speed under this load."""
    free = [one for one, slow in zip(samples, slowed(samples), strict=True) if not slow]
    return free if 2 * len(free) >= len(samples) else list(samples)


def why_throttled(bits: int) -> str:
    """The reasons for throttling, in words: ``power cap, heat``; empty without any."""
    return ", ".join(dict.fromkeys(word for bit, word in THROTTLES.items() if bits & bit))


def slowed_warning(samples: Sequence[Sample]) -> str | None:
    """The warning about samples that the card slowed; None if they are no more than :data:`TOLD`."""
    slow, bits = sum(slowed(samples)), 0
    if slow <= TOLD * len(samples):
        return None
    for one in samples:
        bits |= one.throttled
    clocks = [one.sm_mhz for one in samples if one.sm_mhz is not None]
    fell = f"the clock of the card fell to {min(clocks, default=0)} of {max(clocks, default=0)} MHz"
    why = f"the card throttled: {why_throttled(bits)}" if bits else fell
    counts = "left out" if len(unslowed(samples)) < len(samples) else "which count: so fast is it under this load"
    return f"{why} ({slow} of {len(samples)} samples, {counts})"


def _stop(samples: Sequence[Sample], rules: TimingRules) -> str:
    if rules.quick:
        return "quick" if samples else ""
    share = 1 / rules.rounds
    spent = sum(sample.seconds * sample.calls for sample in samples)
    if len(samples) >= rules.max_samples * share:
        return "budget"
    over_budget = spent >= rules.max_time * share
    if over_budget and len(samples) >= FEWEST * share:
        return "budget"
    if spent < rules.min_time * share or len(samples) < rules.min_samples * share:
        return ""
    seconds = [sample.seconds for sample in samples]
    interval = interval_of_visit(seconds)
    width = rules.width * math.sqrt(rules.rounds)  # over all rounds it is narrower by that
    narrow = interval is not None and (interval[1] - interval[0]) / 2 <= width * median(seconds)
    return "width" if narrow else ""


@contextmanager
def garbage_collection_off() -> Iterator[None]:
    """Collect garbage once now, and not again until the end of the block."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True, slots=True)
class TimeSummary:
    """Statistics of all samples of a cell, in seconds."""

    median: float
    interval: tuple[float, float] | None
    iqr: float
    minimum: float
    used: int
    warnings: tuple[str, ...]


def summarise(rounds: Sequence[Sequence[Sample]], *, quick: bool = False) -> TimeSummary:
    """Median, interval and warnings of the clean samples of each visit to the cell.

    Raises Disturbed if threads waited in nearly all samples, ValueError without one of a running process.
    """
    stopped = sum(sample.stopped for samples in rounds for sample in samples)
    rounds = [[sample for sample in samples if not sample.stopped] for samples in rounds]
    every = [sample for samples in rounds for sample in samples]
    if not every:
        raise ValueError("no sample of a process that was running")
    # Older versions kept all samples if few were clean, and their rows say so.
    old = any(sample.waited is None for sample in every)
    own = counting(every, FEWEST if old else 1 if quick else ENOUGH)
    total, contaminated = len(every), sum(not sample.clean for sample in every)
    if not own and not old:
        waited, whole = sum(one.waited or 0.0 for one in every), sum(one.seconds * one.calls for one in every)
        raise Disturbed(
            f"its threads waited for a core in {contaminated} of {total} samples, for {waited:.2g} s in {whole:.2g} s; "
            + CLOSE_OTHERS
        )
    late = max((sample.share_waited for sample in own if not sample.clean), default=0.0)
    kept = f"too few others: the interval reaches down by {late:.1%}" if late else "left out"
    kept = kept if own else "kept, too few clean ones"
    own = own or every
    by_card, free = slowed_warning(own), set(map(id, unslowed(own)))
    used = [[sample.seconds for sample in samples if id(sample) in free] for samples in rounds]
    interval = interval_over_rounds(used)
    seconds = [one for samples in used for one in samples]
    middle, spread = median(seconds), interquartile_range(seconds)
    warnings = []
    if stopped:
        warnings.append(f"{stopped} of {total + stopped} samples left out: the process was stopped meanwhile")
    if by_card:
        warnings.append(by_card)
    if not quick:
        if spread > 0.25 * middle:
            warnings.append(f"unstable: IQR {spread / middle:.0%} of the median; close other programs")
        elif spread > 0.10 * middle:
            warnings.append(f"noisy: IQR {spread / middle:.0%} of the median; raise --min-time")
        if contaminated > TOLD * total:
            warnings.append(f"{contaminated} of {total} samples disturbed by other processes ({kept}); close them")
    return TimeSummary(
        median=middle,
        interval=interval and (interval[0] * (1 - late), interval[1]),
        iqr=spread,
        minimum=min(seconds),
        used=len(seconds),
        warnings=tuple(warnings),
    )
