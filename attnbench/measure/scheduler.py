"""The kernel's scheduler: priorities for a core, and the time that threads wait for one.

All of it is bound at import, before anything foreign.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

CLOSE_OTHERS = "close other programs and give the same command again, or measure with fewer --threads"
_PROCESSES = "/proc"
_FIRST = -20
"""The value of nice that gives the largest share of a core."""
_open, _read, _close, _list, _READ_ONLY = os.open, os.read, os.close, os.listdir, os.O_RDONLY


def ask_for_cores() -> None:
    """Rank this process, and all that it starts, before other programs, if the system allows it: to root, mostly.

    Linux shares cores between sessions first, and then between the processes of each: a session of its own is told too.
    """
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _FIRST)
        if os.getsid(0) == os.getpid():
            Path("/proc/self/autogroup").write_text(str(_FIRST), encoding="ascii")


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
