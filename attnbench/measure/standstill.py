"""Detect time that is not the program's: the process stood still, or its threads waited for a core.

A thread that is ready and has no core waits for one: other programs have them all. The kernel counts that time for each
thread, its run delay. A call with two threads takes as long as the one that waits, however quick the other is, and an
involuntary context switch does not tell how long the wait was.

A process stands still if a signal or a debugger stopped it, or a laptop's lid was shut. Three things tell, and none of
them costs anything during the call:

- SIGCONT, which the kernel sends to whatever goes on after SIGSTOP or Ctrl-Z, however short the stop was;
- the clock that counts on while the machine sleeps, beside the one that does not;
- time in which the thread neither worked nor waited for a core, far more than the same call is otherwise idle: a
  debugger or a frozen container. A call that sleeps, or waits for a device, does so every time.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

_PROCESSES = "/proc"
_LEAST = 0.2
"""Fewer idle seconds than this are ignored."""
_SHARE = 0.5
"""Share of the time that passed; above it the thread was idle for longer than it worked."""
_MEMORY = 3

# Bound before anything foreign is imported, which may put another clock in their place.
_clock, _thread_time, _read_clock = time.perf_counter, time.thread_time, getattr(time, "clock_gettime", None)
_BOOT_CLOCK, _AWAKE_CLOCK = getattr(time, "CLOCK_BOOTTIME", None), getattr(time, "CLOCK_MONOTONIC", None)
_open, _read, _close, _list, _READ_ONLY = os.open, os.read, os.close, os.listdir, os.O_RDONLY

_continued = 0


def notice_stops() -> None:
    """Count the continuations of this process from now on; only in the main thread, and not on Windows."""
    if hasattr(signal, "SIGCONT") and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCONT, _count)
        signal.siginterrupt(signal.SIGCONT, False)  # a read inside a library must not fail for it


def _count(*_: object) -> None:
    global _continued
    _continued += 1


def run_delays(process: int | str = "self") -> dict[str, float]:
    """Seconds for which each thread of a process was ready without a core, by its number; empty if unknown."""
    delays, threads = {}, f"{_PROCESSES}/{process}/task"
    with suppress(OSError):
        for thread in _list(threads):
            with suppress(OSError, ValueError, IndexError):  # the thread has ended, or the kernel counts nothing
                file = _open(f"{threads}/{thread}/schedstat", _READ_ONLY)  # of Python's own: four times as long
                try:
                    ran, waited = _read(file, 100).split()[:2]
                finally:
                    _close(file)
                if int(ran):
                    delays[thread] = int(waited) / 1e9
    return delays


@dataclass(frozen=True, slots=True)
class Moment:
    """The state at one moment; two tell about the time between. All but ``continued`` in seconds."""

    passed: float
    busy: float
    """Time for which this thread had a core or waited for one."""
    asleep: float
    """Time for which the machine slept."""
    continued: int
    delays: Mapping[str, float] = field(default_factory=dict)
    """Run delay of each thread of the process; empty if unknown."""

    @classmethod
    def now(cls) -> Moment:
        """The present moment, as this thread sees it."""
        asleep = 0.0
        if _read_clock and _BOOT_CLOCK is not None and _AWAKE_CLOCK is not None:
            asleep = _read_clock(_BOOT_CLOCK) - _read_clock(_AWAKE_CLOCK)
        delays = run_delays()
        own = delays.get(str(threading.get_native_id()), 0.0)
        return cls(_clock(), _thread_time() + own, asleep, _continued, delays)

    def delay_until(self, end: Moment) -> float:
        """Seconds for which all threads of the process together waited for a core between two moments."""
        # A thread that ended meanwhile has no second number, one that was started meanwhile no first.
        return sum(max(0.0, delay - self.delays.get(thread, 0.0)) for thread, delay in end.delays.items())


class Standstill:
    """Tells, for calls of one kind, between which moments the process stood still."""

    def __init__(self) -> None:
        self._idle: deque[float] = deque(maxlen=_MEMORY)
        """Idle seconds per call, for the last calls in which no signal and no sleep was seen."""
        self.waited = 0.0
        """Seconds for which threads waited for a core between the last two moments. If the kernel does not tell: for
        which this thread was idle, beyond the idle time of the calls before it."""

    def between(self, start: Moment, end: Moment, calls: int = 1) -> bool:
        """True if the process stood still at some time between two moments, while it made ``calls`` calls."""
        passed = end.passed - start.passed
        idle = max(0.0, passed - (end.busy - start.busy))
        unusual = idle - calls * min(self._idle, default=idle / calls)
        self.waited = start.delay_until(end) if end.delays else max(0.0, unusual)
        if end.continued != start.continued or end.asleep - start.asleep > _LEAST / 2:
            return True
        self._idle.append(idle / calls)
        return unusual > max(_LEAST, _SHARE * passed)
