"""Choose the runs that claims read: of each sweep and number of threads the fullest, and of those the newest.

The newest run of a suite may lack a sweep or a number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from attnbench.errors import CorruptResults, ResultsError
from attnbench.measure.status import Status
from attnbench.results.frame.settings import RUN
from attnbench.results.manifest import read_manifest
from attnbench.results.read import find_results, is_collection, read_results, run_names
from attnbench.results.runs import by_age, first_row, runs_in, suites_of
from attnbench.results.store import ENVIRONMENT, TABLE

_ALIKE = ("suite", "machine_id", "device", "process")
"""Columns in which an older run agrees with the newest of its folder, or it is not read."""
_COLLECTED = ("device",)
"""The same in a collection of runs, which may be of several boots and machines."""
_APART = ["suite", "sweep", "threads"]
MACHINE = "machine"
"""Column with the name of the GPU or processor of each row; empty if its run does not say."""


def read_rows(paths: Sequence[Path], warn: Callable[[str], None]) -> pd.DataFrame:
    """The rows of runs and of results folders; the column ``run`` names the run of each row.

    Warns of runs that cannot be read, or are damaged outside their rows. Raises CorruptResults, and ResultsError if
    there is nothing to read.
    """
    groups = [group for path in paths for group in _groups(path, warn)]
    files = [file for group in groups for file in group.files]
    names = dict(zip(files, run_names(files), strict=True))
    return pd.concat([_fullest(_frames(group, names, warn)) for group in groups], ignore_index=True)


@dataclass(frozen=True, slots=True)
class _RunGroup:
    files: Sequence[Path]
    alike: Sequence[str] = _ALIKE
    """Columns in which the others agree with the newest."""


def _groups(path: Path, warn: Callable[[str], None]) -> list[_RunGroup]:
    files = find_results(path)
    if files == [path] or files[0].parent == path:
        return [_RunGroup(files)]
    collected = {file for file in files if is_collection(_beside(file))}
    own = [file for file in files if file not in collected]
    groups = [_RunGroup([file, *(run / TABLE for run in _beside(file) if run != file.parent)]) for file in own]
    known = suites_of(file.parent for file in own)
    rows = {file: first_row(file.parent) for file in collected}
    suites: dict[str, list[Path]] = {}
    for file in sorted(collected, key=lambda file: str(rows[file].get("started_at", "")), reverse=True):
        suites.setdefault(str(rows[file].get("suite", "")), []).append(file)
    for suite in sorted(suites):
        if suite in known:
            names = ", ".join(file.parent.name for file in suites[suite])
            warn(f"{path} has runs of its own of suite {suite}; left out: {names}")
        else:
            groups.append(_RunGroup(suites[suite], _COLLECTED))
    return groups


def _beside(file: Path) -> list[Path]:
    return by_age(runs_in(file.parent.parent, TABLE))[::-1]


def _frames(group: _RunGroup, names: dict[Path, str], warn: Callable[[str], None]) -> list[pd.DataFrame]:
    """The table of the first file (of a collection the fullest) and those of the others measured alike."""
    newest, *older = group.files
    frames = {newest: _named(newest, names, warn)}
    for file in older:
        try:
            frames[file] = _named(file, names, warn)
        except (CorruptResults, ResultsError) as error:
            warn(f"{error}; this older run is left out")
    collected = group.alike is _COLLECTED
    first = max(frames, key=lambda file: _ok(frames[file])) if collected else newest  # of equally full ones the newest
    alike = []
    for file, frame in frames.items():
        if all(frame[name].iloc[0] == frames[first][name].iloc[0] for name in group.alike):
            alike.append(frame)
        elif collected:
            here, there = (one["device"].iloc[0] for one in (frame, frames[first]))
            warn(f"{file.parent}: of device {here}, while {names[first]} is of {there}; this run is left out")
    return alike


def _named(file: Path, names: dict[Path, str], warn: Callable[[str], None]) -> pd.DataFrame:
    rows, machine = read_results(file, warn=warn), dict[str, str]()
    with suppress(CorruptResults):  # a table that stands alone
        machine = read_manifest(file.parent / ENVIRONMENT).get("environment", {})
    return rows.assign(**{RUN: names[file], MACHINE: machine.get("gpu") or machine.get("processor") or ""})


def _ok(rows: pd.DataFrame) -> int:
    return int((rows["status"] == Status.OK).sum())


def _fullest(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The rows of the fullest run for each sweep and number of threads; the newest run comes first."""
    best: dict[str, tuple[int, pd.DataFrame]] = {}
    for frame in frames:
        for names, rows in frame.groupby(_APART, sort=False, dropna=False):
            key = str(names)  # a number of threads that is not known is NaN, which differs from itself
            count = _ok(rows)
            if key not in best or count > best[key][0]:
                best[key] = count, rows
    return pd.concat([rows for _, rows in best.values()], ignore_index=True)
