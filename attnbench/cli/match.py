"""``attnbench match A B --error 0.1``: the setting of each variant that meets one budget, and how these compare."""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from attnbench.axes import AXES
from attnbench.cell import Pass
from attnbench.cli import completion, console
from attnbench.cli.options import Causal, Device, HeadDim, Heads, MemoryLimit, Plugins, ProcessState, Threads
from attnbench.errors import CannotCreate, Exit, UsageError
from attnbench.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from attnbench.decision.budget import Point
    from attnbench.decision.match import Match, Prepared
    from attnbench.decision.search import Found

_ALSO_FROM = {
    *("variants", "error", "memory", "time", "run", "n", "inputs", "level", "pass_", "plugin"),
    *("csv", "as_json", "plot", "width", "style"),
}
"""Parameters that mean something beside ``--from``; the others say how to measure."""


def match(
    ctx: typer.Context,
    variants: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="VARIANT...",
            show_default=False,
            help="One or more, options in the text; a value of the knob that is given stays.",
            autocompletion=completion.variants,
        ),
    ] = None,
    error: Annotated[
        float | None, typer.Option(metavar="ERROR", help="Budget: relative error against exact attention, 0.1.")
    ] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Budget: peak memory of a call, 64MiB.")] = None,
    time: Annotated[str | None, typer.Option(metavar="TIME", help="Budget: time of a call, 10ms.")] = None,
    run: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="Choose among what this run measured; no search.")
    ] = None,
    n: Annotated[str | None, typer.Option("--n", metavar="LENGTH", help="Length; default 4096.")] = None,
    inputs: Annotated[
        str | None,
        typer.Option(
            metavar="INPUT", help="Where q, k, v come from; default gaussian.", autocompletion=completion.inputs
        ),
    ] = None,
    draws: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Draws of each error.")] = 5,
    most: Annotated[
        int | None, typer.Option(min=1, max=2**20, metavar="N", help="Largest value of a knob; default the length.")
    ] = None,
    heads: Heads = 8,
    head_dim: HeadDim = 64,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Batch B.")] = 1,
    dtype: Annotated[
        Literal["float64", "float32", "bfloat16", "float16"], typer.Option(help="Data type of q, k, v.")
    ] = "float32",
    device: Device = "auto",
    pass_: Annotated[
        Pass, typer.Option("--pass", help="training: forward and backward; decode: one token.")
    ] = "forward",
    level: Annotated[
        Literal["operator", "layer", "model"], typer.Option(help="Attention alone, with its projections, or a model.")
    ] = "operator",
    causal: Causal = False,
    padding: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of the batch's tokens that are padding: 0.5.")
    ] = 0.0,
    compile_: Annotated[
        bool, typer.Option("--compile", help="By torch.compile, each variant as a whole or not at all.")
    ] = False,
    threads: Threads = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of inputs and projections.")] = 0,
    timeout: Annotated[
        float, typer.Option(min=1, max=1e6, metavar="SECONDS", help="Seconds for one try; a slower one is too dear.")
    ] = 60.0,
    min_time: Annotated[
        float, typer.Option(min=0.001, max=3600, metavar="SECONDS", help="Least seconds of samples in turns.")
    ] = 1.0,
    memory_limit: MemoryLimit = None,
    process: ProcessState = "tuned",
    plugin: Plugins = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write every try to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw error against cost to this .svg, .png or .pdf.")
    ] = None,
    width: Annotated[
        Literal["page", "column"], typer.Option(help="Of the drawing; column: 3.3 inches, as in a paper.")
    ] = "page",
    style: Annotated[Literal["light", "dark"], typer.Option(help="Colours of the drawing.")] = "light",
) -> None:
    """Turn the knob of each variant until all meet one budget, then time the settings found in turns.

    For an error it finds the cheapest setting, for memory or time the dearest that fits. One variant alone answers how
    large its knob must be. The exit code is 1 where nothing could be measured.
    """
    given = {name.rstrip("_"): value for name, value in locals().items()} | {"inputs": inputs or "gaussian"}
    from attnbench.decision.budget import budget_of

    budget_of(error=error, memory=memory, time=time)
    if plot is not None and plot.suffix not in (".svg", ".png", ".pdf"):
        raise UsageError(f"--plot {plot}: the name must end in .svg, .png or .pdf")
    for path in (csv, plot):
        if path is not None and not path.parent.is_dir():
            raise CannotCreate(f"cannot write {path}: there is no folder {path.parent}")
    if run is not None:
        _refuse_measuring(ctx)
        answer = _of_run(run, variants or [], (error, memory, time), n, inputs, level, pass_, plugin or [])
        how = f"from {run}; nothing was measured anew"
    else:
        from attnbench.decision.match import MatchQuestion
        from attnbench.units import parse_bytes

        try:
            wanted = None if memory_limit is None else parse_bytes(memory_limit)
        except ValueError as problem:
            raise UsageError(f"--memory-limit: {problem}") from None
        prepared = MatchQuestion(
            variants or [],
            error=error,
            memory=memory,
            time=time,
            n=n or "4096",
            axes={axis: given[axis] for axis in AXES if axis in given},
            device=device,
            level=level,
            pass_=pass_,
            draws=draws,
            most=most,
            threads=threads,
            timeout=timeout,
            min_time=min_time,
            memory_limit=wanted,
            process=process,
            plugins=tuple(plugin or ()),
        ).prepare()
        answer = _measure(prepared, csv)
        threads = prepared.settings.threads
        how = f"{threads} thread{'s' * (threads != 1)}, {answer.environment['process']} process"
        how += f", {draws} draw{'s' * (draws != 1)} of each error"
    for warning in answer.warnings:
        console.warning(warning)
    if as_json:
        console.data(answer.to_json())
    else:
        _print(answer, how)
    if csv is not None:  # last, so that a full disk does not cost the rest
        _write_csv(answer.to_rows(), csv)
    if plot is not None:
        _draw(answer, plot, f"{answer.about}; {how}", width, style)
    if not answer.ok:
        console.error("nothing could be measured; the reasons stand above")
        raise typer.Exit(Exit.FAILED)


