"""``attnbench swap MODEL --variant performer``: the quality of a trained model with another attention."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Unpack

import typer

from attnbench.cli import completion, options
from attnbench.cli.screen import console
from attnbench.cli.screen.outputs import draw, refuse_files, write_rows
from attnbench.cli.signature import command, completed
from attnbench.errors import NothingMeasured, UsageError
from attnbench.results.swaps import EXACT

NEEDS_ONE = "swap needs --variant; for example: attnbench swap listops --variant performer"


@command(options.SwapOptions)
def swap(
    model: options.ModelName,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            "--variant",
            "-v",
            metavar="VARIANT",
            help="What takes the place of attention, options in the text; may be repeated.",
            autocompletion=completion.variants,
        ),
    ] = None,
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Time one window, say what all would take; replace nothing.")
    ] = False,
    csv: Annotated[Path | None, options.File(help="Write the rows to this file as well.")] = None,
    as_json: options.AsJson = False,
    plot: Annotated[
        Path | None, options.File(help="Draw loss over steps and KL over layers to .svg, .png or .pdf.")
    ] = None,
    width: options.Width = "page",
    **given: Unpack[options.SwapOptions],
) -> None:
    """Replace the attention of a trained model, and see what is left of it, without and with a little training.

    Beside the variants stand exact (softmax attention in their place, which must change nothing), mean-value (which
    attends to nothing) and, where something is trained, none: the model as it was, trained as long. The same command
    resumes a stopped run, and a run with further variants takes over existing rows.
    """
    given = completed(options.SwapOptions, given)
    if not variant:
        raise UsageError(NEEDS_ONE)
    refuse_files(csv, plot=plot)

    from attnbench.harness.swap.request import Asked, refuse_inexact, variants_of

    specs = variants_of(variant, given["plugins"])
    console.only_repeats()
    asked = Asked.of(model, specs, given)

    from attnbench.cli.screen.run import measured
    from attnbench.cli.screen.swap import print_foreseen, print_swap

    if dry_run:
        with console.progress(total=1):
            found, cost = asked.foresee()
        print_foreseen(asked.question, found, cost, as_json=as_json)
        return
    with asked.worker() as worker:
        found, plan = asked.plan(worker)
        ((folder, records),) = measured(plan, worker, what="rows")
    refuse_inexact(records)
    rows, table = [record.to_json() for record in records], folder.path / "results.csv"
    if as_json:
        console.data(rows)
    else:
        print_swap(rows, found.layers)
        console.laws_note(records)
        console.line(f"rows: {table}")
    if csv is not None:
        write_rows(rows, csv)
    if plot is not None:
        from attnbench.figures.swap import draw_swap
        from attnbench.results.read import read_results

        draw(lambda: draw_swap(read_results(folder.path)), plot, width=width)
    labels = {spec.label for spec in specs}
    if not any(row.status == "ok" for row in records if row.label in labels and row.sweep != EXACT):
        raise NothingMeasured(f"no variant could be put in; reasons: {table}")
