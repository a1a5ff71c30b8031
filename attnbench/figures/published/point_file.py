"""A file of points read off a paper's figure or table, to be drawn with a run.

A CSV file, with comments on the points above its columns::

    # source: Who et al. 2021, arXiv:0000.00000, figure 3
    # read: by eye from the PDF, each point within 10 %
    model,family,n,time_ms
    Transformer,exact,1024,2.4

``source`` and ``read`` are required, ``title`` is optional. A row is one point: ``model``, ``n``, perhaps ``family``,
and one or more of :data:`VALUES`. An empty cell is a value that was not published.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from attnbench.errors import UsageError, any_of, did_you_mean, not_by_commas
from attnbench.figures.kit.palette import palette
from attnbench.text import quantity

VALUES = {
    "time_ms": "time (ms)",
    "time_relative": "time (relative)",
    "memory_mb": "memory (MB)",
    "memory_relative": "memory (relative)",
}
"""Column of the file -> name of its axis."""
_COLUMNS = ("model", "family", "n", *VALUES)
_ABOUT = ("source", "read", "title")
_MODELS, _TEXT = 16, 300
"""The most models, and letters of a line above the columns."""


@dataclass(frozen=True)
class Points:
    """Published values over the length, and their source."""

    title: str
    source: str
    read: str
    table: pd.DataFrame
    """Columns ``model``, ``n``, perhaps ``family``, and those of :data:`VALUES` that the file has."""


def read_points(path: Path) -> Points:
    """Read a file of points; UsageError with the file, the line and the remedy if it is not one."""
    lines = csv_text(path, "CSV file of points", others=["published"]).splitlines()
    above = next((place for place, line in enumerate(lines) if not line.startswith("#")), len(lines))
    about = _about(path, lines[:above])
    table = _table(path, lines[above:], above)
    return Points(about.get("title", "Published measurements"), about["source"], about["read"], table)


def csv_text(path: Path, what: str, *, others: Sequence[str] = (), megabytes: int = 1) -> str:
    """The text of a ``CSV file of points``, say; UsageError if it cannot be read. ``others`` stand for files."""
    remedy = f"give {''.join(f'{other}, or ' for other in others)}a {what}"
    try:
        if path.exists() and not path.is_file():  # reading a pipe may take for ever
            raise UsageError(f"{path}: not a file; give a {what}")
        with path.open("rb") as file:
            content = file.read(megabytes * 10**6 + 1)
        if len(content) > megabytes * 10**6:
            raise UsageError(f"{path}: more than {megabytes} MB; a {what} is smaller")
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        hint = did_you_mean(str(path), others) or f"; {remedy}"
        raise UsageError(f"{path}: no such file{hint}") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
        raise UsageError(f"{path}: cannot be read ({why}); give a {what}") from None


def csv_lines(path: Path, text: str, above: int = 0) -> Iterator[tuple[str, list[str]]]:
    """Each line of CSV: its file and number, counted from ``above`` on, and its cells; UsageError if it is none."""
    reader = csv.reader(io.StringIO(text), strict=True)
    try:
        for cells in reader:
            if cells:
                yield f"{path}:{above + reader.line_num}", [cell.strip() for cell in cells]
    except csv.Error as error:
        raise UsageError(f"{path}:{above + reader.line_num}: not CSV ({error}); check the quotes") from None


def check_names(at: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise UsageError if a column is not ``known``, or is there twice."""
    for name in names:
        if name not in known:
            if parted := not_by_commas([name]):
                raise UsageError(f"{at}: {parted}")
            hint = did_you_mean(name, known) or f"; there are: {', '.join(known)}"
            raise UsageError(f"{at}: unknown column {name[:60]!r}{hint}")
        if names.count(name) > 1:
            raise UsageError(f"{at}: column {name!r} is there twice; remove one")


