"""Settings that meet one budget: ``attnbench.match``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from attnbench.api.arguments import check_importable, rows_of
from attnbench.api.shown import Matched
from attnbench.cli import options
from attnbench.cli.screen import console
from attnbench.cli.signature import in_python

if TYPE_CHECKING:
    import pandas as pd


@in_python(options.MatchOptions, from_="results")
def match(
    *variants: str,
    results: str | Path | Sequence[str | Path] | pd.DataFrame | None = None,
    progress: bool = True,
    **given: Unpack[options.MatchOptions],
) -> Matched:
    """Turn the knob of each variant until all meet one budget, then time these settings in turn.

    Args:
        variants: one or more, with options in the text; a knob that is given keeps its value.
        results: choose among what finished runs measured, as :func:`attnbench.read_results` reads them, instead of
            measuring. The options that say how to measure are then refused.
        progress: show a progress bar.
        **given: see below.

    Raises:
        UsageError: a variant or an option is wrong, there is no budget or more than one, or nothing has a knob.
        ResultsError: ``results`` cannot be read, or has nothing that the budget is about.
    """
    from attnbench.cli.match import among, asked_in, prepare

    budget, all_ = asked_in(given, {name: name for name in given}, reads=results is not None)
    if results is not None:
        return Matched(among(rows_of(results), variants, budget, all_))
    from attnbench.cli.screen.match import MatchScreen

    prepared = prepare(variants, budget, all_)
    check_importable(entrant.spec for entrant in prepared.entrants)
    with console.progress(1, wanted=progress) as bar:
        screen = MatchScreen(prepared, bar)
        if prepared.trainings is not None and progress:
            prepared.trainings.watcher = screen
        return Matched(prepared.answer(screen.searching, screen.found))
