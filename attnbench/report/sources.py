"""The runs that a report is about: their rows by class of machine, and what each run's folder says of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from attnbench.errors import UsageError
from attnbench.machine import MEMORY_TOLERANCE, differing_products, differing_variables, machine_class, memory_bytes
from attnbench.plots.load import FOLDERS, find_results, read_results
from attnbench.plots.setting import RUN
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


@dataclass(frozen=True)
class Machine:
    """One class of machines and what was measured on it."""

    rows: pd.DataFrame
    """Its rows, counted from 0."""
    environments: Mapping[str, Mapping[str, Any]]
    """Name of each of its runs -> ``environment.json``."""


def by_machine(sources: Sources) -> list[Machine]:
    """The rows by class of machine, in the order of the table."""
    frame = sources.frame
    runs = frame[RUN] if RUN in frame else pd.Series(ONLY, index=frame.index)
    known = {str(run): sources.environments.get(str(run), {}) for run in dict.fromkeys(runs)}
    classes = _classes(known)
    # A table without its folder does not say its class.
    keys = [classes[run] or f"id {name}" for run, name in zip(runs, frame["machine_id"], strict=True)]
    return [
        Machine(part.reset_index(drop=True), {run: known[run] for run in dict.fromkeys(runs[part.index])})
        for _, part in frame.groupby(pd.Series(keys, index=frame.index), sort=False)
    ]


def _classes(environments: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    first: dict[str, list[Mapping[str, Any]]] = {}
    found = {}
    for run, environment in environments.items():
        name = machine_class(environment) if environment.get("environment") else ""
        if name:
            known = first.setdefault(name, [])
            place = next((place for place, one in enumerate(known) if _alike(one, environment)), len(known))
            known += [environment] if place == len(known) else []
            name = f"{name} {place}"
        found[run] = name
    return found


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    here, there = memory_bytes(one), memory_bytes(other)
    near = not here or not there or abs(here - there) <= MEMORY_TOLERANCE * max(here, there)
    return near and not differing_products(one, other) and not differing_variables(one, other)
