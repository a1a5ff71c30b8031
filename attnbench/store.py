"""A run folder: rows appended one write and one fsync at a time, the CSV derived from them.

``records.jsonl`` is the truth. A cell may stand in it several times (once a round); the last line counts.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import sys
import tempfile
import time
import types
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from attnbench.errors import CannotCreate, CorruptResults, StoreError
from attnbench.lock import held, refuse_link, refuse_other_than_file
from attnbench.record import Record, one_line
from attnbench.table import csv_text

RECORDS, SAMPLES, FAILURES, TABLE = "records.jsonl", "samples.jsonl", "failures.jsonl", "results.csv"
ENVIRONMENT, SUITE = "environment.json", "suite.yaml"
_GONE = "the folder is gone, and the rows in it; run the same command again"


class RunFolder:
    """One run on disk.

    Raises:
        CannotCreate: the folder or a file in it cannot be made, or a link stands in its place.
        StoreError: a row cannot be written (disk full); rows before it are intact.
        Locked: another process writes here.
        CorruptResults: damage other than a torn last line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._csv_written = 0.0
        self.repairs: list[str] = []
        """What reading had to mend, for people."""

    @classmethod
    def create(cls, path: Path, *, environment: dict[str, Any], suite_text: str) -> RunFolder:
        """Make a new folder, which must not exist."""
        folder = cls(path)
        try:
            path.mkdir(parents=True)
            try:
                folder._replace(ENVIRONMENT, json.dumps(environment, indent=2) + "\n")
                folder._replace(SUITE, suite_text)
                (path / RECORDS).touch()
            except BaseException:
                shutil.rmtree(path, ignore_errors=True)
                raise
        except OSError as error:
            raise CannotCreate(f"cannot create {path}: {error.strerror}; choose another folder with --out") from error
        return folder

    @property
    def environment(self) -> dict[str, Any]:
        """What was written when the run began; empty where it cannot be read."""
        file = self.path / ENVIRONMENT
        try:
            data = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
        except (OSError, ValueError, RecursionError):
            return {}
        return data if isinstance(data, dict) else {}

    def describe(self, state: dict[str, Any]) -> None:
        """Add what the measuring process says about itself and the machine; what the first one said stays."""
        environment = self.environment
        if not state.keys() <= environment.keys():
            try:
                self._replace(ENVIRONMENT, json.dumps({**environment, **state}, indent=2) + "\n")
            except OSError as error:
                raise StoreError(f"cannot write {self.path / ENVIRONMENT}: {error.strerror}; make room") from error

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold this folder against other runs; the system frees it when the process ends, however it ends."""
        refuse_link(self.path)
        for name in (RECORDS, SAMPLES, FAILURES):
            refuse_other_than_file(self.path / name)
        with held(self.path):
            for left in self.path.glob(f".{TABLE}.*"):  # unfinished tables of killed runs
                with suppress(OSError):
                    left.unlink()
            yield

    def append(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        """Append rows to a JSON-lines file: one write, then fsync."""
        data = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
            handle = os.open(self.path / name, flags, mode=0o644)
            try:
                whole = os.fstat(handle).st_size
                try:
                    written = os.write(handle, data)
                    if written != len(data):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    os.fsync(handle)
                except OSError:
                    with suppress(OSError):  # a torn line that stays is cut off when the run goes on
                        os.ftruncate(handle, whole)
                    raise
            finally:
                os.close(handle)
        except OSError as error:
            remedy = "earlier rows are safe, make room and run the same command again"
            if not self.path.is_dir():
                remedy = _GONE
            raise StoreError(f"cannot write {self.path / name}: {error.strerror}; {remedy}") from error

    def add(self, record: Record, samples: dict[str, Any] | None = None, stderr: Sequence[str] = ()) -> None:
        """Store one cell's row, the raw samples behind it and, where it failed, the last that it wrote to stderr."""
        if stderr:
            names = ("cell_id", "label", "seq_len", "status", "reason")
            self.append(FAILURES, [{name: getattr(record, name) for name in names} | {"stderr": list(stderr)}])
        if samples is not None:
            self.append(SAMPLES, [samples])
        self.append(RECORDS, [record.to_json()])

    def records(self) -> dict[str, Record]:
        """The last row of every cell, in the order in which cells first appeared."""
        rows: dict[str, Record] = {}
        for number, row in self._lines(RECORDS):
            try:
                record = checked(Record.from_json(row))
            except (TypeError, ValueError, KeyError) as error:
                what = one_line(str(error))  # may hold what stands in the file
                raise CorruptResults(f"{self.path / RECORDS}:{number}: not a record of this version: {what}") from None
            rows[record.cell_id] = record
        return rows

    def samples(self) -> dict[str, list[dict[str, Any]]]:
        """Raw samples by cell, one entry a round."""
        rounds: dict[str, list[dict[str, Any]]] = {}
        for number, row in self._lines(SAMPLES):
            if not isinstance(row.get("cell_id"), str):
                raise CorruptResults(f"{self.path / SAMPLES}:{number}: a line without cell_id")
            if type(row.get("round")) is not int or not are_samples(row.get("samples")):
                raise CorruptResults(f"{self.path / SAMPLES}:{number}: not samples of one round")
            rounds.setdefault(row["cell_id"], []).append(row)
        return rounds

    def _lines(self, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Rows with line numbers. Only a last line without its newline may be torn; it is cut off."""
        path = self.path / name
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}; check its permissions") from error
        whole, newline, torn = data.rpartition(b"\n")
        if torn:
            # The process died inside its last write: that cell was never acknowledged and will run again.
            os.truncate(path, len(whole) + len(newline))
            self.repairs.append(
                f"{path}:{data.count(10) + 1}: the last line was cut short when a run ended; it was removed"
            )
        for number, line in enumerate(whole.split(b"\n") if newline else [], start=1):
            try:
                row = json.loads(line, parse_constant=_refuse)
                if not isinstance(row, dict):
                    raise ValueError("not an object")
            except (ValueError, RecursionError) as error:
                raise CorruptResults(
                    f"{path}:{number}: damaged line: {one_line(str(error))}; restore it or start with --fresh"
                ) from None
            yield number, row

    def write_csv(self, records: Sequence[Record], *, at_most_every: float = 0.0) -> None:
        """Write ``results.csv`` anew and put it in place in one step; skipped when written less than a moment ago."""
        now = time.monotonic()
        if at_most_every and now - self._csv_written < at_most_every:
            return
        self._csv_written = now
        try:
            self._replace(TABLE, csv_text(records))
        except OSError as error:
            state = f"{RECORDS} is intact" if self.path.is_dir() else _GONE
            raise StoreError(f"cannot write {self.path / TABLE}: {error.strerror}; {state}") from error

    def _replace(self, name: str, content: str) -> None:
        handle, temporary = tempfile.mkstemp(dir=self.path, prefix=f".{name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(0o644)
            Path(temporary).replace(self.path / name)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number of ours")


@functools.cache
def _kinds() -> dict[str, tuple[type, ...]]:
    """Types that may stand in each field of a record."""
    kinds = {}
    for name, hint in typing.get_type_hints(Record).items():
        members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        kinds[name] = (*members, int) if float in members else members
    return kinds


def checked(record: Record) -> Record:
    """``record`` itself, if it can be stored and read again.

    Raises:
        ValueError: a field of another type, an infinite number, half of a character.
    """
    for name, kinds in _kinds().items():
        value = getattr(record, name)
        if type(value) not in kinds:  # not isinstance: true is no number
            raise ValueError(f"{name} is {one_line(repr(value), 40)}")
        if isinstance(value, str):
            value.encode()  # half of a character, say, is a ValueError
        elif value is not None and not abs(value) <= sys.float_info.max:
            raise ValueError(f"{name} is too large")
    return record


def are_samples(value: object) -> bool:
    """Whether it is what a clock can give: seconds, calls and switches of each sample."""
    return isinstance(value, list) and all(
        isinstance(one, dict)
        and {"seconds", "calls"} <= set(one) <= {"seconds", "calls", "switches"}
        and all(type(number) in (int, float) and 0 <= number <= sys.float_info.max for number in one.values())
        and one["calls"] > 0
        for one in value
    )


def suite_folder(out: Path, name: str) -> Path:
    """Where the runs of a suite lie below ``out``.

    Raises:
        CannotCreate: a link stands there, or a folder whose name differs in upper and lower case only, which many
            systems take for the same.
    """
    folder = out / name
    refuse_link(folder)
    with suppress(OSError):  # none yet, or told where a run is made in it
        for other in out.iterdir():
            if other.name != name and other.name.casefold() == name.casefold():
                raise CannotCreate(
                    f"{other} differs from {name} in upper and lower case only; rename one of the suites"
                )
    return folder


def find_runs(root: Path) -> list[RunFolder]:
    """All run folders at or below ``root``, oldest first within each suite."""
    if (root / RECORDS).is_file():
        return [RunFolder(root)]
    return [RunFolder(path.parent) for path in sorted(root.glob(f"*/*/{RECORDS}")) + sorted(root.glob(f"*/{RECORDS}"))]
