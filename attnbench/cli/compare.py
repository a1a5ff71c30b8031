"""``attnbench compare A B --n 1024..16384``: times and ratios to the first, verdicts and crossover lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Unpack

import typer

from attnbench.cli import options
from attnbench.cli.screen import console
from attnbench.cli.screen.outputs import draw, refuse_files, write_rows
from attnbench.cli.signature import command, completed
from attnbench.errors import NothingMeasured, UsageError
from attnbench.results.frame.marks import error_text, name_text
from attnbench.suite.axes import AXES
from attnbench.text import quantity
from attnbench.units import format_bytes, format_number, format_seconds, format_share, with_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.progress import Progress

    from attnbench.harness.compare.compare import CompareRow, Comparison, OnLength, Side
    from attnbench.harness.compare.compare_question import CompareQuestion
    from attnbench.measure.crossover import Crossover
    from attnbench.results.record import Record

    Printer = Callable[..., None]
    """Prints a table as :func:`attnbench.cli.screen.console.table` does."""


@command(options.CompareOptions)
def compare(
    ctx: typer.Context,
    variants: options.Variants = None,
    *,
    baseline: Annotated[
        str | None, options.Variant(help="The variant that all others are held against; default: the first.")
    ] = None,
    csv: Annotated[Path | None, options.File(help="Write the rows to this file.")] = None,
    as_json: options.AsJson = False,
    format_: Annotated[
        Literal["table", "markdown", "latex"], typer.Option("--format", help="How tables are printed.")
    ] = "table",
    plot: Annotated[Path | None, options.File(help="Draw time against n into this .svg, .png or .pdf.")] = None,
    width: options.Width = "page",
    **given: Unpack[options.CompareOptions],
) -> None:
    """Time variants in turn at each length, in three processes or more, and find the length from which one wins.

    The exit code is 1 if nothing could be measured.
    """
    variants = [*([baseline] if baseline else []), *(one for one in variants or [] if one != baseline)]
    refuse_files(csv, plot=plot)
    question = question_of(variants, given, options.typed_of(ctx)).prepare()

    from attnbench.harness.compare.compare import Stopped
    from attnbench.measure.statistics import FASTER_BAND

    lengths = question.lengths
    with console.progress(total=len(lengths)) as bar:
        stopped: Stopped | None = None
        try:
            comparison = question.answer(watching(bar, lengths, console.note))
        except Stopped as pressed:
            comparison, stopped = pressed.comparison, pressed
            bar.stop()
            console.note("stopped; the finished measurements follow")
        except KeyboardInterrupt:
            bar.stop()
            console.note("stopped; no length was finished")
            raise
    what, threads = str(question), question.settings.threads
    how = f"{quantity(threads, 'thread')}, {comparison.environment['process']} process"
    for warning in comparison.warnings:
        console.warning(warning)
    if as_json:
        console.data(comparison.to_json())
    else:
        console.line(what)
        console.line(how)
        for label, versions in comparison.sides.items() if any(question.pythons) else ():
            console.line(f"{label}: {', '.join(f'{name} {version}' for name, version in versions.items())}")
        console.paragraph(_how_sure(comparison))
        floor = comparison.environment["noise_floor"] or 0.0
        if floor > math.expm1(FASTER_BAND):
            console.line(f"noise floor {floor:.1%}: differences below it get no verdict")
        _print(comparison, _printer(format_))
    if csv is not None:  # last, so that a full disk does not cost the rest
        write_rows(comparison.to_rows(), csv)
    if stopped:
        raise stopped
    if not comparison.ok:
        raise NothingMeasured("nothing could be measured; the reasons stand above")
    if plot is not None:
        draw(lambda: _figure(comparison, f"{what}; {how}"), plot, width=width)


def question_of(variants: Sequence[str], given: options.CompareOptions, typed: Collection[str]) -> CompareQuestion:
    """The question of a command or of :func:`attnbench.compare`; UsageError for an unknown shape or malformed size.

    A named shape decides the axes that the user has not ``typed``. Raises UsageError also without a variant.
    """
    if not variants:
        example = "attnbench compare softmax linear --n 1024..4096"
        raise UsageError(f"compare needs a variant, or several to be held against the first: {example}")
    from attnbench.harness.compare.compare_question import CompareQuestion

    given = completed(options.CompareOptions, given)
    axes = {name: one for name, one in given.items() if given["shape"] is None or name not in AXES or name in typed}
    limit = options.bytes_of(given["memory_limit"])
    return CompareQuestion.of(variants, {**axes, "memory_limit": limit})


def watching(
    bar: Progress, lengths: Sequence[int], say: Callable[[str], None] = lambda text: None, name: str = ""
) -> OnLength:
    """Show the measured length, of the shape called ``name``, on a bar, and give its times to ``say`` at once."""
    before = bar.tasks[0].completed

    def on_length(length: int, process: int, found: Mapping[str, float | str]) -> None:
        if found:
            times = (f"{label} {one if isinstance(one, str) else format_seconds(one)}" for label, one in found.items())
            say(f"{name}n = {length}: {', '.join(times)}")
            return
        said = f"{name}n = {length}" + f", process {process + 1}" * bool(process)
        bar.update(bar.task_ids[0], completed=before + lengths.index(length), description=said)

    return on_length


def _printer(form: Literal["table", "markdown", "latex"]) -> Printer:
    if form == "table":
        return console.table
    from attnbench.results.export.tables import Table, as_text

    def show(
        columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = (), title: str | None = None
    ) -> None:
        console.line("\n" + as_text(Table((title or "").strip(), columns, rows, right), form))  # and an empty line

    return show


def _print(comparison: Comparison, table: Printer) -> None:
    records = [side.record for rows in comparison.rows.values() for row in rows for side in (row.a, row.b)]
    first, others = comparison.labels[0], len(comparison.labels) - 1
    shown = [row for (a, _), rows in comparison.rows.items() if a == first for row in rows]
    columns = ["n", "variant", "time", *_PARTS, "launch", "host", "ratio", "95 % interval", "it is"]
    table(
        columns,
        _time_rows(comparison, shown),
        right=["n", "time", *_PARTS, "host", "ratio", "95 % interval"],
        title="\n" + (f"ratio: time / time of {first}" if others else "time"),
    )
    _print_crossovers({b: one for (a, b), one in comparison.crossovers.items() if a == first and len(shown) > others})
    _explain(shown)
    columns = ["n", "variant", "peak memory", "state", "error", "answering mean(V)", "note"]
    table(
        columns,
        _side_rows(comparison),
        right=["n", "peak memory", "state", "error", "answering mean(V)"],
        title="\nmemory"
        + " and error against exact attention" * any(r.rel_error is not None for _, r in _each(comparison)),
    )
    own = [(n, record) for n, record in _each(comparison) if record.own_error_note or record.own_error is not None]
    if own:
        table(
            ["n", "variant", *console.OWN_ERRORS, "note"],
            [_own_row(n, record) for n, record in own],
            right=["n", *console.OWN_ERRORS],
            title="\nerror against the variant's own formula",
        )
    if comparison.rated and comparison.ok:
        columns = ["n", "variant", *console.REACHED]
        table(
            columns,
            [[str(n), name_text(r.label, r.own_form), *console.reached(r)] for n, r in _each(comparison)],
            right=["n", *console.REACHED],
            title="\nrates, and their share of the machine's limits",
        )
    if comparison.without_error:
        console.paragraph(_without_error(comparison.without_error[0], records[0]))
    named = [name_text(record.label, record.own_form) for record in records]
    console.mark_notes([*named, *(error_text(one.rel_error, one.error_kind) for one in records)])
    console.laws_note(records)
    console.fused_note(records)
    console.replaced_note(records)


def _time_rows(comparison: Comparison, shown: Sequence[CompareRow]) -> list[list[str]]:
    lines = []
    for n in dict.fromkeys(row.n for row in shown):
        here = [row for row in shown if row.n == n]
        baseline = max(here, key=lambda row: row.processes).a
        first = baseline.record
        lines.append([str(n), name_text(first.label, first.own_form), *_time(baseline), "", "", ""])
        for row in here if len(comparison.labels) > 1 else ():
            cells, word = ["-", "-"], _MIRROR.get(row.verdict, row.verdict) + row.word.removeprefix(row.verdict)
            if row.shown is not None:
                ends = [format_number(1 / end) if end else "-" for end in (row.shown.high, row.shown.low)]
                cells = [format_number(1 / row.shown.estimate), " to ".join(ends)]
            lines.append([str(n), name_text(row.b.record.label, row.b.record.own_form), *_time(row.b), *cells, word])
    return lines


_PARTS = {"first token": "first_token_s", "per token": "token_s", "rollback": "rollback_s"}
"""Parts of a generation, and the way back to half of the tokens of one step: title -> column."""
_MIRROR = {"faster": "slower", "slower": "faster"}


def _without_error(n: int, record: Record) -> str:
    from attnbench.harness.compare.compare import LONGEST_ERROR

    most = LONGEST_ERROR // n**2
    heads = min(most, record.heads)
    shared = {"--kv-heads": record.kv_heads, "--qk-heads": record.qk_heads}
    one = "".join(f" {option} 1" for option, few in shared.items() if few < record.heads and heads % few)
    fewer = f"--batch 1 --heads {heads}{one} measures them" if heads else "measure them at shorter --n"
    remedy = fewer if record.batch * record.heads > most else "a larger --timeout measures them"
    return f"no errors from n = {n} on: exact attention in float64 takes too long; {remedy}"


def _how_sure(comparison: Comparison) -> str:
    """Numbers of ratios that share the 95 % of the verdicts, and of processes."""
    if not comparison.processes:
        return "times of one call: nothing took turns"
    over = " to ".join(dict.fromkeys(map(str, comparison.processes[:1] + comparison.processes[-1:])))
    said = f"95 % intervals over {over} process{'es' * (over != '1')}"
    if comparison.family:
        all_ = f"all {comparison.family} together" if comparison.family > 1 else "the only one"
        said += f"; verdicts: 95 % for {all_}" + "; --csv has the pairs of the others" * (len(comparison.labels) > 2)
    return said


def _explain(rows: Sequence[CompareRow]) -> None:
    from attnbench.measure.statistics import SAID

    why = dict.fromkeys(f"withheld at n = {row.n}: {row.withheld}" for row in rows if row.withheld)
    words = {row.verdict for row in rows} | {row.busy for row in rows}
    said = ["", *why, *(f"{word}: {meaning}" for word, meaning in SAID.items() if word in words)]
    for line in said if len(said) > 1 else ():
        console.paragraph(line)


def _time(side: Side) -> list[str]:
    if side.time is None:
        return [str(side.record.status), *[""] * (len(_PARTS) + 2)]
    return [
        with_interval(side.time, *(side.interval or (None, None))),
        *(format_seconds(getattr(side.record, column)) for column in _PARTS.values()),
        side.record.launched,
        format_share(side.host_share),
    ]


def _side_rows(comparison: Comparison) -> list[list[str]]:
    lines = []
    for n, r in _each(comparison):
        error = error_text(r.rel_error, r.error_kind)
        trivial = "-" if r.trivial_error is None else f"{r.trivial_error:.2g}"
        note = r.reason or "; ".join(filter(None, (r.kernel, r.launch_note)))
        sizes = [format_bytes(r.peak_bytes), format_bytes(r.state_bytes)]
        lines.append([str(n), name_text(r.label, r.own_form), *sizes, error, trivial, note])
    return lines


def _own_row(n: int, r: Record) -> list[str]:
    errors = map(console.own_error, (r.own_error, r.own_error_late, r.own_error_grad))
    return [str(n), name_text(r.label, r.own_form), *errors, r.own_error_note.removeprefix("own error: ")]


def _each(comparison: Comparison) -> list[tuple[int, Record]]:
    seen = {
        (row.n, side.record.label): side.record
        for rows in comparison.rows.values()
        for row in rows
        for side in (row.a, row.b)
    }
    return [(key[0], seen[key]) for key in sorted(seen, key=lambda k: (k[0], comparison.labels.index(k[1])))]


def _print_crossovers(found: Mapping[str, Crossover]) -> None:
    said: dict[str, list[str]] = {}
    for name, one in found.items():
        where = "" if one.n is None else f"near n = {one.n:.0f}, between {one.low} and {one.high} (95 %); "
        said.setdefault(where + one.note, []).append(name)
    for text, names in said.items():
        whose = f" of {', '.join(names)}" * (len(found) > 1)
        console.paragraph(f"crossover{whose}: {text}")


def _figure(comparison: Comparison, about: str) -> Figure:
    import pandas as pd

    from attnbench.figures.comparison import draw_comparison
    from attnbench.figures.kit.page import NothingToDraw

    if len(comparison.labels) < 2:
        raise NothingToDraw("one variant alone is beside nothing; name another")
    rows = pd.DataFrame(comparison.to_rows())
    return draw_comparison(rows, crossovers=comparison.to_json()["crossovers"], about=about)
