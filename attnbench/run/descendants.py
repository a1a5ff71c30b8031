"""The processes that a cell started and left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MARK = "ATTNBENCH_WORKER"
"""Variable that all descendants of a worker inherit, whatever session they moved to and whoever adopted them."""
_COMPILER = b"_inductor/compile_worker"
"""In the command line of the processes in which torch compiles."""


def end_descendants(mark: str, worker: int, *, spare: bool) -> None:
    """On Linux, kill every process that ``worker`` started or that inherited ``mark`` from it, until none is left.

    Args:
        spare: the worker goes on, and with it the compilers that torch keeps for the next compilation.
    """
    ended = {worker} if spare else set()
    while found := set(_processes(mark.encode(), worker, _COMPILER if spare else None)) - ended:
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        ended |= found


def _processes(mark: bytes, parent: int, spared: bytes | None) -> Iterator[int]:
    """Children of ``parent``, which just after their birth have no mark yet, and all that have the mark."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # another user's, or gone
            child = (entry / "stat").read_bytes().rpartition(b")")[2].split()[1] == b"%d" % parent
            ours = child or mark in (entry / "environ").read_bytes().split(b"\0")
            if ours and (spared is None or spared not in (entry / "cmdline").read_bytes()):
                yield int(entry.name)
