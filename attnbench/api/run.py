"""Measure a suite: ``attnbench.run``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from attnbench.api.arguments import check_importable
from attnbench.cli import options
from attnbench.cli.screen import console
from attnbench.cli.signature import in_python
from attnbench.harness.plan import make_plan
from attnbench.harness.runner import execute
from attnbench.harness.trial import load_all
from attnbench.suite.expand import Override
from attnbench.suite.schema import Suite

if TYPE_CHECKING:
    import pandas as pd


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
    from attnbench.results.read import read_results

    asked = options_of(given, overrides=overrides or {})
    load_all(asked.plugins)
    plan = make_plan(suite, asked)
    check_importable(cell.variant for cell in plan.cells)
    with console.progress(len(plan.cells), wanted=progress) as bar:
        folder, _ = execute(plan, Screen(plan, bar) if progress else None)
    return read_results(folder.path)
