"""Find run folders below a results folder, and the newest of them."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attnbench.errors import CannotCreate, ResultsError
from attnbench.files import read_stored, refuse_link, stored
from attnbench.results.store import OLD, RECORDS, TABLE, RunFolder
from attnbench.text import one_line


def suite_folder(out: Path, name: str) -> Path:
    """The folder below ``out`` that holds the runs of a suite. Raises CannotCreate: there is a link in its place, or a
    folder whose name differs in upper and lower case only; many systems do not tell the two apart."""
    folder = out / name
    refuse_link(folder)
    with suppress(OSError):  # no such folder yet, or an error that making a run in it will report
        for other in out.iterdir():
            if other.name != name and other.name.casefold() == name.casefold():
                raise CannotCreate(
                    f"{other} differs from {name} in upper and lower case only; rename one of the suites"
                )
    return folder


def find_runs(root: Path) -> list[RunFolder]:
    """All run folders at or below ``root``, oldest first within each suite."""
    if has_rows(root):
        return [RunFolder(root)]
    suites = [*sorted(path for path in root.glob("*") if path.is_dir()), root]
    return [RunFolder(run) for suite in suites for run in by_age(runs_in(suite))]


def runs_in(suite: Path, name: str = RECORDS) -> list[Path]:
    """The folders in ``suite`` that hold a run's file of this name; not hidden ones, which may be half of a run."""
    return [run for run in suite.glob("[!.]*") if stored(run / name).is_file() or has_rows(run, OLD)]


def has_rows(run: Path, *names: str) -> bool:
    """True if the folder holds rows, which older versions kept elsewhere after a swap."""
    return any(stored(run / name).is_file() for name in names or (RECORDS, OLD))


def by_age(runs: Iterable[Path]) -> list[Path]:
    """Run folders, oldest first, by the time in their names; those from the future (a wrong clock) come first."""
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")

    def age(run: Path) -> tuple[bool, str]:
        time = re.match(r"\d{8}T\d{6}", run.name)
        return not (time and time[0] > now), run.name

    return sorted(runs, key=age)


def first_row(run: Path) -> Mapping[str, Any]:
    """The first row of a run, column by column; empty if none can be read."""
    with suppress(OSError, ValueError, RecursionError):
        if stored(run / RECORDS).is_file():
            row = json.loads(read_stored(run / RECORDS).partition(b"\n")[0])
            return row if isinstance(row, dict) else {}
        if stored(run / OLD).is_file():
            return {"suite": "swap"}
        return next(csv.DictReader(io.StringIO(read_stored(run / TABLE).decode(), newline="")), {})
    return {}


def suites_of(runs: Iterable[Path]) -> set[str]:
    """The suites of these runs, as their rows name them."""
    return {str(row["suite"]) for run in runs if (row := first_row(run)).get("suite")}


_REMEDY = "give the folder of one, results/SUITE/STARTED-DEVICE"


def no_run(path: Path, remedy: str = _REMEDY) -> ResultsError:
    """The error for a folder without a run."""
    return ResultsError(f"{path}: {'holds no run' if path.exists() else 'no such folder'}; {remedy}")


def newest_run(path: Path, remedy: str = _REMEDY) -> RunFolder:
    """The run in this folder, or the newest one of the suite whose folder it is. Raises ResultsError: there is none, or
    there are several suites."""
    found = find_runs(path) if path.is_dir() else []
    if not found:
        raise no_run(path, remedy)
    suites = {run.path.parent.name for run in found}
    if len(suites) == 1:  # or a folder in which somebody collects runs
        suites = suites_of(run.path for run in found)
    if len(suites) > 1:
        names = one_line(", ".join(sorted(suites)), 80)
        raise ResultsError(f"{path}: holds runs of several suites ({names}); give the folder of one run or one suite")
    return found[-1]
