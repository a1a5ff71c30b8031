"""The kernel's scheduler: how long it kept threads waiting for a core, and how soon it gives them one after a rest.

All of it is bound here, when this module is imported, which is before anything foreign is.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from contextlib import suppress

_THREADS = "/proc/self/task"
_SLICE = 100_000
"""Nanoseconds of a time slice, the shortest that Linux takes."""
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275), "riscv64": (274, 275)}
"""Numbers of the system calls that set and tell the scheduling of a thread, by architecture."""
_ATTRIBUTES = struct.Struct("IIQiIQQQ")
"""Linux's ``sched_attr``: size, policy, flags, nice, priority, runtime, deadline, period."""

_open, _read, _close, _list, _READ_ONLY = os.open, os.read, os.close, os.listdir, os.O_RDONLY


def run_delays() -> dict[str, float]:
    """Seconds for which each thread of this process was ready and had no core, by its number; empty if nobody tells."""
    delays = {}
    with suppress(OSError):
        for thread in _list(_THREADS):
            with suppress(OSError, ValueError, IndexError):  # the thread has ended, or the kernel counts nothing
                file = _open(f"{_THREADS}/{thread}/schedstat", _READ_ONLY)  # of Python's own: four times as long
                try:
                    ran, waited = _read(file, 100).split()[:2]
                finally:
                    _close(file)
                if int(ran):
                    delays[thread] = int(waited) / 1e9
    return delays


def ask_for_short_slices() -> bool:
    """Ask for short time slices, for this thread and all that it will start; return whether Linux grants them.

    A thread of a short slice gets a core sooner after a rest, and no larger share of it. Beside one busy program on two
    cores, half of all samples of three milliseconds with two threads are undisturbed then, instead of one in forty.
    Linux takes such a wish from 6.12 on; older versions ignore it.
    """
    numbers = _CALLS.get(platform.machine()) if platform.system() == "Linux" else None
    if numbers is None:
        return False
    call, told = ctypes.CDLL(None).syscall, ctypes.create_string_buffer(_ATTRIBUTES.size)
    to_set, to_get = numbers
    if call(to_get, 0, told, _ATTRIBUTES.size, 0):
        return False
    _, policy, flags, nice, *_ = _ATTRIBUTES.unpack(told.raw)
    wanted = _ATTRIBUTES.pack(_ATTRIBUTES.size, policy, flags, nice, 0, _SLICE, 0, 0)
    if policy not in (os.SCHED_OTHER, os.SCHED_BATCH) or call(to_set, 0, wanted, 0):
        return False
    call(to_get, 0, told, _ATTRIBUTES.size, 0)
    return bool(_ATTRIBUTES.unpack(told.raw)[5] == _SLICE)
