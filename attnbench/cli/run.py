"""``attnbench run SUITE``: measure every cell of a suite and store a row for each."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnbench.cli import completion, console
from attnbench.cli.options import (
    Device,
    FirstCallTimeout,
    Fresh,
    MemoryLimit,
    OfLimits,
    On,
    Out,
    OverrideLaunch,
    Plugins,
    ProcessState,
    Threads,
    Unchecked,
    bytes_of,
)
from attnbench.cli.plan import predict, print_heading
from attnbench.cli.startup import importing, worker_ahead
from attnbench.errors import NothingMeasured, UsageError
from attnbench.marks import error_text, name_text
from attnbench.printable import without_empty
from attnbench.suite.shard import parse_shard
from attnbench.units import format_bytes, format_interval, format_number, format_seconds, format_share

if TYPE_CHECKING:
    from attnbench.record import Record
    from attnbench.run.isolation import Worker
    from attnbench.run.many.engine import Engine
    from attnbench.run.many.on import Where
    from attnbench.run.plan import Plan


def run(
    context: typer.Context,
    suite: Annotated[
        str,
        typer.Argument(
            help="A YAML file, the name of a shipped suite, or the folder of a run to repeat.",
            autocompletion=completion.suites,
        ),
    ],
    device: Device = "auto",
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Override the data type: float32, bfloat16 ...")
    ] = None,
    launch: OverrideLaunch = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="AXIS=VALUES",
            help="Override an axis: seq_len=1024,2048.",
            autocompletion=completion.axes,
        ),
    ] = None,
    select: Annotated[
        str | None,
        typer.Option(
            "-k", metavar="EXPRESSION", help="Only these cells: 'performer and n4096', 'causal', 'not bfloat16'."
        ),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option("--shard", metavar="I/K", help="Only part I of K, from 0; attnbench merge joins the parts."),
    ] = None,
    out: Out = Path("results"),
    plugin: Plugins = None,
    threads: Threads = None,
    seed: Annotated[int | None, typer.Option(min=0, metavar="N", help="Override the suite's seed.")] = None,
    cell_timeout: Annotated[
        float, typer.Option(min=1, max=1e6, metavar="SECONDS", help="Time limit for one visit of a cell.")
    ] = 60.0,
    first_call_timeout: FirstCallTimeout = 600.0,
    memory_limit: MemoryLimit = None,
    min_time: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=3600,
            metavar="SECONDS",
            help="Least seconds spent on samples of a cell; default: the suite's.",
        ),
    ] = None,
    process: ProcessState = "tuned",
    like: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Multiply by the libraries of this run; default: of the suite's last."),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, max=20, metavar="N", help="Shuffled visits of each cell; default: the suite's.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One sample per cell, no interval.")] = False,
    on: On = None,
    fresh: Fresh = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Measure failed cells again.")] = False,
    unchecked: Unchecked = False,
    rates: OfLimits = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Predict FLOPs, memory and time; run nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Rows, or the prediction, as JSON on stdout.")] = False,
) -> None:
    """Measure a suite: time, memory and error of every cell, stored one by one.

    A variant that breaks one of its laws (attnbench check) is not measured, and its row names the law.

    The same command resumes an interrupted run. The exit code is 0 if at least one cell was measured, 1 if none was,
    2 for wrong usage or an invalid suite; the documentation lists the others.
    """
    given = {name: value for name, value in locals().items() if name != "context"}
    if again := _repeated(context, suite):
        run(context, **again)
        return
    there = None if on is None else _engine(on, device=device, shard=shard, dry_run=dry_run)
    overrides = _axes(set_ or [])
    wanted = None if shard is None else parse_shard(shard)
    limit = bytes_of(memory_limit)

    from attnbench.suite.load import refuse_early

    of_all = {"dtype": dtype, "launch": launch, "seed": None if seed is None else str(seed)}
    given_to_all = {axis: one for axis, one in of_all.items() if one is not None}
    named = {axis: f"--{axis}" for axis in given_to_all}
    refuse_early(suite, device=device, overrides=overrides | given_to_all, options=named)
    if device == "cpu":
        from attnbench.run.process import memory_limit as limit_for

        limit_for(device, limit)  # before torch is imported, which takes longer than to refuse it

    from attnbench.lock import once

    alone = nullcontext() if fresh or dry_run else once(out, given)
    with ExitStack() as ours:
        ours.enter_context(alone)
        worker = ours.enter_context(worker_ahead(threads, wanted=there is None and not dry_run))
        engine: Engine | None = None
        if there is not None:
            from attnbench.run.many.on import opened

            engine, device = ours.enter_context(opened(there, device))
        with importing():
            from attnbench.run.plan import Options, make_plan
            from attnbench.run.trial import load_all

            load_all(plugin or [])
            options = Options(
                device=device,
                dtype=dtype,
                launch=launch,
                overrides=overrides,
                select=select,
                shard=wanted,
                on=on,
                out=out,
                plugins=tuple(plugin or ()),
                threads=threads,
                seed=seed,
                cell_timeout=cell_timeout,
                first_call_timeout=first_call_timeout,
                memory_limit=limit,
                min_time=min_time,
                process=process,
                like=like,
                rounds=rounds,
                quick=quick,
                fresh=fresh,
                retry_failed=retry_failed,
                unchecked=unchecked,
                dry=dry_run,
                repeats=context.obj,
            )
            plan = make_plan(suite, options)
        if not as_json:
            print_heading(plan)
        if dry_run:
            predict(plan, as_json=as_json)
        elif not plan.cells:  # one job of an array has nothing to do, and must not fail for that
            if as_json:
                console.data([])
            else:
                console.line(f"shard {wanted} has no cells; nothing was run or written")
        else:
            _measure(plan, worker, engine, as_json=as_json, rates=rates or plan.settings.device.startswith("cuda"))


def _repeated(context: typer.Context, suite: str) -> dict[str, Any]:
    """What measures the run again whose folder ``suite`` is, changed by what was typed; empty for all else."""
    from attnbench.files import stored

    if not stored(Path(suite) / "records.jsonl").is_file():
        return {}
    from attnbench.manifest import RUN_ID
    from attnbench.run.repeat import arguments_of
    from attnbench.store import RunFolder

    words = arguments_of(Path(suite))
    source = context.get_parameter_source
    typed = [name for name in context.params if getattr(source(name), "name", "") == "COMMANDLINE"]
    context.obj = RunFolder(Path(suite)).environment.get(RUN_ID)
    again = context.command.make_context("run", words)
    return {**again.params, **{name: context.params[name] for name in typed if name != "suite"}}


def _engine(on: str, *, device: str, shard: str | None, dry_run: bool) -> Where:
    """What ``--on`` says, before anything heavy is imported."""
    from attnbench.run.many.on import parse_on, refuse_senseless

    there = parse_on(on)
    refuse_senseless(device=device, shard=shard, dry_run=dry_run)
    return there


def _axes(texts: Sequence[str]) -> dict[str, str]:
    """Axis -> values, as typed after ``--set``."""
    axes: dict[str, str] = {}
    for text in texts:
        axis, _, values = (part.strip() for part in text.partition("="))
        if not axis or not values:
            raise UsageError(f"--set {text!r} is not AXIS=VALUES; write for instance --set seq_len=1024,2048")
        if axis in axes:
            raise UsageError(f"--set {axis} is given twice; write --set {axis}={axes[axis]},{values}")
        axes[axis] = values
    return axes


def _measure(plan: Plan, worker: Worker, engine: Engine | None, *, as_json: bool, rates: bool) -> None:
    console.only_repeats()
    from attnbench.cli.screen import measured
    from attnbench.store import TABLE

    runs = measured(plan, worker, engine)
    if as_json:
        console.data([record.to_json() for _, records in runs for record in records])
    else:
        for folder, records in runs:
            _print_records(records, rates=rates)
            console.line(f"results: {folder.path / TABLE}")
    if not any(record.status == "ok" for _, records in runs for record in records):
        reasons = ", ".join(str(folder.path / TABLE) for folder, _ in runs)
        raise NothingMeasured(f"no cell could be measured; reasons: {reasons}")
    if not as_json:
        console.line(f"figures: {shlex.join(['attnbench', 'plot', *(str(folder.path) for folder, _ in runs)])}")


_LAUNCH = ("launched", "device", "host")
"""Columns of a GPU."""
_RATES = ("examples/s", "first token", "per token", *console.REACHED)


def _print_records(records: list[Record], *, rates: bool = False) -> None:
    """Print a table for each sweep, with its longest measured length; the CSV has the other lengths."""
    from attnbench.axes import IN_ROWS
    from attnbench.record import COLUMNS

    trainings = [record for record in records if record.steps is not None]
    records = [record for record in records if record.steps is None]
    for sweep in dict.fromkeys(record.sweep for record in records):
        mine = [record for record in records if record.sweep == sweep]
        longest = max((r.seq_len for r in mine if r.status == "ok"), default=max(r.seq_len for r in mine))
        shown = [record for record in mine if record.seq_len == longest]
        axes = [axis for axis in COLUMNS if axis in IN_ROWS and len({getattr(record, axis) for record in shown}) > 1]
        inputs = list(dict.fromkeys(record.inputs for record in shown))
        columns = ["variant", *axes, "time", "95 %", *_LAUNCH, *_RATES]
        columns += ["peak", "state", "error", "loss", "features", "note"]
        rows = [_result_row(record, axes, rates=rates) for record in shown]
        title = f"\n{sweep}, n = {longest}"
        if len(inputs) == 1 and any(record.error_kind for record in shown):
            title += f", {inputs[0]}"
        if len(shown) < len(mine):
            title += f" ({len(mine)} rows in all)"
        console.table(
            *without_empty(columns, rows),
            right=["time", "95 %", *_LAUNCH[1:], *_RATES, "peak", "state", "error", "loss", "features"],
            title=title,
        )
    if trainings:
        from attnbench.cli.score_tables import print_scores

        print_scores(trainings, {record.label: _name(record) for record in trainings})
    if any(record.loss is not None for record in records):
        console.note("loss: in nats, with the median over windows of what it is above the untouched model's")
    elif any(record.hidden_error is not None for record in records):
        console.note("features: relative error of the last features against the untouched model's")
    console.mark_notes(cell for record in records for cell in (_name(record), _error(record)))
    console.unchecked_note(record.laws for record in [*records, *trainings])
    console.fused_note(records)
    console.replaced_note(records)


def _name(record: Record) -> str:
    return name_text(record.label, record.own_form)


def _error(record: Record) -> str:
    return error_text(record.rel_error, record.error_kind)


def _axis_text(record: Record, axis: str) -> str:
    if axis == "inputs" and record.task is not None:
        from attnbench.cli.score_tables import short_task

        return short_task(record.inputs)
    return str(getattr(record, axis))


def _result_row(record: Record, axes: list[str], *, rates: bool) -> list[str]:
    note = record.launch_note if record.status == "ok" else f"{record.status}: {record.reason}"
    rate = "-" if record.examples_per_s is None else format_number(record.examples_per_s)
    return [
        _name(record),
        *(_axis_text(record, axis) for axis in axes),
        format_seconds(record.time_median_s),
        format_interval(record.time_median_s, record.time_ci_low_s, record.time_ci_high_s),
        record.launched,
        format_seconds(record.device_s),
        format_share(record.host_share),
        rate,
        format_seconds(record.first_token_s),
        format_seconds(record.token_s),
        *(console.reached(record) if rates else "-" * len(console.REACHED)),
        format_bytes(record.peak_bytes),
        format_bytes(record.state_bytes),
        _error(record),
        "-" if record.loss is None or record.loss_delta is None else f"{record.loss:.3f} ({record.loss_delta:+.3f})",
        "-" if record.hidden_error is None or record.loss is not None else f"{record.hidden_error:.2g}",
        note,
    ]
