"""``attnbench diff OLD NEW``: the changes between two runs, cell by cell."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Unpack

import typer

from attnbench.cli.screen import decisions
from attnbench.cli.screen.outputs import refuse_files
from attnbench.cli.signature import command, completed


@command(decisions.JudgeOptions)
def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="Folder of a run, or of a suite for its newest run.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The run that is compared with it.")],
    above: Annotated[
        float, decisions.Ratio(help="A ratio of times beyond it counts as slower or faster; 1 or more.")
    ] = 1.05,
    on: decisions.OnOption = "time,memory,error,status,score",
    **given: Unpack[decisions.JudgeOptions],
) -> None:
    """Compare two runs cell by cell, whatever the names of their suites.

    A cell is slower or faster only if the whole interval of its ratio lies beyond the limit. The exit code does not
    tell what changed; that of attnbench gate does.
    """
    given = completed(decisions.JudgeOptions, given)
    refuse_files(given["out"])
    question = decisions.question_of(above, on, given, closes=False)

    from attnbench.answers.gate.decide import decide

    before, now = decisions.read([old, new])
    decisions.show(decide(now, [before], question), given["format_"], given["out"])
