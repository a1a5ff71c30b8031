"""The common options of ``diff`` and ``gate``, and a decision on the terminal or in a file."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

import typer

from attnbench.cli.options import File
from attnbench.cli.screen import console
from attnbench.cli.signature import Default
from attnbench.errors import UsageError, any_of, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnbench.answers.gate.decide import Decision, GateQuestion
    from attnbench.answers.gate.verdict import Measure
    from attnbench.results.measurements import MeasuredRun

Format = Literal["table", "markdown", "json", "junit", "action"]

MOST = 1_000_000


def limit(text: str | float) -> float:
    """The limit of a ratio, new over old; BadParameter if it is no number from 1 to :data:`MOST`, as ``nan`` is not."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1 <= value <= MOST:
        raise typer.BadParameter(f"must be a ratio from 1 to {MOST}, such as 1.05, not {str(text)[:60]!r}")
    return value


Ratio = partial(typer.Option, parser=limit, metavar="RATIO")

OnOption = Annotated[
    str, typer.Option("--on", metavar="MEASURES", help="What is compared: time, memory, error, status, score.")
]


class JudgeOptions(TypedDict, total=False):
    """Options of both commands."""

    memory_above: Annotated[float, Ratio(help="The same for peak memory."), Default(1.02)]
    error_above: Annotated[float, Ratio(help="The same for the error."), Default(1.1)]
    relative_to: Annotated[
        str | None, typer.Option(metavar="VARIANT", help="Divide times by the drift of this unchanged variant.")
    ]
    select: Annotated[
        str | None, typer.Option("-k", metavar="EXPRESSION", help="Only these cells, as in attnbench run.")
    ]
    other_machine: Annotated[
        Literal["refuse", "ratios"],
        typer.Option(help="ratios: judge times over --relative-to; default: softmax."),
        Default("refuse"),
    ]
    as_measured: Annotated[
        bool, typer.Option("--as-measured", help="Judge times as they are, not at one speed of the machine.")
    ]
    format_: Annotated[
        Format,
        typer.Option("--format", help="junit: XML; action: JSON of github-action-benchmark."),
        Default("table"),
    ]
    out: Annotated[Path | None, File(help="Write the format to this file, and print the table.")]


def question_of(above: float, on: str, given: JudgeOptions, **more: Any) -> GateQuestion:
    """The question in the options; ``more`` are fields of it. UsageError if a measure does not exist."""
    from attnbench.answers.gate.decide import GateQuestion
    from attnbench.answers.gate.verdict import Tolerance

    limits = Tolerance(above, given["memory_above"], given["error_above"])
    how: dict[str, Any] = {name: given[name] for name in ("relative_to", "select", "other_machine", "as_measured")}
    return GateQuestion(measures_of(on), limits, **how, **more)


def measures_of(text: str) -> tuple[Measure, ...]:
    """The measures typed after ``--on``; UsageError for an unknown or empty one."""
    from attnbench.answers.gate.verdict import MEASURES

    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in MEASURES:
            raise UsageError(f"--on {name!r}: must be {any_of(MEASURES)}{did_you_mean(name, MEASURES)}")
    if not names:
        raise UsageError(f"--on is empty; name {any_of(MEASURES)}, with commas between them")
    return tuple(measure for measure in MEASURES if measure in names)


def read(paths: Sequence[Path]) -> list[MeasuredRun]:
    """Load runs, and warn of faults outside their rows; UsageError if two paths lead to the same run."""
    from attnbench.answers.gate.decide import read_runs

    runs = read_runs(paths)
    for run in runs:
        for doubt in run.doubts:
            console.warning(doubt)
    return runs


def show(decision: Decision, format_: Format, out: Path | None) -> None:
    """Print a decision, or write it to ``out`` and print its table; CannotCreate if ``out`` cannot be written."""
    if out is not None:
        from attnbench.files import write_output

        write_output(out, text_of(decision, format_))
    if out is not None or format_ == "table":
        _print(decision)
    elif format_ in ("json", "action"):
        from attnbench.answers.gate import decision_table

        console.data(decision_table.to_json(decision) if format_ == "json" else decision_table.to_action(decision))
    else:
        console.line(text_of(decision, format_).rstrip("\n"))


def text_of(decision: Decision, format_: Format) -> str:
    """A decision as the text of a file."""
    import json

    from attnbench.answers.gate import decision_table

    if format_ == "json":
        return json.dumps(decision_table.to_json(decision), indent=2, allow_nan=False) + "\n"
    if format_ == "action":
        return json.dumps(decision_table.to_action(decision), indent=2, allow_nan=False) + "\n"
    if format_ == "junit":
        return decision_table.to_junit(decision)
    return decision_table.to_markdown(decision) if format_ == "markdown" else decision_table.to_text(decision)


def _print(decision: Decision) -> None:
    from attnbench.answers.gate.decision_table import COLUMNS, NUMBERS, table_of

    shown = table_of(decision)
    for line in shown.head:
        console.line(line)
    if shown.rows:
        console.table(COLUMNS, shown.rows, right=NUMBERS)
    for line in shown.foot:
        console.line(line)
