"""How long one call takes: warm-up apart, first call apart, every sample kept, stopped by interval width only."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from attnbench.measure.statistics import FEWEST, interquartile_range, interval_over_rounds, median, median_interval

try:
    import resource
except ImportError:  # Windows has no getrusage: contamination is not seen there
    resource = None  # type: ignore[assignment]  # the module's absence is the information


class ClockError(RuntimeError):
    """The clock stands still, runs backwards or gives something that is not a time."""


READS = 32
"""Looks at the clock to find out what one costs: few enough for a clock that stands still to be found out soon."""
OVERHEAD = 5e-4
"""Of a sample for looking at the clock: half of the thousandth that it may take, since batches are sized from times
that hold the looking as well."""


@dataclass(frozen=True, slots=True)
class TimingRules:
    """When to stop. Times in seconds, over all rounds together."""

    min_time: float = 0.5
    max_time: float = 3.0
    min_samples: int = 20
    max_samples: int = 1000
    width: float = 0.02
    """Stop when the interval's half width is at most this share of the median; never on significance."""
    warmup_time: float = 0.2
    warmup_calls: int = 3
    shortest_sample: float = 1e-3
    """Calls are batched until a sample takes this long, and far longer than looking at the clock."""
    rounds: int = 1
    quick: bool = False
    """One sample after the first call, no interval."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds per call, over ``calls`` calls; ``switches``: how often another process took the core meanwhile."""

    seconds: float
    calls: int
    switches: int = 0

    @property
    def clean(self) -> bool:
        """Few enough involuntary context switches for the time to be this program's own."""
        return self.switches <= 1 + 50 * self.seconds * self.calls

    def to_json(self) -> dict[str, float]:
        """As it is stored."""
        return {"seconds": self.seconds, "calls": self.calls, "switches": self.switches}


class Stopwatch(Protocol):
    """Times a number of calls."""

    def cost(self) -> float:
        """Seconds that looking at the clock adds to a sample."""

    def time(self, call: Callable[[], object], calls: int) -> tuple[float, int]:
        """Seconds for all calls together, and involuntary context switches during them."""


@dataclass(slots=True)
class WallClock:
    """The host's monotonic clock. ``sync`` waits for the device."""

    clock: Callable[[], int] = time.perf_counter_ns
    sync: Callable[[], None] = lambda: None

    def cost(self) -> float:
        start = self.clock()
        for _ in range(READS):
            end = self.clock()
        return (end - start) / READS / 1e9

    def time(self, call: Callable[[], object], calls: int) -> tuple[float, int]:
        self.sync()
        before = _involuntary_switches()
        start = self.clock()
        for _ in range(calls):
            call()
        self.sync()
        end = self.clock()
        return (end - start) / 1e9, _involuntary_switches() - before


class CudaEvents:
    """Device time between two events around each call, with the L2 cache flushed before each.

    Nobody waits between the calls: the host queues the next one while the device still works, as it does in a model.
    """

    def __init__(self, device: str) -> None:
        import torch

        self._torch = torch
        self._device = torch.device(device)
        size = torch.cuda.get_device_properties(self._device).L2_cache_size
        self._flush = torch.empty(2 * max(size, 1 << 20), dtype=torch.uint8, device=self._device)

    def cost(self) -> float:
        return 5e-7  # the resolution of an event, by CUDA's documentation of cudaEventElapsedTime

    def time(self, call: Callable[[], object], calls: int) -> tuple[float, int]:
        cuda = self._torch.cuda
        events = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in range(calls)]
        cuda.synchronize(self._device)
        for start, end in events:
            self._flush.zero_()
            start.record()
            call()
            end.record()
        cuda.synchronize(self._device)
        return sum(start.elapsed_time(end) for start, end in events) / 1e3, 0


@dataclass(frozen=True, slots=True)
class Timing:
    """The samples of one round, and the first call, in seconds."""

    first_call_s: float
    samples: tuple[Sample, ...] = field(default=())
    stopped: str = "width"
    """``width`` (narrow enough), ``budget`` (max_time or max_samples), ``quick``."""


