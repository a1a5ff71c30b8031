"""``attnbench submit RUN``: the folder that hands a run in to a board."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnbench.cli.screen import console


def submit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or of a suite for its newest.")],
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder that holds the runs of a board.")] = Path("runs"),
) -> None:
    """Write the folder that a pull request adds to a board: a run's rows, environment and suite.

    Samples, learning curves, home folders, passwords and tokens stay out. What verify does not accept is refused.
    """
    from attnbench.answers.board.entries import submit as hand_in

    folder, left = hand_in(run, to)
    for one in left:
        console.warning(f"no board shows {one.what}: {one.why}")
    console.line(f"{folder}")
    console.note("add this folder to the board's repository, in a pull request")
