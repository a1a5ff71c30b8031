"""Every column of results.csv, every status of a row, and every exit code."""

from __future__ import annotations

import re
from collections.abc import Iterator

from attnbench.errors import Exit
from attnbench.measure.status import Status
from attnbench.results.record import COLUMNS, FIELDS
from generators.markdown import code, described, page, table, text, words

_NAMES = re.compile(rf"(?<![`\w])({'|'.join(name for name in COLUMNS if '_' in name)})(?![`\w])")
"""Other columns, where a meaning names them."""


def meanings() -> dict[str, str]:
    """Column -> the docstring of the field that it is made of."""
    fields = described("attnbench/results/record.py", "Record")
    return {column: _NAMES.sub(r"``\1``", fields["pass_" if column == "pass" else column]) for column in COLUMNS}


def pages() -> Iterator[tuple[str, str]]:
    """The columns with the statuses, and the exit codes."""
    units = {column: one.unit for column, one in zip(COLUMNS, FIELDS.values(), strict=True)}
    yield (
        "reference/columns.md",
        page(
            "# The columns of results.csv",
            "One row is one measured cell. A field is empty if the row has no such number. Times are in seconds and "
            "sizes in bytes; the end of a column's name says which.",
            table(
                ["column", "unit", "meaning"],
                [[code(name), units[name], words(said)] for name, said in meanings().items()],
            ),
            "## How a cell can end",
            "The column `status` has one of these words.",
            table(["status", "meaning"], [[code(one.value), text(one.meaning)] for one in Status]),
        ),
    )
    said = described("attnbench/errors.py", "Exit")
    yield (
        "reference/exit-codes.md",
        page(
            "# Exit codes",
            "They are the same for all commands.",
            table(["code", "meaning"], [[str(int(one)), words(said[one.name])] for one in Exit]),
        ),
    )
