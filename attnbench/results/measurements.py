"""A finished run as measured: rows by :class:`~attnbench.results.key.Key`, and the machine.

Every comparison of runs begins with :func:`load`; :func:`differing_facts` says if their numbers may be compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnbench.errors import ResultsError, UsageError
from attnbench.files import stored
from attnbench.measure.machine import (
    MEMORY_TOLERANCE,
    class_facts,
    differing_products,
    differing_variables,
    machine_class,
    memory_bytes,
)
from attnbench.measure.status import Status
from attnbench.results.key import Key, key_of
from attnbench.results.manifest import run_ids
from attnbench.results.record import FIELDS, Record
from attnbench.results.runs import newest_run
from attnbench.results.store import EDITED, RECORDS, RunFolder
from attnbench.text import one_line
from attnbench.units import format_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Samples = Mapping[int, list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Visits:
    """The visits to a cell in one run, as measured or at one speed of the machine
    (:mod:`attnbench.answers.gate.pace`)."""

    seconds: Mapping[int, float]
    """Round -> median time."""
    slower: NDArray[np.float64]
    """Slow-down on the yardstick's two pieces of work, mean logarithms (2,)."""
    doubt: NDArray[np.float64]
    """Covariance (2, 2) of the cell's share in it."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One run, without its interrupted cells."""

    path: Path
    name: str
    environment: Mapping[str, Any]
    machine_class: str
    method_version: int
    rows: Mapping[Key, Record]
    """Rows in the order in which they were first measured."""
    samples: Mapping[str, Samples]
    """Samples of times, by cell id; empty for cells without times, or with lost samples."""
    visits: Mapping[str, Visits] = field(default_factory=dict)
    """Cell id -> its visits; empty until times are compared."""
    doubts: tuple[str, ...] = ()


def load(path: Path) -> MeasuredRun:
    """Read the run at ``path``, or the newest run of the suite of that folder.

    Of several rows with the same key the one with the most samples counts; it gets the numbers that only another has.
    Raises ResultsError (no run, several suites, no row yet, another version) and CorruptResults.
    """
    try:
        folder = _folder(path)
    except OSError as error:
        raise ResultsError(
            f"{one_line(str(path))}: cannot be read ({error.strerror}); give a folder written by attnbench run"
        ) from None
    environment = folder.environment
    history = folder.history()
    last = {record.cell_id: record for record in history}
    records = [record for record in last.values() if record.status is not Status.INTERRUPTED]
    if not records:
        raise ResultsError(f"{folder.path}: no row yet; measure first with: attnbench run SUITE")
    samples = folder.samples()
    without = folder.without_samples(records, samples)
    lost = [f"{folder.path}: the samples behind {len(without)} of {len(records)} rows are lost"] if without else []
    gone = {record.cell_id for record in without}
    _, altered = folder.compare_table(history)
    edited = [f"{altered}: {EDITED}"] if altered else []
    return MeasuredRun(
        path=folder.path,
        name=folder.path.resolve().name,
        environment=environment,
        machine_class=machine_class(environment),
        method_version=records[0].method_version,
        rows=_by_key(records),
        samples={cell_id: rounds for cell_id, rounds in samples.items() if cell_id not in gone},
        doubts=(*lost, *edited, *dict.fromkeys(folder.repairs), *folder.doubts()),
    )


def refuse_copies(runs: Iterable[tuple[Path, Mapping[str, Any]]]) -> None:
    """Raise UsageError for a folder that is given twice, and for two with rows of one run, by ``environment.json``."""
    owner: dict[object, Path] = {}
    for path, facts in runs:
        if path.resolve() in owner:
            raise UsageError(f"{path} is given twice; give each run once")
        owner[path.resolve()] = path
        for run in run_ids(facts):
            if owner.setdefault(run, path) is not path:
                raise UsageError(f"{path} is a copy of {owner[run]}, or both hold rows of one run; give another run")


def differing_facts(a: MeasuredRun, b: MeasuredRun) -> list[str]:
    """The facts in which two runs differ and may not be compared, such as ``cores: 2 and 4``.

    These are the version of the method, the facts of :func:`~attnbench.measure.machine.class_facts`, the libraries that
    multiplied, the variables that change arithmetic, and a memory that differs by more than 5 %.
    """
    mine, theirs = ({"method_version": one.method_version, **class_facts(one.environment)} for one in (a, b))
    both = [name for name in mine if mine[name] != theirs.get(name, mine[name])]
    differ = [f"{name}: {_shown(mine[name])} and {_shown(theirs[name])}" for name in both]
    for differing in (differing_products, differing_variables):
        differ += map(one_line, differing(a.environment, b.environment))
    here, there = memory_bytes(a.environment), memory_bytes(b.environment)
    if here and there and abs(here - there) > MEMORY_TOLERANCE * max(here, there):
        differ.append(f"memory: {format_bytes(here)} and {format_bytes(there)}")
    return differ


def differing_rules(a: MeasuredRun, b: MeasuredRun) -> list[str]:
    """The rules by which two runs are known to have taken samples otherwise, such as ``min_time: 0.5 and 0.1``."""
    ours, theirs = (run.environment.get("rules") or {} for run in (a, b))
    both = [name for name in ours if name != "rounds" and theirs.get(name, ours[name]) != ours[name]]
    return [f"{name}: {_shown(ours[name])} and {_shown(theirs[name])}" for name in both]


def began(run: MeasuredRun) -> str:
    """The time of its first row as ``20260301T120000``, or of its name."""
    starts = [row.started_at for row in run.rows.values() if row.started_at]
    return re.sub("[-:]", "", min(starts))[:15] if starts else run.name[:15]


def day(began: str) -> str:
    """``2026-03-01``; a name that has no date as it is."""
    return f"{began[:4]}-{began[4:6]}-{began[6:8]}" if began[:8].isdecimal() else began


def _shown(fact: object) -> str:
    return "unknown" if fact is None else one_line(f"{fact:g}" if isinstance(fact, float) else str(fact), 60)


def _folder(path: Path) -> RunFolder:
    if stored(path).is_file() and stored(path.parent / RECORDS).is_file():
        path = path.parent
    if not path.is_dir():
        known = path.exists()
        what = "a table alone does not say where it was measured" if known else "no such folder"
        raise ResultsError(f"{path}: {what}; give a folder written by attnbench run")
    return newest_run(path, "measure first with: attnbench run SUITE")


def _by_key(records: Iterable[Record]) -> dict[Key, Record]:
    found: dict[Key, list[Record]] = {}
    for record in records:
        found.setdefault(key_of(record), []).append(record)
    return {key: _as_one(alike) for key, alike in found.items()}


def _as_one(records: list[Record]) -> Record:
    """The row with the most samples, with measures that only others have."""
    first, *others = sorted(records, key=_weight, reverse=True)
    for other in others:
        if other.status is Status.OK:
            timed = first.time_median_s is not None  # no other row has the interval of its time
            lacking = [name for name in _MEASURED if getattr(first, name) is None]
            lacking = [name for name in lacking if not (timed and name.startswith("time_"))]
            first = replace(first, **{name: getattr(other, name) for name in lacking})
    return first


def _weight(record: Record) -> tuple[bool, int, int]:
    return record.status is Status.OK, record.time_samples or 0, record.time_rounds or 0


_NAMES = list(FIELDS)
_MEASURED = _NAMES[_NAMES.index("time_median_s") :]
