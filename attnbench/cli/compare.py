"""``attnbench compare A B --n 1024..16384``: paired times, ratios, verdicts and the crossover length."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from attnbench.cell import Positions
from attnbench.cli import completion, console
from attnbench.cli.options import (
    ArchitectureOption,
    AsJson,
    Batch,
    Causal,
    Compile,
    Device,
    Dtype,
    HeadDim,
    Heads,
    LevelOption,
    MemoryLimit,
    MinTime,
    Padding,
    PassOption,
    Plugins,
    ProcessState,
    Seed,
    Threads,
    Unchecked,
    Width,
    bytes_of,
)
from attnbench.cli.outputs import draw, refuse_files, write_rows
from attnbench.errors import Exit
from attnbench.marks import error_text, name_text
from attnbench.printable import without_empty
from attnbench.shape import Bias, Sink
from attnbench.units import format_bytes, with_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from attnbench.measure.crossover import Crossover
    from attnbench.run.compare import Comparison, Row, Side

    Printer = Callable[..., None]
    """Prints a table as :func:`attnbench.cli.console.table` does."""


def compare(
    variants: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="VARIANT VARIANT...",
            show_default=False,
            help="Two or more, with options as in performer:features=512. A module of your own: FILE.py:Class.",
            autocompletion=completion.variants,
        ),
    ] = None,
    n: Annotated[
        str, typer.Option("--n", metavar="LENGTHS", help="Lengths: 1k..16k doubles, 1024..4096+1024 goes in steps.")
    ] = "1024..4096",
    heads: Heads = 8,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Heads of keys and values; default: as many as --heads.")
    ] = None,
    head_dim: HeadDim = 64,
    v_dim: Annotated[int | None, typer.Option(min=1, metavar="N", help="Width of values; default: --head-dim.")] = None,
    batch: Batch = 1,
    dtype: Dtype = "float32",
    device: Device = "auto",
    pass_: PassOption = "forward",
    level: LevelOption = "operator",
    causal: Causal = False,
    mask: Annotated[
        str, typer.Option(metavar="MASK", help="Which pairs are hidden: prefix:64, document:300+200, sliding:128.")
    ] = "none",
    q_start: Annotated[int, typer.Option(min=0, metavar="N", help="Number of keys before the first query.")] = 0,
    bias: Annotated[Bias, typer.Option(help="Position bias, added to the logits.")] = "none",
    sink: Annotated[Sink, typer.Option(help="Logit without a key in each softmax.")] = "none",
    padding: Padding = 0.0,
    new_tokens: Annotated[
        int, typer.Option(min=0, metavar="N", help="Tokens after the prompt, at --pass generate; 0: 32.")
    ] = 0,
    added_tokens: Annotated[
        int, typer.Option(min=0, metavar="N", help="Learned tokens in front of a layer, at --level layer or model.")
    ] = 0,
    query_stride: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens for each query of a layer, at --level layer or model.")
    ] = 1,
    architecture: ArchitectureOption = "encoder",
    positions: Annotated[
        Positions | None,
        typer.Option(
            help="Places of tokens, at --level layer (none, rotary) or model; default: none there, learned here."
        ),
    ] = None,
    compile_: Compile = False,
    inputs: Annotated[
        str,
        typer.Option(
            metavar="INPUT", help="Where q, k, v come from (attnbench list inputs).", autocompletion=completion.inputs
        ),
    ] = "gaussian",
    error: Annotated[bool, typer.Option("--error/--no-error", help="Also measure the error.")] = True,
    threads: Threads = None,
    seed: Seed = 0,
    timeout: Annotated[
        float,
        typer.Option(min=1, max=1e6, metavar="SECONDS", help="Time limit for each length in each process."),
    ] = 120.0,
    min_time: MinTime = 1.0,
    memory_limit: MemoryLimit = None,
    process: ProcessState = "tuned",
    plugin: Plugins = None,
    unchecked: Unchecked = False,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the rows to this file.")] = None,
    as_json: AsJson = False,
    format_: Annotated[
        Literal["table", "markdown", "latex"], typer.Option("--format", help="How tables are printed.")
    ] = "table",
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw time against n into this .svg, .png or .pdf.")
    ] = None,
    width: Width = "page",
) -> None:
    """Time variants in turn at each length, in three processes or more, and find the length from which one wins.

    The exit code is 1 if nothing could be measured.
    """
    given = {name.rstrip("_"): value for name, value in locals().items()}
    from attnbench.run.different import refuse_equal

    if not variants:
        refuse_equal([], [])
    refuse_files(csv, plot=plot)

    from attnbench.measure.statistics import FASTER_BAND
    from attnbench.run.compare import Stopped
    from attnbench.run.question import Question

    own = {"pass_": pass_, "memory_limit": bytes_of(memory_limit), "plugins": tuple(plugin or ())}
    own["unchecked"] = unchecked
    question = Question.of(variants or [], n, given, error=error, **own).prepare()
    lengths = question.lengths
    with console.progress(total=len(lengths)) as bar:

        def on_length(length: int, process: int) -> None:
            said = f"n = {length}" + f", process {process + 1}" * bool(process)
            bar.update(bar.task_ids[0], completed=lengths.index(length), description=said)

        stopped: Stopped | None = None
        try:
            comparison = question.answer(on_length)
        except Stopped as pressed:
            comparison, stopped = pressed.comparison, pressed
            bar.stop()
            console.note("stopped; what was measured until now follows")
        except KeyboardInterrupt:
            bar.stop()
            console.note("stopped; no length was finished")
            raise
    what, threads = str(question), question.settings.threads
    how = f"{threads} thread{'s' * (threads != 1)}, {comparison.environment['process']} process"
    for warning in comparison.warnings:
        console.warning(warning)
    if as_json:
        console.data(comparison.to_json())
    else:
        console.line(what)
        console.line(how)
        console.line(_how_sure(comparison))
        floor = comparison.environment["noise_floor"] or 0.0
        if floor > math.expm1(FASTER_BAND):
            console.line(f"noise floor {floor:.1%}: differences below it get no verdict")
        _print(comparison, _printer(format_))
    if csv is not None:  # last, so that a full disk does not cost the rest
        write_rows(comparison.to_rows(), csv)
    if stopped:
        raise stopped
    if not comparison.ok:
        console.error("nothing could be measured; the reasons stand above")
        raise typer.Exit(Exit.FAILED)
    if plot is not None:
        draw(lambda: _figure(comparison, f"{what}; {how}"), plot, width=width)


def _printer(form: Literal["table", "markdown", "latex"]) -> Printer:
    if form == "table":
        return console.table
    from attnbench.decision.export_tables import Table, as_text

    def show(
        columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = (), title: str | None = None
    ) -> None:
        console.line("\n" + as_text(Table((title or "").strip(), columns, rows, right), form))  # and an empty line

    return show


def _print(comparison: Comparison, table: Printer) -> None:
    records = [side.record for rows in comparison.rows.values() for row in rows for side in (row.a, row.b)]
    shown = {record.label: name_text(record.label, record.own_form) for record in records}
    for (a, b), rows in comparison.rows.items():
        first, second = _broken(shown[a]), _broken(shown[b])
        title = f"time of {a} / time of {b}"
        table(
            ["n", first, second, "ratio", "95 % interval", f"{_broken(a)} is"],
            [_time_row(row) for row in rows],
            right=["n", first, second, "ratio", "95 % interval"],
            title="\n" + (title if len(title) <= console.width() else f"time of {a} /\n  time of {b}"),
        )
        if len(rows) > 1:
            _print_crossover(comparison.crossovers[a, b])
    _explain([row for rows in comparison.rows.values() for row in rows])
    columns = ["n", "variant", "peak memory", "state", "error", "answering mean(V)", "note"]
    table(
        *without_empty(columns, _side_rows(comparison)),
        right=["n", "peak memory", "state", "error", "answering mean(V)"],
        title="\nmemory and error against exact attention",
    )
    if comparison.without_error:
        console.line(f"no errors from n = {comparison.without_error[0]} on: exact attention in float64 takes too long")
    console.mark_notes([*shown.values(), *(error_text(one.rel_error, one.error_kind) for one in records)])
    console.unchecked_note(record.laws for record in records)
    console.fused_note(records)
    console.replaced_note(records)


def _time_row(row: Row) -> list[str]:
    cells = [str(row.n), _time(row.a), _time(row.b)]
    if row.shown is None:
        return [*cells, "-", "-", row.word]
    return [*cells, f"{row.shown.estimate:.3g}", f"{row.shown.low:.3g} to {row.shown.high:.3g}", row.word]


def _how_sure(comparison: Comparison) -> str:
    """For how many ratios the 95 % of the verdicts stands, and over how many processes."""
    all_ = f"all {comparison.family} together" if comparison.family > 1 else "the only one"
    over = " to ".join(dict.fromkeys(map(str, comparison.processes[:1] + comparison.processes[-1:]))) or "no"
    return f"95 % intervals over {over} processes; verdicts: 95 % for {all_}"


def _explain(rows: Sequence[Row]) -> None:
    from textwrap import wrap

    from attnbench.measure.statistics import SAID

    why = dict.fromkeys(f"withheld at n = {row.n}: {row.withheld}" for row in rows if row.withheld)
    words = {row.verdict for row in rows} | {row.busy for row in rows}
    said = ["", *why, *(f"{word}: {meaning}" for word, meaning in SAID.items() if word in words)]
    for line in said if len(said) > 1 else ():
        for part in wrap(line, console.width(), subsequent_indent="  ") or [""]:
            console.line(part)


def _time(side: Side) -> str:
    if side.time is None:
        return str(side.record.status)
    return with_interval(side.time, *(side.interval or (None, None)))


def _side_rows(comparison: Comparison) -> list[list[str]]:
    seen: dict[tuple[int, str], list[str]] = {}
    for rows in comparison.rows.values():
        for row in rows:
            for side in (row.a, row.b):
                r = side.record
                error = error_text(r.rel_error, r.error_kind)
                trivial = "-" if r.trivial_error is None else f"{r.trivial_error:.2g}"
                note = r.reason or (r.kernel or "")
                sizes = [format_bytes(r.peak_bytes), format_bytes(r.state_bytes)]
                seen[row.n, r.label] = [str(row.n), name_text(r.label, r.own_form), *sizes, error, trivial, note]
    return [seen[key] for key in sorted(seen, key=lambda k: (k[0], comparison.labels.index(k[1])))]


def _broken(label: str) -> str:
    """A label as the head of a column; a long one has a line for each option."""
    return label if len(label) <= 14 else label.replace(":", ":\n").replace(",", ",\n")


def _print_crossover(found: Crossover) -> None:
    """Print the crossover on one line, or on several if the terminal would break a long one just anywhere."""
    from textwrap import wrap

    where = "" if found.n is None else f"near n = {found.n:.0f}, between {found.low} and {found.high} (95 %); "
    for part in wrap(f"crossover: {where}{found.note}", console.width(), subsequent_indent="  "):
        console.line(part)


def _figure(comparison: Comparison, about: str) -> Figure:
    import pandas as pd

    from attnbench.plots.comparison import draw_comparison

    rows = pd.DataFrame(comparison.to_rows())
    return draw_comparison(rows, crossovers=comparison.to_json()["crossovers"], about=about)
