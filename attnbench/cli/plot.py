"""``attnbench plot RESULTS``: figures from the CSV alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import typer

from attnbench.cli import completion, options
from attnbench.cli.screen import console
from attnbench.cli.signature import command, completed
from attnbench.errors import UsageError, any_of, did_you_mean
from attnbench.figures import FIGURES
from attnbench.figures.pictures import PICTURES
from attnbench.files import refuse_link
from attnbench.units import format_interval

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("svg", "png", "pdf")


def asked_for(results: Sequence[Path] | None) -> str | None:
    """The picture's name that the arguments begin with; None for runs. A file or folder comes first.

    Raises UsageError if the first argument is neither, and much like a picture's name.
    """
    first = str(results[0]) if results else ""
    hint = did_you_mean(first, PICTURES)
    if not hint or Path(first).exists():
        return None
    if first not in PICTURES:
        raise UsageError(f"{first}: no such file or folder, and no picture{hint}")
    return first


@command(options.PlotOptions)
def plot(
    results: Annotated[
        list[Path] | None,
        typer.Argument(
            help="A results folder, one run in it, or a results.csv; several are drawn together. Default: results. "
            f"Or a picture that needs no run: {', '.join(PICTURES)}, followed by variants; a file or folder of that "
            "name comes first.",
            show_default=False,
            autocompletion=completion.drawn,
        ),
    ] = None,
    figure: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIGURE",
            help=f"{any_of(FIGURES)}; default: all that apply.",
            autocompletion=completion.figures,
        ),
    ] = None,
    *,
    layer: Annotated[
        int | None, options.Count(min=0, help="Layer of captured inputs, from 0, for weights and spectrum.")
    ] = None,
    head: Annotated[int | None, options.Count(min=0, help="Head, from 0, for weights and spectrum.")] = None,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PLUGIN", help="FILE.py, FILE.py:Class or module with more variants, for pattern and weights."
        ),
    ] = None,
    dpi: Annotated[int, typer.Option(min=30, max=1200, metavar="N", help="Dots per inch of a png.")] = 100,
    format_: Annotated[
        str, typer.Option("--format", metavar="FORMATS", help="svg, png, pdf, with commas between them.")
    ] = "svg,png",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder for figures, or for a folder of each of several suites; default: RUN/plots, or ./plots for "
            "several runs and for pictures.",
        ),
    ] = None,
    **given: Unpack[options.PlotOptions],
) -> None:
    """Draw the figures of one run or of several, or a picture that needs no run.

    Options whose help begins with "Only" choose among the speeds. Each speed then stands beside the error that was
    measured in the most similar way.
    """
    formats = tuple(dict.fromkeys(part.strip() for part in format_.split(",") if part.strip()))
    for one in formats:
        if one not in FORMATS:
            raise UsageError(f"--format {one!r}: choose from {', '.join(FORMATS)}")
    if not formats:
        raise UsageError("--format is empty; choose from svg, png, pdf")

    given = completed(options.PlotOptions, given)
    if (picture := asked_for(results)) is not None:
        from attnbench.figures.pictures import write
        from attnbench.harness.trial import load_all

        folder = _folder(out, Path("plots"))
        console.only_repeats()
        load_all(plugin or [])
        named: dict[str, Any] = {"pass" if name == "pass_" else name: one for name, one in given.items()}
        named |= {"layer": layer, "head": head, "figure": figure, "dpi": dpi}
        written = write(picture, folder, formats, [str(one) for one in (results or [])[1:]], **named)
        console.heading(f"{picture}: {PICTURES[picture]}")
        for file in written:
            console.line(f"  {file}")
        return
    for option, value in {"layer": layer, "head": head, "plugin": plugin}.items():
        if value not in (None, []):
            belongs = "belongs to a picture that needs no run: attnbench plot weights performer"
            raise UsageError(f"--{option} {belongs} --{option} ...")

    from attnbench.figures import draw_all
    from attnbench.figures.kit.page import NothingToDraw
    from attnbench.results.frame.settings import restrict
    from attnbench.results.read import find_results, read_results

    console.only_repeats()
    how = how_to_draw(given)
    paths = results or [Path("results")]
    # Several runs make one table; a folder of several suites makes one for each, since these are not compared.
    tables = [paths] if len(paths) > 1 else [[path] for path in find_results(paths[0])]
    refused: list[tuple[str, UsageError | NothingToDraw]] = []
    for table in tables:
        name = str(table[0].parent) if len(table) == 1 else ", ".join(map(str, table))
        folder = _folder(out, table[0].parent / "plots" if len(table) == 1 else Path("plots"))
        if out is not None and len(tables) > 1:  # the figures of all runs have the same names
            folder /= table[0].parent.relative_to(paths[0])
        left_out: list[str] = []
        try:
            frame = read_results(table, warn=console.warning)
            written = draw_all(
                frame,
                folder,
                formats,
                figures=figure,
                dpi=dpi,
                on_left_out=lambda name, why: left_out.append(f"{name} ({why})"),  # noqa: B023  # called at once
                **how,
            )
        except (UsageError, NothingToDraw) as problem:
            refused.append((name, problem))
            continue
        console.heading(name)
        for file in written:
            console.line(f"  {file}")
        if left_out:
            console.note(f"  not drawn: {', '.join(left_out)}")
        if any(file.stem.endswith("peers") for file in written):
            _print_pairs(restrict(frame, how["only"]))
    if len(refused) == len(tables):
        raise refused[0][1]
    for name, why in refused:
        console.note(f"{name}: {why}")


def _folder(out: Path | None, default: Path) -> Path:
    if out is None:
        refuse_link(default)
    return out or default


_FILTERS = ("sweep", "level", "pass_", "dtype", "causal", "head_dim")


def how_to_draw(given: options.PlotOptions) -> dict[str, Any]:
    """The options as :func:`attnbench.figures.draw` takes them: those that choose among rows become ``only``."""
    rest: dict[str, Any] = {**given}
    wanted = {name.rstrip("_"): rest.pop(name) for name in _FILTERS}
    return rest | {"only": {column: value for column, value in wanted.items() if value is not None}}


def _print_pairs(frame: pd.DataFrame) -> None:
    from attnbench.figures.peers import PASSES, left_out, pairs

    numbers = ["n", "time", "95 %", "least", "limit", "peak", "×floor"]
    found = [one for one in pairs(frame) if not math.isnan(one.time) or not math.isnan(one.peak)]
    names = list(dict.fromkeys(one.names for one in found))
    for name, words in PASSES.items():
        part = [one for one in found if one.pass_ == name]
        part.sort(key=lambda one: (names.index(one.names), one.n))
        rows = [
            [
                "" if last and last.names == one.names else " / ".join(one.names),
                *(str(one.n), _ratio(one.time)),
                format_interval(one.time, one.low, one.high, _ratio) or "-",
                *map(_ratio, (one.least, one.limit, one.peak, one.above_floor)),
            ]
            for last, one in zip([None, *part], part, strict=False)
        ]
        if rows:
            title = f"\nvariant over package, {words}"
            console.table(["variant / package", *numbers], rows, right=numbers, title=title)
    if found:
        console.note(
            "All are ratios. time: of medians, with its 95 % interval; least: of the shortest times; limit: of time "
            "if the variant ran at the machine's full rates; peak: of peak memory; ×floor: time over limit"
        )
        for line in left_out(frame):
            console.note(line)


def _ratio(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.2g}"
