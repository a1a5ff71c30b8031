"""``attnbench merge RUN... --out FOLDER``: runs of one suite on several machines, as one run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from attnbench.cli.screen import console
from attnbench.errors import UsageError


def merge(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs of one suite, such as its shards.")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder for the new run; it must not exist.")
    ] = None,
    rates_within: Annotated[
        float,
        typer.Option(min=0, max=1e6, metavar="SHARE", help="Share by which the machines' measured rates may differ."),
    ] = 0.1,
) -> None:
    """Join runs of one suite into one run that plot, report, diff and gate read like any other.

    The runs must have one method and one class of machine, with memories within 5 %. If one machine measured cells
    twice, those that differ by the variant alone come from one run: that with more of them, then more rounds, then
    given first. A cell that two machines measured is refused, and so is a machine whose rates differ from those of the
    others. Then nothing is written.
    """
    if out is None:
        raise UsageError(
            "merge needs --out FOLDER; for example: attnbench merge results/lra/*of4 --out results/lra-all"
        )
    from attnbench.results.merge import merge as join

    merged = join(runs, out, rates_within=rates_within)
    rows = [[str(path), machine, str(count)] for path, machine, count in merged.parts]
    console.table(["run", "machine", "rows"], rows, right=["rows"])
    for note in merged.notes:
        console.warning(note)
    console.line(f"results: {out / 'results.csv'}")
    console.line(f"figures: {shlex.join(['attnbench', 'plot', str(out)])}")
