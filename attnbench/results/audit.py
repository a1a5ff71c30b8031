"""The check that a run is as it was written: checksums of lines and files, and the files made from its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnbench.errors import CorruptResults, StoreError
from attnbench.files import read_stored, stored
from attnbench.measure.status import Status
from attnbench.results.manifest import ENDS, digest, is_sealed
from attnbench.results.record import Record
from attnbench.results.sources import SOURCES
from attnbench.results.store import CURVES, FILES, RECORDS, SAMPLES, TABLE, RunFolder
from attnbench.results.table import altered_lines, read_table


@dataclass(frozen=True, slots=True)
class Audit:
    """The outcome of the check of one run."""

    path: Path
    rows: int
    """Rows that can be read: the last of each cell."""
    findings: Sequence[str]
    """Lines and files that are not as they were written, one line each, with file and line."""
    notes: Sequence[str]
    """Facts that cannot be known of a run of this age, one line each."""
    environment: Mapping[str, Any]
    """Empty where it cannot be read."""
    is_sealed: bool
    """True if its rows have checksums; without findings they are then as they were written."""


_UNSEALED = "an attnbench before checksums wrote its rows, so nothing vouches for them"
_UNENDED = "it was not complete when it was last written, so lines that are lost from it cannot be told"


def audit(path: Path) -> Audit:
    """Check the run in the folder ``path``; nothing in it is changed."""
    folder = RunFolder(path)
    environment: dict[str, Any] = {}
    try:
        environment = folder.environment
        findings = folder.doubts()
    except CorruptResults as error:  # the rows are looked at all the same
        findings = [str(error)]
    broken = [line for name in FILES for line in folder.damage(name)]
    findings = [*broken, *findings, *_of_the_sources(path, environment)]
    records: dict[str, Record] = {}
    if not any(line.startswith(str(path / RECORDS)) for line in broken):
        try:
            records = folder.records()
            findings += _of_the_rows(folder, records, broken, complete=ENDS in environment)
            findings += _of_the_table(folder, complete=ENDS in environment)
        except (CorruptResults, StoreError) as error:
            findings.append(str(error))
    sealed = not environment or is_sealed(environment)
    note = _UNSEALED if not sealed else _UNENDED if environment and ENDS not in environment else ""
    notes = [f"{path}: {note}"] if note else []
    return Audit(path, len(records), list(dict.fromkeys(findings)), notes, environment, sealed)


def _of_the_sources(path: Path, environment: Mapping[str, Any]) -> Iterator[str]:
    """Copies of plug-ins and of their data that differ from what the run used."""
    seen = (one[0] for one in environment.get(SOURCES, {}).values())
    known = " ".join([*environment.get("plugins", {}).values(), *seen])
    for file in sorted(one for one in (path / SOURCES).rglob("*") if one.is_file() and one.suffix != ".pyc"):
        content = file.read_bytes()
        if digest(content) not in known and digest(b"%d " % len(content) + content) not in known:
            yield f"{file}: not as the run used it"


def _of_the_rows(
    folder: RunFolder, records: Mapping[str, Record], broken: Sequence[str], *, complete: bool
) -> Iterator[str]:
    """Rows whose samples or learning curve are lost, or do not fit them; samples and curves without a row, but for the
    last of a run that was cut short before it wrote the row."""
    is_whole = {
        name: not any(line.startswith(str(folder.path / name)) for line in broken) for name in (SAMPLES, CURVES)
    }
    found: dict[str, list[str]] = {}
    if is_whole[SAMPLES]:
        for record in folder.without_samples(records.values()):
            yield f"{folder.path / SAMPLES}: the samples of {record.label} n={record.seq_len} are lost"
        found[SAMPLES] = [*folder.samples()]
    if is_whole[CURVES]:
        found[CURVES] = [*folder.curves()]
        for record in records.values():
            is_trained = record.status is Status.OK and record.best_step is not None and not folder.is_thinned
            if is_trained and record.cell_id not in found[CURVES]:
                yield f"{folder.path / CURVES}: the learning curve of {record.label} n={record.seq_len} is lost"
    for name, cell_ids in found.items():
        for cell_id in sorted({*(cell_ids if complete else cell_ids[:-1])} - records.keys()):
            yield f"{folder.path / name}: cell {cell_id} has no row in {RECORDS}"


def _of_the_table(folder: RunFolder, *, complete: bool) -> Iterator[str]:
    """Lines of ``results.csv`` that no row gives, and rows that it lacks; while a run goes on it may lack some."""
    file = folder.path / TABLE
    history = folder.history()
    last = {record.cell_id: record for record in history}
    if not stored(file).is_file():
        if complete:
            yield f"{file}: it is lost; attnbench run writes it anew from {RECORDS}"
        return
    try:
        table = read_table(read_stored(file).decode())
    except (OSError, ValueError):
        yield f"{file}:1: not a table of rows"
        return
    for number, what in altered_lines(table, last.values() if complete else history).items():
        yield f"{file}:{number}: {what}"
    listed = {row.get("cell_id") for row in table}
    for record in last.values() if complete else ():
        if record.cell_id not in listed:
            yield f"{file}: {record.label} n={record.seq_len} (cell {record.cell_id}) is lost"
