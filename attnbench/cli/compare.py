"""``attnbench compare A B --n 1024..16384``: paired times, ratios, verdicts and the crossover length."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from attnbench.cell import Pass
from attnbench.cli import completion, console
from attnbench.errors import CannotCreate, UsageError
from attnbench.shape import Bias
from attnbench.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from attnbench.measure.statistics import Crossover
    from attnbench.run.compare import Comparison, Row, Side


def compare(
    variants: Annotated[
        list[str],
        typer.Argument(
            help="Two or more, options in the text: performer:features=512.", autocompletion=completion.variants
        ),
    ],
    n: Annotated[str, typer.Option("--n", help="Lengths: 1024..16384 doubles, 1024..4096+1024 steps.")] = "1024..4096",
    heads: Annotated[int, typer.Option(min=1, help="Heads H.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Head width D.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Batch B.")] = 1,
    dtype: Annotated[
        Literal["float64", "float32", "bfloat16", "float16"], typer.Option(help="Data type of q, k, v.")
    ] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")] = "auto",
    pass_: Annotated[
        Pass, typer.Option("--pass", help="training: forward and backward; decode: one token.")
    ] = "forward",
    level: Annotated[
        Literal["operator", "layer", "model"], typer.Option(help="Attention alone, with its projections, or a model.")
    ] = "operator",
    causal: Annotated[bool, typer.Option("--causal", help="Query i sees keys up to i.")] = False,
    bias: Annotated[Bias, typer.Option(help="Added to the logits; exact attention only.")] = "none",
    compile_: Annotated[
        bool, typer.Option("--compile", help="By torch.compile, each variant as a whole or not at all.")
    ] = False,
    inputs: Annotated[str, typer.Option(help="Where q, k, v come from (attnbench list inputs).")] = "gaussian",
    error: Annotated[bool, typer.Option("--error/--no-error", help="Also measure the error.")] = True,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default all cores.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of inputs and projections.")] = 0,
    timeout: Annotated[float, typer.Option(min=1, max=1e6, help="Seconds for one length.")] = 120.0,
    min_time: Annotated[
        float, typer.Option(min=0.001, max=3600, help="Least seconds of samples at each length.")
    ] = 1.0,
    memory_limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="8GiB, say; default 85 % of what is free.")
    ] = None,
    process: Annotated[
        Literal["tuned", "as-shipped"],
        typer.Option(help="Allocator and matmul library: tuned, or as torch ships."),
    ] = "tuned",
    plugin: Annotated[list[str] | None, typer.Option(help="FILE.py or module with further variants.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the rows to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw time against n to this .svg, .png or .pdf.")] = None,
) -> None:
    """Compare variants, taking turns in one process, at each length; then say from which length on one wins."""
    from attnbench.suite.ranges import parse_range

    lengths = parse_range(n)
    if plot is not None and plot.suffix not in (".svg", ".png", ".pdf"):
        raise UsageError(f"--plot {plot}: the name must end in .svg, .png or .pdf")

    import attnbench.attention
    import attnbench.inputs  # noqa: F401  # fills the table of inputs
    from attnbench.cell import Cell
    from attnbench.machine import available_cores, resolve_device
    from attnbench.measure.statistics import FASTER_BAND
    from attnbench.measure.time import TimingRules
    from attnbench.plugins import load
    from attnbench.qkv import INPUTS
    from attnbench.run.compare import compare as measure
    from attnbench.run.isolation import Settings
    from attnbench.run.plan import default_memory_limit
    from attnbench.shape import Shape
    from attnbench.spec import parse_spec, parse_specs
    from attnbench.units import parse_bytes
    from attnbench.variant import VARIANTS

    for source in plugin or []:
        load(source)
    device = resolve_device(device)
    specs = [VARIANTS.get(s.name).normalise(s) for text in variants for s in parse_specs(text)]
    source_of_inputs = parse_spec(inputs)
    source_of_inputs = INPUTS.get(source_of_inputs.name).normalise(source_of_inputs)
    try:
        limit = default_memory_limit(device) if memory_limit is None else parse_bytes(memory_limit)
    except ValueError as problem:
        raise UsageError(f"--memory-limit: {problem}") from None
    for path in (csv, plot):
        if path is not None and not path.parent.is_dir():
            raise CannotCreate(f"cannot write {path}: there is no folder {path.parent}")
    cells = [
        Cell(
            suite="compare",
            sweep="compare",
            variant=spec,
            shape=Shape(batch=batch, heads=heads, seq_len=lengths[0], head_dim=head_dim, causal=causal, bias=bias),
            level=level,
            pass_=pass_,
            dtype=dtype,
            device=device,
            inputs=source_of_inputs,
            seed=seed,
            measure=("time", "memory", "error") if error and level == "operator" else ("time", "memory"),
            error_draws=2,
            compile=compile_,
        )
        for spec in specs
    ]
    settings = Settings(
        device=device,
        threads=threads or available_cores(),
        process=process,
        memory_limit=limit,
        plugins=tuple(plugin or ()),
        dtypes=(dtype,),
        rates=False,
    )
    rules = TimingRules(min_time=min_time, max_time=10 * min_time)
    with console.progress(total=len(lengths)) as bar:

        def on_length(length: int) -> None:
            bar.update(bar.task_ids[0], completed=lengths.index(length), description=f"n = {length}")

        try:
            comparison = measure(cells, lengths, settings, rules, timeout=timeout, on_length=on_length)
        except KeyboardInterrupt:
            bar.stop()
            console.note("stopped; compare keeps nothing, use a suite and attnbench run for long measurements")
            raise
    form = "".join([" causal" * causal, f" {bias}" if bias != "none" else "", " compiled" * compile_])
    what = f"{level} {pass_}{form}, B={batch} H={heads} D={head_dim}, {dtype}, {source_of_inputs}, on {device}"
    plural = "" if settings.threads == 1 else "s"
    how = f"{settings.threads} thread{plural}, {comparison.environment['process']} process"
    if as_json:
        console.data(comparison.to_json())
    else:
        console.line(what)
        console.line(f"{how}; ± is a 95 % interval")
        floor = comparison.environment["noise_floor"] or 0.0
        if floor > math.expm1(FASTER_BAND):
            console.line(f"noise floor {floor:.1%}: differences below it get no verdict")
        for note in comparison.environment["process_notes"]:
            console.warning(note)
        _print(comparison)
    if csv is not None:  # after the rest, which a full disk must not take along
        _write_csv(comparison, csv)
    if plot is not None:
        _draw(comparison, plot, f"{what}; {how}")


def _print(comparison: Comparison) -> None:
    for (a, b), rows in comparison.rows.items():
        console.table(
            ["n", a, b, "ratio", "95 % interval", f"{a} is"],
            [_time_row(row) for row in rows],
            right=["n", a, b, "ratio", "95 % interval"],
            title=f"\ntime of {a} / time of {b}",
        )
        console.line(_crossover_line(a, b, comparison.crossovers[a, b]))
    columns = ["n", "variant", "peak memory", "state", "error", "answering mean(V)", "note"]
    sides = _side_rows(comparison)
    used = [any(row[i] not in ("", "-") for row in sides) for i in range(len(columns))]
    console.table(
        [name for name, use in zip(columns, used, strict=True) if use],
        [[cell for cell, use in zip(row, used, strict=True) if use] for row in sides],
        right=["n", "peak memory", "state", "error", "answering mean(V)"],
        title="\nmemory and error against exact attention",
    )
    if comparison.without_error:
        console.line(f"no errors from n = {comparison.without_error[0]} on: exact attention in float64 takes too long")
    console.error_notes({s.record.error_kind for rows in comparison.rows.values() for r in rows for s in (r.a, r.b)})


def _time_row(row: Row) -> list[str]:
    cells = [str(row.n), _time(row.a), _time(row.b)]
    if row.ratio is None:
        return [*cells, "-", "-", row.verdict]
    interval = "-"
    if row.ratio.low is not None and row.ratio.high is not None:
        interval = f"{row.ratio.low:.3g} to {row.ratio.high:.3g}"
    return [*cells, f"{row.ratio.estimate:.3g}", interval, row.verdict]


def _time(side: Side) -> str:
    if side.time is None:
        return str(side.record.status)
    spread = f" ±{(side.interval[1] - side.interval[0]) / 2 / side.time:.0%}" if side.interval else ""
    return format_seconds(side.time) + spread


def _side_rows(comparison: Comparison) -> list[list[str]]:
    seen: dict[tuple[int, str], list[str]] = {}
    for rows in comparison.rows.values():
        for row in rows:
            for side in (row.a, row.b):
                r = side.record
                error = console.error_text(r)
                trivial = "-" if r.trivial_error is None else f"{r.trivial_error:.2g}"
                note = r.reason or (r.kernel or "")
                sizes = [format_bytes(r.peak_bytes), format_bytes(r.state_bytes)]
                seen[row.n, r.label] = [str(row.n), r.label, *sizes, error, trivial, note]
    return [seen[key] for key in sorted(seen, key=lambda k: (k[0], comparison.labels.index(k[1])))]


def _crossover_line(a: str, b: str, found: Crossover) -> str:
    if found.n is None:
        return f"crossover of {a} and {b}: {found.note}"
    low = f"{found.low:.0f}" if found.low > 0 and math.isfinite(found.low) else "below the range"
    high = f"{found.high:.0f}" if math.isfinite(found.high) else "above the range"
    return f"crossover of {a} and {b}: n = {found.n:.0f} (95 % interval {low} to {high}); {found.note}"


def _write_csv(comparison: Comparison, path: Path) -> None:
    import pandas as pd

    from attnbench.table import no_formula

    table = pd.DataFrame(comparison.to_rows()).map(lambda cell: no_formula(cell) if isinstance(cell, str) else cell)
    try:
        table.to_csv(path, index=False)
    except OSError as error:
        raise CannotCreate(f"cannot write {path}: {error.strerror}") from error


def _draw(comparison: Comparison, path: Path, about: str) -> None:
    import pandas as pd

    from attnbench.plots.comparison import draw_comparison
    from attnbench.plots.style import save

    figure = draw_comparison(
        pd.DataFrame(comparison.to_rows()), crossovers=comparison.to_json()["crossovers"], about=about
    )
    save(figure, path.with_suffix(""), (path.suffix[1:],))
