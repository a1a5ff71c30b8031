"""The commands as functions: measure, compare, read and draw from a script or a notebook.

A terminal and a notebook show a progress bar, and a pipe a line a minute. ``progress=False`` shows nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attnbench.cell import Architecture, Launch, Level, Pass, Positions
from attnbench.cli import console
from attnbench.errors import UsageError
from attnbench.notebook import Compared, Figures, Matched, Page, Replaced
from attnbench.run.plan import Options, make_plan
from attnbench.run.process import Process
from attnbench.run.question import Question
from attnbench.run.runner import execute
from attnbench.run.trial import load_all
from attnbench.shape import Bias, Sink
from attnbench.spec import Spec
from attnbench.suite.expand import Override
from attnbench.suite.schema import Suite
from attnbench.units import parse_bytes
from attnbench.variant import VARIANTS

if TYPE_CHECKING:
    import pandas as pd

    from attnbench.decision.match import Prepared
    from attnbench.pretrained.tune import Trained

Dtype = Literal["float64", "float32", "bfloat16", "float16"]


def run(
    suite: Suite | str | Path,
    *,
    out: str | Path = "results",
    select: str | None = None,
    overrides: Mapping[str, Override] | None = None,
    device: str = "auto",
    threads: int | None = None,
    rounds: int | None = None,
    min_time: float | None = None,
    cell_timeout: float = 60.0,
    first_call_timeout: float = 600.0,
    memory_limit: int | str | None = None,
    process: Process = "tuned",
    like: str | Path | None = None,
    plugins: Sequence[str] = (),
    quick: bool = False,
    fresh: bool = False,
    retry_failed: bool = False,
    unchecked: bool = False,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure every cell of a suite, as ``attnbench run`` does; the same call again resumes a run that was stopped.

    Args:
        suite: a shipped name such as ``"quick"``, the path of a YAML file, or what :func:`attnbench.load_suite` gave.
        out: the results folder; the run gets a folder of its own in it.
        select: only the cells that match, as after ``-k``: ``"performer and not n4096"``, ``"causal"``.
        overrides: axis -> value, list of values or text, as after ``--set``: ``{"seq_len": [512, 1024]}``,
            ``{"variant": "sdpa,performer:features=64", "dtype": "bfloat16"}``.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1`` or ``mps``.
        threads: CPU threads; None: all cores.
        rounds: shuffled visits of each cell; None: as many as the suite says.
        min_time: least time in seconds that is spent on samples of a cell; None: what the suite says.
        cell_timeout: time limit in seconds for one visit of a cell.
        first_call_timeout: time limit in seconds for first calls that may compile, on a GPU and of compiled cells; the
            other limit leaves them out.
        memory_limit: bytes, or text such as ``"8GiB"``; None: most of the free memory.
        process: ``tuned``, or ``as-shipped``: allocator and matmul library as torch ships them.
        like: a run whose libraries multiply the float32 matrices; None: those of the suite's last run on such a
            machine, else those that a probe finds faster.
        plugins: files and modules with more variants, or ``FILE.py:Class``, a module of x that becomes one as it is;
            the measuring process imports them as well.
        quick: take one sample for each cell, without an interval.
        fresh: start a new run instead of resuming one.
        retry_failed: measure failed cells again.
        unchecked: measure variants without holding them to their laws first; the column ``laws`` says so.
        progress: show a progress bar.

    Returns:
        The rows of ``results.csv``, one per cell, as :func:`attnbench.read_results` reads them. Where a cell could not
        be measured, ``status`` and ``reason`` say how it ended.

    Raises:
        UsageError: an option or an axis is wrong, or nothing is selected.
        SuiteError: the suite cannot be used.
        StoreError: the results cannot be written.
    """
    from attnbench.cli.screen import Screen
    from attnbench.plots.load import read_results

    load_all(plugins)
    options = Options(
        device=device,
        overrides=overrides or {},
        select=select,
        out=Path(out),
        plugins=tuple(plugins),
        threads=threads,
        cell_timeout=cell_timeout,
        first_call_timeout=first_call_timeout,
        memory_limit=_bytes(memory_limit),
        min_time=min_time,
        process=process,
        like=None if like is None else Path(like),
        rounds=rounds,
        quick=quick,
        fresh=fresh,
        retry_failed=retry_failed,
        unchecked=unchecked,
    )
    plan = make_plan(suite, options)
    _must_be_importable(cell.variant for cell in plan.cells)
    with console.progress(len(plan.cells), wanted=progress) as bar:
        folder, _ = execute(plan, Screen(plan, bar) if progress else None)
    return read_results(folder.path)


