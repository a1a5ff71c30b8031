"""Whether a run is as it was written: its chains of seals, what they begin with, and the files made from its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnbench.errors import CorruptResults, StoreError
from attnbench.journal import Line, first_seal
from attnbench.machine import id_of
from attnbench.manifest import ENDS, OPENING, is_sealed
from attnbench.record import Record
from attnbench.status import Status
from attnbench.store import CURVES, FILES, RECORDS, SAMPLES, TABLE, RunFolder
from attnbench.table import altered_lines, read_table


@dataclass(frozen=True, slots=True)
class Audit:
    """What was found in one run."""

    path: Path
    rows: int
    """Rows that can be read: the last of each cell."""
    findings: Sequence[str]
    """What is not as it was written, one line each, with file and line."""
    notes: Sequence[str]
    """What cannot be known of a run of this age, one line each."""
    environment: Mapping[str, Any]
    """Empty where it cannot be read."""
    is_sealed: bool
    """Whether its rows have seals; without findings they are then as they were written."""


_UNSEALED = "an attnbench before seals wrote its rows, so nothing vouches for them"


def audit(path: Path) -> Audit:
    """Check the run in the folder ``path``; nothing in it is changed."""
    folder = RunFolder(path)
    environment: dict[str, Any] = {}
    sizes = tuple(f"{path / name}: lines" for name in FILES)  # told by line below
    try:
        environment = folder.environment
        findings = [doubt for doubt in folder.doubts() if not doubt.startswith(sizes)]
    except CorruptResults as error:  # the rows are looked at all the same
        findings = [str(error)]
    findings += _of_the_machine(path, environment)
    broken = list(_of_the_chains(path, environment))
    findings += broken
    records: dict[str, Record] = {}
    if not any(line.startswith(str(path / RECORDS)) for line in broken):
        try:
            records = folder.records()
            findings += _of_the_rows(folder, records, broken)
            findings += _of_the_table(folder, complete=ENDS in environment)
        except (CorruptResults, StoreError) as error:
            findings.append(str(error))
    sealed = not environment or is_sealed(environment)
    notes = _notes(path, environment) if sealed else [f"{path}: {_UNSEALED}"]
    return Audit(path, len(records), list(dict.fromkeys(findings)), notes, environment, sealed)


def _of_the_chains(path: Path, environment: Mapping[str, Any]) -> Iterator[str]:
    """Lines of the JSON-lines files that are not as they were written."""
    opening = str(environment.get(OPENING, "")) if environment else None
    ends = environment.get(ENDS)
    sealed = not environment or is_sealed(environment)
    for name in FILES:
        file = path / name
        end = ends.get(name, {"lines": 0, "seal": ""}) if isinstance(ends, dict) else None
        first = None if opening is None else first_seal(file, opening)
        for number, what in damage(_content(file), first, end, sealed=sealed).items():
            yield f"{file}:{number}: {what}"


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise StoreError(f"cannot read {file}: {error.strerror}; check its permissions") from error


def _of_the_machine(path: Path, environment: Mapping[str, Any]) -> list[str]:
    """Facts of a machine that do not give its id."""
    machines = environment.get("machines") or [environment]
    wrong = [
        one["machine_id"]
        for one in machines
        if isinstance(one.get("environment"), dict) and one.get("machine_id") not in (None, id_of(one["environment"]))
    ]
    return [f"{path / 'environment.json'}: the facts of machine {name} were changed" for name in wrong]


def _of_the_rows(folder: RunFolder, records: Mapping[str, Record], broken: Sequence[str]) -> Iterator[str]:
    """Rows whose samples or learning curve are lost, or do not fit them; samples and curves without a row."""
    is_whole = {
        name: not any(line.startswith(str(folder.path / name)) for line in broken) for name in (SAMPLES, CURVES)
    }
    found: dict[str, set[str]] = {}
    if is_whole[SAMPLES]:
        for record in folder.without_samples(records.values()):
            yield f"{folder.path / SAMPLES}: the samples of {record.label} n={record.seq_len} are lost"
        found[SAMPLES] = set(folder.samples())
    if is_whole[CURVES]:
        found[CURVES] = set(folder.curves())
        for record in records.values():
            is_trained = record.status is Status.OK and record.best_step is not None
            if is_trained and record.cell_id not in found[CURVES]:
                yield f"{folder.path / CURVES}: the learning curve of {record.label} n={record.seq_len} is lost"
    for name, cell_ids in found.items():
        for cell_id in sorted(cell_ids - records.keys()):
            yield f"{folder.path / name}: cell {cell_id} has no row in {RECORDS}"


def _of_the_table(folder: RunFolder, *, complete: bool) -> Iterator[str]:
    """Lines of ``results.csv`` that no row gives, and rows that it lacks; while a run goes on it may lack some."""
    file = folder.path / TABLE
    history = folder.history()
    last = {record.cell_id: record for record in history}
    if not file.is_file():
        if complete:
            yield f"{file}: it is lost; attnbench run writes it anew from {RECORDS}"
        return
    try:
        table = read_table(_content(file).decode("utf-8"))
    except ValueError:
        yield f"{file}:1: not a table of rows"
        return
    for number, what in altered_lines(table, last.values() if complete else history).items():
        yield f"{file}:{number}: {what}"
    listed = {row.get("cell_id") for row in table}
    for record in last.values() if complete else ():
        if record.cell_id not in listed:
            yield f"{file}: {record.label} n={record.seq_len} (cell {record.cell_id}) is lost"


def _notes(path: Path, environment: Mapping[str, Any]) -> list[str]:
    if environment and OPENING not in environment:
        return [f"{path}: its seals do not cover environment.json, as those of newer runs do"]
    if environment and ENDS not in environment:
        return [f"{path}: the run is not complete, so lines that are lost at an end cannot be told"]
    return []


_CHANGED = "changed, or lines before it are lost"
_MOST = 20
"""Most lines for which a predecessor is looked for in the whole file."""


def damage(data: bytes, first: str | None, end: Mapping[str, Any] | None, *, sealed: bool = True) -> dict[int, str]:
    """Number of each line that is not as it was written -> what happened to it; empty for a whole file.

    Each line is held to the seals of the others: one whose seal fits no predecessor was changed, or its predecessor is
    lost; one that its successor skips was added; and one whose predecessor stands elsewhere was moved.

    Args:
        data: the file.
        first: the seal before the first line (:func:`attnbench.journal.first_seal`); None where it is not known.
        end: where the file ended when its run was complete, as :attr:`attnbench.journal.Journal.end`; None where the
            run never was.
    """
    whole, newline, torn = data.rpartition(b"\n")
    lines = [_line(text) for text in whole.split(b"\n")] if newline else []
    found = _broken(lines, first) if sealed else {}
    if end is not None:
        _judge(lines, found, end)
    if torn:
        found[len(lines) + 1] = "cut short"
    return dict(sorted(found.items()))


def _line(text: bytes) -> Line | None:
    """The line; None if it has no seal."""
    with suppress(ValueError, RecursionError):
        if (line := Line.of(text)).seal:
            return line
    return None


def _broken(lines: Sequence[Line | None], first: str | None) -> dict[int, str]:
    """Lines that do not follow the line before them."""
    places = {line.seal: number for number, line in reversed(list(enumerate(lines, start=1))) if line}
    found: dict[int, str] = {}
    before = last_good = first
    for number, line in enumerate(lines, start=1):
        if line is None:
            found[number] = _CHANGED
            continue
        seal = line.seal
        if places[seal] < number:
            found[number] = f"added: it repeats line {places[seal]}"
            continue
        follows = before is None or line.follows(before)
        skips = last_good is not None and line.follows(last_good)
        if skips:  # as if the lines between were not there
            between = range(places.get(last_good or "", 0) + 1, number)
            found |= {place: "added" for place in between if found.get(place) == _CHANGED}
        if follows or skips:
            last_good = seal
        else:
            found[number] = _elsewhere(line, first, places) if len(found) < _MOST else _CHANGED
        before = seal
    return found


def _elsewhere(line: Line, first: str | None, places: Mapping[str, int]) -> str:
    """What happened to a line, by where its predecessor stands now."""
    if first is not None and line.follows(first):
        return "moved: it was the first line"
    was = next((place for other, place in places.items() if line.follows(other)), None)
    return _CHANGED if was is None else f"moved: it was written after what is line {was}"


def _judge(lines: Sequence[Line | None], found: dict[int, str], end: Mapping[str, Any]) -> None:
    """Say more about the lines of a complete run, whose number and last seal are known."""
    seals = [line.seal if line else "" for line in lines]
    if is_there := end["seal"] in seals:
        after = range(seals.index(end["seal"]) + 2, len(lines) + 1)
        found |= dict.fromkeys(after, "added after the run was complete")
    lost = int(end["lines"]) - len(lines) + sum(what.startswith("added") for what in found.values())
    doubtful = [number for number, what in found.items() if what == _CHANGED]
    count = f"{lost} line{'s are' if lost > 1 else ' is'} lost"
    if lost <= 0:
        found |= dict.fromkeys(doubtful, "changed, or the line before it was, and sealed anew")
    elif len(doubtful) == 1 and is_there:
        found[doubtful[0]] = f"{count} before it"
    elif not doubtful and not is_there:
        found[len(lines) + 1] = f"{count} from here on"
