"""``attnbench swap MODEL --variant performer``: the quality of a trained model with another attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Unpack

import typer

from attnbench.cli import options
from attnbench.cli.screen import console
from attnbench.cli.screen.outputs import draw, refuse_files, write_rows
from attnbench.cli.signature import command, completed
from attnbench.errors import NothingMeasured, UsageError
from attnbench.results.swaps import EXACT, MEAN_VALUE, Between, Row, SwapLine, lines
from attnbench.text import quantity
from attnbench.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from attnbench.harness.swap.described import ModelFacts
    from attnbench.harness.swap.request import Foreseen
    from attnbench.harness.swap.swap_question import SwapQuestion
    from attnbench.models.pretrained.subject import Layer


@command(options.SwapOptions)
def swap(
    model: options.ModelName,
    variant: Annotated[
        list[str] | None,
        options.Variant(
            "--variant", "-v", help="What takes the place of attention, options in the text; may be repeated."
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
        raise UsageError("swap needs --variant; for example: attnbench swap listops --variant performer")
    refuse_files(csv, plot=plot, inputs=(given["text"], model))

    from attnbench.harness.swap.request import SwapRequest, refuse_inexact, variants_of

    specs = variants_of(variant, given["plugins"])
    console.only_repeats()
    asked = SwapRequest.of(model, specs, given)

    from attnbench.cli.screen.run import measured

    if dry_run:
        with console.progress(total=1):
            found, cost = asked.foresee()
        _print_foreseen(asked.question, found, cost, as_json=as_json)
        return
    with asked.worker() as worker:
        found, plan = asked.plan(worker)
        ((folder, records),) = measured(plan, worker, what="rows")
    refuse_inexact(records)
    rows, table = [record.to_json() for record in records], folder.path / "results.csv"
    if as_json:
        console.data(rows)
    else:
        _print(rows, found.layers)
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


_LONGEST_LABEL = 15
"""Characters of a label that stays on one line."""
_MOST_LAYERS = 8
"""Layers with a column each; of more, the table has the median and the largest."""


def _print(rows: Sequence[Row], layers: Sequence[Layer]) -> None:
    found = lines(rows)
    first = rows[0]
    _print_heading(first["model"], layers, first["windows"], first["seq_len"])
    together = [line for line in found if not line.alone]
    _print_together(together)
    _print_repaired([line for line in together if line.over_control is not None])
    _print_alone([line for line in found if line.alone])
    _print_missing(rows)
    _print_notes(together, found)
    for warning in dict.fromkeys(filter(None, (row["warnings"] for row in rows))):
        console.line(warning)


def _print_foreseen(question: SwapQuestion, model: ModelFacts, found: Foreseen, *, as_json: bool) -> None:
    if as_json:
        console.data({**asdict(found), "seconds": found.seconds})
        return
    _print_heading(question.model, model.layers, question.windows, question.length)
    resumed = f", of which {found.resumed} are there" if found.resumed else ""
    console.line(f"{quantity(found.rows, 'row')}{resumed}")
    console.line(
        f"{format_count(found.windows_read)} windows to read, {format_count(found.windows_trained)} to train on, "
        f"{format_seconds(found.window_s)} a window"
    )
    console.line(f"about {format_seconds(found.seconds)}, and {format_bytes(found.weight_bytes)} for weights")
    console.line("nothing was replaced")


def _print_heading(model: str, layers: Sequence[Layer], windows: int, length: int) -> None:
    shape, text = layers[0].shape, f"{quantity(windows, 'window')} of {length} tokens"
    console.line(f"{model}: {quantity(len(layers), 'layer')}, {shape.H} × {shape.D}, {layers[0].kind}; {text}")


def _print_together(found: Sequence[SwapLine]) -> None:
    untrained = {line.label: line.loss or 0.0 for line in reversed(found)}
    ordered = sorted(found, key=lambda line: (untrained[line.label], line.label, line.steps))
    trained = any(line.steps for line in found)
    cells = [
        {
            "variant": console.in_parts(line.label, _LONGEST_LABEL),
            "steps": str(line.steps) if trained else "-",
            "loss": _number(line.loss, ".3f"),
            "over original": _interval(line.over_original),
            "accuracy": _number(line.accuracy, ".3f"),
            "agrees": _number(line.top1_agreement, ".2f"),
            "KL": _number(line.kl, ".2g"),
            "cosine": _number(line.feature_cosine if line.loss is None else None, ".3f"),
            "neighbours": _number(line.neighbours if line.loss is None else None, ".2f"),
            "features": _number(line.hidden_error if line.loss is None else None, ".2g"),
            "error": _number(line.attention_error, ".2g"),
        }
        for line in ordered
    ]
    # The untouched model and exact attention in all layers accompany any choice of layers.
    some = dict.fromkeys(line.replaced.replace("+", ",") for line in found if line.replaced != "all")
    _table(cells, f"\nreplaced: layers {', '.join(some)}" if some else "\nall replaced together")


def _print_repaired(found: Sequence[SwapLine]) -> None:
    cells = [
        {
            "variant": line.label,
            "steps": str(line.steps),
            "over the control": _interval(line.over_control),
            "repaired": f"as {MEAN_VALUE}" if line.as_trivial else _number(line.repaired, ".0%"),
        }
        for line in sorted(found, key=lambda line: (line.steps, line.over_control.median if line.over_control else 0.0))
    ]
    if cells:
        _table(cells, "\nafter training, above the model that was left whole and trained as long")


def _print_alone(found: Sequence[SwapLine]) -> None:
    if not found:
        return
    places = sorted({int(line.replaced) for line in found})
    column = "KL" if any(line.kl is not None for line in found) else "features"
    cells = []
    for label in dict.fromkeys(line.label for line in found):
        of = {int(line.replaced): line for line in found if line.label == label}
        values = {place: line.kl if column == "KL" else line.hidden_error for place, line in of.items()}
        known = {place: value for place, value in values.items() if value is not None}
        if len(places) <= _MOST_LAYERS:
            cells.append({"variant": label} | {str(place): _number(values.get(place), ".2g") for place in places})
        elif known:
            largest = max(known, key=lambda place: known[place])
            ends = {"median": f"{median(known.values()):.2g}", "largest": f"{known[largest]:.2g}"}
            cells.append({"variant": label, **ends, "in layer": str(largest)})
    what = "KL from the original" if column == "KL" else "error of the last features"
    _table(cells, f"\none layer replaced, untrained: {what}, by layer")


def _print_missing(rows: Sequence[Row]) -> None:
    said = dict.fromkeys(f"{row['label']}: {row['status']}: {row['reason']}" for row in rows if row["status"] != "ok")
    if said:
        console.line()
    for line in said:
        console.paragraph(line)


def _print_notes(together: Sequence[SwapLine], found: Sequence[SwapLine]) -> None:
    few = {line.label: line.pairs_seen for line in together if line.pairs_seen is not None and line.pairs_seen < 0.995}
    if few:
        console.note("pairs with a weight: " + ", ".join(f"{label} {share:.0%}" for label, share in few.items()))
    if any(line.over_original for line in found):
        console.note("over: median over windows in nats, with its exact 95 % interval")
    console.note(
        "error: of a replaced layer's output on the original's own q, k, v, mean over layers; nothing is propagated\n"
        "exact: softmax attention put in the same way; mean-value: attends to nothing"
    )
    if any(line.label == "none" for line in found):
        console.note("none: nothing is replaced; its gain by training is no recovery from a swap")


def _table(cells: Sequence[dict[str, str]], title: str) -> None:
    columns = list(cells[0])
    console.table(columns, [list(row.values()) for row in cells], right=columns[1:], title=title)


def _number(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)


def _interval(of: Between | None) -> str:
    return "-" if of is None else f"{of.median:+.2f} ({of.low:.2f} to {of.high:.2f})"
