"""The figures of a run: ``attnbench.plot``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from attnbench.api.arguments import rows_of
from attnbench.api.shown import Figures
from attnbench.cli import options
from attnbench.cli.signature import completed, in_python

if TYPE_CHECKING:
    import pandas as pd


@in_python(options.PlotOptions)
def plot(
    results: str | Path | Sequence[str | Path] | pd.DataFrame,
    *,
    figures: Sequence[str] | None = None,
    save: str | Path | None = None,
    formats: Sequence[str] = ("svg", "png"),
    only: Mapping[str, object] | None = None,
    **given: Unpack[options.PlotOptions],
) -> Figures:
    """Draw the figures of a run, as ``attnbench plot`` does.

    Args:
        results: rows as :func:`attnbench.run` returns them, or anything that :func:`attnbench.read_results` reads: a
            results folder, one run in it, a ``results.csv``, or several of these.
        figures: names of the figures to draw, such as ``["scaling"]``; None: all that apply.
        save: a folder to write them to, in ``formats`` (``svg``, ``png``, ``pdf``); None: nothing is written.
        only: column -> value; only rows with these values.
        **given: see below.

    Returns:
        Matplotlib figures by name, the most telling first; a notebook shows them all.

    Raises:
        UsageError: a figure, a format or an option that does not exist.
        ResultsError: there is nothing that can be read or drawn.
        StoreError: a file cannot be written.
    """
    from attnbench.cli.plot import how_to_draw
    from attnbench.figures import draw
    from attnbench.figures.kit import style as files

    how = how_to_draw(completed(options.PlotOptions, given))
    how["only"] |= only or {}
    drawn = Figures(draw(rows_of(results), figures=figures, **how))
    if save is not None:
        for name, figure in drawn.items():
            files.save(figure, Path(save) / name, formats)
    return drawn
