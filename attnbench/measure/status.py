"""The outcomes of a cell."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Status(StrEnum):
    """One word for each outcome; only ``ok`` rows have numbers to compare."""

    meaning: str

    OK = "ok", "measured"
    UNSUPPORTED = "unsupported", "the variant's mathematics does not allow it; the reason says why"
    OOM = "oom", "needs more memory than the limit"
    TIMEOUT = "timeout", "took longer than --cell-timeout, or in its first call than --first-call-timeout"
    CRASH = "crash", "killed the process it ran in"
    NONFINITE = "nonfinite", "output holds NaN or infinity, so it was not timed"
    ERROR = "error", "raised an exception"
    INTERRUPTED = "interrupted", "stopped by the user before it was done"
    DISTURBED = "disturbed", "kept waiting for a core, so that no time is its own; the same command measures it anew"

    def __new__(cls, word: str, meaning: str = "") -> Self:  # a call without it looks a word up
        status = str.__new__(cls, word)
        status._value_, status.meaning = word, meaning
        return status


STOPPING = (Status.OOM, Status.TIMEOUT)
"""Outcomes that hold for every longer sequence of the same cell too."""

UNFINISHED = (Status.INTERRUPTED, Status.DISTURBED)
"""Outcomes that say nothing about the cell: the same command measures it again."""

FIRST_CALL = "raise --first-call-timeout"
"""Words in the reason of a row whose first call took too long. Longer lengths of the same cell may be faster."""
