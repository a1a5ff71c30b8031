"""Read a run or ``results.csv`` as a DataFrame with the columns of :data:`attnbench.results.record.COLUMNS`."""

from __future__ import annotations

import csv
import io
import math
import re
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from attnbench.errors import ResultsError, not_by_commas
from attnbench.files import PACKED, read_stored, stored
from attnbench.measure.status import Status
from attnbench.results.record import ADDED, COLUMNS, FIELDS, READABLE, Record
from attnbench.results.renamed import named_as_today
from attnbench.results.runs import by_age, has_rows, no_run, runs_in, suites_of
from attnbench.results.store import CURVES, EDITED, ENVIRONMENT, OLD, RECORDS, RunFolder
from attnbench.results.store import TABLE as FILE
from attnbench.results.table import FORMULA
from attnbench.results.validation import refuse_impossible
from attnbench.suite.axes import FOLLOWING
from attnbench.text import printable

FOLDERS = "folders"
"""Attribute of a table: name and folder of each run in it; the folder has its learning curves."""


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def read_results(path: str | Path | Sequence[str | Path], *, warn: Callable[[str], None] = _warn) -> pd.DataFrame:
    """Read a ``results.csv``, a run's folder, a suite's folder (newest run) or a results folder (each suite's newest).

    Several paths give one table, in their order, with a column ``run`` that names the run of each row. Text columns
    are never NaN (empty instead); numbers that were not measured are NaN; ``causal``, ``compile``, ``compiled`` and
    ``quick`` are bool.

    In a run's folder the rows are those of ``records.jsonl``, in the order of ``results.csv``. A table without
    ``records.jsonl`` beside it is read by itself.

    Args:
        warn: called with one line for each thing that is wrong with a run but spares the rows that are returned.

    Raises:
        CorruptResults: rows, or ``environment.json`` of their run, are not as they were written.
        ResultsError: there is no such file or no run in the folder, the schema is another, or a value does not fit its
            column.
    """
    paths = [path] if isinstance(path, str | Path) else list(path)
    files = list(dict.fromkeys(file for one in paths for file in find_results(Path(one))))
    frames = [_of_run(file, warn) if _is_in_run(file) else _alone(file, warn) for file in files]
    if not any(len(frame) for frame in frames):
        names = ", ".join(str(file) for file in files) or "no path given"
        raise ResultsError(f"{names}: no row yet; measure first with: attnbench run SUITE")
    runs = run_names(files) if len(paths) > 1 else [""] * len(files)
    if len(paths) > 1:
        frames = [frame.assign(run=name) for frame, name in zip(frames, runs, strict=True)]
    table = pd.concat([frame for frame in frames if len(frame)], ignore_index=True)
    table.attrs[FOLDERS] = tuple((name, str(file.parent)) for name, file in zip(runs, files, strict=True))
    return table


def read_curves(frame: pd.DataFrame) -> dict[tuple[str, str], list[dict[str, typing.Any]]]:
    """(run's name, cell id) -> the points of the learning curve, by step; a single run has an empty name.

    ``frame``: rows of :func:`read_results`. Raises CorruptResults for altered lines.
    """
    folders = [(name, Path(folder)) for name, folder in frame.attrs.get(FOLDERS, ())]
    return {
        (name, cell_id): points
        for name, folder in folders
        if stored(folder / CURVES).is_file()
        for cell_id, points in RunFolder(folder).curves().items()
    }


def run_names(files: Sequence[Path]) -> list[str]:
    """For each CSV file, the part of its path that distinguishes its run."""
    paths = [(file.absolute().parent if file.name == FILE else file.absolute()).parts for file in files]
    while len(paths) > 1 and len({path[:1] for path in paths}) == 1 and all(len(path) > 1 for path in paths):
        paths = [path[1:] for path in paths]
    while len(paths) > 1 and len({path[-1:] for path in paths}) == 1 and all(len(path) > 1 for path in paths):
        paths = [path[:-1] for path in paths]
    for place in range(min(map(len, paths), default=0)):  # one folder's name is enough if it distinguishes all
        if len({path[place] for path in paths}) == len(paths) > 1:
            return [path[place] for path in paths]
    return ["/".join(path) if len(paths) > 1 else path[-1] for path in paths]


