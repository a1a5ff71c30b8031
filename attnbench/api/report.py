"""A run as one HTML page: ``attnbench.report``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attnbench.api.shown import ReportPage
from attnbench.cli.signature import naming_arguments

if TYPE_CHECKING:
    import pandas as pd


@naming_arguments(**{"--out": "save", **{f"--{name}": name for name in ("title", "against", "check")}})
def report(
    results: str | Path | Sequence[str | Path] | pd.DataFrame,
    *,
    save: str | Path | None = None,
    title: str | None = None,
    against: str | Path | None = None,
    check: str | Path | None = None,
    figures: bool = False,
) -> ReportPage:
    """Make the report of one run or several, as ``attnbench report`` does: an HTML page that needs no network.

    Args:
        results: rows as :func:`attnbench.run` returns them, or anything that :func:`attnbench.read_results` reads.
        save: the file to write it to; None: nothing is written.
        title: title of the page; None: the suites and the machine.
        against: the folder of an older run, with which each row is compared.
        check: a file that ``attnbench check --json`` wrote.
        figures: also include the other figures that :func:`attnbench.plot` draws.

    Returns:
        The text of the page; a notebook shows it.

    Raises:
        UsageError: a run is named twice, ``check`` is not such a file, or the older run cannot be compared.
        ResultsError: there is nothing that can be read.
        StoreError: the file cannot be written.
    """
    import warnings

    from attnbench.answers.report.against import read_against
    from attnbench.answers.report.check_findings import read_laws
    from attnbench.answers.report.html_page import make_page
    from attnbench.answers.report.provenance import of_frame, read_sources
    from attnbench.files import write_output

    doubts: list[str] = []

    def doubt(said: str) -> None:
        doubts.append(said)
        warnings.warn(said, stacklevel=2)

    paths = [results] if isinstance(results, str | Path) else results
    sources = read_sources(paths, warn=doubt) if isinstance(paths, Sequence) else of_frame(paths)
    laws = read_laws(Path(check)) if check is not None else []
    older = read_against(sources.folders, Path(against)) if against is not None else None
    page = ReportPage(make_page(sources, title=title, laws=laws, figures=figures, against=older, doubts=doubts))
    if save is not None:
        write_output(Path(save), page)
    return page
