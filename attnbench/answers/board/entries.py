"""The runs of a board: as they were written, with the rows whose laws held; and how one is handed in."""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from attnbench.answers.report.provenance import MachineClass, title_of
from attnbench.errors import AttnbenchError, CannotCreate, CorruptResults, ResultsError, UsageError
from attnbench.files import PACKED, make_folder, replace_file
from attnbench.measure.status import Status
from attnbench.results.audit import audit
from attnbench.results.manifest import ENDS, OPENING, RUN_ID, THINNED, read_manifest
from attnbench.results.read import read_results, run_names
from attnbench.results.record import HELD, NOT_TRIED, UNCHECKED
from attnbench.results.runs import find_runs, newest_run, no_run
from attnbench.results.store import ENVIRONMENT, RECORDS, TABLE, RunFolder
from attnbench.text import one_line, quantity, without_secrets

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


def read_runs(paths: Iterable[Path]) -> tuple[list[MachineClass], list[LeftOut]]:
    """The runs at or below these folders, each by itself, and all that is left out.

    Raises ResultsError if there is no such folder, or no run that can be shown.
    """
    folders, out, taken, known = list[Path](), list[LeftOut](), list[MachineClass](), dict[str, str]()
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


def take(folder: Path, name: str) -> tuple[MachineClass, list[LeftOut]]:
    """The rows of a run whose laws held, if some of them have times, and the others.

    Raises AttnbenchError if it is not as it was written, nothing vouches for it, or it cannot be read.
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
        out.append(LeftOut(name, quantity(len(rows), "row"), one_line(f"{why}: {names}", 300)))
    held = frame[frame["laws"] == HELD]
    if not (held["time_median_s"] > 0).any():
        out += [LeftOut(name, quantity(len(held), "row"), "no time among them")] if len(held) or not out else []
        held = held[:0]
    return MachineClass(held.reset_index(drop=True), {name: found.environment}), out


def _folders(root: Path) -> Iterator[Path]:
    """The runs at or below a folder, also those whose rows are lost."""
    yield from (run.path for run in find_runs(root))
    for depth in ("", "[!.]*/", "[!.]*/[!.]*/"):
        yield from sorted(file.parent for file in root.glob(f"{depth}{ENVIRONMENT}"))


_HOMES = r"(?<![\w.~-])(?:(?:/home|/Users|[A-Za-z]:\\+Users)[/\\]+[^/\\\s\"',;:]+|/root)(?![\w.-])"
"""Home folders of any user, in JSON."""


def submit(run: str | Path, to: str | Path = "runs") -> tuple[Path, list[LeftOut]]:
    """Write the folder that hands a run in to a board, as ``attnbench submit`` does; give it, and rows no board shows.

    Args:
        run: the folder of a run, or of a suite for its newest.
        to: the folder that holds the runs of a board; the new one in it is named by date and machine, and by
            the id of the run if another run has that name.

    Raises:
        ResultsError: there is no run, runs of several suites, or one that a board does not take.
        UsageError: a board would show none of its rows.
        CannotCreate: it was handed in before, or the folder cannot be made.
    """
    folder = newest_run(Path(run))
    machine, out = take(folder.path, folder.path.name)
    if not len(machine.rows):
        why = "; ".join(f"{one.what}: {one.why}" for one in out)
        raise UsageError(f"{folder.path}: {why}; so no board shows it; measure it again")
    facts = folder.environment
    date = re.sub("[-:]", "", str(facts.get("started_at", "")))[:15] or folder.path.name
    place = Path(to) / "-".join([date, re.sub("[^a-z0-9]+", "-", title_of(machine).lower()).strip("-")])
    if place.exists() and facts.get(RUN_ID) != _run_id(place):  # a shard of a like machine, or a merged run
        place = place.with_name(f"{place.name}-{facts.get(RUN_ID) or folder.path.name}")
    if place.exists():
        same = "a run with the same start and machine was handed in before"
        raise CannotCreate(f"{place} exists: {same}; choose another folder with --to")
    make_folder(Path(to), "--to")
    kept = {name: value for name, value in facts.items() if name not in (ENDS, OPENING)}
    records = [record.to_json() for record in folder.in_order()]
    about, suite, records = _for_all([{**kept, THINNED: facts.get(ENDS, {})}, folder.suite_text, records])
    with RunFolder.whole(place, environment=about, suite_text=suite) as thin:
        thin.correct({name: facts[name] for name in (RUN_ID,) if name in facts})
        thin.append(RECORDS, records)
        thin.write_csv(thin.in_order())
        thin.conclude()
        for file in (thin.path / RECORDS, thin.path / TABLE):
            replace_file(file.with_name(file.name + PACKED), lzma.compress(file.read_bytes(), preset=9))
            file.unlink()
    return place, out


def _run_id(place: Path) -> object:
    with suppress(CorruptResults):
        return read_manifest(place / ENVIRONMENT).get(RUN_ID)
    return ""


def _for_all(data: Any) -> Any:
    """The same data without homes of people, passwords and tokens."""
    return json.loads(re.sub(_HOMES, "~", without_secrets(json.dumps(data, ensure_ascii=False))))
