"""``attnbench diff OLD NEW``: what changed between two runs, cell by cell."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnbench.cli.decisions import (
    AsMeasured,
    ErrorAbove,
    FormatOption,
    MemoryAbove,
    OnOption,
    OtherMachine,
    OutOption,
    RelativeTo,
    Select,
    limit,
    measures_of,
    read,
    show,
)
from attnbench.cli.outputs import refuse_files


def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="Folder of a run, or of a suite for its newest run.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The run that is compared with it.")],
    above: Annotated[
        float,
        typer.Option(
            parser=limit, metavar="RATIO", help="A ratio of times beyond it counts as slower or faster; 1 or more."
        ),
    ] = 1.05,
    memory_above: MemoryAbove = 1.02,
    error_above: ErrorAbove = 1.1,
    on: OnOption = "time,memory,error,status,score",
    relative_to: RelativeTo = None,
    select: Select = None,
    other_machine: OtherMachine = "refuse",
    as_measured: AsMeasured = False,
    format_: FormatOption = "table",
    out: OutOption = None,
) -> None:
    """Compare two runs cell by cell, whatever the names of their suites.

    A cell is slower or faster only if the whole interval of its ratio lies beyond the limit. The exit code does not
    tell what changed; that of attnbench gate does.
    """
    refuse_files(out)
    measures = measures_of(on)

    from attnbench.decision.decide import Question, decide
    from attnbench.decision.judge import Limits

    before, now = read([old, new])
    limits = Limits(above, memory_above, error_above)
    question = Question(
        measures, limits, relative_to, select, other_machine=other_machine, as_measured=as_measured, closes=False
    )
    show(decide(now, [before], question), format_, out)
