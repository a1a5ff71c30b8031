"""``results.csv`` -> DataFrame with the columns of :data:`attnbench.record.COLUMNS`, or one line that says why not."""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from attnbench.errors import ResultsError
from attnbench.record import ADDED, COLUMNS, SCHEMA_VERSION, Record
from attnbench.status import Status
from attnbench.table import FORMULA

FILE = "results.csv"


def read_results(path: str | Path | Sequence[str | Path]) -> pd.DataFrame:
    """Read a ``results.csv``, a run's folder, a suite's folder (its newest run) or a results folder (of each suite).

    Several paths give one table, in their order. Text columns are never NaN (empty instead); numbers that were not
    measured are NaN; ``causal``, ``compile``, ``compiled`` and ``quick`` are bool.

    Raises:
        ResultsError: no such file, no run in the folder, another schema, or a value that does not fit its column.
    """
    paths = [path] if isinstance(path, str | Path) else list(path)
    files = [file for one in paths for file in find_results(Path(one))]
    frames = [_read(file) for file in files]
    if not any(len(frame) for frame in frames):
        names = ", ".join(str(file) for file in files) or "no path given"
        raise ResultsError(f"{names}: no row yet; measure first with: attnbench run SUITE")
    return pd.concat([frame for frame in frames if len(frame)], ignore_index=True)


def find_results(path: Path) -> list[Path]:
    """The CSV files that ``path`` stands for; folder names of runs start with their time, so the last is the newest.

    Raises:
        ResultsError: nothing there.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ResultsError(f"{path}: no such file or folder; give a results.csv or a folder written by attnbench run")
    if (path / FILE).is_file():
        return [path / FILE]
    if (path / "records.jsonl").is_file():
        raise ResultsError(f"{path}: this run has no {FILE} yet; continue it with the attnbench run that began it")
    suites = [path, *sorted(child for child in path.iterdir() if child.is_dir())]
    newest = [runs[-1] for suite in suites if (runs := sorted(suite.glob(f"*/{FILE}")))]
    if not newest:
        raise ResultsError(f"{path}: holds no run (no {FILE} inside); measure first with: attnbench run SUITE")
    return newest


def _read(file: Path) -> pd.DataFrame:
    try:
        # An empty cell is the only "not measured": a variant may be called NA.
        text = pd.read_csv(file, dtype=str, keep_default_na=False, na_values=[""], encoding="utf-8")
    except pd.errors.EmptyDataError:
        raise ResultsError(f"{file}: empty file; measure again with: attnbench run SUITE") from None
    except (ValueError, OSError) as error:
        raise ResultsError(f"{file}: not a CSV table ({' '.join(str(error).split())[:120]})") from None
    added = {name: None if value is None else str(value) for name, value in ADDED.items()}
    text = text.assign(**{name: value for name, value in added.items() if name not in text.columns})
    missing = [name for name in COLUMNS if name not in text.columns]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ResultsError(
            f"{file}: not a results table of this version: column {', '.join(missing[:3])}{more} missing; "
            "measure again, or use the attnbench that wrote it"
        )
    versions = sorted(set(text["schema_version"].dropna()) - {str(SCHEMA_VERSION)})
    if versions:
        raise ResultsError(
            f"{file}: schema_version {versions[0]}, this attnbench reads {SCHEMA_VERSION}; "
            "measure again, or use the attnbench that wrote it"
        )
    frame = pd.DataFrame({name: _typed(text[name], kind, name, file) for name, kind in _kinds().items()})
    unknown = sorted(set(frame["status"]) - {str(status) for status in Status})
    if unknown:
        raise ResultsError(f"{file}: status {unknown[0]!r} does not exist; was the file edited?")
    return frame


def _kinds() -> dict[str, type]:
    """Column -> str, bool, int or float; what may be absent and is a number is float."""
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
