"""End everything that a cell starts, whatever session it moved to and however it changed its environment.

On Linux the worker is the child of a guard. The kernel makes the guard the parent of every orphan below it, so none
gets away unless the guard itself is killed. On other systems a process that leaves its process group gets away.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from attnbench.measure.standstill import run_delays

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_AWAITED = (signal.SIGCHLD, signal.SIGTERM)
_COMPILER = b"_inductor/compile_worker"


def guard() -> None:
    """On Linux, go on in a child process and leave this one as its guard.

    The guard ends all below it, and itself in the child's way, when the child or its own parent ends, or at SIGTERM.
    """
    if sys.platform != "linux":
        return
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    child = os.fork()
    if not child:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
        return
    try:
        os.closerange(0, 3)  # otherwise nobody would notice that the child closed them
        code = None
        while code is None and signal.sigwait(_AWAITED) == signal.SIGCHLD:
            code = _exit_code(child)
        me = os.getpid()
        while below := [pid for pid, (parent, _) in _processes() if parent == me]:
            for pid in below:
                os.kill(pid, signal.SIGKILL)
            for pid in below:
                os.waitpid(pid, 0)
        _end(-signal.SIGTERM if code is None else code)
    finally:
        os._exit(255)


def _exit_code(child: int) -> int | None:
    code = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def _end(code: int) -> None:
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has written its own core file
    with suppress(OSError):  # SIGKILL can have no other handler
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
    os.kill(os.getpid(), -code)


def end_left_behind(guard: int) -> int:
    """On Linux, kill all below ``guard`` but the worker and torch's compilers; return their number."""
    ended: set[int] = set()
    while found := set(_left_behind(guard)) - ended:
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        ended |= found
    return len(ended)


def end_all(guard: int) -> None:
    """Kill ``guard``, even if it is stopped, and then all below it: while it lives, it may start others."""
    below = {guard, *_below(guard)} if sys.platform == "linux" else {guard}
    for pid in sorted(below, key=lambda pid: pid != guard):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)  # ends stopped processes as well


def seconds_used(guard: int) -> float:
    """Processor time of ``guard`` and all below it, ended processes included; 0 if the system does not say."""
    ticks = 0
    for pid in (guard, *_below(guard)) if sys.platform == "linux" else ():
        with suppress(OSError):  # gone
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # its own, and of the children that it waited for
    return ticks / float(os.sysconf("SC_CLK_TCK")) if ticks else 0.0


def seconds_waited(guard: int) -> dict[str, float]:
    """Seconds for which each thread of ``guard`` and of the process that measures was ready without a core; empty if
    unknown."""
    delays = run_delays(guard)
    with suppress(OSError, IndexError):
        delays |= run_delays(Path(f"/proc/{guard}/task/{guard}/children").read_text(encoding="ascii").split()[0])
    return delays


def _below(process: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in sorted(_processes(), key=lambda one: one[1][1]):
        children.setdefault(parent, []).append(pid)
    found = list(children.get(process, []))
    for pid in found:
        found += children.get(pid, [])
    return found


def _left_behind(guard: int) -> Iterator[int]:
    for pid in _below(guard)[1:]:  # the guard's first child measures
        with suppress(OSError):  # gone
            if _COMPILER not in Path(f"/proc/{pid}/cmdline").read_bytes():
                yield pid


def _processes() -> Iterator[tuple[int, tuple[int, int]]]:
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # gone
            fields = entry.read_bytes().rpartition(b")")[2].split()
            yield int(entry.parent.name), (int(fields[1]), int(fields[19]))
