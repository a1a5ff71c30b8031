"""Records as the text of ``results.csv``: one row each, nothing that a spreadsheet would run."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable

from attnbench.record import COLUMNS, Record

FORMULA = r"'*[=+\-@\t\r\n＝＋－＠]"
"""How a text starts that a spreadsheet may run, in some languages with the wide signs as well; a text that already has
the mark gets another, so that a reader who takes one off has the text."""


def no_formula(text: str) -> str:
    """The text, with the mark ``'`` before it where a spreadsheet would run it as a formula."""
    return f"'{text}" if re.match(FORMULA, text) else text


def csv_text(records: Iterable[Record]) -> str:
    """A header and one row for each record; floats by repr, nothing for None."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([_cell(row[column]) for column in COLUMNS] for row in (record.to_json() for record in records))
    return text.getvalue()


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return no_formula(value) if isinstance(value, str) else repr(value) if isinstance(value, float) else str(value)
