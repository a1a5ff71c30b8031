"""``attnbench history RESULTS``: one measure of the same cells over many runs, with its changes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Unpack

import typer

from attnbench.cli import options
from attnbench.cli.screen import console
from attnbench.cli.screen.outputs import draw, refuse_files
from attnbench.cli.signature import command, completed

if TYPE_CHECKING:
    from attnbench.answers.history import History, Line


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
    if as_json:
        console.data(found.to_json())
    else:
        for run, why in found.left_out.items():
            console.warning(f"left out: {run}: {why}")
        _print(found, narrowed=bool(given["variants"] or given["select"]))
    if plot is not None:
        import pandas as pd

        from attnbench.figures.history import draw_history

        frame = pd.DataFrame(found.to_rows())
        draw(lambda: draw_history(frame, found.metric, unit=found.unit, about=found.how), plot, width=width)


def _print(found: History, *, narrowed: bool) -> None:
    from attnbench.answers.gate import words
    from attnbench.answers.history import FEWEST_RUNS
    from attnbench.results.measurements import began, day

    first, last = (day(began(run)) for run in (found.runs[0], found.runs[-1]))
    console.paragraph(
        f"{found.metric} in {len(found.runs)} runs, {first} to {last}" + f"; {found.how}" * bool(found.how)
    )
    axes = words.telling(line.row for line in found.lines)
    shown = [line for line in found.lines if line.changes or narrowed]

    def row(line: Line) -> list[str]:
        values = line.values
        first, last = (values[0], values[-1]) if values else (None, None)
        ends = [words.number(one, found.metric, found.unit) for one in (first, last)]
        ratio = words.ratio(last / first if first and last else None)
        said = [
            f"{day(point.began)} {words.plain(point.change)} {words.ratio(point.change.ratio)}".removesuffix(" -")
            + f" ({words.interval(point.change)})" * (words.interval(point.change) != "-")
            for point in line.points
            if point.change
        ]
        return [words.name(line.row, axes), str(len(values)), *ends, ratio, "; ".join(said) or "-"]

    if shown:
        columns = ["cell", "runs", "first", "latest", "ratio", "changes"]
        console.table(columns, [row(line) for line in shown], right=columns[1:5])
    changed = sum(bool(line.changes) for line in found.lines)
    console.paragraph(f"{changed} of {len(found.lines)} cells changed; joint 95 % over all cells and runs")
    if found.between is not None:
        console.line(f"runs of one program differ by {found.between:.1%}")
    elif found.metric == "time":
        console.line(f"no verdict on times yet: that takes {FEWEST_RUNS} runs of three rounds, and one more")
