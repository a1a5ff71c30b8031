"""The runs that a report is about: their rows and what each run's folder says of itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from attnbench.errors import UsageError
from attnbench.plots.load import FOLDERS, find_results, read_results
from attnbench.store import ENVIRONMENT, RunFolder

ONLY = ""
"""Name of the only run of a table; its rows have no column ``run``."""


@dataclass(frozen=True)
class Sources:
    """Rows of one run or several, and the ``environment.json`` of each."""

    frame: pd.DataFrame
    environments: dict[str, dict[str, Any]]
    """Name of the run -> what was written when it began; empty for a table without its folder."""
    folders: dict[str, Path]
    """Name of the run -> its folder."""


def read_sources(paths: Sequence[str | Path], *, warn: Callable[[str], None]) -> Sources:
    """Read runs, tables and folders of runs, as ``attnbench plot`` takes them.

    Args:
        warn: called with one line for each thing that is wrong with a run, though not with its rows.

    Raises:
        UsageError: one run is named twice.
        CorruptResults: rows, or ``environment.json`` of their run, are not as they were written.
        ResultsError: there is nothing to read.
    """
    files = [file for path in paths for file in find_results(Path(path))]
    seen: dict[Path, Path] = {}
    for file in files:
        if (whole := file.resolve()) in seen:
            raise UsageError(f"{file} is named twice; name each run once, and a folder that holds it not as well")
        seen[whole] = file
    return of_frame(read_results(files if len(files) != 1 else files[0], warn=warn))


def of_frame(frame: pd.DataFrame) -> Sources:
    """The same for rows that :func:`attnbench.read_results` has read."""
    folders = {str(name): Path(folder) for name, folder in frame.attrs.get(FOLDERS, ())}
    return Sources(frame, {name: _environment(folder) for name, folder in folders.items()}, folders)


def _environment(folder: Path) -> dict[str, Any]:
    return RunFolder(folder).environment if (folder / ENVIRONMENT).is_file() else {}
