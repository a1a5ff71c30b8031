"""A machine that nobody asks any more ends itself, lest it measure beside its successor.

The driver may give a machine up that is merely out of reach, and Ray's actors live on where the process is gone that
started them. So a machine holds a lease, which every call renews.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

PATIENCE = 60.0
"""Seconds without a call after which a machine ends itself; in a call, beyond what the call may take."""
_EVERY = 1.0
"""Seconds between two looks."""


def clock() -> float:
    """Seconds that go on while the machine is stopped or asleep."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


class Lease:
    """How long a machine may go on without a call."""

    def __init__(self, clock: Callable[[], float] = clock, parent: Callable[[], int] = os.getppid) -> None:
        self._clock, self._parent = clock, parent
        self._owner = parent()
        self._until = clock() + PATIENCE

    def renew(self, seconds: float = 0.0) -> None:
        """Allow :data:`PATIENCE` from now on, and ``seconds`` for what begins now."""
        self._until = self._clock() + seconds + PATIENCE

    def why_over(self) -> str:
        """Why the machine must end now; empty where it may go on."""
        if self._parent() != self._owner:
            return "the process that started it is gone"
        return f"no call for {PATIENCE:.0f} s" if self._clock() > self._until else ""

    def watch(self, end: Callable[[str], None]) -> None:
        """Look every second from now on, in a thread; ``end`` is called with the reason once the lease is over."""

        def look() -> None:
            while not (why := self.why_over()):
                time.sleep(_EVERY)
            end(why)

        threading.Thread(target=look, daemon=True, name="lease").start()
