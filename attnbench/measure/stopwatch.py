"""Readings before and after a call: the host's clock, and the times that another process took the core.

All of it is bound at import, before anything foreign: a plug-in that patches :mod:`time` changes no measured time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from resource import RUSAGE_SELF, getrusage
from typing import Protocol


def _involuntary_switches() -> int:
    return getrusage(RUSAGE_SELF).ru_nivcsw


class ClockError(RuntimeError):
    """The clock stands still, runs backwards or gives no time at all, or the process never runs."""


READS = 32
"""Looks at the clock that measure its cost; few, so that a clock that stands still is soon found."""


class Stopwatch(Protocol):
    """Times a number of calls."""

    def cost(self) -> float:
        """Seconds that a look at the clock adds to a sample."""

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
