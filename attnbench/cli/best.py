"""``attnbench best SHAPES.csv``: the fastest form that keeps an error, shape by shape."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import typer

from attnbench.cli import options
from attnbench.cli.screen import console
from attnbench.cli.signature import command, completed
from attnbench.errors import NothingMeasured
from attnbench.results.frame.marks import error_text, name_text
from attnbench.text import quantity
from attnbench.units import format_bytes, format_number, with_interval

if TYPE_CHECKING:
    from rich.progress import Progress

    from attnbench.answers.best import Best, BestChoice, ReadyContests, Workload
    from attnbench.harness.compare.compare import Contest, OnLength
    from attnbench.harness.outside.isolation import Settings


@command(options.BestOptions)
def best(
    shapes: Annotated[
        Path | None,
        typer.Argument(
            metavar="SHAPES.csv",
            show_default=False,
            help="A row for each shape. Columns: n, heads, kv_heads, head_dim and other axes; pass, shape, name.",
        ),
    ] = None,
    *,
    as_json: options.AsJson = False,
    **given: Unpack[options.BestOptions],
) -> None:
    """Find the fastest form that keeps an error, shape by shape, with its lead over the next, its memory and its error.

    All forms take turns, as in attnbench compare. A tie is a form whose interval allows that it is as fast. The
    exit code is 1 if nothing could be measured.
    """
    prepared = prepare(shapes, given)
    with console.progress(total=prepared.count) as bar:
        found = prepared.answer(watching(bar, console.note))
        if found.stopped:
            bar.stop()
            console.note("stopped; the finished measurements follow")
    for warning in found.warnings:
        console.warning(warning)
    if as_json:
        console.data(found.to_json())
    else:
        _print(found, prepared.contests[0].settings)
    if found.stopped:
        raise found.stopped
    if not any(row["a_time_median_s"] or row["b_time_median_s"] for row in found.rows):
        raise NothingMeasured("nothing could be measured; the reasons stand above")


def prepare(shapes: Path | None, given: options.BestOptions) -> ReadyContests:
    """The contests of a command or of :func:`attnbench.best`; UsageError if a shape, a form or an option is wrong."""
    from attnbench.answers.best import ReadyContests, shapes_of
    from attnbench.suite.ranges import parse_range

    given = completed(options.BestOptions, given)
    how: dict[str, Any] = {**given, "memory_limit": options.bytes_of(given["memory_limit"])}
    asked = shapes_of(shapes, given["shape"], parse_range(given["lengths"]))
    return ReadyContests.of(asked, given["variants"] or (), how | {"plugins": given["plugins"] or ()})


def watching(bar: Progress, say: Callable[[str], None] = lambda text: None) -> Callable[[Workload, Contest], OnLength]:
    """Show the measured shape and length on a bar, and give their times to ``say``."""
    from attnbench.cli.compare import watching

    return lambda asked, contest: watching(bar, contest.lengths, say, f"{asked.name}, ")


def _print(found: Best, settings: Settings) -> None:
    from attnbench.measure.statistics import SAID

    threads = quantity(settings.threads, "thread")
    console.line(f"on {settings.device}, {threads}, {found.environment['process']} process")
    console.paragraph(f"verdicts: 95 % for all {found.family} ratios of the table together")
    for name, about in dict.fromkeys((one.asked.name, one.about) for one in found.choices):
        console.paragraph(f"{name}: {about}")
    columns = ["shape", "n", "fastest", "time", "peak memory", "error", "a tie with", "next", "margin", "verdict"]
    table = [[one.asked.name, str(one.n), *_row(one)] for one in found.choices]
    console.table(
        columns,
        table,
        right=["n", "time", "peak memory", "error"],
        title="\nmargin: time of the next / time of the fastest",
    )
    said: dict[str, list[str]] = {}
    for one in found.choices:
        for label, reason in one.left_out.items():
            said.setdefault(f"{label}: {reason}", []).append(f"{one.asked.name} {one.n}")
    for text, where in said.items():
        console.paragraph(text + f" (at {', '.join(where)})" * (len(where) < len(found.choices)))
    for word, meaning in SAID.items():
        if any(word in one.verdict for one in found.choices):
            console.paragraph(f"{word}: {meaning}")
    console.mark_notes(cell for row in table for cell in row)
    console.laws_note(found.records)


def _row(one: BestChoice) -> list[str]:
    if one.fastest is None:
        return ["-", "-", "-", "-", "", "", "", one.verdict]
    record, ends = one.fastest.record, one.fastest.interval or (None, None)
    margin = one.margin and with_interval(one.margin.estimate, one.margin.low, one.margin.high, _number)
    return [
        name_text(record.label, record.own_form),
        with_interval(one.fastest.time, *ends),
        format_bytes(record.peak_bytes),
        error_text(record.rel_error, record.error_kind),
        ", ".join(one.tied),
        one.next or "",
        margin or "",
        one.verdict,
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else format_number(value)