def find_results(path: Path) -> list[Path]:
    """The CSV files of ``path``: of a suite's runs only the newest, but all runs in a folder of several suites.

    Raises ResultsError if there is nothing to read.
    """
    path = path.with_suffix("") if path.suffix == PACKED and path.is_file() else path
    if stored(path).is_file() or (path.name == FILE and has_rows(path.parent, OLD)):
        return [path]
    if not path.is_dir():
        raise ResultsError(f"{path}: no such file or folder; give a results.csv or a folder written by attnbench run")
    if stored(path / FILE).is_file() and not _is_stray(path / FILE):
        return [path / FILE]
    if has_rows(path, OLD):
        return [path / FILE]  # which stands for the rows
    if stored(path / RECORDS).is_file():
        raise ResultsError(f"{path}: this run has no {FILE} yet; continue it with the attnbench run that began it")
    suites = [path, *sorted(child for child in path.iterdir() if child.is_dir())]
    tables = [[run / FILE for run in runs_in(suite, FILE) if not _is_stray(run / FILE)] for suite in suites]
    runs = [by_age(file.parent for file in [*filter(_is_in_run, here)] or here) for here in tables]
    standing = [run / FILE for together in runs for run in (together if is_collection(together) else together[-1:])]
    if not standing:
        raise no_run(path, f"there is no {FILE}; measure first with: attnbench run SUITE")
    return standing


def _is_stray(file: Path) -> bool:
    return not _is_in_run(file) and any(runs_in(near) for near in (file.parent, *file.parent.glob("*")))


def is_collection(runs: Sequence[Path]) -> bool:
    """True if the runs of one folder are of several suites, so that none replaces another."""
    return len(suites_of(runs)) > 1


def _is_in_run(file: Path) -> bool:
    return file.name == FILE and has_rows(file.parent)


def _alone(file: Path, warn: Callable[[str], None]) -> pd.DataFrame:
    if file.name == FILE and (file.parent / ENVIRONMENT).exists():
        warn(f"{file.parent}: {RECORDS} is missing, so nothing vouches for {FILE}")
    try:
        text = read_stored(file).decode("utf-8-sig")
    except (ValueError, OSError) as error:
        raise _no_table(file, f" ({error.strerror})" if isinstance(error, OSError) else "") from None
    return _read(text, file)


def _of_run(file: Path, warn: Callable[[str], None]) -> pd.DataFrame:
    folder = RunFolder(file.parent)
    history = folder.history()
    records = {record.cell_id: record for record in history}
    if without := folder.without_samples(records.values()):
        warn(f"{file.parent}: the samples behind {len(without)} of {len(records)} rows are lost")
    for line in [*folder.repairs, *folder.doubts()]:
        warn(line)
    order, altered = folder.compare_table(history)
    missing = len(records.keys() - set(order))
    if altered:
        warn(f"{altered}: {EDITED}")
    elif missing and not has_rows(file.parent, OLD):
        warn(f"{file} lacks {missing} of {len(records)} rows; those of {RECORDS} are used")
    rows = [records[cell_id] for cell_id in dict.fromkeys([*order, *records]) if cell_id in records]
    frame = _of_records(rows)
    environment = folder.environment  # the machines of a merged run were found alike, and share a series
    return frame.assign(machine_id=str(environment["machine_id"])) if environment.get("machines") else frame


