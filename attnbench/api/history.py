"""One measure over many runs: ``attnbench.history``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from attnbench.api.shown import Followed
from attnbench.cli import options
from attnbench.cli.signature import completed, in_python


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
    return Followed(history([Path(one) for one in paths], completed(options.HistoryOptions, given)))
