"""``attnbench match A B --error 0.1``: the setting of each variant that meets one budget, and their comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

import typer

from attnbench.cli import completion, options
from attnbench.cli.screen import console
from attnbench.cli.screen.outputs import draw, refuse_files, write_rows
from attnbench.cli.signature import command, completed
from attnbench.errors import NothingMeasured
from attnbench.text import quantity

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from attnbench.answers.match.budget import Budget
    from attnbench.answers.match.match import ReadyMatch
    from attnbench.answers.match.result import Match
    from attnbench.cli.screen.match import MatchScreen


@command(options.MatchOptions)
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
    *,
    run: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN", help="Choose among the settings of this run; measure nothing."),
    ] = None,
    csv: Annotated[Path | None, options.File(help="Write every try to this file.")] = None,
    as_json: options.AsJson = False,
    plot: Annotated[
        Path | None, options.File(help="Draw error or score against cost into this .svg, .png or .pdf.")
    ] = None,
    width: options.Width = "page",
    style: Annotated[Literal["light", "dark"], typer.Option(help="Colours of the drawing.")] = "light",
    **given: Unpack[options.MatchOptions],
) -> None:
    """Turn the knob of each variant until all meet one budget, then time these settings in turn.

    For an error or a score it finds the cheapest setting, for memory or time the most expensive one that fits. For a
    score it trains each setting as attnbench score does, and the same command resumes a match that was stopped. For
    one variant it says how large the knob must be. The exit code is 1 if nothing could be measured.
    """
    budget, given = asked_in(given, options.typed_of(ctx), reads=run is not None)
    refuse_files(csv, plot=plot, inputs=(run,))
    if run is not None:
        from attnbench.results.read import read_results

        answer = among(read_results(run, warn=console.warning), variants or [], budget, given)
        how = f"from {run}; nothing was measured anew"
    else:
        prepared = prepare(variants or [], budget, given)
        answer = _measure(prepared, csv)
        threads, draws = prepared.settings.threads, given["draws"]
        how = f"{quantity(threads, 'thread')}, {answer.environment['process']} process"
        trains = budget.target == "score"
        how += ", trainings of one thread" if trains else f", {quantity(draws, 'draw')} of each error"
    for warning in answer.warnings:
        console.warning(warning)
    if as_json:
        console.data(answer.to_json())
    else:
        from attnbench.cli.screen.match import print_match

        print_match(answer, how)
    if csv is not None:  # last, so that a full disk does not cost the rest
        write_rows(answer.to_rows(), csv, whole=["value"])
    if plot is not None:
        draw(lambda: _figure(answer, f"{answer.about}; {how}"), plot, width=width, style=style)
    if not answer.ok:
        raise NothingMeasured("nothing could be measured; the reasons stand above")


def asked_in(
    given: options.MatchOptions, typed: Mapping[str, str], *, reads: bool
) -> tuple[Budget, options.MatchOptions]:
    """The budget and all options, in those of the command or of :func:`attnbench.match`; loads their plug-ins.

    ``typed``: option given by the user -> its name for messages. ``reads``: rows of finished runs are given. Raises
    UsageError without exactly one budget, or if an option means nothing beside the others.
    """
    from attnbench.answers.match.budget import budget_of
    from attnbench.harness.trial import load_all

    given = completed(options.MatchOptions, given)
    budget = budget_of(error=given["error"], memory=given["memory"], time=given["time"], score=given["score"])
    use = options.Use.COST if given["score"] is None else options.Use.SCORE
    options.refuse_unused(typed, use | options.Use.RUN if reads else use)
    load_all(given["plugins"])
    return budget, given


def prepare(variants: Sequence[str], budget: Budget, given: options.MatchOptions) -> ReadyMatch:
    """The settings and the process that will measure or train them.

    Raises UsageError if a variant or an option is wrong, or nothing has a knob.
    """
    from attnbench.answers.match.match import prepare_costs, prepare_scores

    how: dict[str, Any] = {**given, "memory_limit": options.bytes_of(given["memory_limit"])}
    return prepare_scores(variants, budget, how) if budget.target == "score" else prepare_costs(variants, budget, how)


def among(frame: pd.DataFrame, variants: Sequence[str], budget: Budget, given: options.MatchOptions) -> Match:
    """The answer among the rows of finished runs; ResultsError if they lack the budget's measure."""
    from attnbench.answers.match.from_run import match_run, match_scores
    from attnbench.answers.match.match import one_length
    from attnbench.results.frame.settings import check_columns

    check_columns(frame)
    n = None if given["n"] is None else one_length(given["n"])
    if budget.target == "score":
        return match_scores(frame, variants, budget, n=n, task=given["task"], pass_=given["pass_"] or "training")
    timed, inputs = given["pass_"] or "forward", given["inputs"]
    return match_run(frame, variants, budget, n=n, inputs=inputs, level=given["level"], pass_=timed)


def _measure(prepared: ReadyMatch, csv: Path | None) -> Match:
    from attnbench.cli.screen.match import MatchScreen

    with console.progress(total=1) as bar:
        screen = MatchScreen(prepared, bar)
        if prepared.trainings is not None:
            each, steps = prepared.trainings.of_one_setting, prepared.same["steps"]
            said = f"at most {quantity(each * screen.most, 'training')} of {quantity(steps, 'step')}"
            console.note(f"{said}, {each} for each setting that is tried")
            prepared.trainings.watcher = screen
        try:
            return prepared.answer(screen.searching, screen.found)
        except KeyboardInterrupt:
            bar.stop()
            _keep(prepared, screen, csv)
            raise


def _keep(prepared: ReadyMatch, screen: MatchScreen, csv: Path | None) -> None:
    from attnbench.answers.match.result import Match
    from attnbench.answers.match.search import FoundSetting
    from attnbench.cli.screen.match import print_tries

    knobs = {one.spec.label: one.ladder.knob.option if one.ladder else "" for one in prepared.entrants}
    found = [FoundSetting(label, knobs[label], tuple(points), None) for label, points in screen.tried.items()]
    rows = Match(prepared.budget, found, same=prepared.same).to_rows()
    if csv is not None and rows:
        write_rows(rows, csv, whole=["value"])
        console.note(f"stopped; {csv} has what was measured")
    elif rows:
        print_tries(rows)
    elif prepared.trainings is None:
        console.note("stopped; nothing was measured yet")
    if screen.folder is not None:
        console.note(f"stopped; finished trainings are in {screen.folder}; the same command resumes the match")


def _figure(answer: Match, about: str) -> Figure:
    import pandas as pd

    from attnbench.figures.frontier import draw_frontier

    return draw_frontier(pd.DataFrame(answer.to_rows()), title=answer.headline(), about=about)
