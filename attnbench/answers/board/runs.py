"""The runs of a board: those that are as they were written, and their rows whose laws held."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from attnbench.answers.report.sources import Machine
from attnbench.errors import AttnbenchError, CorruptResults, ResultsError
from attnbench.measure.status import Status
from attnbench.results.audit import audit
from attnbench.results.manifest import OPENING, RUN_ID
from attnbench.results.read import read_results, run_names
from attnbench.results.record import HELD, NOT_TRIED, UNCHECKED
from attnbench.results.runs import find_runs, no_run
from attnbench.results.store import ENVIRONMENT, TABLE
from attnbench.text import one_line, quantity

_WITHOUT = {
    "": "rows of an older attnbench do not say whether the laws held",
    UNCHECKED: "measured with --unchecked",
    NOT_TRIED: "laws not tried: it compiles itself for each shape, cannot be built so small or computes on no CPU",
}


class LeftOut(NamedTuple):
    """A run that is not shown, or some rows of it, and why."""

    run: str
    what: str
    why: str


def read_runs(paths: Iterable[Path]) -> tuple[list[Machine], list[LeftOut]]:
    """The runs at or below these folders, each by itself, and all that is left out.

    Raises ResultsError if there is no such folder, or no run that can be shown.
    """
    folders, out, taken, known = list[Path](), list[LeftOut](), list[Machine](), dict[str, str]()
    for path in paths:
        if not path.is_dir():
            raise ResultsError(f"{path}: no such folder; give folders of runs, or folders that hold some")
        found = list(_folders(path))
        out += [] if found else [LeftOut(path.resolve().name, "folder", "holds no run")]
        folders += [folder for folder in dict.fromkeys(found) if folder.resolve() not in map(Path.resolve, folders)]
    for folder, name in zip(folders, run_names([folder / TABLE for folder in folders]), strict=True):
        try:
            machine, without = take(folder, name)
            (environment,) = machine.environments.values()
            run = str(environment.get(RUN_ID) or environment.get(OPENING) or name)
            if (first := known.setdefault(run, name)) != name:
                raise ResultsError(f"a copy of {first}")
            taken += [machine] if len(machine.rows) else []
            out += without
        except AttnbenchError as error:
            why = str(error).replace(f"{folder}/", "").replace(str(folder), name)
            out.append(LeftOut(name, "all rows", one_line(why, 300)))
    if not taken:
        raise ResultsError("; ".join(map(": ".join, out)) or str(no_run(Path(), "give folders of runs")))
    return taken, out


def take(folder: Path, name: str) -> tuple[Machine, list[LeftOut]]:
    """The rows of a run whose laws held, if some of them have times, and the others.

    Raises:
        AttnbenchError: it is not as it was written, nothing vouches for it, or it cannot be read.
    """
    found = audit(folder)
    if doubts := found.findings or (() if found.is_sealed else found.notes):
        kind = CorruptResults if found.findings else ResultsError
        raise kind(doubts[0] + f"; and {len(doubts) - 1} more" * (len(doubts) > 1))
    frame, out = read_results(folder), []
    frame = frame[frame["status"] != Status.INTERRUPTED]
    for law, rows in frame[frame["laws"] != HELD].groupby("laws", sort=False):
        labels = list(dict.fromkeys(rows["label"]))
        names = ", ".join(labels[:6]) + f" and {len(labels) - 6} more" * (len(labels) > 6)
        why = _WITHOUT.get(str(law), f"the law {law} is broken")
        out.append(LeftOut(name, f"{quantity(len(rows), 'row')}", one_line(f"{why}: {names}", 300)))
    held = frame[frame["laws"] == HELD]
    if not (held["time_median_s"] > 0).any():
        out += [LeftOut(name, quantity(len(held), "row"), "no time among them")] if len(held) or not out else []
        held = held[:0]
    return Machine(held.reset_index(drop=True), {name: found.environment}), out


def _folders(root: Path) -> Iterator[Path]:
    """The runs at or below a folder, also those whose rows are lost."""
    yield from (run.path for run in find_runs(root))
    for depth in ("", "*/", "*/*/"):
        yield from sorted(file.parent for file in root.glob(f"{depth}{ENVIRONMENT}"))