def _refuse_measuring(ctx: typer.Context) -> None:
    """Refuse options that say how to measure, where nothing is measured."""
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(str(parameter.name))
        if source is not None and source.name == "COMMANDLINE" and parameter.name not in _ALSO_FROM:
            raise UsageError(f"{parameter.opts[0]} says how to measure, and --from measures nothing; leave one out")


def _of_run(
    run: Path,
    variants: list[str],
    budgets: tuple[float | None, str | None, str | None],
    n: str | None,
    inputs: str | None,
    level: str,
    pass_: str,
    plugins: list[str],
) -> Match:
    from attnbench.decision.budget import budget_of
    from attnbench.decision.match import one_length
    from attnbench.decision.match_run import match_run
    from attnbench.plots.load import read_results
    from attnbench.plugins import load

    for source in plugins:
        load(source)
    error, memory, time = budgets
    frame = read_results(run, warn=console.warning)
    return match_run(
        frame,
        variants,
        budget_of(error=error, memory=memory, time=time),
        n=None if n is None else one_length(n),
        inputs=inputs,
        level=level,
        pass_=pass_,
    )


def _measure(prepared: Prepared, csv: Path | None) -> Match:
    """Search and time; what was measured before Ctrl-C is written too."""
    from attnbench.decision.match import rows_of
    from attnbench.decision.search import Found

    tried: dict[str, list[Point]] = {}
    with console.progress(total=len(prepared.entrants) + 1) as bar:
        (task,) = bar.task_ids

        def on_search(label: str) -> None:
            bar.update(task, completed=len(tried), description=label or "in turns")

        def on_try(label: str, point: Point) -> None:
            tried.setdefault(label, []).append(point)
            bar.update(task, description=f"{point.label}, {len(tried[label])} tried")

        try:
            return prepared.answer(on_search, on_try)
        except KeyboardInterrupt:
            bar.stop()
            if csv is not None and tried:
                knobs = {one.spec.label: one.ladder.knob.option if one.ladder else "" for one in prepared.entrants}
                found = [Found(label, knobs[label], tuple(points), None) for label, points in tried.items()]
                _write_csv(rows_of(prepared.budget, found, prepared.same), csv)
                console.note(f"stopped; {csv} has what was measured")
            else:
                console.note(
                    "stopped; nothing was measured yet" if csv else "stopped; without --csv match keeps nothing"
                )
            raise


