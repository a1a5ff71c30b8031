"""``attnbench plot RESULTS``: figures from the CSV alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from attnbench.cell import Pass
from attnbench.cli import console
from attnbench.errors import CannotCreate, UsageError

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("svg", "png", "pdf")


def plot(
    results: Annotated[Path, typer.Argument(help="A results folder, one run in it, or a results.csv.")] = Path(
        "results"
    ),
    figure: Annotated[
        list[str] | None,
        typer.Option(help="tradeoff, peers, catalogue, scaling, error, map or speedup; default all that apply."),
    ] = None,
    n: Annotated[int | None, typer.Option(min=1, help="Length; default the longest at which all are ok.")] = None,
    x: Annotated[
        Literal["examples_per_s", "tokens_per_s", "time_median_s"], typer.Option(help="Speed axis of tradeoff.")
    ] = "examples_per_s",
    y: Annotated[
        Literal["rel_error", "max_abs_error", "cosine"], typer.Option(help="Accuracy axis of tradeoff.")
    ] = "rel_error",
    level: Annotated[
        Literal["operator", "layer", "model"] | None, typer.Option(help="Only rows of this level's speed.")
    ] = None,
    pass_: Annotated[
        Pass | None,
        typer.Option("--pass", help="Only rows of this pass's speed."),
    ] = None,
    inputs: Annotated[str | None, typer.Option(help="Which inputs' error to show; default listops.")] = None,
    overlay: Annotated[
        Literal["published"] | None, typer.Option(help="Add the paper's own eleven points beside ours.")
    ] = None,
    format_: Annotated[str, typer.Option("--format", help="svg, png, pdf, comma-separated.")] = "svg,png",
    out: Annotated[Path | None, typer.Option(help="Folder for figures; default RUN/plots.")] = None,
) -> None:
    """Draw the figures of a run: the trade-off figure first, scaling, error."""
    formats = tuple(dict.fromkeys(part.strip() for part in format_.split(",") if part.strip()))
    for one in formats:
        if one not in FORMATS:
            raise UsageError(f"--format {one!r}: choose from {', '.join(FORMATS)}")
    if not formats:
        raise UsageError("--format is empty; choose from svg, png, pdf")

    from attnbench.measure.time import garbage_collection_off
    from attnbench.plots import draw_all
    from attnbench.plots.load import find_results, read_results

    options = {"n": n, "x": x, "y": y, "level": level, "pass_": pass_, "inputs": inputs, "overlay": overlay}
    for path in find_results(results):
        folder = out or path.parent / "plots"
        if out is None and folder.is_symlink():
            raise CannotCreate(
                f"{folder} is a link, and figures are written to no other place; remove it or give --out"
            )
        with garbage_collection_off():  # to look through all that is imported and drawn takes a tenth of the time
            frame = read_results(path)
            written = draw_all(frame, folder, formats, figures=figure, **options)
        console.heading(str(path.parent))
        for file in written:
            console.line(f"  {file}")
        if any(file.stem.endswith("peers") for file in written):
            _print_pairs(frame)


def _print_pairs(frame: pd.DataFrame) -> None:
    """Each variant over the public package beside it: a table for each pass, a line for each length."""
    from attnbench.plots.peers import PASSES, left_out, pairs

    numbers = ["n", "time", "±", "least", "limit", "peak", "×floor"]
    found = [one for one in pairs(frame) if not math.isnan(one.time) or not math.isnan(one.peak)]
    names = list(dict.fromkeys(one.names for one in found))
    for name, words in PASSES.items():
        part = [one for one in found if one.pass_ == name]
        part.sort(key=lambda one: (names.index(one.names), one.n))
        rows = [
            [
                "" if last and last.names == one.names else " / ".join(one.names),
                *(str(one.n), _ratio(one.time)),
                "-" if math.isnan(one.low) else f"{math.sqrt(one.high / one.low) - 1:.0%}",
                *map(_ratio, (one.least, one.limit, one.peak, one.above_floor)),
            ]
            for last, one in zip([None, *part], part, strict=False)
        ]
        if rows:
            title = f"\nvariant over package, {words}"
            console.table(["variant / package", *numbers], rows, right=numbers, title=title)
    if found:
        console.note(
            "time: of the medians, with half its 95 % interval; least: of the shortest times; limit: what time would "
            "be if the variant ran at this machine's full rates; peak: of memory; ×floor: time over limit"
        )
        for line in left_out(frame):
            console.note(line)


def _ratio(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2g}"
