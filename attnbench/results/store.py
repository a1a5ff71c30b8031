"""A run folder: rows appended with one write and one fsync each, and the CSV derived from them.

``records.jsonl`` is the truth. A cell may be in it several times (once per round); the last line counts.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

from attnbench.errors import CorruptResults, ResultsError, StoreError, cannot_write
from attnbench.files import (
    read_stored,
    refuse_link,
    refuse_other_than_file,
    remove_unfinished,
    replace_file,
    stored,
    unpack,
)
from attnbench.results.journal import GONE, Journal
from attnbench.results.lock import held
from attnbench.results.manifest import ENDS, OPENING, RUN_ID, THINNED, digest, is_sealed, read_manifest, write_manifest
from attnbench.results.old_swaps import old_rows
from attnbench.results.record import READABLE, SCHEMA_VERSION, Record
from attnbench.results.table import altered_lines, csv_text, read_table
from attnbench.results.validation import are_points, are_samples, checked, foreign_to_run, foreign_to_samples
from attnbench.text import one_line, quantity

RECORDS, SAMPLES, FAILURES, TABLE = "records.jsonl", "samples.jsonl", "failures.jsonl", "results.csv"
CURVES, CHECKPOINTS = "curves.jsonl", "checkpoints"
ENVIRONMENT, SUITE = "environment.json", "suite.yaml"
OLD = "swap.jsonl"
"""Rows of a swap by an older version (:mod:`attnbench.results.old_swaps`)."""
EDITED = f"not what the run stored; the rows of {RECORDS} are used"
"""Words for a line of ``results.csv``, after its place."""
FILES = (RECORDS, SAMPLES, FAILURES, CURVES)
"""The JSON-lines files of a run, with a checksum in each line."""


class RunFolder:
    """One run on disk.

    Raises:
        CannotCreate: the folder or a file in it cannot be made, or there is a link in its place.
        StoreError: a row cannot be written (disk full, file removed or replaced); rows before it are intact.
        Locked: another process writes here.
        CorruptResults: there is damage other than a torn last line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.repairs: list[str] = []
        """Repairs while opening or reading the folder, as messages for people."""
        self._journals = dict[str, Journal]()
        self._has_grown = False
        self._opened: os.stat_result | None = None
        self._csv_written = 0.0

    @classmethod
    def create(cls, path: Path, *, environment: dict[str, Any], suite_text: str) -> RunFolder:
        """Make a new folder, which must not exist."""
        folder = cls(path)
        try:
            path.mkdir(parents=True)
            try:
                facts = {"schema_version": SCHEMA_VERSION, "suite_digest": digest(suite_text), RUN_ID: token_hex(8)}
                write_manifest(path / ENVIRONMENT, {**environment, **facts})
                replace_file(path / SUITE, suite_text)
                (path / RECORDS).touch()
            except BaseException:
                shutil.rmtree(path, ignore_errors=True)
                raise
        except OSError as error:
            raise cannot_write(path, error) from error
        return folder

    @classmethod
    @contextmanager
    def whole(cls, path: Path, *, environment: dict[str, Any], suite_text: str) -> Iterator[RunFolder]:
        """A new folder, locked and hidden, that stands at ``path`` once this block has filled it."""
        hidden = path.with_name(f".{path.name}.{token_hex(4)}")
        folder = cls.create(hidden, environment=environment, suite_text=suite_text)
        try:
            with folder.lock():
                yield folder
            (hidden / ".lock").unlink(missing_ok=True)
            hidden.rename(path)
        except BaseException as error:
            shutil.rmtree(hidden, ignore_errors=True)
            if isinstance(error, OSError):
                raise cannot_write(path, error) from error
            if isinstance(error, StoreError):
                raise type(error)(str(error).replace(str(hidden), str(path))) from error
            raise

    @property
    def environment(self) -> dict[str, Any]:
        """The facts in ``environment.json``, which was written when the run began."""
        return read_manifest(self.path / ENVIRONMENT)

    @property
    def suite_text(self) -> str:
        """The suite that was run. Raises CorruptResults if it cannot be read."""
        try:
            return read_stored(self.path / SUITE).decode()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise CorruptResults(f"{self.path / SUITE}: {one_line(str(why), 100)}; restore it") from None

    @property
    def _facts(self) -> dict[str, Any]:
        """The same; nothing if they cannot be read, which :meth:`doubts` reports."""
        with suppress(CorruptResults):
            return self.environment
        return {}

    @property
    def is_thinned(self) -> bool:
        """True if rows of it lack samples and curves by intention."""
        return THINNED in self._facts

    def describe(self, state: Mapping[str, Any]) -> None:
        """Add the measuring process's facts of itself and the machine, unless an earlier one has given all of them."""
        environment = self.environment
        if not state.keys() <= environment.keys():
            self._rewrite({**environment, **state})

    def correct(self, facts: dict[str, Any]) -> None:
        """Replace facts about the machine with those found out since."""
        self._rewrite({**self.environment, **facts})

    def conclude(self) -> None:
        """Note lines and digest of each file, so that a line that is lost or added is told; the run is complete.

        The folder must be locked.
        """
        ends = {name: end for name in FILES if (end := self._journal(name).look().end)["lines"]}
        with suppress(CorruptResults):  # doubts() reports it
            environment = self.environment
            if environment.get(ENDS) != ends:
                self._rewrite({**environment, ENDS: ends})
        self._has_grown = False  # whatever is added later makes that note wrong

    def _rewrite(self, facts: dict[str, Any]) -> None:
        try:
            write_manifest(self.path / ENVIRONMENT, facts)
        except OSError as error:
            raise cannot_write(self.path / ENVIRONMENT, error) from error

    def doubts(self) -> list[str]:
        """Doubts about the suite and about lost or added lines, one line each; the rows can be read all the same.

        Raises CorruptResults if ``environment.json`` cannot be read: the method of the rows is then unknown.
        """
        environment = self.environment
        wanted = environment.get("suite_digest")
        whole = wanted is None
        with suppress(CorruptResults):
            whole = whole or wanted == digest(self.suite_text)
        suite = [] if whole else [f"{self.path / SUITE} is not the suite that was run; restore it"]
        ends = environment.get(ENDS)
        return suite if ends is None else [*suite, *(said for name in FILES for said in self._lost(name, ends))]

    def _lost(self, name: str, ends: Mapping[str, Any]) -> Iterator[str]:
        page, wanted = self._journal(name).look(), ends.get(name, {"lines": 0})
        count = abs(lost := wanted["lines"] - len(page.seals))
        if lost:
            how = "lost" if lost > 0 else "added after the run was complete"
            yield f"{self.path / name}: {quantity(count, 'line')} {how}; restore it"
        elif not page.damage and wanted != page.end and "digest" in wanted:  # schema 2 has none
            yield f"{self.path / name}: its lines are others, or in another order; restore it"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock this folder and its files against other runs; the system frees them when the process ends."""
        refuse_link(self.path)
        for name in FILES:
            refuse_other_than_file(self.path / name)
        with held(self.path):
            for name in (TABLE, ENVIRONMENT):
                remove_unfinished(self.path / name)
            self._opened = self.path.lstat()
            try:
                for name in (TABLE, *FILES):
                    unpack(self.path / name)
                for name in FILES:
                    torn = self._journal(name).open().torn
                    if torn:
                        self.repairs.append(f"{torn}: the last line was cut short when a run ended; it was removed")
                yield
            finally:
                for journal in self._journals.values():
                    journal.close()

    def append(self, name: str, rows: Sequence[dict[str, Any]]) -> list[str]:
        """Append rows to a JSON-lines file with one write and one fsync, and return their checksums."""
        if not self._has_grown:
            self._has_grown, facts = True, self._facts
            if facts.pop(ENDS, None) is not None:
                self._rewrite(facts)
        return self._journal(name).append(rows)

    def _journal(self, name: str) -> Journal:
        if name not in self._journals:
            journal = Journal(self.path / name)
            with suppress(CorruptResults):
                facts = self.environment
                journal = Journal(self.path / name, str(facts.get(OPENING, "")), is_sealed=is_sealed(facts))
            self._journals[name] = journal
        return self._journals[name]

    def add(
        self,
        record: Record,
        samples: dict[str, Any] | None = None,
        failure: Record | None = None,
        stderr: Sequence[str] = (),
        points: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Store one cell's row, and the raw samples or the learning curve behind it.

        Where a visit failed and left stderr, how it failed and the end of its stderr are stored too.
        """
        if failure and stderr:
            names = ("cell_id", "label", "seq_len", "status", "reason")
            self.append(FAILURES, [{name: getattr(failure, name) for name in names} | {"stderr": list(stderr)}])
        if samples is not None:
            self.append(SAMPLES, [samples])
        if points:
            self.append(CURVES, [{"cell_id": record.cell_id, "points": list(points)}])
        (record.seal,) = self.append(RECORDS, [record.to_json()])

    def history(self) -> list[Record]:
        """Every row ever stored, in order: the record in line 1, in line 2, and so on.

        Raises CorruptResults if a line is not as it was written, and ResultsError for a schema of another version.
        """
        environment = self._facts
        if stored(self.path / OLD).is_file():
            return old_rows(self.path / OLD, environment)
        self._refuse_other_schema(environment)
        records = []
        for number, row in enumerate(self.rows(RECORDS), start=1):
            self._refuse_other_schema(row)
            try:
                record = checked(Record.from_json(row))
            except (TypeError, ValueError, KeyError) as error:
                what = one_line(str(error))  # may quote text from the file
                raise CorruptResults(f"{self.path / RECORDS}:{number}: not a record of this version: {what}") from None
            if foreign := foreign_to_run(record, environment):
                raise CorruptResults(f"{self.path / RECORDS}:{number}: a row of another run: {foreign}")
            records.append(record)
        return records

    def _refuse_other_schema(self, facts: dict[str, Any]) -> None:
        schema = facts.get("schema_version")
        if isinstance(schema, int) and schema not in READABLE:
            raise ResultsError(
                f"{self.path}: schema_version {one_line(str(schema), 40)}, this attnbench reads {READABLE[0]} to "
                f"{READABLE[-1]}; use the attnbench that wrote it"
            )

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Every row of a JSON-lines file of the run, with its checksum, in order."""
        page = self._journal(name).read()
        if page.torn:
            self.repairs.append(f"{page.torn}: the last line is cut short; it is left out")
        return page.rows

    def damage(self, name: str) -> list[str]:
        """Lines of a JSON-lines file of the run that are not as they were written, each with its place."""
        page = self._journal(name).look()
        found = [f"{self.path / name}:{number}: {what}" for number, what in page.damage.items()]
        return [*found, f"{page.torn}: cut short"] if page.torn else found

    def records(self) -> dict[str, Record]:
        """The last row of every cell, in the order in which cells first appeared."""
        return {record.cell_id: record for record in self.history()}

    def in_order(self) -> list[Record]:
        """The last row of every cell, in the order of ``results.csv``, which is that of the suite."""
        history = self.history()
        records = {record.cell_id: record for record in history}
        order, altered = self.compare_table(history)
        self.repairs += [f"{altered}: {EDITED}"] * bool(altered)
        return [records[cell_id] for cell_id in dict.fromkeys([*order, *records]) if cell_id in records]

    def samples(self) -> dict[str, dict[int, list[dict[str, Any]]]]:
        """Raw samples by cell and round; for a round that was repeated after a crash, the last ones."""
        cells: dict[str, dict[int, list[dict[str, Any]]]] = {}
        for number, row in enumerate(self.rows(SAMPLES), start=1):
            place = f"{self.path / SAMPLES}:{number}"
            if not isinstance(row.get("cell_id"), str):
                raise CorruptResults(f"{place}: a line without cell_id")
            if type(row.get("round")) is not int or not are_samples(row.get("samples")):
                raise CorruptResults(f"{place}: not samples of one round")
            cells.setdefault(row["cell_id"], {})[row["round"]] = row["samples"]
        return cells

    def curves(self) -> dict[str, list[dict[str, Any]]]:
        """The learning curve of each trained cell, by cell id; for a cell trained twice, the last one."""
        curves: dict[str, list[dict[str, Any]]] = {}
        for number, row in enumerate(self.rows(CURVES), start=1):
            if not isinstance(row.get("cell_id"), str) or not are_points(row.get("points")):
                raise CorruptResults(f"{self.path / CURVES}:{number}: not a learning curve")
            curves[row["cell_id"]] = row["points"]
        return curves

    def without_samples(
        self, records: Iterable[Record], stored: Mapping[str, Mapping[int, list[dict[str, Any]]]] | None = None
    ) -> list[Record]:
        """The ``records`` that have a time but lack the samples of some of its rounds.

        ``stored``: those of :meth:`samples`, if they are known. Raises CorruptResults for a time of other samples.
        """
        stored, without = self.samples() if stored is None else stored, []
        is_thinned = self.is_thinned
        for record in records:
            rounds = stored.get(record.cell_id, {})
            if record.time_median_s is None or (is_thinned and not rounds):
                continue
            if not set(range(record.time_rounds or 1)) <= rounds.keys():
                without.append(record)
            elif foreign := foreign_to_samples(record, rounds.values()):
                raise CorruptResults(
                    f"{self.path / RECORDS}: cell {record.cell_id}: {foreign}; restore it or start with --fresh"
                )
        return without

    def write_csv(self, records: Sequence[Record], *, at_most_every: float = 0.0) -> None:
        """Replace ``results.csv`` in one step, unless it was written less than ``at_most_every`` seconds ago."""
        now = time.monotonic()
        if at_most_every and now - self._csv_written < at_most_every:
            return
        self._csv_written = now
        self._refuse_another_folder()
        try:
            replace_file(self.path / TABLE, csv_text(records))
        except OSError as error:
            raise StoreError(f"cannot write {self.path / TABLE}: {error.strerror}; {RECORDS} is intact") from error

    def refuse_changes(self) -> None:
        """Raise StoreError unless the rows are where they were written, and nothing else was written there."""
        self._refuse_another_folder()
        for journal in self._journals.values():
            journal.refuse_another_file()

    def _refuse_another_folder(self) -> None:
        with suppress(OSError):
            if self._opened is None or os.path.samestat(self._opened, self.path.lstat()):
                return
        what = "another folder stands in its place; run the same command again" if self.path.exists() else GONE
        raise StoreError(f"cannot write in {self.path}: {what}")

    def compare_table(self, history: Sequence[Record]) -> tuple[list[str], str]:
        """The cell ids of ``results.csv`` in its order, and the place of lines that match no row; empty if all do."""
        file = self.path / TABLE
        try:
            table = read_table(read_stored(file).decode())
        except FileNotFoundError:
            return [], ""
        except (OSError, ValueError):
            return [], f"{file}:1"
        altered = altered_lines(table, history)
        more = f" and {len(altered) - 1} more lines" if len(altered) > 1 else ""
        return [row.get("cell_id", "") for row in table], f"{file}:{min(altered)}{more}" if altered else ""
