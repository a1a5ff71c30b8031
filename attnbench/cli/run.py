"""``attnbench run SUITE``: measure every cell of a suite and store a row for each."""

from __future__ import annotations

import gc
import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from attnbench.cli import completion, console
from attnbench.errors import UsageError
from attnbench.units import format_bytes, format_count, format_seconds, parse_bytes

if TYPE_CHECKING:
    from attnbench.cell import Cell
    from attnbench.record import Record
    from attnbench.run.isolation import Worker
    from attnbench.run.plan import Plan


def run(
    suite: Annotated[
        str, typer.Argument(help="A YAML file, or the name of a shipped suite.", autocompletion=completion.suites)
    ],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="Override the suite: float32, bfloat16 ...")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="AXIS=VALUES", help="Override an axis: seq_len=1024,2048.")
    ] = None,
    select: Annotated[
        str | None, typer.Option("-k", metavar="EXPRESSION", help="Only these cells: 'performer and not n4096'.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("results"),
    plugin: Annotated[list[str] | None, typer.Option(help="FILE.py or module with further variants.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default all cores.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Override the suite's seed.")] = None,
    cell_timeout: Annotated[
        float, typer.Option(min=1, max=1e6, help="Seconds that one visit of a cell may take.")
    ] = 60.0,
    memory_limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="8GiB, say; default 85 % of what is free.")
    ] = None,
    min_time: Annotated[
        float | None,
        typer.Option(min=0.001, max=3600, help="Least seconds of samples for each cell; default the suite's."),
    ] = None,
    process: Annotated[
        Literal["tuned", "as-shipped"],
        typer.Option(help="Allocator and matmul library: tuned, or as torch ships."),
    ] = "tuned",
    rounds: Annotated[
        int | None, typer.Option(min=1, max=20, help="Shuffled visits of each cell; default the suite's.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One sample per cell, no interval.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin a new run instead of continuing one.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Measure cells that failed again.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Predict FLOPs and memory; run nothing.")] = False,
) -> None:
    """Measure a suite: time, memory and error of every cell, stored one by one.

    The same command continues an interrupted run.
    """
    given = dict(locals())
    overrides = dict(_axis(text) for text in set_ or [])
    try:
        limit = None if memory_limit is None else parse_bytes(memory_limit)
    except ValueError as error:
        raise UsageError(f"--memory-limit: {error}") from None

    from attnbench.suite.load import refuse_early

    of_all = {"dtype": dtype, "seed": None if seed is None else str(seed)}
    refuse_early(suite, device=device, overrides=overrides | {axis: one for axis, one in of_all.items() if one})

    from attnbench.machine import available_cores
    from attnbench.run.invocation import once
    from attnbench.run.isolation import Settings, Worker

    alone = nullcontext() if fresh or dry_run else once(out, given)
    with alone, Worker(Settings(threads=threads or available_cores())) as worker:
        if not dry_run:
            worker.begin()  # it imports torch while this process does
        from attnbench.measure.time import garbage_collection_off

        with garbage_collection_off():  # none of what is imported is garbage, and to look through it takes long
            import attnbench.attention
            import attnbench.inputs  # noqa: F401  # fills the table of inputs
            from attnbench.plugins import load
            from attnbench.run.plan import Options, make_plan

            for source in plugin or []:
                load(source)
            options = Options(
                device=device,
                dtype=dtype,
                overrides=overrides,
                select=select,
                out=out,
                plugins=tuple(plugin or ()),
                threads=threads,
                seed=seed,
                cell_timeout=cell_timeout,
                memory_limit=limit,
                min_time=min_time,
                process=process,
                rounds=rounds,
                quick=quick,
                fresh=fresh,
                retry_failed=retry_failed,
            )
            plan = make_plan(suite, options)
            gc.freeze()  # or the first search for garbage after this goes through all of it
        _print_plan(plan)
        if dry_run:
            _print_prediction(plan)
        else:
            _measure(plan, worker)


def _axis(text: str) -> tuple[str, str]:
    axis, equals, values = text.partition("=")
    if not equals or not axis or not values:
        raise UsageError(f"--set {text!r} is not AXIS=VALUES, such as seq_len=1024,2048")
    return axis.strip(), values


def _print_plan(plan: Plan) -> None:
    settings = plan.settings
    limit = f", memory limit {format_bytes(settings.memory_limit)}" if settings.memory_limit else ""
    console.heading(f"{plan.suite.name}: {len(plan.cells)} cells on {settings.device}")
    plural = "" if settings.threads == 1 else "s"
    console.line(f"{settings.threads} thread{plural}, {settings.process} process{limit}")
    rows = []
    for sweep in dict.fromkeys(cell.sweep for cell in plan.cells):
        cells = [cell for cell in plan.cells if cell.sweep == sweep]
        lengths = sorted({cell.shape.N for cell in cells})
        span = str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]}..{lengths[-1]}"
        what = "+".join(cells[0].measure)
        variants = len({cell.variant for cell in cells})
        level = f"{cells[0].level} {cells[0].pass_}"
        rows.append([sweep, level, what, str(variants), span, str(len(cells))])
    console.table(
        ["sweep", "level and pass", "measures", "variants", "n", "cells"], rows, right=["variants", "n", "cells"]
    )


