"""``attnbench history RESULTS``: one measure of the same cells over many runs, with its changes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Unpack

import typer

from attnbench.cli import options
from attnbench.cli.screen import console
from attnbench.cli.screen.outputs import draw, refuse_files
from attnbench.cli.signature import command, completed


@command(options.HistoryOptions)
def history(
    results: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RESULTS", show_default=False, help="Folders of runs or suites. Default: results."),
    ] = None,
    *,
    as_json: options.AsJson = False,
    plot: Annotated[
        Path | None, options.File(help="Draw the values over the runs into this .svg, .png or .pdf.")
    ] = None,
    width: options.Width = "page",
    **given: Unpack[options.HistoryOptions],
) -> None:
    """Follow the cells through the runs of one machine, and find the runs from which on something changed.

    Runs that cannot be compared with the newest are left out with the reason. A time changed only if the whole
    interval against the runs before lies beyond the limit; intervals of all cells and runs hold together. The first
    four runs get no verdict on times, nor does a run of less than three rounds.
    """
    given = completed(options.HistoryOptions, given)
    refuse_files(plot=plot)

    from attnbench.answers.history import history

    found = history(results or [Path("results")], given)
    for doubt in found.doubts:
        console.warning(doubt)
    if as_json:
        console.data(found.to_json())
    else:
        for run, why in found.left_out.items():
            console.warning(f"left out: {run}: {why}")
        console.paragraph(found.head)
        if rows := found.table(every=bool(given["variants"] or given["select"])):
            columns = ["cell", "runs", "first", "latest", "ratio", "changes"]
            console.table(columns, rows, right=columns[1:5])
        for said in found.foot:
            console.paragraph(said)
    if plot is not None:
        import pandas as pd

        from attnbench.figures.history import draw_history

        frame = pd.DataFrame(found.to_rows())
        draw(lambda: draw_history(frame, found.metric, unit=found.unit, about=found.how), plot, width=width)