def compare(
    *variants: str,
    lengths: str | int | Sequence[int] = (1024, 2048, 4096),
    shape: str | None = None,
    heads: int = 8,
    kv_heads: int | None = None,
    head_dim: int = 64,
    v_dim: int | None = None,
    batch: int = 1,
    dtype: Dtype = "float32",
    device: str = "auto",
    level: Level = "operator",
    pass_: Pass = "forward",
    causal: bool = False,
    mask: str = "none",
    q_start: int = 0,
    bias: Bias = "none",
    sink: Sink = "none",
    padding: float = 0.0,
    new_tokens: int = 0,
    added_tokens: int = 0,
    query_stride: int = 1,
    architecture: Architecture = "encoder",
    positions: Positions | None = None,
    compile: bool = False,
    launch: Launch = "auto",
    inputs: str = "gaussian",
    error: bool = True,
    seed: int = 0,
    threads: int | None = None,
    timeout: float = 120.0,
    first_call_timeout: float = 600.0,
    min_time: float = 1.0,
    memory_limit: int | str | None = None,
    process: Process = "tuned",
    plugins: Sequence[str] = (),
    unchecked: bool = False,
    rates: bool = False,
    progress: bool = True,
) -> Compared:
    """Time variants in turn at each length, in three processes or more, as ``attnbench compare`` does.

    Args:
        variants: one or more, with options in the text: ``"performer:features=512"``; at level ``layer`` or ``model``
            also a module of x, ``"model.py:Attention"``.
        lengths: numbers, or text such as ``"1024..16384"`` (doubling).
        shape: name of a published shape, ``"llama3-8b"``: its heads, widths and causality; an argument that is not its
            default wins.
        heads, head_dim, batch: H, D and B of q, k and v ``(B, H, N, D)``.
        kv_heads: heads of k and v, a divisor of ``heads``; None: as many.
        v_dim: width of v and of the output; None: that of k.
        mask: which pairs are hidden: ``"prefix:64"``, ``"document:300+200"``, ``"sliding:128"``.
        q_start: how many keys stand before the first query, causal or with a mask.
        sink: ``"learned"`` puts a logit without a key into each softmax.
        padding: share of the tokens that are padding, below 1.
        new_tokens: tokens after the prompt, with ``pass_="generate"``; 0 stands for 32.
        added_tokens: learned tokens in front of the input of each layer, at level ``layer`` or ``model``.
        query_stride: tokens for which each layer has one query, at level ``layer`` or ``model``.
        architecture: kind of model, at level ``model``: ``encoder``, ``decoder`` or ``encoder-decoder``, which reads as
            many tokens as it writes.
        positions: ``"rotary"`` or ``"none"``, at level ``layer`` or ``model``; in a model also ``"learned"``, which it
            has by default, or ``"sinusoid"``.
        launch: on CUDA ``"eager"``, or ``"graph"``, a CUDA graph of the call; ``"auto"``: a graph if that is possible.
        inputs: where q, k and v come from, such as ``"gaussian:logit_std=2"``; ``attnbench list inputs`` names them.
        error: measure the error against exact attention as well, at level ``operator``.
        timeout: time limit in seconds for each length in each process.
        min_time: least time in seconds that is spent on samples at each length, in three processes together.
        rates: also measure what the machine can do, and tell how close to it each variant is; a GPU always is.
        device, threads, first_call_timeout, memory_limit, process, plugins, unchecked, progress: as for :func:`run`.

    Raises:
        UsageError: a variant or an option is wrong, or one variant is there twice.
    """
    given = dict(locals())
    from attnbench.axes import AXES
    from attnbench.cli.compare import watching

    if shape is not None:  # whether an argument was given is not known here
        given |= {axis: None for axis in AXES if given.get(axis) == AXES[axis].default}

    own = {"error": error, "memory_limit": _bytes(memory_limit), "unchecked": unchecked, "rates": rates}
    question = Question.of(variants, lengths, given, **own).prepare()
    _must_be_importable(cell.variant for cell in question.cells)
    with console.progress(len(question.lengths), wanted=progress) as bar:
        return Compared(question.answer(watching(bar, question.lengths)))