def _read(table: str, file: Path) -> pd.DataFrame:
    reader = csv.DictReader(io.StringIO(table), restval="", strict=True)
    try:
        if parted := not_by_commas(reader.fieldnames or ()):
            raise ResultsError(f"{file}:1: {parted}")
        rows = list(reader)
    except csv.Error:
        raise _no_table(file) from None
    if not reader.fieldnames:
        raise ResultsError(f"{file}: empty file; measure again with: attnbench run SUITE")
    if any(None in row for row in rows):
        raise _no_table(file)
    older = {axis: other for axis, other in FOLLOWING.items() if axis not in reader.fieldnames}
    missing = [name for name in COLUMNS if name not in {*reader.fieldnames, *ADDED}]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ResultsError(
            f"{file}: not a results table of this version: column {', '.join(missing[:3])}{more} missing; "
            "measure again, or use the attnbench that wrote it"
        )
    versions = sorted({row["schema_version"] for row in rows} - {"", *map(str, READABLE)})
    if versions:
        raise ResultsError(
            f"{file}: schema_version {versions[0]}, this attnbench reads {READABLE[0]} to {READABLE[-1]}; "
            "measure again, or use the attnbench that wrote it"
        )
    columns: dict[str, list[object]] = {name: [] for name in COLUMNS}
    for number, row in enumerate(map(named_as_today, rows), start=2):
        full = {**_BEFORE, **{axis: row[other] for axis, other in older.items() if other in row}, **row}
        for name, kind in _KINDS.items():
            try:
                columns[name].append(_value(full[name], kind))
            except (ValueError, KeyError):
                wanted = {bool: "True or False", int: "a whole number", float: "a finite number"}[kind]
                raise ResultsError(f"{file}:{number}: {name} is {full[name]!r}, not {wanted}") from None
        try:
            refuse_impossible({name: values[-1] for name, values in columns.items()})
        except ValueError as problem:
            raise ResultsError(f"{file}:{number}: {problem}; was the file edited?") from None
    unknown = sorted({row["status"] for row in rows} - {str(status) for status in Status})
    if unknown:
        raise ResultsError(f"{file}: status {unknown[0]!r} does not exist; was the file edited?")
    return _framed(columns)


def _of_records(rows: Sequence[Record]) -> pd.DataFrame:
    columns = {name: [getattr(row, field) for row in rows] for name, field in zip(COLUMNS, FIELDS, strict=True)}
    for name, kind in _KINDS.items():
        if kind is str:
            shown = {one: "" if one is None else printable(str(one)) for one in set(columns[name])}
            columns[name] = [shown[one] for one in columns[name]]
    return _framed(columns)


def _framed(columns: Mapping[str, list[typing.Any]]) -> pd.DataFrame:
    kinds = {name: object if kind is str else kind for name, kind in _KINDS.items()}
    return pd.DataFrame({name: pd.Series(columns[name], dtype=kind) for name, kind in kinds.items()})


def _no_table(file: Path, why: str = "") -> ResultsError:
    return ResultsError(f"{file}: not a CSV table{why}; give a results.csv of attnbench run")


_BEFORE = {name: "" if value is None else str(value) for name, value in ADDED.items()}
_KINDS: dict[str, type] = {
    name: str if issubclass(one.kind, str) else float if one.empty else one.kind
    for name, one in zip(COLUMNS, FIELDS.values(), strict=True)
}
"""Column -> str, bool, int or float; a number that may be missing is float."""


def _value(text: str, kind: type) -> object:
    """The value of a cell; ValueError or KeyError if it is not of this kind."""
    if kind is str:  # the writer puts ' before a formula of a spreadsheet
        return re.sub(rf"^'(?={FORMULA})", "", text)
    if kind is bool:
        return {"true": True, "false": False}[text.lower()]
    if kind is float:
        if math.isinf(amount := float(text) if text else math.nan):  # no run stores one
            raise ValueError(text)
        return amount
    number = int(text) if text.removeprefix("-").isdecimal() else float(text)  # a float lacks digits of some seeds
    if abs(number) >= 2**63 or number % 1:
        raise ValueError(text)
    return int(number)
