"""What can go wrong by the user's hand. Each message is one line that says what to change."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of the command line; the README's table repeats them."""

    OK = 0
    FAILED = 1
    USAGE = 2
    CORRUPT = 65
    CANNOT_CREATE = 73
    IO = 74
    LOCKED = 75
    INTERRUPTED = 130
    TERMINATED = 143


class AttnbenchError(Exception):
    """Base of every error that is reported in one line, without a traceback."""

    exit_code = Exit.USAGE

    def __str__(self) -> str:
        return " ".join(super().__str__().splitlines())  # what was typed may hold line breaks


class UsageError(AttnbenchError):
    """A name, option, axis or value that does not exist or does not fit."""


class SuiteError(AttnbenchError):
    """A suite file that cannot be used; the message starts with ``file:line:``."""


class ResultsError(AttnbenchError):
    """A results folder or CSV that cannot be read as one of ours."""


class CorruptResults(ResultsError):
    """Damage inside a results file that is not merely a torn last line."""

    exit_code = Exit.CORRUPT


class StoreError(AttnbenchError):
    """Results cannot be written."""

    exit_code = Exit.IO


class CannotCreate(StoreError):
    """The results folder cannot be made."""

    exit_code = Exit.CANNOT_CREATE


class Locked(StoreError):
    """Another process writes to this results folder."""

    exit_code = Exit.LOCKED


class Unsupported(AttnbenchError):
    """The variant's mathematics does not allow this shape, option or pass; the message is the reason."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'performer'?`` or the empty string."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
