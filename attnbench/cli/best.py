"""``attnbench best SHAPES.csv``: the fastest form that keeps an error, shape by shape."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import typer

from attnbench.cli import options
from attnbench.cli.screen import console
from attnbench.cli.signature import command, completed
from attnbench.errors import Exit
from attnbench.results.frame.marks import error_text, name_text
from attnbench.text import without_empty
from attnbench.units import format_bytes, format_number, with_interval

if TYPE_CHECKING:
    from rich.progress import Progress

    from attnbench.answers.best import Asked, Best, Choice, Form, Prepared
    from attnbench.harness.compare.compare import Contest, OnLength


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

    from attnbench.answers.best import StoppedBest

    with console.progress(total=prepared.count) as bar:
        stopped: KeyboardInterrupt | None = None
        try:
            found = prepared.answer(watching(bar))
        except StoppedBest as pressed:
            found, stopped = pressed.best, pressed
            bar.stop()
            console.note(
                "stopped; what was measured until now follows" if found.choices else "stopped; no shape was finished"
            )
    for warning in found.warnings:
        console.warning(warning)
    if as_json:
        console.data(found.to_json())
    elif found.choices:
        _print(found, prepared)
    if stopped:
        raise stopped
    if not found.ok:
        console.error("nothing could be measured; the reasons stand above")
        raise typer.Exit(Exit.FAILED)


def prepare(shapes: Path | None, given: options.BestOptions) -> Prepared:
    """The contests of a command or of :func:`attnbench.best`; UsageError if a shape, a form or an option is wrong."""
    from attnbench.answers.best import Prepared, shapes_of
    from attnbench.suite.ranges import parse_range

    given = completed(options.BestOptions, given)
    how: dict[str, Any] = {**given, "memory_limit": options.bytes_of(given["memory_limit"])}
    asked = shapes_of(shapes, given["shape"], parse_range(given["lengths"]))
    return Prepared.of(asked, given["variants"] or (), how | {"plugins": given["plugins"] or ()})


def watching(bar: Progress) -> Any:
    """Show the measured shape and length on a bar."""

    def of(asked: Asked, contest: Contest) -> OnLength:
        before = bar.tasks[0].completed

        def on_length(length: int, process: int, found: Mapping[str, float | str]) -> None:
            if not found:
                done = before + contest.lengths.index(length) + bool(process)
                said = f"{asked.name}, n = {length}" + f", process {process + 1}" * bool(process)
                bar.update(bar.task_ids[0], completed=done, description=said)

        return on_length

    return of


def _print(found: Best, prepared: Prepared) -> None:
    contest = prepared.contests[0]
    threads, device = contest.settings.threads, contest.settings.device
    console.line(f"on {device}, {threads} thread{'s' * (threads != 1)}, {found.environment['process']} process")
    over = " to ".join(dict.fromkeys(map(str, found.processes[:1] + found.processes[-1:]))) or "no"
    console.paragraph(
        f"95 % intervals over {over} processes; verdicts: 95 % for all {found.family} ratios of the table together"
    )
    for name, about in dict.fromkeys((one.asked.name, one.about) for one in found.choices):
        console.paragraph(f"{name}: {about}")
    columns = ["shape", "n", "fastest", "time", "peak memory", "error", "a tie with", "next", "margin", "verdict"]
    console.table(
        *without_empty(columns, [_row(one) for one in found.choices]),
        right=["n", "time", "peak memory", "error"],
        title="\nmargin: time of the next / time of the fastest",
    )
    said: dict[str, list[str]] = {}
    for one in found.choices:
        for form in one.forms:
            if form.out or form.word == "withheld":
                reason = form.out or f"no verdict: {form.why}"
                said.setdefault(f"{form.label}: {reason}", []).append(f"{one.asked.name} {one.n}")
    everywhere = len(found.choices)
    console.line()
    for text, where in said.items():
        console.paragraph(text + f" (at {', '.join(where)})" * (len(where) < everywhere))
    records = [form.side.record for one in found.choices for form in one.forms]
    first = [one.fastest.side.record for one in found.choices if one.fastest]
    console.mark_notes(name_text(one.label, one.own_form) for one in first)
    console.mark_notes(error_text(one.rel_error, one.error_kind) for one in first)
    console.unchecked_note(record.laws for record in records)


def _row(one: Choice) -> list[str]:
    first, after = one.fastest, one.next
    if first is None:
        return [one.asked.name, str(one.n), "-", "-", "-", "-", "", "", "", one.verdict]
    record = first.side.record
    return [
        one.asked.name,
        str(one.n),
        name_text(record.label, record.own_form),
        with_interval(first.side.time, *(first.side.interval or (None, None))),
        format_bytes(record.peak_bytes),
        error_text(record.rel_error, record.error_kind),
        ", ".join(form.label for form in one.tied),
        after.label if after else "",
        _margin(after),
        "; ".join(dict.fromkeys(filter(None, (one.verdict, after.why if after else "")))),
    ]


def _margin(after: Form | None) -> str:
    if after is None or after.ratio is None:
        return ""
    low, high = after.ratio.low, after.ratio.high
    ends = f" ({format_number(low)} to {format_number(high)})" if low and high else ""
    return format_number(after.ratio.estimate) + ends