def match(
    *variants: str,
    error: float | None = None,
    memory: int | str | None = None,
    time: float | str | None = None,
    score: float | None = None,
    results: str | Path | Sequence[str | Path] | pd.DataFrame | None = None,
    n: int | str | None = None,
    inputs: str | None = None,
    draws: int = 5,
    most: int | None = None,
    heads: int | None = None,
    head_dim: int | None = None,
    batch: int | None = None,
    dtype: Dtype = "float32",
    device: str = "auto",
    level: Level = "operator",
    pass_: Pass | None = None,
    causal: bool = False,
    padding: float = 0.0,
    compile: bool = False,
    seed: int = 0,
    task: str | None = None,
    steps: int = 400,
    seeds: int = 3,
    rates: str = "0.004,0.008",
    layers: int = 2,
    ffn: int = 128,
    pretrain: bool = False,
    out: str | Path = "results",
    fresh: bool = False,
    threads: int | None = None,
    timeout: float = 60.0,
    first_call_timeout: float = 600.0,
    min_time: float = 1.0,
    memory_limit: int | str | None = None,
    process: Process = "tuned",
    plugins: Sequence[str] = (),
    unchecked: bool = False,
    progress: bool = True,
) -> Matched:
    """Turn the knob of each variant until all meet one budget, then time these settings in turn.

    Args:
        variants: one or more, with options in the text; a knob that is given keeps its value.
        error: budget, as a relative error against exact attention on the same inputs. The cheapest setting that meets
            it with its whole interval is chosen.
        memory: budget in bytes, or text such as ``"64MiB"``. The most expensive setting that fits is chosen.
        time: budget in seconds, or text such as ``"10ms"``.
        score: budget, as a score between 0 and 1 of the trained model. The cheapest setting that meets it with its
            whole interval is chosen. Each setting is trained as by ``attnbench score``, whose sizes are the defaults.
        results: choose among what finished runs measured, as :func:`attnbench.read_results` reads them, instead of
            measuring. Of the arguments below, only ``n``, ``inputs``, ``task``, ``level`` and ``pass_`` then matter:
            they choose the rows.
        n: the length; None: 4096, or 64 for a score.
        inputs: where q, k and v come from; None: ``gaussian``.
        draws: draws of inputs and random projections for each error.
        most: largest value of a knob that is tried; None: ``n``.
        timeout: time limit in seconds for one setting; a slower one is too expensive. A training may go on without
            progress for as long.
        min_time: least time in seconds that is spent on samples of the turns at the end.
        pass_: the pass that is timed; None: ``forward``, or ``training`` for a score.
        task, steps, seeds, rates, layers, ffn, pretrain: the trainings for a score, as ``attnbench score`` takes them;
            task None: ``recall``.
        out: the results folder, in which the trainings are kept; the same call again resumes them.
        fresh: train anew.
        heads, head_dim, batch, dtype, level, causal, padding, compile, seed, device, threads, first_call_timeout,
        memory_limit, process, plugins, unchecked, progress: as for :func:`compare`.

    Raises:
        UsageError: a variant or an option is wrong, there is no budget or more than one, or nothing has a knob.
        ResultsError: ``results`` cannot be read, or has nothing that the budget is about.
    """
    given = dict(locals())
    if score is None and task is not None:
        raise UsageError(f"task={task!r} says what is trained, and nothing is without a score; give score as well")
    from attnbench.cli.match import among, to_measure
    from attnbench.decision.budget import budget_of

    budget = budget_of(error=error, memory=memory, time=time, score=score)
    given |= {"memory_limit": _bytes(memory_limit)}
    load_all(plugins)
    if results is not None:
        return Matched(among(_rows(results), given, budget))
    return _answered(to_measure(given, budget), progress=progress)