def measure_time(
    call: Callable[[], object],
    rules: TimingRules,
    *,
    stopwatch: Stopwatch | None = None,
    earlier: Sequence[Sample] = (),
) -> Timing:
    """Time ``call`` for one round of ``rules.rounds``; ``earlier`` holds the samples of the rounds before.

    Raises:
        ClockError: a duration of zero, below zero or not finite.
    """
    watch = stopwatch or WallClock()
    with garbage_collection_off():
        first, switches = checked(watch, call, 1)
        if rules.quick:
            seconds, switches = checked(watch, call, 1)
            return Timing(first, (Sample(seconds, 1, switches),), "quick")
        calls = _warm_up(watch, call, rules, first)
        samples: list[Sample] = []
        spent = 0.0
        while True:
            seconds, switches = checked(watch, call, calls)
            samples.append(Sample(seconds / calls, calls, switches))
            spent += seconds
            stopped = _stop(samples, earlier, spent, rules)
            if stopped:
                return Timing(first, tuple(samples), stopped)


def _warm_up(watch: Stopwatch, call: Callable[[], object], rules: TimingRules, first: float) -> int:
    """Run until caches, allocator and clocks have settled; returns how many calls make one sample."""
    spent, calls_made, quickest = first, 1, math.inf
    calls = 1
    shortest = max(rules.shortest_sample, watch.cost() / OVERHEAD)
    enough = rules.warmup_time / rules.rounds
    while spent < enough or (calls_made < rules.warmup_calls and spent < 5 * enough):
        seconds, _ = checked(watch, call, calls)
        quickest = min(quickest, seconds / calls)
        spent += seconds
        calls_made += calls
        if seconds < shortest:
            calls *= 2
    if math.isinf(quickest):
        quickest = first
    return max(1, math.ceil(shortest / quickest))


def _stop(samples: Sequence[Sample], earlier: Sequence[Sample], spent: float, rules: TimingRules) -> str:
    """Why to stop now, or the empty string."""
    share = 1 / rules.rounds
    if len(samples) >= rules.max_samples * share:
        return "budget"
    over_budget = spent >= rules.max_time * share
    if over_budget and len(samples) >= FEWEST * share:
        return "budget"
    if spent < rules.min_time * share or len(samples) < rules.min_samples * share:
        return ""
    everything = [sample.seconds for sample in (*earlier, *samples)]
    interval = median_interval(everything)
    narrow = interval is not None and (interval[1] - interval[0]) / 2 <= rules.width * median(everything)
    return "width" if narrow else ""


def checked(watch: Stopwatch, call: Callable[[], object], calls: int) -> tuple[float, int]:
    """What the stopwatch says, if it is a time.

    Raises:
        ClockError: zero, below zero or not finite.
    """
    seconds, switches = watch.time(call, calls)
    if not (math.isfinite(seconds) and seconds > 0):
        raise ClockError(f"the clock gave {seconds} s for {calls} call(s)")
    return seconds, switches


def _involuntary_switches() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if resource else 0


@contextmanager
def garbage_collection_off() -> Iterator[None]:
    """Collected once now, and not again until the end of the block."""
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
    """The statistic of all samples of a cell, in seconds."""

    median: float
    interval: tuple[float, float] | None
    iqr: float
    minimum: float
    used: int
    contaminated: int
    warnings: tuple[str, ...]


def summarise(rounds: Sequence[Sequence[Sample]], *, quick: bool = False) -> TimeSummary:
    """Median, interval and warnings; contaminated samples are left out where at least six clean ones remain.

    Args:
        rounds: the samples of each visit to the cell.

    Raises:
        ValueError: no sample.
    """
    total = sum(map(len, rounds))
    contaminated = sum(not sample.clean for samples in rounds for sample in samples)
    drop = total - contaminated >= min(FEWEST, total)
    used = [[sample.seconds for sample in samples if sample.clean or not drop] for samples in rounds]
    seconds = [one for samples in used for one in samples]
    middle, spread = median(seconds), interquartile_range(seconds)
    warnings = []
    if not quick:
        if spread > 0.25 * middle:
            warnings.append(f"unstable: IQR {spread / middle:.0%} of the median; close other programs")
        elif spread > 0.10 * middle:
            warnings.append(f"noisy: IQR {spread / middle:.0%} of the median; raise --min-time")
        if contaminated:
            kept = "left out" if drop else "kept, too few clean ones"
            warnings.append(f"{contaminated} of {total} samples disturbed by other processes ({kept}); close them")
    return TimeSummary(
        median=middle,
        interval=interval_over_rounds(used),
        iqr=spread,
        minimum=min(seconds),
        used=len(seconds),
        contaminated=contaminated,
        warnings=tuple(warnings),
    )
