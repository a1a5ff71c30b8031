"""``attnbench run SUITE``: measure every cell of a suite and store a row for each."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import typer

from attnbench.cli import completion, options
from attnbench.cli.screen import console
from attnbench.cli.signature import command, completed
from attnbench.errors import NothingMeasured, UsageError
from attnbench.results.frame.marks import error_text, name_text
from attnbench.suite.axes import Launch
from attnbench.suite.shard import parse_shard
from attnbench.text import quantity
from attnbench.units import format_bytes, format_count, format_interval, format_number, format_seconds, format_share

if TYPE_CHECKING:
    from attnbench.harness.forecast import Duration
    from attnbench.harness.many.ray import RayEngine
    from attnbench.harness.outside.isolation import Worker
    from attnbench.harness.plan import Options, Plan
    from attnbench.measure.flops import Prediction
    from attnbench.results.record import Record
    from attnbench.suite.cell import Cell


@command(options.RunOptions)
def run(
    context: typer.Context,
    suite: Annotated[
        str,
        typer.Argument(
            help="A YAML file, the name of a shipped suite, or the folder of a run to repeat.",
            autocompletion=completion.suites,
        ),
    ],
    *,
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Override the data type: float32, bfloat16 ...")
    ] = None,
    launch: Annotated[Launch | None, typer.Option("--launch", help=options.LAUNCH)] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="AXIS=VALUES",
            help="Override an axis: seq_len=1024,2048.",
            autocompletion=completion.axes,
        ),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option("--shard", metavar="I/K", help="Only part I of K, from 0; attnbench merge joins the parts."),
    ] = None,
    seed: Annotated[int | None, options.Count(min=0, help="Override the suite's seed.")] = None,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="ENGINE", help="Let machines share the cells: ray, or ray:ADDRESS of a cluster."),
    ] = None,
    beside: Annotated[
        str | None,
        typer.Option("--beside", metavar="PYTHON", help="Take turns with this environment: two runs, for gate."),
    ] = None,
    rates: options.OfLimits = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Predict FLOPs, memory and time; run nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Rows, or the prediction, as JSON on stdout.")] = False,
    **given: Unpack[options.RunOptions],
) -> None:
    """Measure a suite: time, memory and error of every cell, stored one by one.

    A variant that breaks one of its laws (attnbench check) is not measured, and its row names the law.

    The same command resumes an interrupted run. The exit code is 0 if at least one cell was measured, 1 if none was,
    2 for wrong usage or an invalid suite; the documentation lists the others.
    """
    if again := _repeated(context, suite):
        run(context, **again)
        return
    given = completed(options.RunOptions, given)
    device = given["device"]
    there = None if on is None else _engine(on, device=device, shard=shard, dry_run=dry_run)
    if beside is not None and on:
        raise UsageError("--beside: two environments of one machine take turns; leave --on out")
    overrides = _axes(set_ or [])
    wanted = None if shard is None else parse_shard(shard)
    limit = options.bytes_of(given["memory_limit"])

    from attnbench.harness.outside.interpreter import Interpreter
    from attnbench.suite.load import read_suite, refuse_early

    other = None if beside is None else Interpreter.of(beside)
    of_all = {"dtype": dtype, "launch": launch, "seed": None if seed is None else str(seed)}
    named = {axis: f"--{axis}" for axis, one in of_all.items() if one is not None}
    for axis in named.keys() & overrides.keys():
        raise UsageError(f"{named[axis]} and --set {axis} are both given; leave one of them out")
    overrides |= {axis: str(of_all[axis]) for axis in named}
    read = read_suite(suite)
    refuse_early(read, device=device, overrides=overrides, options=named)
    if device == "cpu":
        from attnbench.harness.wire.process import memory_limit as limit_for

        limit_for(device, limit)  # before torch is imported, which takes longer than to refuse it

    from attnbench.results.lock import once

    alone = nullcontext() if given["fresh"] or dry_run else once(Path(given["out"]), context.params)
    with ExitStack() as ours:
        ours.enter_context(alone)
        worker = ours.enter_context(_worker_ahead(given["threads"], wanted=there is None and not dry_run))
        engine: RayEngine | None = None
        if there is not None:
            from attnbench.harness.many.ray import RayEngine

            engine = ours.enter_context(closing(RayEngine(there, device)))
            device = engine.device
        from attnbench.harness.plan import make_plan
        from attnbench.harness.trial import load_all

        load_all(given["plugins"])
        asked = options_of(
            {**given, "device": device},
            overrides=overrides,
            named=named,
            shard=wanted,
            on=on,
            beside=other,
            dry=dry_run,
            repeats=context.obj,
        )
        plan = make_plan(read, asked)
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


def options_of(given: options.RunOptions, **more: Any) -> Options:
    """The plan's share of a command's options, and ``more`` fields; UsageError if the memory limit is no size."""
    from attnbench.harness.plan import Options

    given = completed(options.RunOptions, given)
    like = given["like"]
    own: dict[str, Any] = {**given, "out": Path(given["out"]), "like": None if like is None else Path(like)}
    own |= {"memory_limit": options.bytes_of(given["memory_limit"]), "plugins": tuple(given["plugins"])}
    return Options(**own, **more)


@contextmanager
def _worker_ahead(threads: int | None, *, wanted: bool) -> Iterator[Worker]:
    from attnbench.harness.outside.isolation import Settings, Worker
    from attnbench.measure.machine import default_threads

    with Worker(Settings(threads=threads or default_threads())) as worker:
        if wanted:
            worker.begin()
        yield worker


def _repeated(context: typer.Context, suite: str) -> dict[str, Any]:
    from attnbench.files import stored

    if not stored(Path(suite) / "records.jsonl").is_file():
        return {}
    from attnbench.harness.repeat import arguments_of
    from attnbench.results.manifest import RUN_ID
    from attnbench.results.store import RunFolder

    words = arguments_of(Path(suite))
    source = context.get_parameter_source
    typed = [name for name in context.params if getattr(source(name), "name", "") == "COMMANDLINE"]
    context.obj = RunFolder(Path(suite)).environment.get(RUN_ID)
    again = context.command.make_context("run", words)
    return {**again.params, **{name: context.params[name] for name in typed if name != "suite"}}


def _engine(on: str, *, device: str, shard: str | None, dry_run: bool) -> str:
    from attnbench.harness.many.ray import parse_on, refuse_senseless

    there = parse_on(on)
    refuse_senseless(device=device, shard=shard, dry_run=dry_run)
    return there


def _axes(texts: Sequence[str]) -> dict[str, str]:
    axes: dict[str, str] = {}
    for text in texts:
        axis, _, values = (part.strip() for part in text.partition("="))
        if not axis or not values:
            raise UsageError(f"--set {text!r} is not AXIS=VALUES; write for instance --set seq_len=1024,2048")
        if axis in axes:
            raise UsageError(f"--set {axis} is given twice; write --set {axis}={axes[axis]},{values}")
        axes[axis] = values
    return axes


def _measure(plan: Plan, worker: Worker, engine: RayEngine | None, *, as_json: bool, rates: bool) -> None:
    console.only_repeats()
    from attnbench.cli.screen.run import measured
    from attnbench.measure.machine import versions
    from attnbench.results.store import TABLE

    runs = measured(plan, worker, engine)
    if as_json:
        console.data([record.to_json() for _, records in runs for record in records])
    else:
        for folder, records in runs:
            _print_records(records, rates=rates)
            named = (f"{name} {version}" for name, version in versions(folder.environment).items())
            where = f" ({', '.join(named)})" if plan.options.beside else ""
            console.line(f"results: {folder.path / TABLE}{where}")
    if not any(record.status == "ok" for _, records in runs for record in records):
        reasons = ", ".join(str(folder.path / TABLE) for folder, _ in runs)
        raise NothingMeasured(f"no cell could be measured; reasons: {reasons}")
    if not as_json:
        paths = [str(folder.path) for folder, _ in runs]
        console.line(f"figures: {shlex.join(['attnbench', 'plot', *paths])}")
        if plan.options.beside:
            console.line(f"verdict: {shlex.join(['attnbench', 'gate', paths[0], '--against', paths[1]])}")


_LAUNCH = ("launched", "device", "host")
_RATES = ("examples/s", "first token", "per token", "rollback", *console.REACHED)


def _print_records(records: list[Record], *, rates: bool = False) -> None:
    from attnbench.results.record import COLUMNS
    from attnbench.suite.axes import IN_ROWS, OF_SWAPS

    trainings = [record for record in records if record.steps is not None]
    records = [record for record in records if record.steps is None]
    for sweep in dict.fromkeys(record.sweep for record in records):
        mine = [record for record in records if record.sweep == sweep]
        longest = max((r.seq_len for r in mine if r.status == "ok"), default=max(r.seq_len for r in mine))
        shown = [record for record in mine if record.seq_len == longest]
        known = [axis for axis in COLUMNS if axis in (*IN_ROWS, *OF_SWAPS)]
        axes = [axis for axis in known if len({getattr(record, axis) for record in shown}) > 1]
        inputs = list(dict.fromkeys(record.inputs for record in shown))
        columns = ["variant", *axes, "time", "95 %", *_LAUNCH, *_RATES]
        columns += ["peak", "state", "error", "own error", "loss", "features", "note"]
        rows = [_result_row(record, axes, rates=rates) for record in shown]
        title = f"\n{sweep}, n = {longest}"
        if len(inputs) == 1 and any(record.error_kind for record in shown):
            title += f", {inputs[0]}"
        if len(shown) < len(mine):
            title += f" ({quantity(len(mine), 'row')} in all)"
        console.table(
            columns,
            rows,
            right=["time", "95 %", *_LAUNCH[1:], *_RATES, "peak", "state", "error", "own error", "loss", "features"],
            title=title,
        )
    if trainings:
        from attnbench.cli.screen.score import print_scores

        print_scores(trainings)
    if any(record.loss is not None for record in records):
        console.note("loss: in nats, with the median over windows of what it is above the untouched model's")
    elif any(record.hidden_error is not None for record in records):
        console.note("features: relative error of the last features against the untouched model's")
    console.mark_notes(cell for record in records for cell in (_name(record), _error(record)))
    console.laws_note([*records, *trainings])
    console.fused_note(records)
    console.replaced_note(records)


def _name(record: Record) -> str:
    return name_text(record.label, record.own_form)


def _error(record: Record) -> str:
    return error_text(record.rel_error, record.error_kind)


def _axis_text(record: Record, axis: str) -> str:
    if axis == "inputs" and record.task is not None:
        from attnbench.cli.screen.score import short_task

        return short_task(record.inputs)
    return str(getattr(record, axis))


def _result_row(record: Record, axes: list[str], *, rates: bool) -> list[str]:
    notes = "; ".join(filter(None, (record.launch_note, record.own_error_note)))
    note = notes if record.status == "ok" else f"{record.status}: {record.reason}"
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
        format_seconds(record.rollback_s),
        *(console.reached(record) if rates else "-" * len(console.REACHED)),
        format_bytes(record.peak_bytes),
        format_bytes(record.state_bytes),
        _error(record),
        console.own_error(record.own_error),
        "-" if record.loss is None or record.loss_delta is None else f"{record.loss:.3f} ({record.loss_delta:+.3f})",
        "-" if record.hidden_error is None or record.loss is not None else f"{record.hidden_error:.2g}",
        note,
    ]


def print_heading(plan: Plan) -> None:
    """Print the suite, its process, and a line for each sweep."""
    settings = plan.settings
    limit = f", memory limit {format_bytes(settings.memory_limit)}" if settings.memory_limit else ""
    shard = f", shard {plan.options.shard} of {quantity(plan.whole, 'cell')}" if plan.options.shard else ""
    console.heading(f"{plan.suite.name}: {quantity(len(plan.cells), 'cell')} on {settings.device}{shard}")
    threads = quantity(settings.threads, "thread")
    if plan.options.on is not None:  # its machines have cores and memory of their own
        threads = f"machines of {plan.options.on}: {threads if plan.options.threads else 'threads as each has cores'}"
        limit = limit if plan.options.memory_limit else ""
    console.line(f"{threads}, {settings.process} process{limit}")
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


def predict(plan: Plan, *, as_json: bool) -> None:
    """Print a line for each cell, with the axes that differ between cells, or everything as JSON."""
    from attnbench.harness.forecast import duration, estimate
    from attnbench.suite.describe import axes_of, shown, varying

    found = []
    with console.progress(total=len(plan.cells)) as bar:
        for cell, one in estimate(plan.cells, plan.settings.threads):
            found.append((cell, one))
            bar.update(bar.task_ids[0], completed=len(found), description=cell.variant.label)
    limit, lasting = plan.settings.memory_limit or math.inf, duration(plan)
    fits = [None if one.peak_bytes is None else one.peak_bytes <= limit for _, one in found]
    if as_json:
        about: dict[str, Any] = {
            "suite": plan.suite.name,
            **{name: getattr(plan.settings, name) for name in ("device", "threads", "process")},
            "memory_limit_bytes": plan.settings.memory_limit,
            "shard": str(plan.options.shard) if plan.options.shard else None,
            "cells": [_cell(cell, one, fit) for (cell, one), fit in zip(found, fits, strict=True)],
        }
        console.data(about | asdict(lasting))
        return
    axes = varying(plan.cells)
    rows = []
    for (cell, one), fit in zip(found, fits, strict=True):
        note = "; ".join(filter(None, ["will not fit" if fit is False else "", one.reason]))
        values = [shown(axes_of(cell)[axis]) for axis in axes]
        sizes = [format_count(one.matmul_flops), format_bytes(one.peak_bytes)]
        rows.append([cell.sweep, cell.variant.label, str(cell.shape.N), *values, *sizes, note])
    numbers = ["n", "matmul FLOPs", "peak"]
    console.table(["sweep", "variant", "n", *axes, *numbers[1:], "note"], rows, right=numbers)
    words: dict[bool | None, str] = {True: "fit", False: "will not fit"}
    ends = Counter(words.get(fit) or one.reason.partition(":")[0] for (_, one), fit in zip(found, fits, strict=True))
    counts = ", ".join(f"{count} {word}" for word, count in ends.items())
    console.paragraph(f"{quantity(len(found), 'cell')}: {counts}; nothing was run")
    console.paragraph(f"the run will take {_minutes(lasting)}; {lasting.ground}")


def _minutes(lasting: Duration) -> str:
    seconds = lasting.seconds or lasting.least_seconds
    said = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
    return f"{'at least' if lasting.seconds is None else 'about'} {said}" if seconds else "an unknown time"


def _cell(cell: Cell, predicted: Prediction, fits: bool | None) -> dict[str, Any]:
    from attnbench.suite.describe import axes_of

    return {
        "cell_id": cell.cell_id,
        "sweep": cell.sweep,
        "variant": cell.variant.label,
        "level": cell.level,
        "pass": cell.pass_,
        "measure": list(cell.measure),
        "seq_len": cell.shape.N,
        **axes_of(cell),
        "matmul_flops": predicted.matmul_flops,
        "peak_bytes": predicted.peak_bytes,
        "fits": fits,
        "reason": predicted.reason,
    }
