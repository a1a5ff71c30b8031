"""``attnbench board FOLDER... --out SITE``: a static site from runs of many people."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnbench.cli.screen import console


def board(
    runs: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Runs, or folders that hold some.")],
    out: Annotated[Path, typer.Option(metavar="SITE", help="Folder for the pages.")] = Path("board"),
) -> None:
    """Write a site with a page for each shape, and the length from which on a variant beats the best exact kernel.

    Runs that verify does not accept, and rows whose laws did not hold, are left out and named with the reason.
    """
    from attnbench.answers.board.site import board as written

    index, left = written(runs, out)
    for one in left:
        console.warning(f"left out: {one.run}, {one.what}: {one.why}")
    console.line(f"{index}")
