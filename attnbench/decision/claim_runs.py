"""Which runs claims read: of each sweep and number of threads the fullest, and of equally full ones the newest.

Elsewhere a results folder stands for the newest run of each suite. Here that would hide rows: a claim about two numbers
of threads needs two runs of a suite, and a run of one sweep alone may be newer than the run of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from attnbench.errors import CorruptResults, ResultsError
from attnbench.plots.load import find_results, read_results, run_names
from attnbench.plots.setting import RUN
from attnbench.runs import by_age
from attnbench.status import Status
from attnbench.store import TABLE

_ALIKE = ("suite", "machine_id", "device", "process")
"""Columns in which an older run agrees with the newest of its folder, or it is not read."""
_APART = ["suite", "sweep", "threads"]


def read_rows(paths: Sequence[Path], warn: Callable[[str], None]) -> pd.DataFrame:
    """The rows of runs, and of what results folders hold; the column ``run`` names the run of each row.

    Args:
        warn: is told what is wrong with a run but spares its rows, and which older runs cannot be read.

    Raises:
        CorruptResults: rows are not as they were written.
        ResultsError: there is nothing to read, or it cannot be read.
    """
    groups = [
        [file] if path in (file, file.parent) else [file, *_older(file)]
        for path in paths
        for file in find_results(path)
    ]
    files = [file for group in groups for file in group]
    names = dict(zip(files, run_names(files), strict=True))
    return pd.concat([_fullest(_frames(group, names, warn)) for group in groups], ignore_index=True)


def _older(file: Path) -> list[Path]:
    """The tables of the older runs of a suite's folder, the newest first."""
    runs = by_age(table.parent for table in file.parent.parent.glob(f"*/{TABLE}") if table.is_file())
    return [run / TABLE for run in reversed(runs) if run != file.parent]


def _frames(files: Sequence[Path], names: dict[Path, str], warn: Callable[[str], None]) -> list[pd.DataFrame]:
    """The table of the first file, and those of the others that were measured on the same machine."""
    newest, *older = files
    frames = [read_results(newest, warn=warn).assign(**{RUN: names[newest]})]
    for file in older:
        try:
            frame = read_results(file, warn=warn).assign(**{RUN: names[file]})
        except (CorruptResults, ResultsError) as error:
            warn(f"{error}; this older run is left out")
            continue
        if all(frame[column].iloc[0] == frames[0][column].iloc[0] for column in _ALIKE):
            frames.append(frame)
    return frames


def _fullest(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """For each sweep and number of threads, the rows of the run with most that are ok; the newest run comes first."""
    best: dict[str, tuple[int, pd.DataFrame]] = {}
    for frame in frames:
        for names, rows in frame.groupby(_APART, sort=False, dropna=False):
            key = str(names)  # a number of threads that is not known is NaN, which differs from itself
            count = int((rows["status"] == Status.OK).sum())
            if key not in best or count > best[key][0]:
                best[key] = count, rows
    return pd.concat([rows for _, rows in best.values()], ignore_index=True)