def _answered(prepared: Prepared, *, progress: bool) -> Matched:
    from attnbench.cli.match_screen import MatchScreen

    _must_be_importable(entrant.spec for entrant in prepared.entrants)
    with console.progress(1, wanted=progress) as bar:
        screen = MatchScreen(prepared, bar)
        if prepared.trainings is not None and progress:
            prepared.trainings.watcher = screen
        return Matched(prepared.answer(screen.searching, screen.found))


def swap(
    model: str,
    *variants: str,
    text: str | Path | None = None,
    layers: str = "all",
    length: int | None = None,
    windows: int = 16,
    steps: str | int | Sequence[int] = 0,
    learning_rate: float = 3e-4,
    batch: int = 8,
    train: Trained = "all",
    redraw: int = 0,
    seeds: int = 1,
    device: str = "auto",
    threads: int | None = None,
    out: str | Path = "results",
    plugins: Sequence[str] = (),
    fresh: bool = False,
    progress: bool = True,
) -> Replaced:
    """Put variants into a trained model in the place of its attention, as ``attnbench swap`` does.

    Args:
        model: ``"listops"``, which is shipped; a folder, a .gguf file, ``"pypi:PACKAGE/FILE"``, or an id in the hub's
            cache on this disk.
        variants: one or more, with options in the text: ``"local:window=64"``.
        text: a file to read; None: the model's own.
        layers: ``"all"`` together; ``"each"``, or every fifth by ``"each/5"``, alone and untrained; ``"each,all"``; or
            ``"0,5"``, these two together.
        length: tokens of a window; None: 512, of ``listops`` 128.
        windows: how many are evaluated on, at least 6.
        steps: numbers of training steps after which the model is evaluated, such as ``(0, 50)``.
        learning_rate, batch: of AdamW; windows in a step.
        train: ``"all"`` parameters, those of ``"attention"``, or what the ``"variant"`` brings, which is fitted layer
            by layer to what the untouched layer answers.
        redraw: draw random features anew every so many steps; 0: never.
        seeds: visits of each variant.
        out: the results folder, in which the rows are kept; the same call again resumes them.
        fresh: start anew.
        device, threads, plugins, progress: as for :func:`run`.

    Raises:
        UsageError: an argument is wrong, there is no such model, or the text is too short.
        Unsupported: the model's attention cannot be replaced.
        BrokenContract: softmax attention in the place of the model's own changes it.
    """
    given = dict(locals())
    if not variants:
        raise UsageError("swap needs a variant; for example: attnbench.swap('listops', 'performer')")
    from attnbench.cli.swap_tables import SwapScreen
    from attnbench.pretrained.asked import Asked, variants_of
    from attnbench.pretrained.swap import Watcher

    specs = variants_of(variants, plugins)
    _must_be_importable(specs, "its rows are kept, and nothing would tell them from those of another class")
    numbers = steps if isinstance(steps, str) else ",".join(map(str, [steps] if isinstance(steps, int) else steps))
    asked = Asked.of(model, specs, given | {"steps": numbers, "text": None if text is None else Path(text)})
    with console.progress(1, wanted=progress) as bar:
        return Replaced(asked.answer(SwapScreen(bar) if progress else Watcher()))


