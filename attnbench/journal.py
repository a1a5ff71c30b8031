"""A file of JSON lines that only grows, each line sealed with a digest of itself and of all lines before it.

A line that was changed, repeated, removed or moved breaks the chain of seals at that point. Only the last line may be
torn, if the process that was writing it ended.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnbench.errors import CorruptResults, StoreError
from attnbench.files import read_stored
from attnbench.record import SEAL, one_line

_REMEDY = "restore it or start with --fresh"
_CHANGED = "this line was changed, or one before it was removed"
GONE = "the folder is gone, and the rows in it; run the same command again"


@dataclass(frozen=True, slots=True)
class Page:
    """What a journal holds."""

    rows: list[dict[str, Any]]
    """The row of each line, in order, with its seal under ``seal`` if the file is sealed."""
    seal: str
    """Seal of the last line."""
    size: int
    """Bytes of all whole lines."""
    torn: str = ""
    """Place of a last line that is not whole, as file and line number; empty where there is none."""
    damage: dict[int, str] = field(default_factory=dict)
    """Number of each line that is not as it was written -> what it is."""


class Journal:
    """One such file. It can be read at any time, and appended to once it is open.

    Raises:
        CorruptResults: a line is not as it was written.
        StoreError: the file cannot be read or written, or is no longer the one that was opened.
    """

    def __init__(self, path: Path, opening: str | None = "", *, is_sealed: bool = True) -> None:
        """A journal at ``path``, whether it exists or not.

        Args:
            opening: what the chain of seals begins with, beside the file's name, so that lines of one run cannot pass
                for those of another. None: it is lost, and the first line is believed.
            is_sealed: whether the run has seals, which is a fact of the run (:func:`attnbench.manifest.is_sealed`).
        """
        self.path, self._is_sealed = path, is_sealed
        # The file's name is a part of it, so that a sample cannot pass for a record.
        self._first = None if opening is None else opening + path.name
        self._handle: int | None = None
        self._is_open = False
        self._seal, self._size, self._lines = self._first or path.name, 0, 0

    def read(self) -> Page:
        """All whole lines, after checking each of them."""
        page = self.look()
        for number, what in page.damage.items():
            raise CorruptResults(f"{self.path}:{number}: {what}; {_REMEDY}")
        return page

    def look(self) -> Page:
        """All whole lines that can be read, and which are not as they were written."""
        data = b""
        try:
            with suppress(FileNotFoundError):
                data = read_stored(self.path)
        except OSError as error:
            raise StoreError(f"cannot read {self.path}: {error.strerror}; check its permissions") from error
        except ValueError as error:
            return Page([], self._first or self.path.name, 0, damage={1: str(error)})
        whole, newline, torn = data.rpartition(b"\n")
        lines = whole.split(b"\n") if newline else []
        before, rows, damage = self._first, [], dict[int, str]()
        for number, text in enumerate(lines, start=1):
            try:
                row = json.loads(text, parse_constant=_refuse)
                if not isinstance(row, dict):
                    raise ValueError("not an object")
                seal = row.pop(SEAL, None)
                if self._is_sealed != isinstance(seal, str):
                    raise ValueError("with a seal of another run" if seal else "without a seal")
                if self._is_sealed and before is not None and not _follows(row, seal, before):
                    damage[number] = _CHANGED
                before = seal or before
                rows.append(row | ({SEAL: seal} if seal else {}))
            except (ValueError, RecursionError) as error:
                damage[number] = _CHANGED if self._is_sealed else f"damaged line: {one_line(str(error))}"
        place = f"{self.path}:{len(lines) + 1}" if torn else ""
        return Page(rows, before or self.path.name, len(whole) + len(newline), place, damage)

    def open(self) -> Page:
        """Prepare for appending: read what is there, cut off a torn last line, and keep this very file open."""
        page = self.read()
        with suppress(FileNotFoundError):
            try:
                self._handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0))
                if page.torn:  # that cell was never acknowledged and will run again
                    os.ftruncate(self._handle, page.size)
            except FileNotFoundError:
                raise
            except OSError as error:
                raise StoreError(f"cannot write {self.path}: {error.strerror}; check its permissions") from error
        self._is_open = True
        self._seal, self._size, self._lines = page.seal, page.size, len(page.rows)
        return page

    def close(self) -> None:
        """Let go of the file."""
        if self._handle is not None:
            os.close(self._handle)
        self._handle, self._is_open = None, False

    def append(self, rows: Sequence[dict[str, Any]]) -> list[str]:
        """Append rows in one write, sync them to the disk and return their seals.

        If that fails, whatever part of them was written is removed again.
        """
        if not self._is_open:
            self.open()
        seals: list[str] = []
        lines: list[str] = []
        for row in rows:
            seals.append(_next_seal(seals[-1] if seals else self._seal, _digested(row)))
            lines.append(json.dumps(row | {SEAL: seals[-1]}, allow_nan=False) + "\n")
        data = "".join(lines).encode()
        try:
            if self._handle is None:  # nothing was there when this journal was opened, so nothing may be there now
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
                self._handle = os.open(self.path, flags, mode=0o666)
            self.refuse_another_file()
            self._write(self._handle, data)
        except OSError as error:
            remedy = "earlier rows are safe, make room and run the same command again"
            if not self.path.parent.is_dir():
                remedy = GONE
            raise StoreError(f"cannot write {self.path}: {error.strerror}; {remedy}") from error
        self._seal = seals[-1] if seals else self._seal
        self._size, self._lines = self._size + len(data), self._lines + len(rows)
        return seals

    @property
    def end(self) -> dict[str, Any]:
        """Lines, bytes and last seal of the open file."""
        return {"lines": self._lines, "bytes": self._size, "seal": self._seal}

    def refuse_another_file(self) -> None:
        """Make sure that the file at this path is the one that was opened, and still has the same length."""
        if self._handle is None:
            return
        ours = os.fstat(self._handle)
        try:
            there = self.path.lstat()
        except OSError:
            what = "was removed"
            if not self.path.parent.is_dir():
                raise StoreError(f"cannot write {self.path}: {GONE}") from None
        else:
            if not os.path.samestat(ours, there):
                what = "was replaced by another file"
            elif ours.st_size != self._size:
                what = "was cut or written to"
            else:
                return
        raise StoreError(f"{self.path} {what} while this run was writing to it; run the same command again")

    def _write(self, handle: int, data: bytes) -> None:
        try:
            if os.write(handle, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(handle)
        except OSError:
            with suppress(OSError):  # if a torn line stays, it is cut off when the run is resumed
                os.ftruncate(handle, self._size)
            raise


def _follows(row: dict[str, Any], seal: str, before: str) -> bool:
    """Whether a row has this seal after a line with the seal ``before``."""
    as_it_stands = json.dumps(row)[:-1].encode()  # older versions digested the columns in the order they wrote
    return seal == _next_seal(before, _digested(row)) or seal == _next_seal(before, as_it_stands)


def _next_seal(before: str, body: bytes) -> str:
    return hashlib.sha256(before.encode() + body).hexdigest()[:16]


def _digested(row: dict[str, Any]) -> bytes:
    return json.dumps(row, sort_keys=True)[:-1].encode()  # what a line says counts, and not how its JSON is written


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number of ours")
