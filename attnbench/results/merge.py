"""Merge runs of one suite on several machines: shards, or a run that ended early and its remainder.

What may be merged is what may be compared: one method, one class of machine, memories within 5 % and rates within
10 %. Rows, samples, curves and failures are copied. Nothing is written before all of it is known to
fit together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from attnbench.errors import CannotCreate, CorruptResults, ResultsError, UsageError
from attnbench.files import stored
from attnbench.measure.machine import (
    MEMORY_TOLERANCE,
    RATES_WITHIN,
    class_facts,
    differing_products,
    differing_variables,
    differing_versions,
    memory_bytes,
    rates,
)
from attnbench.measure.status import UNFINISHED, Status
from attnbench.results.key import Key, key_of
from attnbench.results.manifest import ENDS, ENGINE, FRESH, SEAL, THINNED, TOGETHER, digest, of_machines
from attnbench.results.measurements import refuse_copies
from attnbench.results.record import Record
from attnbench.results.sources import said
from attnbench.results.store import CURVES, FAILURES, RECORDS, SAMPLES, SUITE, RunFolder
from attnbench.text import one_line
from attnbench.units import format_bytes, format_count
from attnbench.version import __version__

_OF_A_MACHINE = (
    *("machine_id", "environment", "memory_limit_bytes", "process_notes"),
    *("matmul_rate", "exp_rate", "copy_rates", "timer_cost_s", "noise_floor", "card"),
    *("attnbench", "run_id", "opening", "run_key", "folder", "shard", "started_at"),
)
"""Facts of ``environment.json`` that a merged run keeps for each run that it is made of."""


@dataclass(frozen=True, slots=True)
class MergedRun:
    """A run that is to be merged."""

    folder: RunFolder
    environment: Mapping[str, Any]
    suite: str
    records: Mapping[str, Record]
    """The last row of each cell, by cell id."""

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def machines(self) -> list[dict[str, Any]]:
        """Facts of its machine, or of each machine of a merged run."""
        own = {name: self.environment[name] for name in _OF_A_MACHINE if name in self.environment}
        ids = {name: one for name, one in own.items() if name in ("run_id", "opening")}  # an engine's lack them
        return [{**ids, **one} for one in self.environment.get("machines") or [own]]


@dataclass(frozen=True, slots=True)
class Merged:
    """The merged run."""

    folder: RunFolder
    parts: Sequence[tuple[Path, str, int]]
    """Each run with its machine and the number of its rows that were kept."""
    notes: Sequence[str]


Kept = list[tuple[MergedRun, dict[str, Record]]]
"""Each run with those of its rows that stay, by cell id."""


def merge(paths: Iterable[Path], out: Path, *, rates_within: float = RATES_WITHIN) -> Merged:
    """Join runs into a new run folder ``out``; ``rates_within`` is the share by which the machines' rates may differ.

    Raises UsageError if the runs do not belong together; the message says what differs, or which one is the odd one.
    Raises ResultsError, CorruptResults, and CannotCreate if ``out`` exists or cannot be made.
    """
    paths = list(paths)
    if out.exists() or out.is_symlink():
        raise CannotCreate(f"cannot create {out}: it exists; choose another folder with --out")
    if len(paths) < 2:
        raise UsageError("merge needs two runs or more, and one is given")
    sources = [_read(path) for path in paths]
    refuse_copies((source.path, source.environment) for source in sources)
    refuse_unlike([(source.path, source.environment, source.machines) for source in sources], rates_within)
    for source in sources[1:]:
        if source.suite != sources[0].suite:
            raise UsageError(
                f"{source.path / SUITE} is not {sources[0].path / SUITE}: only runs of one suite, with the same "
                "--set, become one run; attnbench plot takes several runs as they are"
            )
    kept, notes = _choose(sources)
    notes += dict.fromkeys(said for source in sources for said in source.folder.repairs)
    notes += [*_missing_shards(sources), *_ratios_between_machines(kept)]
    apart = [(one.path, differing_versions(sources[0].environment, one.environment)) for one in sources[1:]]
    notes += [f"{sources[0].path} and {path}: other versions: {'; '.join(found)}" for path, found in apart if found]
    folder = _write(out, kept)
    counts = {source.path: len(records) for source, records in kept}
    parts = [(one.path, str(one.environment.get("machine_id", "")), counts.get(one.path, 0)) for one in sources]
    return Merged(folder, parts, notes)


def _read(path: Path) -> MergedRun:
    if not stored(path / RECORDS).is_file():
        raise ResultsError(f"{path}: no {RECORDS} here; give the folder of a run, results/SUITE/STARTED-DEVICE")
    folder = RunFolder(path)
    environment = folder.environment
    records = {record.cell_id: record for record in folder.in_order()}
    lost = [
        f"{path}: the samples of {one.label} n={one.seq_len} are lost"
        for one in folder.without_samples(records.values())
    ]
    doubts = [*folder.doubts(), *lost]
    if doubts:
        raise CorruptResults(doubts[0])
    if not records:
        raise ResultsError(f"{path}: no row yet; leave it out")
    return MergedRun(folder, environment, folder.suite_text, records)


def _choose(sources: Sequence[MergedRun]) -> tuple[Kept, list[str]]:
    """Each cell's row; if one machine measured it twice, that of the run with most of the cells that are compared with
    it. Raises UsageError: two machines measured the same cell."""
    measured: dict[tuple[Path, Key], list[int]] = {}
    for source in sources:
        for record in source.records.values():
            rounds = measured.setdefault((source.path, _compared(record)), [])
            rounds += [record.time_rounds or 0] * (record.status is Status.OK)

    def worth(one: tuple[MergedRun, Record]) -> tuple[object, ...]:
        source, record = one
        rounds = measured[source.path, _compared(record)]
        return record.status not in UNFINISHED, record.status is Status.OK, len(rounds), sum(rounds)

    best: dict[str, tuple[MergedRun, Record]] = {}
    twice = 0
    for source in sources:
        for cell_id, record in source.records.items():
            other = best.get(cell_id)
            if other is None:
                best[cell_id] = source, record
                continue
            known = not {record.status, other[1].status} & {*UNFINISHED}
            if known and record.machine_id != other[1].machine_id:
                raise UsageError(
                    f"{record.label} n={record.seq_len} (cell {cell_id}) was measured on two machines, in "
                    f"{other[0].path} and in {source.path}; its rounds belong to one: leave one of these runs out"
                )
            twice += known
            best[cell_id] = max(other, (source, record), key=worth)
    kept = [(one, {cell_id: row for cell_id, (owner, row) in best.items() if owner is one}) for one in sources]
    cells = "1 cell is" if twice == 1 else f"{twice} cells are"
    said = (
        f"{cells} in two runs of one machine; of equal outcomes, those of the run with more measured variants, "
        "then more rounds, then given first are kept"
    )
    return [(source, rows) for source, rows in kept if rows], [said] * bool(twice)


def _compared(record: Record) -> Key:
    """The key that a row shares with those that differ by the variant alone."""
    return key_of(record).but(variant="", options="", learning_rate=None)


def _missing_shards(sources: Sequence[MergedRun]) -> list[str]:
    given = {machine["shard"] for source in sources for machine in source.machines if "shard" in machine}
    splits = {shard.partition("/")[2] for shard in given}
    if len(splits) != 1:
        return []
    (of,) = splits
    missing = [f"{index}/{of}" for index in range(int(of)) if f"{index}/{of}" not in given]
    names = ", ".join(missing[:8]) + f" and {len(missing) - 8} more" * (len(missing) > 8)
    return [f"without shard {names}: it was not given, or is empty"] if missing else []


def _ratios_between_machines(kept: Kept) -> list[str]:
    machines: dict[Key, set[str]] = {}
    for record in (record for _, records in kept for record in records.values()):
        if record.time_median_s is not None or record.train_s is not None:
            machines.setdefault(_compared(record), set()).add(record.machine_id)
    count = sum(len(found) > 1 for found in machines.values())
    settings = "1 setting" if count == 1 else f"{count} settings"
    return [f"in {settings} variants were timed on two machines, so their ratios are between these"] if count else []


def _write(out: Path, kept: Kept) -> RunFolder:
    sources = [source for source, _ in kept]
    with RunFolder.whole(out, environment=_environment(kept, out), suite_text=sources[0].suite) as folder:
        for source, records in kept:
            for name in (FAILURES, SAMPLES, CURVES):
                rows = [row for row in source.folder.rows(name) if row["cell_id"] in records]
                if rows:
                    bare = [{key: value for key, value in row.items() if key != SEAL} for row in rows]
                    folder.append(name, bare)
        merged = _in_order([record for _, records in kept for record in records.values()])
        seals = folder.append(RECORDS, [record.to_json() for record in merged])
        folder.write_csv([replace(record, seal=seal) for record, seal in zip(merged, seals, strict=True)])
        folder.conclude()
    return RunFolder(out)


def _in_order(records: Sequence[Record]) -> list[Record]:
    """The rows by sweep, label and length, in the order of a suite."""
    sweeps = list(dict.fromkeys(record.sweep for record in records))
    labels = list(dict.fromkeys(record.label for record in records))
    return sorted(records, key=lambda one: (sweeps.index(one.sweep), labels.index(one.label), one.seq_len))


def _environment(kept: Kept, out: Path) -> dict[str, Any]:
    environments = [source.environment for source, _ in kept]
    machines = [machine for source, _ in kept for machine in source.machines]
    keys = "".join(sorted(str(machine.get("run_key", "")) for machine in machines))
    of_its_own = ("shard", "machines", ENGINE, TOGETHER, ENDS)
    shared = {name: value for name, value in environments[0].items() if name not in of_its_own}
    thinned = [one[THINNED] for one in environments if THINNED in one]
    return {
        **shared,
        "attnbench": __version__,
        "run_key": digest(f"merged {keys}"),
        "cells": digest("".join(sorted(cell_id for _, records in kept for cell_id in records))),
        "folder": out.name,
        "started_at": min(str(one.get("started_at", "")) for one in machines),
        "input_files": {name: content for one in environments for name, content in one.get("input_files", {}).items()},
        "process_notes": list(dict.fromkeys(note for one in environments for note in one.get("process_notes", ()))),
        **of_machines(machines),
        **({THINNED: thinned} if thinned else {}),
    }


Facts = Mapping[str, Any]
"""The content of ``environment.json``."""


def refuse_unlike(runs: Sequence[tuple[Path, Facts, Sequence[Facts]]], rates_within: float) -> None:
    """Refuse runs of different methods, classes of machine, memories or rates. Raises UsageError.

    Args:
        runs: folder, environment, and the facts of each machine that measured it.
        rates_within: share by which the largest rate of a machine may exceed the smallest; of a machine with several
            runs, the median counts.
    """
    (first, ours, _), *others = runs
    for path, theirs, _ in others:
        differ = [*_differences(_decisive(ours), _decisive(theirs)), *differing_variables(ours, theirs)]
        said = f"{first} and {path} were not measured alike"
        if differ:
            raise UsageError(f"{said}: {one_line('; '.join(differ), 160)}; {_MERGE_LIKE}")
        if chosen := differing_products(ours, theirs):
            remedy = f"a probe chose otherwise; measure it again with --fresh --like {first}"
            raise UsageError(f"{said}: {one_line('; '.join(chosen), 160)}: {remedy}")
    machines = [(path, machine) for path, _, machines in runs for machine in machines]
    memories = [(path, memory_bytes(machine)) for path, machine in machines]
    _refuse_odd("memory", [(path, size) for path, size in memories if size], MEMORY_TOLERANCE, format_bytes)
    by_name: dict[str, dict[object, list[tuple[Path, float]]]] = {}
    for number, (path, machine) in enumerate(machines):
        which = machine.get("host") or machine.get("machine_id") or number
        for name, rate in rates(machine):
            by_name.setdefault(name, {}).setdefault(which, []).append((path, rate))
    for name, found in by_name.items():  # what one machine measured twice differs by the noise of measuring
        each = [(known[0][0], median(rate for _, rate in known)) for known in found.values()]
        _refuse_odd(name, each, rates_within, lambda rate: f"{format_count(rate)}/s")


def _decisive(environment: Facts) -> dict[str, Any]:
    """The facts that decide numbers, except memory and rates, which are never equal to the digit."""
    rules = environment.get("rules")
    machine = environment.get("environment")
    return {
        **{name: environment.get(name) for name in ("attnbench", "method_version", "schema_version", FRESH)},
        **class_facts(environment),
        "torch": machine.get("torch") if isinstance(machine, dict) else None,
        **{f"rule {name}": value for name, value in (rules or {}).items() if name != "rounds"},
        **{f"plug-in {name}": value for name, value in (environment.get("plugins") or {}).items()},
        "input files": {
            **(environment.get("input_files") or {}),
            **{said(name): seen[0] for name, seen in (environment.get("sources") or {}).items()},
        },
    }


def _differences(ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[str]:
    files = ours.pop("input files"), theirs.pop("input files")
    for name in dict.fromkeys([*ours, *theirs]):
        if ours.get(name) != theirs.get(name):
            yield f"{name} {_shown(ours.get(name))} and {_shown(theirs.get(name))}"
    for name in files[0].keys() & files[1].keys():  # a shard knows only the files of its own cells
        if files[0][name] != files[1][name]:
            yield f"contents of {name}"


def _shown(value: object) -> str:
    return "unknown" if value is None else one_line(str(value), 40)


_MERGE_LIKE = "merge runs of one version on machines of one kind"
_ALLOW = "measure again on a quiet machine, or allow more with --rates-within"


def _refuse_odd(what: str, found: Sequence[tuple[Path, float]], within: float, shown: Callable[[float], str]) -> None:
    """Refuse values if the largest exceeds the smallest by more than a share, and name the odd one."""
    values = [value for _, value in found]
    if not values or max(values) <= (1 + within) * min(values):
        return
    apart = f"{shown(min(values))} to {shown(max(values))}, more than {within:.0%} apart"
    if len(found) == 2:
        raise UsageError(f"{what} of {found[0][0]} and {found[1][0]} is {apart}; {_ALLOW}")
    middle = median(values)
    path, odd = max(found, key=lambda one: max(one[1] / middle, middle / one[1]))
    raise UsageError(f"{what} is {apart}; {path} is the odd one with {shown(odd)}: leave it out, or {_ALLOW}")
