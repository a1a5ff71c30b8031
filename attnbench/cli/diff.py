"""``attnbench diff OLD NEW``: the changes between two runs, cell by cell."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnbench.cli import decisions
from attnbench.cli.outputs import refuse_files


def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="Folder of a run, or of a suite for its newest run.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The run that is compared with it.")],
    above: Annotated[
        float,
        typer.Option(
            parser=decisions.limit,
            metavar="RATIO",
            help="A ratio of times beyond it counts as slower or faster; 1 or more.",
        ),
    ] = 1.05,
    memory_above: decisions.MemoryAbove = 1.02,
    error_above: decisions.ErrorAbove = 1.1,
    on: decisions.OnOption = "time,memory,error,status,score",
    relative_to: decisions.RelativeTo = None,
    select: decisions.Select = None,
    other_machine: decisions.OtherMachine = "refuse",
    as_measured: decisions.AsMeasured = False,
    format_: decisions.FormatOption = "table",
    out: decisions.OutOption = None,
) -> None:
    """Compare two runs cell by cell, whatever the names of their suites.

    A cell is slower or faster only if the whole interval of its ratio lies beyond the limit. The exit code does not
    tell what changed; that of attnbench gate does.
    """
    refuse_files(out)
    measures = decisions.measures_of(on)

    from attnbench.decision.decide import Question, decide
    from attnbench.decision.judge import Limits

    before, now = decisions.read([old, new])
    limits = Limits(above, memory_above, error_above)
    question = Question(
        measures, limits, relative_to, select, other_machine=other_machine, as_measured=as_measured, closes=False
    )
    decisions.show(decide(now, [before], question), format_, out)