def plot(
    results: str | Path | Sequence[str | Path] | pd.DataFrame,
    *,
    figures: Sequence[str] | None = None,
    save: str | Path | None = None,
    formats: Sequence[str] = ("svg", "png"),
    **options: Any,
) -> Figures:
    """Draw the figures of a run, as ``attnbench plot`` does.

    Args:
        results: rows as :func:`run` returns them, or anything that :func:`attnbench.read_results` reads: a results
            folder, one run in it, a ``results.csv``, or several of these.
        figures: names of the figures to draw, such as ``["scaling"]``; None: all that apply.
        save: a folder to write them to, in ``formats`` (``svg``, ``png``, ``pdf``); None: nothing is written.
        options: as :func:`attnbench.plots.draw` takes them: ``n``, ``x``, ``y``, ``inputs``, ``only``, ``title``,
            ``style``, ``width``.

    Returns:
        Matplotlib figures by name, the most telling first; a notebook shows them all.

    Raises:
        UsageError: a figure, a format or an option that does not exist.
        ResultsError: there is nothing that can be read or drawn.
        StoreError: a file cannot be written.
    """
    from attnbench.plots import draw
    from attnbench.plots import style as files

    drawn = Figures(draw(_rows(results), figures=figures, **options))
    if save is not None:
        for name, figure in drawn.items():
            files.save(figure, Path(save) / name, formats)
    return drawn


def report(
    results: str | Path | Sequence[str | Path] | pd.DataFrame,
    *,
    save: str | Path | None = None,
    title: str | None = None,
    against: str | Path | None = None,
    check: str | Path | None = None,
    figures: bool = False,
) -> Page:
    """Make the report of one run or several, as ``attnbench report`` does: an HTML page that needs no network.

    Args:
        results: rows as :func:`run` returns them, or anything that :func:`attnbench.read_results` reads.
        save: the file to write it to; None: nothing is written.
        title: title of the page; None: the suites and the machine.
        against: the folder of an older run, with which each row is compared.
        check: a file that ``attnbench check --json`` wrote.
        figures: also include the figures that :func:`plot` draws, as SVG.

    Returns:
        The text of the page; a notebook shows it.

    Raises:
        UsageError: a run is named twice, ``check`` is not such a file, or the older run cannot be compared.
        ResultsError: there is nothing that can be read.
        StoreError: the file cannot be written.
    """
    import warnings

    from attnbench.files import write_output
    from attnbench.report.against import read_against
    from attnbench.report.laws import read_laws
    from attnbench.report.page import make_page
    from attnbench.report.sources import of_frame, read_sources

    doubts: list[str] = []

    def doubt(said: str) -> None:
        doubts.append(said)
        warnings.warn(said, stacklevel=2)

    paths = [results] if isinstance(results, str | Path) else results
    sources = read_sources(paths, warn=doubt) if isinstance(paths, Sequence) else of_frame(paths)
    laws = read_laws(Path(check)) if check is not None else []
    older = read_against(sources.folders, Path(against)) if against is not None else None
    page = Page(make_page(sources, title=title, laws=laws, figures=figures, against=older, doubts=doubts))
    if save is not None:
        write_output(Path(save), page)
    return page


def _rows(results: str | Path | Sequence[str | Path] | pd.DataFrame) -> pd.DataFrame:
    from attnbench.plots.load import read_results

    return read_results(results) if isinstance(results, str | Path | Sequence) else results


def _bytes(size: int | str | None) -> int | None:
    try:
        return parse_bytes(size) if isinstance(size, str) else size
    except ValueError as error:
        raise UsageError(f"memory_limit: {error}") from None


_ELSEWHERE = "cells are measured in another process"


def _must_be_importable(specs: Iterable[Spec], why: str = _ELSEWHERE) -> None:
    """Refuse a class that exists in this session only: the measuring process could not find it, say."""
    for spec in specs:
        if VARIANTS.get(spec.name).make.__module__ == "__main__":
            raise UsageError(
                f"variant {spec.name!r} exists in this session only, and {why}; "
                "write it to a file and pass plugins=['FILE.py']"
            )
