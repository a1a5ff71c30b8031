"""``attnbench match A B --error 0.1``: the setting of each variant that meets one budget, and their comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Unpack

import typer

from attnbench.cli import completion, options
from attnbench.cli.screen import console
from attnbench.cli.screen.outputs import draw, refuse_files, write_rows
from attnbench.cli.signature import command, completed
from attnbench.errors import Exit, UsageError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from attnbench.answers.match.budget import Budget
    from attnbench.answers.match.match import Prepared
    from attnbench.answers.match.result import Match
    from attnbench.cli.screen.match import MatchScreen

_WITH_FROM = {
    *("variants", "error", "memory", "time", "score", "run", "n", "inputs", "task", "level", "pass_", "plugins"),
    *("csv", "as_json", "plot", "width", "style"),
}
"""Parameters with a meaning for ``--from``; the others are about measuring."""
_OF_TRAININGS = {"task", "steps", "seeds", "rates", "layers", "ffn", "pretrain", "out", "fresh"}
"""Parameters for ``--score`` only."""
_NOT_OF_TRAININGS = {"inputs", "draws", "dtype", "level", "padding", "compile", "seed"}
"""Parameters without a meaning for ``--score``."""


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
    asked = asked_in(variants or [], given, options.typed_of(ctx), measures=run is None)
    refuse_files(csv, plot=plot)
    if run is not None:
        from attnbench.results.read import read_results

        answer = asked.among(read_results(run, warn=console.warning))
        how = f"from {run}; nothing was measured anew"
    else:
        prepared = asked.to_measure()
        answer = _measure(prepared, csv)
        threads, draws = prepared.settings.threads, asked.given["draws"]
        how = f"{threads} thread{'s' * (threads != 1)}, {answer.environment['process']} process"
        trains = asked.budget.target == "score"
        how += ", trainings of one thread" if trains else f", {draws} draw{'s' * (draws != 1)} of each error"
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
        console.error("nothing could be measured; the reasons stand above")
        raise typer.Exit(Exit.FAILED)


@dataclass(frozen=True, slots=True)
class Asked:
    """The question of a ``match``: the variants, the budget and the options."""

    variants: Sequence[str]
    budget: Budget
    given: options.MatchOptions

    def to_measure(self) -> Prepared:
        """The settings and the process that will measure them.

        Raises UsageError if a variant or an option is wrong, or nothing has a knob.
        """
        from attnbench.answers.match.match import MatchQuestion, score_match
        from attnbench.harness.compare.question import Question

        given = {**self.given, "memory_limit": options.bytes_of(self.given["memory_limit"])}
        if self.budget.target == "score":
            return score_match({**given, "variants": self.variants}).prepare()
        given |= {"error": True, "rates": False, "pass_": self.given["pass_"] or "forward"}
        given["lengths"] = 4096 if self.given["n"] is None else self.given["n"]
        return MatchQuestion(
            Question.of(self.variants, given), self.budget, self.given["draws"], self.given["most"]
        ).prepare()

    def among(self, frame: pd.DataFrame) -> Match:
        """The answer among the rows of finished runs; ResultsError if they lack the budget's measure."""
        from attnbench.answers.match.from_run import match_run, match_scores
        from attnbench.answers.match.match import one_length

        variants, budget, given = self.variants, self.budget, self.given
        n = None if given["n"] is None else one_length(given["n"])
        if budget.target == "score":
            return match_scores(frame, variants, budget, n=n, task=given["task"], pass_=given["pass_"] or "training")
        timed, inputs = given["pass_"] or "forward", given["inputs"]
        return match_run(frame, variants, budget, n=n, inputs=inputs, level=given["level"], pass_=timed)


def asked_in(
    variants: Sequence[str], given: options.MatchOptions, typed: Mapping[str, str], *, measures: bool
) -> Asked:
    """The question in the options of the command or of :func:`attnbench.match`; loads its plug-ins.

    ``typed``: option given by the user -> its name for messages. ``measures``: no rows of finished runs are given.
    Raises UsageError without exactly one budget, or if an option means nothing beside the others.
    """
    from attnbench.answers.match.budget import budget_of
    from attnbench.harness.trial import load_all

    given = completed(options.MatchOptions, given)
    trains = given["score"] is not None
    budget = budget_of(error=given["error"], memory=given["memory"], time=given["time"], score=given["score"])
    for name, option in typed.items():
        if not measures and name not in _WITH_FROM:
            raise UsageError(f"{option} says how to measure, and --from measures nothing; leave one out")
        if not trains and name in _OF_TRAININGS:
            raise UsageError(f"{option} says how models are trained; give --score as well, or leave it out")
        if trains and name in _NOT_OF_TRAININGS:
            raise UsageError(f"{option} says nothing of models that are trained; leave it out beside --score")
    load_all(given["plugins"])
    return Asked(variants, budget, given)


def _measure(prepared: Prepared, csv: Path | None) -> Match:
    from attnbench.cli.screen.match import MatchScreen

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
    from attnbench.answers.match.result import rows_of
    from attnbench.answers.match.search import Found
    from attnbench.text import without_empty
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

    from attnbench.figures.frontier import draw_frontier

    return draw_frontier(pd.DataFrame(answer.to_rows()), about=about)
