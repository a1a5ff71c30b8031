"""Read a run or ``results.csv`` as a DataFrame with the columns of :data:`attnbench.record.COLUMNS`."""

from __future__ import annotations

import functools
import io
import types
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from attnbench.axes import FOLLOWING
from attnbench.errors import ResultsError
from attnbench.record import ADDED, COLUMNS, READABLE, Record
from attnbench.runs import by_age, suites_of
from attnbench.status import Status
from attnbench.store import CURVES, ENVIRONMENT, RECORDS, RunFolder
from attnbench.store import TABLE as FILE
from attnbench.table import FORMULA, csv_text

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

    Args:
        frame: a table from :func:`read_results`, or some of its rows.

    Raises:
        CorruptResults: lines are not as they were written.
    """
    folders = [(name, Path(folder)) for name, folder in frame.attrs.get(FOLDERS, ())]
    return {
        (name, cell_id): points
        for name, folder in folders
        if (folder / CURVES).is_file()
        for cell_id, points in RunFolder(folder).curves().items()
    }


def run_names(files: Sequence[Path]) -> list[str]:
    """For each CSV file, the part of its path that tells its run from the others."""
    paths = [(file.absolute().parent if file.name == FILE else file.absolute()).parts for file in files]
    while len(paths) > 1 and len({path[:1] for path in paths}) == 1 and all(len(path) > 1 for path in paths):
        paths = [path[1:] for path in paths]
    while len(paths) > 1 and len({path[-1:] for path in paths}) == 1 and all(len(path) > 1 for path in paths):
        paths = [path[:-1] for path in paths]
    for place in range(min(map(len, paths), default=0)):  # one folder's name is enough if it tells all apart
        if len({path[place] for path in paths}) == len(paths) > 1:
            return [path[place] for path in paths]
    return ["/".join(path) if len(paths) > 1 else path[-1] for path in paths]


def find_results(path: Path) -> list[Path]:
    """The CSV files that ``path`` stands for; of a suite's runs only the newest.

    In a folder with runs of several suites, where somebody collects runs, each of them stands for itself.

    Raises:
        ResultsError: there is nothing to read.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ResultsError(f"{path}: no such file or folder; give a results.csv or a folder written by attnbench run")
    if (path / FILE).is_file() and not _is_stray(path / FILE):
        return [path / FILE]
    if (path / RECORDS).is_file():
        raise ResultsError(f"{path}: this run has no {FILE} yet; continue it with the attnbench run that began it")
    suites = [path, *sorted(child for child in path.iterdir() if child.is_dir())]
    tables = [[file for file in suite.glob(f"*/{FILE}") if file.is_file() and not _is_stray(file)] for suite in suites]
    runs = [by_age(file.parent for file in [*filter(_is_in_run, here)] or here) for here in tables]
    standing = [run / FILE for together in runs for run in (together if is_collection(together) else together[-1:])]
    if not standing:
        raise ResultsError(f"{path}: holds no run (no {FILE} inside); measure first with: attnbench run SUITE")
    return standing


def _is_stray(file: Path) -> bool:
    """Whether a table stands where runs are, and not in one: somebody else put it there."""
    runs = (run for below in ("*", "*/*") for run in file.parent.glob(f"{below}/{RECORDS}"))
    return not _is_in_run(file) and any(runs)


def is_collection(runs: Sequence[Path]) -> bool:
    """Whether these runs of one folder are of several suites, so that none of them takes the place of another."""
    return len(suites_of(runs)) > 1


def _is_in_run(file: Path) -> bool:
    return file.name == FILE and (file.parent / RECORDS).is_file()


def _alone(file: Path, warn: Callable[[str], None]) -> pd.DataFrame:
    if file.name == FILE and (file.parent / ENVIRONMENT).exists():
        warn(f"{file.parent}: {RECORDS} is missing, so nothing vouches for {FILE}")
    return _read(file, file)


def _of_run(file: Path, warn: Callable[[str], None]) -> pd.DataFrame:
    """The rows of the run whose folder ``file`` is in."""
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
        warn(f"{altered}: not what the run stored; the rows of {RECORDS} are used")
    elif missing:
        warn(f"{file} lacks {missing} of {len(records)} rows; those of {RECORDS} are used")
    rows = [records[cell_id] for cell_id in dict.fromkeys([*order, *records]) if cell_id in records]
    frame = _read(io.StringIO(csv_text(rows)), file)
    return _as_one_machine(frame, folder)