def _print_prediction(plan: Plan) -> None:
    from attnbench.run.estimate import estimate

    rows = []
    unfit = 0
    for cell, predicted in estimate(plan.cells, plan.settings.threads):
        limit = plan.settings.memory_limit
        fits = predicted.peak_bytes is None or limit is None or predicted.peak_bytes <= limit
        unfit += not fits
        note = "; ".join(filter(None, ["" if fits else "will not fit", predicted.reason]))
        flops, peak = format_count(predicted.matmul_flops), format_bytes(predicted.peak_bytes)
        rows.append([cell.sweep, cell.variant.label, str(cell.shape.N), flops, peak, note])
    columns = ["sweep", "variant", "n", "matmul FLOPs", "peak", "note"]
    console.table(columns, rows, right=["n", "matmul FLOPs", "peak"])
    console.line(f"{len(plan.cells)} cells, {unfit} will not fit; nothing was run")


def _measure(plan: Plan, worker: Worker) -> None:
    from attnbench.run.runner import Watcher, execute

    class Screen(Watcher):
        """Progress bar, and a line for each cell that fails."""

        folder: Path | None = None

        def begun(self, folder: Path, *, cells: int, visits: int, resumed: int) -> None:
            self.folder = folder
            bar.update(bar.task_ids[0], total=visits)
            if resumed:
                console.note(f"continuing {folder}: {resumed} of {cells} cells are measured (--fresh begins anew)")

        def visiting(self, cell: Cell) -> None:
            bar.update(bar.task_ids[0], description=cell.label)

        def visited(self, record: Record) -> None:
            bar.advance(bar.task_ids[0])
            if record.status not in ("ok", "unsupported"):
                console.note(f"{record.label} n={record.seq_len}: {record.status}: {record.reason}")

        def warned(self, message: str) -> None:
            console.warning(message)

    screen = Screen()
    with console.progress(total=len(plan.cells)) as bar:
        try:
            folder, records = execute(plan, screen, worker)
        except KeyboardInterrupt:
            bar.stop()
            if screen.folder is not None:
                console.note(f"stopped; finished cells are in {screen.folder}; the same command goes on from there")
            raise
    _print_records(records)
    console.line(f"results: {folder.path / 'results.csv'}")
    console.line(f"figures: {shlex.join(['attnbench', 'plot', str(folder.path)])}")


def _print_records(records: list[Record]) -> None:
    """One table a sweep: the longest length of every variant; how the others ended stands in the CSV."""
    for sweep in dict.fromkeys(record.sweep for record in records):
        mine = [record for record in records if record.sweep == sweep]
        longest = max((r.seq_len for r in mine if r.status == "ok"), default=max(r.seq_len for r in mine))
        shown = [record for record in mine if record.seq_len == longest]
        axes = [axis for axis in _AXES if len({getattr(record, axis) for record in shown}) > 1]
        inputs = list(dict.fromkeys(record.inputs for record in shown))
        columns = ["variant", *axes, "time", "±", "per second", "peak", "state", "error", "note"]
        rows = [_result_row(record, axes) for record in shown]
        used = [any(row[i] not in ("", "-") for row in rows) for i in range(len(columns))]
        title = f"\n{sweep}, n = {longest}"
        if len(inputs) == 1 and any(record.error_kind for record in shown):
            title += f", {inputs[0]}"
        if len(shown) < len(mine):
            title += f" ({len(mine)} rows in all)"
        console.table(
            [name for name, use in zip(columns, used, strict=True) if use],
            [[cell for cell, use in zip(row, used, strict=True) if use] for row in rows],
            right=["time", "±", "per second", "peak", "state", "error"],
            title=title,
        )
    console.error_notes({record.error_kind for record in records})


_AXES = ("batch", "heads", "head_dim", "kv_len", "causal", "bias", "compile", "dtype", "inputs", "seed")
"""Shown where they differ between the rows of one table."""


def _result_row(record: Record, axes: list[str]) -> list[str]:
    spread = "-"
    if record.time_ci_low_s and record.time_ci_high_s and record.time_median_s:
        spread = f"{(record.time_ci_high_s - record.time_ci_low_s) / 2 / record.time_median_s:.0%}"
    note = "" if record.status == "ok" else f"{record.status}: {record.reason}"
    rate = "-" if record.examples_per_s is None else f"{record.examples_per_s:.3g}"
    return [
        record.label,
        *(str(getattr(record, axis)) for axis in axes),
        format_seconds(record.time_median_s),
        spread,
        rate,
        format_bytes(record.peak_bytes),
        format_bytes(record.state_bytes),
        console.error_text(record),
        note,
    ]