def _about(path: Path, lines: Sequence[str]) -> dict[str, str]:
    about: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        name, colon, text = (part.strip() for part in line.removeprefix("#").partition(":"))
        if name not in _ABOUT or not colon or not text:
            raise UsageError(f"{path}:{number}: write # source: TEXT, # read: TEXT or # title: TEXT above the columns")
        if name in about:
            raise UsageError(f"{path}:{number}: a second line for {name}; write all of it in one")
        if len(text) > _TEXT:
            raise UsageError(f"{path}:{number}: {name} has {len(text)} letters; shorten it to {_TEXT}")
        about[name] = text
    wanted = {"source": "the paper and its figure or table", "read": "how exactly its points were read"}
    for name, what in wanted.items():
        if name not in about:
            raise UsageError(f"{path}:1: no {name}; begin the file with a line # {name}: that says {what}")
    return about


def _table(path: Path, lines: Sequence[str], above: int) -> pd.DataFrame:
    columns: list[str] = []
    rows: dict[tuple[object, object], dict[str, object]] = {}
    places: list[str] = []
    for at, cells in csv_lines(path, "\n".join(lines), above):
        if not columns:
            _check_columns(at, cells)
            columns = cells
            continue
        row = _row(at, columns, cells)
        point = row["model"], row["n"]
        if point in rows:
            raise UsageError(f"{at}: {point[0]!r} has a row of n = {point[1]} already; remove one")
        rows[point] = row
        places.append(at)
    if not rows:
        raise UsageError(f"{path}:{above + max(1, len(lines))}: no points; write model,n,time_ms and a row for each")
    table = pd.DataFrame(list(rows.values()))
    _check_models(table, places)
    return table


def _check_models(table: pd.DataFrame, places: Sequence[str]) -> None:
    for turn, (model, part) in enumerate(table.groupby("model", sort=False)):
        first = part.index[0]
        if turn == _MODELS:
            raise UsageError(f"{places[first]}: more than {_MODELS} models; draw fewer in one file")
        if "family" in table and (other := part.index[part["family"] != part["family"][first]]).size:
            said = f"{model!r} is of the family {part['family'][first]!r} above; give it one family"
            raise UsageError(f"{places[other[0]]}: {said}")
        for column in VALUES:
            if column in table and part[column].count() == 1:
                said = f"one {column} of {model!r}; a line needs two lengths, so add one or remove it"
                raise UsageError(f"{places[part.index[part[column].notna()][0]]}: {said}")


def _check_columns(at: str, names: Sequence[str]) -> None:
    check_names(at, names, _COLUMNS)
    for name in ("model", "n"):
        if name not in names:
            raise UsageError(f"{at}: no column {name}; the columns are model, n and {any_of(VALUES)}")
    if not set(names) & set(VALUES):
        raise UsageError(f"{at}: no column of values; add {any_of(VALUES)}")


def _row(at: str, columns: Sequence[str], cells: Sequence[str]) -> dict[str, object]:
    if len(cells) != len(columns):
        raise UsageError(
            f"{at}: {quantity(len(cells), 'cell')} for {quantity(len(columns), 'column')}; write {','.join(columns)}"
        )
    if not any(cell for name, cell in zip(columns, cells, strict=True) if name in VALUES):
        raise UsageError(f"{at}: no value in this row; write {any_of(VALUES)}, or remove the row")
    return {name: _READ[name](f"{at}: {name}", cell) for name, cell in zip(columns, cells, strict=True)}


def _name(at: str, cell: str) -> str:
    if not cell:
        raise UsageError(f"{at} is empty; name the model of this point")
    return cell


def _family(at: str, cell: str) -> str:
    families = list(palette().families)
    if cell not in families:
        hint = did_you_mean(cell, families) or f"; there are: {', '.join(families)}"
        raise UsageError(f"{at} is {cell!r}{hint}")
    return cell


def _length(at: str, cell: str) -> int:
    if not (cell.isascii() and cell.isdigit() and 0 < int(cell[:18]) < 2**40):
        raise UsageError(f"{at} is {cell!r}, not a length; write a whole number such as 1024")
    return int(cell)


def _value(at: str, cell: str) -> float:
    if not cell:
        return math.nan
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not 1e-30 < value < 1e30:
        raise UsageError(f"{at} is {cell!r}, not a number above 0; write one such as 2.4, or nothing")
    return value


_READ: dict[str, Callable[[str, str], object]] = {
    "model": _name,
    "family": _family,
    "n": _length,
    **dict.fromkeys(VALUES, _value),
}
