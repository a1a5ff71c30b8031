"""Import plug-ins in a process of their own first: there they may hang, crash or end Python, and not here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from tempfile import TemporaryFile
from time import monotonic

from attnbench.contract.plugins.discovery import HUB, file_of, load
from attnbench.errors import UsageError
from attnbench.harness.outside.isolation import signal_name
from attnbench.harness.wire.descendants import end_all, guard, seconds_waited
from attnbench.harness.wire.process import environment_for
from attnbench.text import one_line

LIMIT = 120.0
"""Seconds to import all plug-ins of a command and end Python, without those in which it waited for a core; ten times as
many for a kernel of the hub to be fetched."""
_LOADED = "loaded"
_tried = set[str]()


def load_all(sources: Sequence[str]) -> None:
    """Load plug-ins in their order, once a process of its own could import them all and end.

    Raises UsageError if one cannot be imported, takes too long to import or to end, or ends Python.
    """
    if new := [file for file in dict.fromkeys(map(file_of, sources)) if file not in _tried]:
        _try(new)
        _tried.update(new)
    for source in sources:
        load(source)


def _try(files: Sequence[str]) -> None:
    named, limit = f"plug-in {', '.join(files)}", LIMIT * (10 if any(one.startswith(HUB) for one in files) else 1)
    with TemporaryFile("w+") as answer, TemporaryFile("w+", errors="replace") as printed:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "attnbench.harness.trial", *files],
            stdin=subprocess.DEVNULL,
            stdout=answer,
            stderr=printed,
            env=environment_for(1),
            start_new_session=True,  # Ctrl-C reaches this process only, which ends the other
        )
        try:
            import torch  # noqa: F401  # meanwhile: whatever follows needs it

            code = _ended(process, limit)
        finally:
            end_all(process.pid)
            process.wait()
        for file in (answer, printed):
            file.seek(0)
        told, last = answer.read(), one_line(printed.read().strip().rpartition("\n")[2])
    doing = "Python ended after it was imported" if told == _LOADED else "it was imported"
    if code is None:
        raise UsageError(f"{named}: {limit:.0f} s passed before {doing}; make its import short, and end its threads")
    if told not in (_LOADED, ""):
        raise UsageError(told)
    if code or not told:
        how = f"by {signal_name(-code)}" if code < 0 else f"with code {code}"
        raise UsageError(f"{named}: Python ended {how} while it was imported{last and f': {last}'}")


def _ended(process: subprocess.Popen[bytes], limit: float) -> int | None:
    """The exit code; None if it does not end in ``limit`` seconds without those in which a thread waited for a core."""
    began, waited = monotonic(), 0.0
    while (left := limit + waited - (monotonic() - began)) > 0:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(left)
        waited = max(seconds_waited(process.pid).values(), default=0.0)
    return None


def main() -> None:
    """The trial process: import each plug-in, and report it before Python ends, or its failure."""
    guard()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is then the plug-in's own
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        for file in sys.argv[1:]:
            load(file)
    except UsageError as problem:
        answer.write(str(problem))
    else:
        answer.write(_LOADED)
    answer.flush()


if __name__ == "__main__":
    main()
