"""``attnbench match A B --error 0.1``: the setting of each variant that meets one budget, and how these compare."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from attnbench.cli import completion, console, options
from attnbench.cli.outputs import draw, refuse_files, write_rows
from attnbench.errors import Exit, UsageError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from attnbench.cli.match_screen import MatchScreen
    from attnbench.decision.budget import Budget
    from attnbench.decision.match import Prepared
    from attnbench.decision.matched import Match

_WITH_FROM = {
    *("variants", "error", "memory", "time", "score", "run", "n", "inputs", "task", "level", "pass_", "plugin"),
    *("csv", "as_json", "plot", "width", "style"),
}
"""Parameters that mean something beside ``--from``; the others say how to measure."""
_OF_TRAININGS = {"task", "steps", "seeds", "rates", "layers", "ffn", "pretrain", "out", "fresh"}
"""Parameters that mean something beside ``--score`` only."""
_NOT_OF_TRAININGS = {"inputs", "draws", "dtype", "level", "padding", "compile_", "seed"}
"""Parameters that mean nothing beside ``--score``."""


def match(
    ctx: typer.Context,
    variants: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="VARIANT...",
            show_default=False,
            help="One or more, with options; a knob that is given keeps its value.",
            autocompletion=completion.variants,
        ),
    ] = None,
    error: Annotated[
        float | None, typer.Option(metavar="ERROR", help="Budget: relative error against exact attention, such as 0.1.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Budget: peak memory of a call, such as 64MiB.")
    ] = None,
    time: Annotated[str | None, typer.Option(metavar="TIME", help="Budget: time of a call, such as 10ms.")] = None,
    score: Annotated[
        float | None,
        typer.Option(
            metavar="SCORE", help="Budget: score of the trained model, such as 0.9. Default sizes are those of score."
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN", help="Choose among the settings of this run; measure nothing."),
    ] = None,
    n: Annotated[
        str | None, typer.Option("--n", metavar="LENGTH", help="Length; default: 4096, with --score 64.")
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option(
            metavar="INPUT", help="Where q, k, v come from; default: gaussian.", autocompletion=completion.inputs
        ),
    ] = None,
    draws: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Draws for each error.")] = 5,
    most: Annotated[
        int | None, typer.Option(min=1, max=2**20, metavar="N", help="Largest value of a knob; default: the length.")
    ] = None,
    heads: options.Heads = 8,
    head_dim: options.HeadDim = 64,
    batch: options.Batch = 1,
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
    pass_: options.PassOption = "forward",
    level: options.LevelOption = "operator",
    causal: options.Causal = False,
    padding: options.Padding = 0.0,
    compile_: options.Compile = False,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="TASK",
            help="With --score: task to train on (attnbench list tasks); default: recall.",
            autocompletion=completion.tasks,
        ),
    ] = None,
    steps: options.Steps = 400,
    seeds: options.Seeds = 3,
    rates: options.Rates = "0.004,0.008",
    layers: options.Layers = 2,
    ffn: options.Ffn = 128,
    pretrain: options.Pretrain = False,
    out: options.Out = Path("results"),
    fresh: options.Fresh = False,
    threads: options.Threads = None,
    seed: options.Seed = 0,
    timeout: Annotated[
        float,
        typer.Option(min=1, max=1e6, metavar="SECONDS", help="Time limit for one try; a slower one is too expensive."),
    ] = 60.0,
    first_call_timeout: options.FirstCallTimeout = 600.0,
    min_time: options.MinTime = 1.0,
    memory_limit: options.MemoryLimit = None,
    process: options.ProcessState = "tuned",
    plugin: options.Plugins = None,
    unchecked: options.Unchecked = False,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write every try to this file.")] = None,
    as_json: options.AsJson = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw error or score against cost into this .svg, .png or .pdf.")
    ] = None,
    width: options.Width = "page",
    style: Annotated[Literal["light", "dark"], typer.Option(help="Colours of the drawing.")] = "light",
) -> None:
    """Turn the knob of each variant until all meet one budget, then time these settings in turn.

    For an error or a score it finds the cheapest setting, for memory or time the most expensive one that fits. For a
    score it trains each setting as attnbench score does, and the same command resumes a match that was stopped. For
    one variant it says how large the knob must be. The exit code is 1 if nothing could be measured.
    """
    given = {name.rstrip("_"): value for name, value in locals().items()}
    from attnbench.decision.budget import budget_of

    budget = budget_of(error=error, memory=memory, time=time, score=score)
    typed = options.typed_of(ctx)
    _refuse(typed, trains=score is not None, measures=run is None)
    refuse_files(csv, plot=plot)
    # The defaults of sizes are those of compare, or with --score those of score.
    given |= {name: None for name in ("batch", "heads", "head_dim") if name not in typed}
    given |= {"pass_": pass_ if "pass_" in typed else None, "variants": variants or []}
    given |= {"memory_limit": options.bytes_of(memory_limit), "plugins": tuple(plugin or ())}
    if run is not None:
        from attnbench.plots.load import read_results
        from attnbench.run.trial import load_all

        load_all(given["plugins"])
        answer = among(read_results(run, warn=console.warning), given, budget)
        how = f"from {run}; nothing was measured anew"
    else:
        prepared = to_measure(given, budget)
        answer = _measure(prepared, csv)
        threads = prepared.settings.threads
        how = f"{threads} thread{'s' * (threads != 1)}, {answer.environment['process']} process"
        how += ", trainings of one thread" if score is not None else f", {draws} draw{'s' * (draws != 1)} of each error"
    for warning in answer.warnings:
        console.warning(warning)
    if as_json:
        console.data(answer.to_json())
    else:
        from attnbench.cli.match_screen import print_match

        print_match(answer, how)
    if csv is not None:  # last, so that a full disk does not cost the rest
        write_rows(answer.to_rows(), csv, whole=["value"])
    if plot is not None:
        draw(lambda: _figure(answer, f"{answer.about}; {how}"), plot, width=width, style=style)
    if not answer.ok:
        console.error("nothing could be measured; the reasons stand above")
        raise typer.Exit(Exit.FAILED)


def _refuse(typed: Mapping[str, str], *, trains: bool, measures: bool) -> None:
    for name, option in typed.items():
        if not measures and name not in _WITH_FROM:
            raise UsageError(f"{option} says how to measure, and --from measures nothing; leave one out")
        if not trains and name in _OF_TRAININGS:
            raise UsageError(f"{option} says how models are trained; give --score as well, or leave it out")
        if trains and name in _NOT_OF_TRAININGS:
            raise UsageError(f"{option} says nothing of models that are trained; leave it out beside --score")


def to_measure(given: Mapping[str, Any], budget: Budget) -> Prepared:
    """The question in the arguments of the command or of :func:`attnbench.match`; None stands for a default."""
    from attnbench.decision.match import MatchQuestion, score_match
    from attnbench.run.question import Question

    if budget.target == "score":
        return score_match(given).prepare()
    own = {"pass_": given["pass_"] or "forward", "unchecked": given["unchecked"]}
    how = Question.of(given["variants"], 4096 if given["n"] is None else given["n"], given, **own)
    return MatchQuestion(how, budget, given["draws"], given["most"]).prepare()


def among(frame: pd.DataFrame, given: Mapping[str, Any], budget: Budget) -> Match:
    """The answer among rows that are there, to the same arguments."""
    from attnbench.decision.match import one_length
    from attnbench.decision.match_run import match_run, match_scores

    variants, n = given["variants"], None if given["n"] is None else one_length(given["n"])
    if budget.target == "score":
        pass_ = given["pass_"] or "training"
        return match_scores(frame, variants, budget, n=n, task=given["task"], pass_=pass_)
    pass_, inputs, level = given["pass_"] or "forward", given["inputs"], given["level"]
    return match_run(frame, variants, budget, n=n, inputs=inputs, level=level, pass_=pass_)


def _measure(prepared: Prepared, csv: Path | None) -> Match:
    """Search and time; what was measured before Ctrl-C is written too."""
    from attnbench.cli.match_screen import MatchScreen

    with console.progress(total=1) as bar:
        screen = MatchScreen(prepared, bar)
        if prepared.trainings is not None:
            each, steps = prepared.trainings.of_one_setting, prepared.same["steps"]
            said = f"at most {each * screen.most} trainings of {steps} steps"
            console.note(f"{said}, {each} for each setting that is tried")
            prepared.trainings.watcher = screen
        try:
            return prepared.answer(screen.searching, screen.found)
        except KeyboardInterrupt:
            bar.stop()
            _keep(prepared, screen, csv)
            raise


def _keep(prepared: Prepared, screen: MatchScreen, csv: Path | None) -> None:
    from attnbench.decision.matched import rows_of
    from attnbench.decision.search import Found
    from attnbench.printable import without_empty
    from attnbench.units import format_bytes, format_seconds

    knobs = {one.spec.label: one.ladder.knob.option if one.ladder else "" for one in prepared.entrants}
    found = [Found(label, knobs[label], tuple(points), None) for label, points in screen.tried.items()]
    rows = rows_of(prepared.budget, found, prepared.same)
    if csv is not None and rows:
        write_rows(rows, csv, whole=["value"])
        console.note(f"stopped; {csv} has what was measured")
    elif rows:
        columns = ["setting", "", "error", "score", "time", "peak memory"]
        shown = [
            [
                row["label"],
                row["status"],
                *("-" if row[name] is None else f"{row[name]:.3g}" for name in ("error", "score")),
                format_seconds(row["time_median_s"]),
                format_bytes(row["peak_bytes"]),
            ]
            for row in rows
        ]
        console.table(*without_empty(columns, shown), right=columns[2:], title="measured before the stop")
    elif prepared.trainings is None:
        console.note("stopped; nothing was measured yet")
    if screen.folder is not None:
        console.note(f"stopped; finished trainings are in {screen.folder}; the same command resumes the match")


def _figure(answer: Match, about: str) -> Figure:
    import pandas as pd

    from attnbench.plots.frontier import draw_frontier

    return draw_frontier(pd.DataFrame(answer.to_rows()), about=about)
