"""Errors that the user can cause or mend. Each message is one line with the remedy."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from difflib import get_close_matches
from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of the command line; the documentation shows this text."""

    OK = 0
    """Done. Cells that failed are rows with a status and a reason."""
    FAILED = 1
    """``run``, ``compare``, ``best``, ``match``, ``score`` and ``swap``: nothing could be measured. ``check``: a law is
    broken. ``gate``: something got worse. Otherwise the measuring process did not start, or an unforeseen error ended
    the command."""
    USAGE = 2
    """Wrong usage, an invalid suite, or an input file or plug-in that cannot be read. Nothing was written."""
    CORRUPT = 65
    """A results file was changed or is damaged. The message names the file, and the line if there is one."""
    CANNOT_CREATE = 73
    """The results folder or an output file cannot be made."""
    IO = 74
    """Results cannot be written (the disk is full, say), their files were removed or replaced during the run, or output
    that was the point of the command was lost. Rows that were written before stay as they are."""
    LOCKED = 75
    """Another run writes to this folder."""
    INTERRUPTED = 130
    """Stopped by Ctrl-C. Finished rows are kept."""
    TERMINATED = 143
    """Stopped by TERM. Finished rows are kept."""


class AttnbenchError(Exception):
    """Base of every error that is reported in one line, without a traceback."""

    exit_code = Exit.USAGE

    def __str__(self) -> str:
        return " ".join(super().__str__().splitlines())  # the user's text in it may hold line breaks


class UsageError(AttnbenchError):
    """A name, option, axis or value that does not exist or does not fit."""


class SuiteError(AttnbenchError):
    """A suite file that cannot be used; the message starts with the file and, if it could be read, the line."""


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


def cannot_write(place: object, error: OSError, elsewhere: str = "choose another place") -> StoreError:
    """The error for a file or folder that the system refuses, with its remedy; one code for one cause."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
    kind, remedy = (StoreError, "make room") if full else (CannotCreate, elsewhere)
    return kind(f"cannot write {place}: {error.strerror}; {remedy}")


class Locked(StoreError):
    """Another process writes to this results folder."""

    exit_code = Exit.LOCKED


class NothingMeasured(AttnbenchError):
    """Every cell failed; the results say how each one did."""

    exit_code = Exit.FAILED


class Unsupported(AttnbenchError):
    """The variant's mathematics does not allow this shape, option or pass; the message is the reason."""


_PYDANTIC = {
    "Value error, ": "",
    "Input should be": "must be",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "a valid integer, unable to parse string as an integer": "a whole number",
    "a valid integer, got a number with a fractional part": "a whole number",
    "a valid integer": "a whole number",
    "a valid number, unable to parse string as a number": "a number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid string": "text",
    "a finite number": "finite",
}


def plain_words(said: str) -> str:
    """Pydantic's message about one value, reworded to follow the value's name: ``must be at least 1``."""
    for theirs, ours in _PYDANTIC.items():
        said = said.replace(theirs, ours)
    return " ".join(said.split()).rstrip(".")


def shell_word(name: str) -> str:
    """``name`` as one word without shell quotes: ``formula's gradients`` as ``formulas-gradients``."""
    return name.replace(" ", "-").replace("'", "")


def any_of(words: Iterable[str]) -> str:
    """``a, b or c``."""
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def not_by_commas(names: Iterable[str]) -> str:
    """The remedy for a first line of CSV whose columns are parted by semicolons or tabs; else empty."""
    sign = next((sign for sign in (";", "\t") for name in names if sign in name), "")
    return sign and f"the columns are parted by {sign!r}; part them by commas"


class BrokenContract(AttnbenchError):
    """A variant breaks a rule for all variants: it returns a wrong shape, say, or an earlier result."""


def said(error: BaseException) -> str:
    """``ValueError: no such thing``: kind and message, even if a foreign class raises an error in ``__str__``."""
    name = type.__dict__["__name__"].__get__(type(error))  # a class may hide its name
    try:
        text = str(error)
    except BaseException:
        text = ""
    return f"{name}: {text}".rstrip(": ")


_ELSEWHERE = {
    "gpu": "cuda",
    "nvidia": "cuda",
    "fp64": "float64",
    "double": "float64",
    "fp32": "float32",
    "float": "float32",
    "single": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
}
"""Names used elsewhere -> their names here."""


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """``; did you mean 'performer'?``, or an empty text if no similarity reaches ``cutoff`` (1 means equal)."""
    known = list(known)
    same = _ELSEWHERE.get(name.lower())
    close = [same] if same in known else get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""


class Diverged(Exception):  # an outcome of the training, not an error of ours
    """The loss became NaN or infinity."""
