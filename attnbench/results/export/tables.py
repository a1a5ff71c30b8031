"""Rows of a run as tables for a page: Markdown or LaTeX, one for each sweep."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from attnbench.measure.status import Status
from attnbench.results.frame import marks
from attnbench.results.intervals import floor_of, learnt, summary
from attnbench.results.record import COLUMNS, UNCHECKED, Record
from attnbench.results.trainings import choose, trained
from attnbench.suite.axes import FOLLOWING, IN_ROWS, OF_SWAPS
from attnbench.text import not_live, without_empty
from attnbench.units import format_bytes, format_interval, format_seconds

Format = Literal["markdown", "latex"]
_AXES = (
    *("level", "pass_", *(name for name in COLUMNS if name in (*IN_ROWS, *OF_SWAPS) and name != "seed")),
    *("test_len", "learning_rate", "seed"),
)
_NUMBERS = ("n", "time", "95 %", "first token", "per token", "peak", "state", "error", "score", "score 95 %", "seeds")


@dataclass(frozen=True, slots=True)
class Table:
    """A table as text; ``right`` names the columns of numbers, ``notes`` and the marks' meanings stand below it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[str] = ()
    notes: Sequence[str] = ()

    @property
    def beneath(self) -> list[str]:
        return [*self.notes, *marks.notes(cell for row in [self.columns, *self.rows] for cell in row)]


def tables_of(records: Sequence[Record]) -> list[Table]:
    """A table for each sweep, with a line for each row and only the columns that say something.

    Trainings that differ only in their seed share a line: the mean and its interval over seeds.
    """
    sweeps: dict[str, list[Record]] = {}
    for record in records:
        sweeps.setdefault(record.sweep, []).append(record)
    return [_of_sweep(name, mine) for name, mine in sweeps.items()]


@dataclass(frozen=True, slots=True)
class _TableLine:
    """One line of a table: a row, or the trainings at the chosen rate, one of which is ``row``."""

    row: Record
    scores: tuple[str, str, str] = ("-", "-", "-")
    """Score, its interval, and the number of seeds."""
    note: str = ""


def _of_sweep(name: str, every: Sequence[Record]) -> Table:
    lines = [*(_TableLine(one, note=_note(one)) for one in every if not _is_training(one)), *_trainings(every)]
    records = [line.row for line in lines]
    axes = [axis for axis in _AXES if len({getattr(record, axis) for record in records}) > 1]
    same = {
        axis
        for axis, other in FOLLOWING.items()
        if all(getattr(record, axis) == getattr(record, other) for record in records)
    }
    axes = [axis for axis in axes if axis not in same]
    columns = ["variant", *(axis.rstrip("_") for axis in axes), *_NUMBERS, "note"]
    rows = [
        [
            marks.name_text(line.row.label, line.row.own_form),
            *(str(getattr(line.row, axis)) for axis in axes),
            *_numbers(line.row),
            *line.scores,
            line.note,
        ]
        for line in lines
    ]
    notes = ["score: mean over seeds; its 95 % over seeds, with one seed over test examples"] * any(
        line.scores[0] != "-" for line in lines
    )
    notes += ["no variant was held to its laws first: --unchecked"] * any(one.laws == UNCHECKED for one in every)
    return Table(f"{records[0].suite}: {name}", *without_empty(columns, rows), _NUMBERS, notes)


def _is_training(record: Record) -> bool:
    return record.steps is not None


def _trainings(records: Sequence[Record]) -> Iterator[_TableLine]:
    rows = {record.cell_id: record for record in records}
    found = trained(record for record in records if _is_training(record))
    choices = choose(found)
    floors: dict[object, float | None] = {}
    for problem in {choice.problem for choice in choices}:
        floors[problem] = floor_of(
            one for choice in choices if choice.problem == problem and (one := summary(choice)) is not None
        )
    for choice in choices:
        one = summary(choice)
        if one is None:
            alike = choice.rows or [row for row in found if (row.label, row.problem) == (choice.label, choice.problem)]
            row = rows[alike[0].cell_id]
            yield _TableLine(row, note=_note(row) if choice.rows else choice.notes[-1])
            continue
        first = next(row for row in choice.rows if row.ok)
        ends = "-" if one.ends is None else f"{one.ends[0]:.3f} to {one.ends[1]:.3f}"
        score = marks.score_text(one.over_seeds.mean, learnt=learnt(one, floors[choice.problem]))
        failed = f"{one.failed} of {len(choice.rows)} trainings failed" if one.failed else ""
        yield _TableLine(rows[first.cell_id], (score, ends, str(len(one.by_seed))), failed)


def _numbers(record: Record) -> list[str]:
    return [
        str(record.seq_len),
        format_seconds(record.time_median_s),
        format_interval(record.time_median_s, record.time_ci_low_s, record.time_ci_high_s) or "-",
        format_seconds(record.first_token_s),
        format_seconds(record.token_s),
        format_bytes(record.peak_bytes),
        format_bytes(record.state_bytes),
        marks.error_text(record.rel_error, record.error_kind),
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
    notes = [part for said in table.beneath for part in ("", _in_markdown(said))]
    return "\n".join([*title, *(f"| {' | '.join(line)} |" for line in lines), *notes]) + "\n"


def _latex(table: Table) -> str:
    sides = "".join("r" if column in table.right else "l" for column in table.columns)
    head, *body = (f"  {' & '.join(_words(row, _in_latex))} \\\\" for row in [table.columns, *table.rows])
    caption = [f"\\caption{{{_in_latex(table.title)}}}"] if table.title else []
    inside = [f"\\begin{{tabular}}{{{sides}}}", "  \\toprule", head, "  \\midrule", *body, "  \\bottomrule"]
    notes = [f"\\par\\footnotesize {_in_latex(said)}" for said in table.beneath]
    return "\n".join(["\\begin{table}", *caption, *inside, "\\end{tabular}", *notes, "\\end{table}"]) + "\n"


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
    "°": r"$^\circ$",
    "µ": r"\textmu{}",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


def _in_latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
