"""What is looked at before and after a call: the host's clock, and how often another process took the core.

All of it is bound here, when this module is imported, which is before anything foreign is: a plug-in that puts another
clock into :mod:`time` changes no time that is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

try:
    from resource import RUSAGE_SELF, getrusage
except ImportError:  # Windows has no getrusage: contamination is not seen there

    def _involuntary_switches() -> int:
        return 0
else:

    def _involuntary_switches() -> int:
        return getrusage(RUSAGE_SELF).ru_nivcsw


class ClockError(RuntimeError):
    """The clock stands still, runs backwards or gives no time at all, or the process never runs."""


READS = 32
"""Number of looks at the clock that tell what one costs; few enough that a clock that stands still is soon found."""


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
