"""The outcomes of a cell."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """One word for each outcome; only ``ok`` rows have numbers to compare."""

    OK = "ok"
    UNSUPPORTED = "unsupported"
    OOM = "oom"
    TIMEOUT = "timeout"
    CRASH = "crash"
    NONFINITE = "nonfinite"
    ERROR = "error"
    INTERRUPTED = "interrupted"
    DISTURBED = "disturbed"

    @property
    def meaning(self) -> str:
        return _MEANING[self]


STOPPING = (Status.OOM, Status.TIMEOUT)
"""Outcomes that hold for every longer sequence of the same cell too."""

UNFINISHED = (Status.INTERRUPTED, Status.DISTURBED)
"""Outcomes that say nothing about the cell: the same command measures it again."""

FIRST_CALL = "raise --first-call-timeout"
"""Words in the reason of a row whose first call took too long. Longer lengths of the same cell may be faster."""

_MEANING = {
    Status.OK: "measured",
    Status.UNSUPPORTED: "the variant's mathematics does not allow it; the reason says why",
    Status.OOM: "needs more memory than the limit",
    Status.TIMEOUT: "took longer than --cell-timeout, or in its first call than --first-call-timeout",
    Status.CRASH: "killed the process it ran in",
    Status.NONFINITE: "output holds NaN or infinity, so it was not timed",
    Status.ERROR: "raised an exception",
    Status.INTERRUPTED: "stopped by the user before it was done",
    Status.DISTURBED: "kept waiting for a core, so that no time is its own; the same command measures it anew",
}
