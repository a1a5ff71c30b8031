"""Rows as the text of a CSV such as ``results.csv``, safe in a spreadsheet and on a terminal."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Reversible, Sequence
from functools import lru_cache

from attnbench.results.manifest import SEAL
from attnbench.results.record import ADDED, COLUMNS, Record
from attnbench.results.renamed import named_as_today
from attnbench.suite.axes import FOLLOWING
from attnbench.text import printable

csv.field_size_limit(2**31 - 1)  # the losses of some thousand windows stand in one cell
FORMULA = r"'*[=+\-@\t\r\n＝＋－＠]"
"""Start of a text that a spreadsheet may run as a formula; in some languages the wide signs start one too. A text that
already has the mark ``'`` gets another, so that a reader who takes one off has the text."""


def no_formula(text: str) -> str:
    """The text, with the mark ``'`` before it if a spreadsheet would run it as a formula."""
    return f"'{text}" if re.match(FORMULA, text) else text


def csv_text(records: Iterable[Record]) -> str:
    """A header and one line for each record."""
    return text_of(COLUMNS, map(_row, records))


def text_of(columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> str:
    """A header and one line for each row, with floats by repr and an empty cell for None."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(row[column]) for column in columns] for row in rows)
    return text.getvalue()


def read_table(text: str) -> list[dict[str, str]]:
    """The rows of such a text under today's names, as column -> text. Raises ValueError: it is no table of rows."""
    reader = csv.DictReader(io.StringIO(text), strict=True)
    try:
        rows = list(reader)
        columns = set(reader.fieldnames or [""])
    except csv.Error as error:
        raise ValueError(str(error)) from None
    if not columns <= set(COLUMNS) or any(None in row or None in row.values() for row in rows):
        raise ValueError("its columns are not those of a table of records")
    return [named_as_today(row) for row in rows]


def altered_lines(table: Sequence[dict[str, str]], records: Reversible[Record]) -> dict[int, str]:
    """Line numbers of a table that match none of these records, or repeat a line, with which of the two.

    A column that the table lacks has the value that it has in older rows.
    """
    lines = [_whole(row) for row in table]
    unmatched = set(lines)
    for record in reversed(records):  # a table has the last row of each cell
        if not unmatched:
            break
        row = _row(record)
        unmatched.discard(tuple(_cell(row[column]) for column in COLUMNS))
    first = {line: number for number, line in reversed(list(enumerate(lines, start=2)))}
    return {
        number: "no row of records.jsonl gives this line" if line in unmatched else f"it repeats line {first[line]}"
        for number, line in enumerate(lines, start=2)
        if line in unmatched or first[line] != number
    }


def _row(record: Record) -> dict[str, object]:
    return record.to_json() | {SEAL: record.seal}


@lru_cache(2**12)
def _text(value: str) -> str:
    return no_formula(printable(value))


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return _text(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


_BEFORE = {name: _cell(value) for name, value in ADDED.items()}


def _whole(row: Mapping[str, str]) -> tuple[str | None, ...]:
    older = {axis: row.get(other) for axis, other in FOLLOWING.items()}
    return tuple({**_BEFORE, **older, **row}.get(column) for column in COLUMNS)