def _as_one_machine(frame: pd.DataFrame, folder: RunFolder) -> pd.DataFrame:
    """Rows of a merged run with the name of all its machines, which were found alike, so that they share a series."""
    environment = folder.environment
    return frame.assign(machine_id=str(environment["machine_id"])) if environment.get("machines") else frame


def _read(source: Path | io.StringIO, file: Path) -> pd.DataFrame:
    """The rows of a table; messages call it ``file``."""
    try:
        # An empty cell is the only "not measured": a variant may be called NA.
        text = pd.read_csv(source, dtype=object, keep_default_na=False, na_values=[""], encoding="utf-8")
    except pd.errors.EmptyDataError:
        raise ResultsError(f"{file}: empty file; measure again with: attnbench run SUITE") from None
    except (ValueError, OSError) as error:
        why = f" ({error.strerror})" if isinstance(error, OSError) else ""
        raise ResultsError(f"{file}: not a CSV table{why}; give a results.csv of attnbench run") from None
    older = {axis: text[other] for axis, other in FOLLOWING.items() if axis not in text and other in text}
    added = {name: None if value is None else str(value) for name, value in ADDED.items()} | older
    lacking = {name: value for name, value in added.items() if name not in text.columns}
    text = pd.concat([text, pd.DataFrame(lacking, index=text.index, dtype=object)], axis=1)
    missing = [name for name in COLUMNS if name not in text.columns]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ResultsError(
            f"{file}: not a results table of this version: column {', '.join(missing[:3])}{more} missing; "
            "measure again, or use the attnbench that wrote it"
        )
    versions = sorted(set(text["schema_version"].dropna()) - set(map(str, READABLE)))
    if versions:
        raise ResultsError(
            f"{file}: schema_version {versions[0]}, this attnbench reads {READABLE[0]} to {READABLE[-1]}; "
            "measure again, or use the attnbench that wrote it"
        )
    frame = pd.DataFrame({name: _typed(text[name], kind, name, file) for name, kind in _kinds().items()})
    unknown = sorted(set(frame["status"]) - {str(status) for status in Status})
    if unknown:
        raise ResultsError(f"{file}: status {unknown[0]!r} does not exist; was the file edited?")
    return frame


@functools.cache
def _kinds() -> Mapping[str, type]:
    """Column -> str, bool, int or float; a number that may be missing is float."""
    kinds: dict[str, type] = {}
    for field_name, hint in typing.get_type_hints(Record).items():
        members = set(typing.get_args(hint)) if isinstance(hint, types.UnionType) else {hint}
        optional = types.NoneType in members
        (kind,) = members - {types.NoneType}
        kind = str if issubclass(kind, str) else float if optional else kind
        kinds["pass" if field_name == "pass_" else field_name] = kind
    return {name: kinds[name] for name in COLUMNS}


def _typed(column: pd.Series[str], kind: type, name: str, file: Path) -> pd.Series[typing.Any]:
    try:
        if kind is str:
            text = column.fillna("").astype(object)
            # The writer puts ' before what a spreadsheet would run as a formula.
            if any(one.startswith("'") for one in text.unique()):
                text = text.str.replace(rf"^'(?={FORMULA})", "", regex=True)
            return text
        if kind is bool:
            flags = column.map({"True": True, "False": False, "true": True, "false": False})
            if flags.isna().any():
                raise ValueError
            return flags.astype(np.bool_)
        numbers = column.astype(np.float64)
        if kind is float:
            return numbers
        if not (np.isfinite(numbers) & (numbers % 1 == 0)).all():
            raise ValueError
        return numbers.astype(np.int64)
    except (ValueError, TypeError):
        wanted = {bool: "True or False", int: "a whole number", float: "a number"}[kind]
        fits = column.map(lambda cell: _fits(cell, kind))
        line = int(np.flatnonzero(~fits.to_numpy())[0]) + 2
        raise ResultsError(f"{file}:{line}: {name} is {column.iloc[line - 2]!r}, not {wanted}") from None


def _fits(cell: object, kind: type) -> bool:
    if not isinstance(cell, str):
        return kind is float
    if kind is bool:
        return cell in ("True", "False", "true", "false")
    try:
        value = float(cell)
    except ValueError:
        return False
    return kind is float or (np.isfinite(value) and value == int(value))
