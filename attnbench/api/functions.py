"""The functions of Python, with the options of their commands; each imports heavy libraries when it is called."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from attnbench.api.shown import Chosen, Compared, Figures, Followed, Matched, Replaced, ReportPage
from attnbench.cli import options
from attnbench.cli.screen import console
from attnbench.cli.signature import completed, in_python, naming_arguments
from attnbench.contract.spec import Spec
from attnbench.contract.variant import VARIANTS
from attnbench.errors import UsageError
from attnbench.suite.cell import UNTOUCHED

if TYPE_CHECKING:
    import pandas as pd

    from attnbench.suite.expand import Override
    from attnbench.suite.schema import Suite


@in_python(options.RunOptions, set="overrides")
def run(
    suite: Suite | str | Path,
    *,
    overrides: Mapping[str, Override] | None = None,
    progress: bool = True,
    **given: Unpack[options.RunOptions],
) -> pd.DataFrame:
    """Measure every cell of a suite, as ``attnbench run`` does; the same call again resumes a run that was stopped.

    Args:
        suite: a shipped name such as ``"quick"``, the path of a YAML file, or the result of
            :func:`attnbench.load_suite`.
        overrides: axis -> value, list of values or text, as after ``--set``: ``{"seq_len": [512, 1024]}``,
            ``{"variant": "sdpa,performer:features=64", "dtype": "bfloat16"}``.
        progress: show a progress bar.
        **given: see below.

    Returns:
        The rows of ``results.csv``, one per cell, as :func:`attnbench.read_results` reads them. If a cell could not
        be measured, ``status`` and ``reason`` say how it ended.

    Raises:
        UsageError: an option or an axis is wrong, or nothing is selected.
        SuiteError: the suite cannot be used.
        StoreError: the results cannot be written.
    """
    from attnbench.cli.run import options_of
    from attnbench.cli.screen.run import Screen
    from attnbench.harness.plan import make_plan
    from attnbench.harness.runner import execute
    from attnbench.harness.trial import load_all
    from attnbench.results.read import read_results

    asked = options_of(given, overrides=overrides or {})
    load_all(asked.plugins)
    plan = make_plan(suite, asked)
    check_importable(cell.variant for cell in plan.cells)
    with console.progress(len(plan.cells), wanted=progress) as bar:
        folder, _ = execute(plan, Screen(plan, bar) if progress else None)
    return read_results(folder.path)


@in_python(options.CompareOptions)
def compare(*variants: str, progress: bool = True, **given: Unpack[options.CompareOptions]) -> Compared:
    """Time variants in turn at each length, in three processes or more, as ``attnbench compare`` does.

    Args:
        variants: one or more, with options in the text: ``"performer:features=512"``; at level ``layer`` or ``model``
            also a module of x, ``"model.py:Attention"``.
        progress: show a progress bar.
        **given: see below.

    Raises:
        UsageError: a variant or an option is wrong, or one variant is there twice.
    """
    from attnbench.cli.compare import question_of, watching

    question = question_of(variants, given, given.keys()).prepare()
    check_importable(cell.variant for cell in question.cells)
    with console.progress(len(question.lengths), wanted=progress) as bar:
        return Compared(question.answer(watching(bar, question.lengths)))


@in_python(options.BestOptions)
def best(shapes: str | Path | None = None, *, progress: bool = True, **given: Unpack[options.BestOptions]) -> Chosen:
    """Find the fastest form that keeps an error, shape by shape, as ``attnbench best`` does.

    Args:
        shapes: a CSV file with a row for each shape: ``n``, ``heads``, ``kv_heads``, ``head_dim`` and other axes,
            ``pass``, ``shape`` for a published one, ``name``.
        progress: show a progress bar.
        **given: see below.

    Raises:
        UsageError: there is no shape, or a shape, a variant or an option is wrong.
    """
    from attnbench.cli.best import prepare, watching

    prepared = prepare(None if shapes is None else Path(shapes), given)
    check_importable(cell.variant for contest in prepared.contests for cell in contest.cells)
    with console.progress(prepared.count, wanted=progress) as bar:
        found = prepared.answer(watching(bar))
    if found.stopped:
        raise found.stopped
    return Chosen(found)


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


@in_python(options.SwapOptions)
def swap(model: str, *variants: str, progress: bool = True, **given: Unpack[options.SwapOptions]) -> Replaced:
    """Put variants into a trained model in the place of its attention, as ``attnbench swap`` does.

    Args:
        model: ``"listops"``, which is shipped; a folder, a .gguf file, ``"pypi:PACKAGE/FILE"``, or an id in the hub's
            cache on this disk.
        variants: one or more, with options in the text: ``"local:window=64"``.
        progress: show a progress bar.
        **given: see below.

    Raises:
        UsageError: an argument is wrong, there is no such model, or the text is too short.
        Unsupported: the model's attention cannot be replaced.
        BrokenContract: softmax attention in the place of the model's own changes it.
    """
    if not variants:
        raise UsageError("swap needs a variant; for example: attnbench.swap('listops', 'performer')")
    from attnbench.cli.screen.run import Screen
    from attnbench.harness.runner import execute
    from attnbench.harness.swap.request import SwapRequest, refuse_inexact, variants_of

    given = completed(options.SwapOptions, given)
    specs = variants_of(variants, given["plugins"])
    check_importable(specs, "its rows are kept, and nothing would tell them from those of another class")
    asked = SwapRequest.of(model, specs, given)
    with asked.worker() as worker, console.progress(1, wanted=progress) as bar:
        _, plan = asked.plan(worker)
        folder, records = execute(plan, Screen(plan, bar) if progress else None, worker)
    refuse_inexact(records)
    return Replaced(folder.path, records)


_ELSEWHERE = "cells are measured in another process"


def check_importable(specs: Iterable[Spec], why: str = _ELSEWHERE) -> None:
    """Refuse a class that exists in this session only, since the worker could not import it."""
    for spec in specs:
        if spec.name != UNTOUCHED and VARIANTS.get(spec.name).make.__module__ == "__main__":
            raise UsageError(
                f"variant {spec.name!r} exists in this session only, and {why}; "
                "write it to a file and pass plugins=['FILE.py']"
            )


@in_python(options.HistoryOptions)
def history(results: str | Path | Sequence[str | Path], **given: Unpack[options.HistoryOptions]) -> Followed:
    """Follow the cells through the runs of one machine, and find where they changed, as ``attnbench history`` does.

    Args:
        results: folders of runs, of suites or of results.
        **given: see below.

    Raises:
        UsageError: nothing is chosen, or no two runs have a cell in common.
        ResultsError: no run can be read.
    """
    from attnbench.answers.history import history

    paths = [results] if isinstance(results, str | Path) else results
    found = history([Path(one) for one in paths], completed(options.HistoryOptions, given))
    for doubt in found.doubts:
        warnings.warn(doubt, stacklevel=4)
    return Followed(found)


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


def rows_of(results: str | Path | Sequence[str | Path] | pd.DataFrame) -> pd.DataFrame:
    """Rows as they are, or read from where they are kept."""
    from attnbench.results.read import read_results

    return read_results(results) if isinstance(results, str | Path | Sequence) else results


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
    from attnbench.answers.report.against import read_against
    from attnbench.answers.report.check_findings import read_laws
    from attnbench.answers.report.html_page import make_page
    from attnbench.answers.report.provenance import folders_of, read_sources
    from attnbench.files import write_output

    doubts: list[str] = []

    def doubt(said: str) -> None:
        doubts.append(said)
        warnings.warn(said, stacklevel=2)

    paths = [results] if isinstance(results, str | Path) else results
    rows = read_sources(paths, warn=doubt) if isinstance(paths, Sequence) else paths
    laws = read_laws(Path(check)) if check is not None else []
    older = read_against(folders_of(rows), Path(against), doubt) if against is not None else None
    page = ReportPage(make_page(rows, title=title, laws=laws, figures=figures, against=older, doubts=doubts))
    if save is not None:
        write_output(Path(save), page)
    return page


def cite(run: str | Path) -> str:
    """Write how the run in a folder, or the newest of a suite's folder, was measured, and BibTeX of its variants.

    Raises:
        ResultsError: there is no run.
        UsageError: it has no row yet.
    """
    from attnbench.cli.cite import cited

    method, entries, doubts = cited(Path(run))
    for doubt in doubts:
        warnings.warn(doubt, stacklevel=2)
    return "\n".join([method, *entries])
