"""A file of JSON lines that only grows, each line with a checksum of itself under ``seal``.

Only the last line may be torn, if the process that was writing it ended.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnbench.errors import CorruptResults, StoreError
from attnbench.files import read_stored
from attnbench.results.manifest import SEAL, digest
from attnbench.text import one_line

_REMEDY = "restore it or start with --fresh"
_CHANGED = "this line was changed"
GONE = "the folder is gone, and the rows in it; run the same command again"


@dataclass(frozen=True, slots=True)
class JournalContent:
    """The content of a journal."""

    rows: list[dict[str, Any]]
    """The row of each line, in order, with its checksum under ``seal`` if the run has checksums."""
    seals: list[str]
    """Checksum of each line; empty if it has none."""
    size: int
    """Bytes of all whole lines."""
    torn: str = ""
    """Place of a last line that is not whole, as file and line number; empty where there is none."""
    damage: dict[int, str] = field(default_factory=dict)
    """Number of each line that is not as it was written -> its fault."""

    @property
    def end(self) -> dict[str, Any]:
        """Number of lines, and a digest of all of them in their order."""
        return {"lines": len(self.seals), "digest": digest("".join(self.seals))}


class Journal:
    """One such file. It can be read at any time, and appended to once it is open.

    Raises:
        CorruptResults: a line is not as it was written.
        StoreError: the file cannot be read or written, or is no longer the one that was opened.
    """

    def __init__(self, path: Path, opening: str = "", *, is_sealed: bool = True) -> None:
        """A journal at ``path``, whether it exists or not.

        ``opening`` begins the chain of checksums in a run of schema 2, where a line's is also of the line before it.
        ``is_sealed``: the run has checksums (:func:`attnbench.results.manifest.is_sealed`).
        """
        self.path, self._is_sealed = path, is_sealed
        self._opening = opening + path.name
        self._handle: int | None = None
        self._is_open = False
        self._size = 0

    def read(self) -> JournalContent:
        """All whole lines, after checking each of them."""
        page = self.look()
        for number, what in page.damage.items():
            raise CorruptResults(f"{self.path}:{number}: {what}; {_REMEDY}")
        return page

    def look(self) -> JournalContent:
        """All whole lines that can be read, and which are not as they were written."""
        data = b""
        try:
            with suppress(FileNotFoundError):
                data = read_stored(self.path)
        except OSError as error:
            raise StoreError(f"cannot read {self.path}: {error.strerror}; check its permissions") from error
        except ValueError as error:
            return JournalContent([], [], 0, damage={1: str(error)})
        whole, newline, torn = data.rpartition(b"\n")
        lines = whole.split(b"\n") if newline else []
        before, rows, seals, damage = self._opening, list[dict[str, Any]](), list[str](), dict[int, str]()
        for number, text in enumerate(lines, start=1):
            seals.append("")
            try:
                row = json.loads(text, parse_constant=_refuse)
                if not isinstance(row, dict):
                    raise ValueError("not an object")
                seal = row.pop(SEAL, None)
                if self._is_sealed != isinstance(seal, str):
                    raise ValueError("with a checksum of another run" if seal else "without a checksum")
                if self._is_sealed:
                    if seal not in _checksums(row, before):
                        damage[number] = _CHANGED
                    seals[-1] = before = row[SEAL] = seal
                rows.append(row)
            except (ValueError, RecursionError) as error:
                damage[number] = _CHANGED if self._is_sealed else f"damaged line: {one_line(str(error))}"
        place = f"{self.path}:{len(lines) + 1}" if torn else ""
        return JournalContent(rows, seals, len(whole) + len(newline), place, damage)

    def open(self) -> JournalContent:
        """Prepare for appending: read the present lines, cut off a torn last line, and keep this very file open."""
        page = self.read()
        try:
            self._handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
            if page.torn:  # that cell was never acknowledged and will run again
                os.ftruncate(self._handle, page.size)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StoreError(f"cannot write {self.path}: {error.strerror}; check its permissions") from error
        self._is_open, self._size = True, page.size
        return page

    def close(self) -> None:
        """Let go of the file."""
        if self._handle is not None:
            os.close(self._handle)
        self._handle, self._is_open = None, False

    def append(self, rows: Sequence[dict[str, Any]]) -> list[str]:
        """Append rows in one write, sync them to the disk and return their checksums.

        If that fails, whatever part of them was written is removed again.
        """
        if not self._is_open:
            self.open()
        seals = [digest(_said(row)) for row in rows]
        lines = [json.dumps(row | {SEAL: seal}, allow_nan=False) for row, seal in zip(rows, seals, strict=True)]
        data = "".join(f"{line}\n" for line in lines).encode()
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
        self._size += len(data)
        return seals

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


def _said(row: dict[str, Any]) -> str:
    return json.dumps(row, sort_keys=True)[:-1]  # the content of a line counts, and not the form of its JSON


def _checksums(row: dict[str, Any], before: str) -> Iterator[str]:
    """The checksums that a row may have: its own, or those that schema 2 gave it behind the line ``before``."""
    yield digest(_said(row))
    yield digest(before + _said(row))
    yield digest(before + json.dumps(row)[:-1])  # the first of schema 2 took columns in the order they stood in


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number of ours")
