"""stdout and stderr that never stop a command: what cannot be written is dropped, and reported at the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast


class Lasting:
    """A text stream that goes on in silence once nothing more can be written to it."""

    def __init__(self, stream: TextIO, lost: str = "") -> None:
        self._stream = stream
        self.lost = lost
        """Why something was not written; empty if all was, or if a reader has seen enough (``| head``)."""
        self.only_repeats = False
        """Whether what is written here is in files as well."""

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        if not isinstance(error, BrokenPipeError):
            self.lost = self.lost or error.strerror or str(error)
        # What is still in the stream's buffer goes there as well; otherwise it would raise again when Python ends.
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting_streams() -> Iterator[Lasting]:
    """Make stdout and stderr lasting inside this context; yield stdout."""
    _open_missing()
    before = sys.stdout, sys.stderr
    out, err = (_lasting(stream, number) for number, stream in enumerate(before, start=1))
    sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, err)
    try:
        yield out
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = before


def _lasting(stream: TextIO | None, number: int) -> Lasting:
    if stream is not None:
        return Lasting(stream)
    return Lasting(open(number, "w", encoding="utf-8", closefd=False), "it is closed")


def _open_missing() -> None:
    """Open streams that were closed before this program began, on the null device.

    Otherwise the next opened file would take such a stream's number, and prints would go into a file of results.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # open takes the lowest free number
