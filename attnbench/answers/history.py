"""One measure of the same cells over many runs, and the runs from which on it is another: ``attnbench history``.

A value is of its run alone: a time is at the full speed that the machine had in that run, or over that of another
variant in it. A change is a run, or three in a row, whose whole interval against the runs before, as the gate makes it,
lies beyond the limit. These are the last :data:`WINDOW` since the last change. The spread between runs comes from all
runs before, and a change stays one if later runs come: the i-th run after the first has 1 / (i (i + 1)) of the 5 % by
which all cells and runs together may be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import exp, isfinite, log
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from attnbench.answers.gate import phrases
from attnbench.answers.gate.decide import over
from attnbench.answers.gate.join import RowPair, launch_of
from attnbench.answers.gate.pace import as_measured, at_one_speed
from attnbench.answers.gate.verdict import COLUMNS, RAN, Ruling, Times, Tolerance, judge, times_of
from attnbench.errors import ResultsError, UsageError
from attnbench.measure.machine import differing_versions
from attnbench.measure.statistics import FEWEST_VISITS, spread_between
from attnbench.measure.status import Status
from attnbench.results.key import Key
from attnbench.results.measurements import MeasuredRun, Visits, began, day, differing_facts, load, refuse_copies
from attnbench.results.record import Record
from attnbench.results.runs import find_runs, no_run
from attnbench.suite.select import matches
from attnbench.text import quantity

Metric = Literal["time", "memory", "error"]
WINDOW = 8
"""Most runs that a run is held against."""
FEWEST_RUNS = 4
"""Fewest runs before a time has a verdict: fewer do not say how runs of one program differ."""
SPANS = (1, 3)
"""Numbers of runs that are held against those before: a small change shows when it has lasted."""
_UNCHANGED = ("same", "unsure", "missing")


def read_history(paths: Sequence[Path], newest: MeasuredRun | None = None) -> tuple[list[MeasuredRun], dict[str, str]]:
    """The runs at or below these folders, oldest first, that may be compared with the newest or with this one.

    And the name of each other one with the reason. Raises ResultsError if a folder has no run, or none can be read.
    """
    found, out = list[MeasuredRun](), dict[str, str]()
    runs = {path: find_runs(path) for path in paths}
    for path in [path for path in paths if not runs[path]]:
        raise no_run(path, "give a folder of several runs")
    folders = {run.path.resolve(): run.path for ones in runs.values() for run in ones}
    if newest is not None:
        folders.pop(newest.path.resolve(), None)
    for folder in folders.values():
        try:
            found.append(load(folder))
        except ResultsError as error:
            out[folder.name] = str(error)
    if not found and newest is None:
        raise ResultsError("; ".join(out.values()))
    kept = [] if newest is None else [newest]
    found.sort(key=began)
    for run in found:
        facts = differing_facts(newest or found[-1], run)
        try:
            refuse_copies((one.path, one.environment) for one in [*kept, run])
        except UsageError as error:
            facts.append(str(error))
        if facts:
            out[run.name] = "; ".join(facts)
        elif newest is None or (began(run), run.path.resolve()) < (began(newest), newest.path.resolve()):
            kept.append(run)
    return kept[newest is not None :], out


@dataclass(slots=True)
class HistoryPoint:
    """One cell in one run."""

    run: str
    began: str
    value: float | None
    """Seconds, bytes or a relative error; None if it failed or was not measured."""
    rounds: int = 0
    """Number of rounds behind a time; 0 without one."""
    change: Ruling | None = None
    """The finding against the runs before, if something changed from here on."""


@dataclass(slots=True)
class CellHistory:
    """One cell over the runs."""

    row: Record
    """That of the latest run."""
    measured: Record | None = None
    """The latest with a number; None before the first."""
    points: list[HistoryPoint] = field(default_factory=list)
    stretches: list[list[Visits]] = field(default_factory=lambda: [[]])
    """Visits in each run, a list for each time between two changes, also of the way in which calls are launched."""

    @property
    def changes(self) -> list[HistoryPoint]:
        return [point for point in self.points if point.change]

    @property
    def values(self) -> list[float]:
        return [point.value for point in self.points if point.value is not None]


@dataclass(frozen=True, slots=True)
class History:
    """The cells that at least two runs have, and the runs that are left out."""

    metric: Metric
    unit: str
    """Unit of times: s, or the variant that they were divided by."""
    how: str
    """The form of its times, in words."""
    runs: Sequence[MeasuredRun]
    left_out: Mapping[str, str]
    """Name of a run -> the reason."""
    lines: Sequence[CellHistory]
    between: float | None
    """Spread between runs of one program, on the log scale; None if it is not known."""

    @property
    def head(self) -> str:
        first, last = (day(began(run)) for run in (self.runs[0], self.runs[-1]))
        return f"{self.metric} in {len(self.runs)} runs, {first} to {last}" + f"; {self.how}" * bool(self.how)

    @property
    def doubts(self) -> list[str]:
        """Faults of its runs outside their rows, one line each."""
        return [doubt for run in self.runs for doubt in run.doubts]

    @property
    def foot(self) -> list[str]:
        """The number of changes, other versions, and the spread between runs."""
        changed = sum(bool(line.changes) for line in self.lines)
        said = [f"{changed} of {len(self.lines)} cells changed; joint 95 % over all cells and runs"]
        if without := sum(not line.values for line in self.lines):
            said.append(f"{without} of {len(self.lines)} cells have no {self.metric}")
        for before, run in pairwise(self.runs):
            if found := differing_versions(before.environment, run.environment):
                said.append(f"{day(began(run))}: other versions than in the run before: {'; '.join(found)}")
        if self.between is not None:
            said.append(f"runs of one program differ by {self.between:.1%}")
            later = {run.name for run in self.runs[FEWEST_RUNS:]}
            points = [one for line in self.lines for one in line.points if one.run in later]
            if few := [day(one.began) for one in points if 0 < one.rounds < FEWEST_VISITS]:
                times = f"{quantity(len(few), 'time')} of fewer than {FEWEST_VISITS} rounds"
                said.append(f"no verdict on {times}, the last {max(few)}")
        elif self.metric == "time":
            said.append(f"no verdict on times yet: that takes {FEWEST_RUNS} runs of three rounds, and one more")
        return said

    def table(self, *, every: bool = False) -> list[list[str]]:
        """The cells that changed, or all: name, runs, first and latest value, ratio, changes."""
        axes = phrases.telling(line.row for line in self.lines)
        return [self._row(line, axes) for line in self.lines if line.changes or every]

    def _row(self, line: CellHistory, axes: Sequence[str]) -> list[str]:
        values = line.values
        first, last = (values[0], values[-1]) if values else (None, None)
        ends = [phrases.number(one, self.metric, self.unit) for one in (first, last)]
        said = [
            f"{day(point.began)} {phrases.plain(point.change)} {phrases.ratio(point.change.ratio)}".removesuffix(" -")
            + f" ({phrases.interval(point.change)})" * (phrases.interval(point.change) != "-")
            for point in line.points
            if point.change
        ]
        ratio = phrases.ratio(last / first if first and last else None)
        return [phrases.name(line.row, axes), str(len(values)), *ends, ratio, "; ".join(said) or "-"]

    def to_rows(self) -> list[dict[str, Any]]:
        """A row for each cell and run."""
        axes = phrases.telling(line.row for line in self.lines)
        rows = []
        for line in self.lines:
            about = {"cell": phrases.name(line.row, axes), "label": line.row.label, "family": line.row.family}
            for point in line.points:
                found = point.change
                numbers = ((name, getattr(found, name, None)) for name in ("ratio", "low", "high"))
                ends = {name: one if isfinite(one or 0.0) else None for name, one in numbers}  # JSON has no infinity
                said = {"change": phrases.plain(found) if found else "", **ends}
                rows.append({**about, "run": point.run, "began": point.began, self.metric: point.value, **said})
        return rows

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        said = {"metric": self.metric, "unit": self.unit, "times": self.how, "between_runs": self.between}
        runs = [{"run": run.name, "began": began(run)} for run in self.runs]
        return {**said, "runs": runs, "left_out": self.left_out, "points": self.to_rows()}


def history(paths: Sequence[Path], given: Mapping[str, Any]) -> History:
    """Follow the cells through the runs, with the options of ``attnbench history``; those that lack are not given.

    Raises UsageError if nothing is chosen, a name chooses nothing, no two runs have a cell in common, or an option is
    of times and they are not followed; ResultsError if no run can be read.
    """
    metric: Metric = given["metric"]
    if metric != "time" and (given.get("relative_to") or given.get("as_measured")):
        raise UsageError(f"--on {metric}: --relative-to and --as-measured are for times; leave them out")
    runs, out = read_history(paths)
    how, unit = "", "s"
    if metric == "time":
        runs, how = _timed(runs, out, plain=bool(given.get("as_measured")))
        if base := given.get("relative_to"):
            unit, runs = base, _over(runs, base, out)
    above = given.get("above")
    limits = Tolerance() if above is None else Tolerance(**{metric: above})
    lines, between = follow(runs, metric, limits, lambda row: _chosen(row, given))
    several = [line for line in lines if len(line.points) > 1]
    known = {name for run in runs for row in run.rows.values() for name in (row.variant, row.label)}
    unknown = [name for name in given.get("variants") or () if name not in known]
    if unknown or not several:
        without = "".join(f"; {name} is left out: {reason}" for name, reason in list(out.items())[:3])
        if len(runs) == 1:
            raise UsageError(f"no other run may be compared with {runs[0].name}, the newest; name others{without}")
        why = f"no two of {len(runs)} runs have a cell in common" if lines else "no cell is chosen"
        why = f"-v {unknown[0]!r}: no cell is chosen" if unknown else why
        raise UsageError(f"{why}; a cell is called {phrases.address(next(iter(runs[-1].rows.values())))}{without}")
    return History(metric, unit, how, runs, out, several, between)


def follow(
    runs: Sequence[MeasuredRun], metric: Metric, limits: Tolerance, chosen: Callable[[Record], bool] = lambda row: True
) -> tuple[list[CellHistory], float | None]:
    """The chosen cells through runs with visits, oldest first, and the spread between runs of one program."""
    lines, between = dict[Key, CellHistory](), None
    for place, run in enumerate(runs):
        rows = {key.but(options=row.label): (key, row) for key, row in run.rows.items() if chosen(row)}
        if metric == "time" and place >= FEWEST_RUNS:
            stretches = [part for line in lines.values() for part in line.stretches]
            between = spread_between([[list(one.seconds.values()) for one in part] for part in stretches])
        changed: dict[Key, tuple[Ruling, int]] = {}
        for span in SPANS if between is not None else SPANS[:1]:
            known = [one for one in rows if one in lines and one not in changed]
            pairs = {one: pair for one in known if (pair := _pair(lines[one], *rows[one], run, span))}
            times = Times({}, None)
            if between is not None:
                share = 2 * len(SPANS) * place * (place + 1)
                times = times_of(list(pairs.values()), between=(between, _freedom(lines.values())), looks=share)
            for one, pair in pairs.items():
                status = judge(replace(pair, old=lines[one].row), ("status",), limits, times)
                for change in [*judge(pair, (metric,), limits, times), *status]:
                    if change.verdict not in _UNCHANGED:
                        changed.setdefault(one, (change, span))
        for one, (_, row) in rows.items():
            _add(lines.setdefault(one, CellHistory(row)), run, row, metric, *changed.get(one, (None, 1)))
    return list(lines.values()), between


def _timed(runs: Sequence[MeasuredRun], out: dict[str, str], *, plain: bool) -> tuple[list[MeasuredRun], str]:
    """The runs with their visits, as the newest one allows, and how their times are given."""
    paced = [None if plain else at_one_speed([run], alike=True) for run in runs]
    if paced[-1] is None:
        return [as_measured(run) for run in runs], "times as measured"
    for run, one in zip(runs, paced, strict=True):
        if one is None:
            out[run.name] = "no yardstick beside its times; --as-measured takes it in"
    return [one[0][0] for one in paced if one], "times at the full speed that the machine had in each run"


def _over(runs: Sequence[MeasuredRun], variant: str, out: dict[str, str]) -> list[MeasuredRun]:
    kept = list[MeasuredRun]()
    for run in runs:
        try:
            kept.append(over(run, variant))
        except UsageError as error:
            out[run.name] = str(error)
    if not kept:
        raise UsageError(out[runs[-1].name])
    return kept


def _chosen(row: Record, given: Mapping[str, Any]) -> bool:
    variants, select = given.get("variants"), given.get("select")
    named = not variants or row.variant in variants or row.label in variants
    return named and (select is None or matches(select, phrases.address(row)))


def _pair(line: CellHistory, key: Key, row: Record, run: MeasuredRun, span: int) -> RowPair | None:
    """The last ``span`` runs, with this one, against those before them; None if there are none before.

    Its old row is the latest with a number, so that a run that failed hides no change.
    """
    before, after = line.stretches[-1], _visits(run, row)
    if span > 1:
        if not after or len(before) < span:
            return None
        before, after = before[: 1 - span], [*before[1 - span :], *after]
    return RowPair(key, line.measured or line.row, row, tuple(before[-WINDOW:]), tuple(after))


def _visits(run: MeasuredRun, row: Record) -> list[Visits]:
    known = row.status is Status.OK and row.cell_id in run.visits
    return [run.visits[row.cell_id]] if known else []


def _freedom(lines: Iterable[CellHistory]) -> int:
    """Degrees of freedom of the spread between runs: those of one cell, since a slow run slows all of them."""
    return max(sum(max(0, len(one) - 1) for one in line.stretches) for line in lines)


def _add(line: CellHistory, run: MeasuredRun, row: Record, metric: Metric, change: Ruling | None, span: int) -> None:
    visits = _visits(run, row)
    if metric == "time":
        value = exp(fmean(map(log, visits[0].seconds.values()))) if visits else None
    else:
        value = getattr(row, COLUMNS[metric]) if row.status in RAN else None
    alone = row.quick and metric == "time"  # no other run is held against its one call
    if visits and not alone and line.measured and launch_of(row) != launch_of(line.measured):
        line.stretches.append([])
    line.stretches[-1] += visits * (not alone)
    line.points.append(HistoryPoint(run.name, began(run), value, min([len(one.seconds) for one in visits], default=0)))
    line.row, line.measured = row, line.measured if value is None or alone else row
    if change:
        timed = [point for point in line.points if point.value is not None] if span > 1 else line.points
        timed[-span].change = change
        if change.measure == "time":
            line.stretches.append(line.stretches[-1][-span:])
            del line.stretches[-2][-span:]
