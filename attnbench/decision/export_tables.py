"""Rows of a run as tables for a page: Markdown or LaTeX, one for each sweep."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from attnbench.axes import FOLLOWING, IN_ROWS
from attnbench.printable import not_live, without_empty
from attnbench.record import COLUMNS, Record
from attnbench.status import Status
from attnbench.units import format_bytes, format_seconds

Format = Literal["markdown", "latex"]
_AXES = (
    *("level", "pass_", *(name for name in COLUMNS if name in IN_ROWS and name != "seed")),
    *("learning_rate", "seed"),
)
"""Columns that are shown where they differ between the rows of one sweep."""
_NUMBERS = ("n", "time", "±", "peak", "state", "error", "score")


@dataclass(frozen=True, slots=True)
class Table:
    """A table as text; ``right`` names the columns that hold numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[str] = ()


def tables_of(records: Sequence[Record]) -> list[Table]:
    """A table for each sweep, with a line for each row and only the columns that say something."""
    sweeps: dict[str, list[Record]] = {}
    for record in records:
        sweeps.setdefault(record.sweep, []).append(record)
    return [_of_sweep(name, mine) for name, mine in sweeps.items()]


def _of_sweep(name: str, records: Sequence[Record]) -> Table:
    axes = [axis for axis in _AXES if len({getattr(record, axis) for record in records}) > 1]
    same = {
        axis
        for axis, other in FOLLOWING.items()
        if all(getattr(record, axis) == getattr(record, other) for record in records)
    }
    axes = [axis for axis in axes if axis not in same]
    columns = ["variant", *(axis.rstrip("_") for axis in axes), *_NUMBERS, "note"]
    rows = [
        [record.label, *(str(getattr(record, axis)) for axis in axes), *_numbers(record), _note(record)]
        for record in records
    ]
    return Table(f"{records[0].suite}: {name}", *without_empty(columns, rows), _NUMBERS)


def _numbers(record: Record) -> list[str]:
    spread = "-"
    if record.time_ci_low_s and record.time_ci_high_s and record.time_median_s:
        spread = f"{(record.time_ci_high_s - record.time_ci_low_s) / 2 / record.time_median_s:.0%}"
    return [
        str(record.seq_len),
        format_seconds(record.time_median_s),
        spread,
        format_bytes(record.peak_bytes),
        format_bytes(record.state_bytes),
        "-" if record.rel_error is None or record.error_kind == "learned" else f"{record.rel_error:.2g}",
        "-" if record.score is None else f"{record.score:.3f}",
    ]


def _note(record: Record) -> str:
    return "" if record.status is Status.OK else f"{record.status}: {record.reason}".rstrip(": ")


def as_text(table: Table, form: Format) -> str:
    """The table in this form, with a line break at its end."""
    return {"markdown": _markdown, "latex": _latex}[form](table)


def _markdown(table: Table) -> str:
    sides = ["---:" if column in table.right else "---" for column in table.columns]
    lines = [_words(table.columns, _in_markdown), sides, *(_words(row, _in_markdown) for row in table.rows)]
    title = [f"**{_in_markdown(table.title)}**", ""] if table.title else []
    return "\n".join([*title, *(f"| {' | '.join(line)} |" for line in lines)]) + "\n"


def _latex(table: Table) -> str:
    """A ``table`` with the rules of the package booktabs."""
    sides = "".join("r" if column in table.right else "l" for column in table.columns)
    head, *body = (f"  {' & '.join(_words(row, _in_latex))} \\\\" for row in [table.columns, *table.rows])
    caption = [f"\\caption{{{_in_latex(table.title)}}}"] if table.title else []
    inside = [f"\\begin{{tabular}}{{{sides}}}", "  \\toprule", head, "  \\midrule", *body, "  \\bottomrule"]
    return "\n".join(["\\begin{table}", *caption, *inside, "\\end{tabular}", "\\end{table}"]) + "\n"


def _words(row: Sequence[str], escape: Callable[[str], str]) -> list[str]:
    return [escape(" ".join(cell.replace(":\n", ":").replace(",\n", ",").split())) for cell in row]


def _in_markdown(text: str) -> str:
    return not_live(re.sub(r"([\\|*_`<>\[\]])", r"\\\1", text))


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "·": r"$\cdot$",
    "√": r"$\surd$",
    "†": r"$\dagger$",
    "µ": r"\textmu{}",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


def _in_latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