_COLUMNS = ("variant", "knob", "value", "error", "95 % interval", "time", "peak", "tries", "budget")


def _print(answer: Match, how: str) -> None:
    console.line(answer.about)
    console.line(how)
    times = {label: side.time for label, side in answer.sides().items()}
    rows = [_row(answer, one, times) for one in answer.found]
    used = [any(row[i] not in ("", "-") for row in rows) for i in range(len(_COLUMNS))]
    columns = [name for name, use in zip(_COLUMNS, used, strict=True) if use]
    console.table(
        columns,
        [[cell for cell, use in zip(row, used, strict=True) if use] for row in rows],
        right=[name for name in columns if name not in ("variant", "knob", "budget")],
        title=f"\n{answer.budget}",
    )
    console.line()
    for sentence in answer.sentences():
        for part in wrap(sentence, console.width(), subsequent_indent="  ", break_on_hyphens=False):
            console.line(part)
    points = [point for one in answer.found for point in one.tries]
    console.error_notes({point.error_kind for point in points})
    console.own_form_note(point.own_form for point in points)


def _row(answer: Match, one: Found, times: dict[str, float | None]) -> list[str]:
    """The chosen setting, else what comes nearest to the budget, else the last try."""
    point = one.chosen or one.best(answer.budget) or (one.tries[-1] if one.tries else None)
    if point is None:
        return [one.variant, one.knob, "-", "-", "-", "-", "-", "0", "not measured"]
    kind = point.error_kind
    error = "-" if point.error is None else f"{point.error:.2g}" + " *" * (kind == "distance")
    error = "learned" if kind == "learned" else error
    between = f"{point.spread[0]:.2g} to {point.spread[1]:.2g}" if point.spread else "-"
    time = times.get(point.label) if one.chosen else None
    return [
        one.variant + console.DAGGER * bool(point.own_form),
        one.knob,
        "-" if point.value is None else str(point.value),
        error,
        between,
        format_seconds(time or point.time),
        format_bytes(point.memory),
        str(len(one.tries)),
        "met" if one.chosen else "not met",
    ]


def _write_csv(rows: list[dict[str, object]], path: Path) -> None:
    import pandas as pd

    from attnbench.files import write_output
    from attnbench.printable import printable
    from attnbench.table import no_formula

    def plain(cell: object) -> object:
        return no_formula(printable(cell)) if isinstance(cell, str) else cell

    table = pd.DataFrame(rows).astype({"value": "Int64"}).map(plain, na_action="ignore")
    write_output(path, table.to_csv(index=False, lineterminator="\n"))


def _draw(answer: Match, path: Path, about: str, width: str, style: str) -> None:
    import pandas as pd

    from attnbench.plots.frontier import draw_frontier
    from attnbench.plots.page import NothingToDraw, laid_out
    from attnbench.plots.palette import drawn_in
    from attnbench.plots.style import save

    try:
        with laid_out(width), drawn_in(style):
            save(draw_frontier(pd.DataFrame(answer.to_rows()), about=about), path.with_suffix(""), (path.suffix[1:],))
    except NothingToDraw as why:
        console.warning(f"no chart is written: {why}")
