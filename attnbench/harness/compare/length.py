"""Measure all variants at one length within one time limit: each alone, then in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from attnbench.harness.inside.launch import EAGER
from attnbench.harness.inside.pairs import Turns, take_turns
from attnbench.harness.outside.isolation import CellFailed, Worker
from attnbench.harness.wire.protocol import Answer, Pairs, TakeTurns, VisitCell
from attnbench.laws.exact_error import error_kind
from attnbench.measure.machine import OtherLoad
from attnbench.measure.status import FIRST_CALL, Status
from attnbench.measure.time import Sample, TimingRules
from attnbench.results.record import FIELDS, Record
from attnbench.results.validation import are_samples
from attnbench.suite.cell import Cell

TURNS = 4
"""Fewest turns of each variant in one process: two orders, each with its reverse."""
WARM_UP_CALLS = 3
"""Calls to warm up a variant whose calls take long, before its turns."""
_OF_ONE_CALL: dict[str, Any] = dict.fromkeys(name for name, column in FIELDS.items() if not column.one_call)
"""Columns that the first look fills, but for which one call is not enough."""


@dataclass(slots=True)
class Length:
    """Results at one length. Variants by position in the list of cells."""

    records: dict[int, Record] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    """Seconds of one call at the first look."""
    times: list[dict[int, list[float]]] = field(default_factory=list)
    """For each process the seconds of each variant that took turns; the i-th entries of its lists are of one turn."""
    pairs: list[Pairs] = field(default_factory=list)
    prompts: dict[int, list[float]] = field(default_factory=dict)
    """For each process the prompt's share of a variant's call, in pass ``generate``."""
    lost: list[tuple[int, Record]] = field(default_factory=list)
    """Failures of a variant in a later process; they cost no other measurement."""
    others: float | None = None
    """Number of cores that other programs used, if nothing took turns; None if the system does not say."""
    unchecked: list[tuple[int, str]] = field(default_factory=list)
    with_error: bool = True
    even_if_off: bool = False
    """Measure an incorrect variant that claims to be exact all the same, with a warning."""
    unsure: set[int] = field(default_factory=set)
    """Variants out of time, perhaps through another's fault: longer lengths still try them."""
    traces: str = ""

    def of_both(self, i: int, j: int) -> tuple[list[list[float]], list[list[float]]]:
        """Seconds of both variants, for each process in which both took turns."""
        both = [(one[i], one[j]) for one in self.times if i in one and j in one]
        return [a for a, _ in both], [b for _, b in both]


def measure_length(
    workers: Sequence[Worker],
    cells: Sequence[Cell],
    rules: TimingRules,
    *,
    timeout: float,
    known: Mapping[int, Record],
    unchecked: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Length:
    """Look at each cell alone in its worker, then let those that are ``ok`` take turns. A failure is a record and stops
    no other.

    This is the first process for these cells; :func:`measure_again` is for the others. ``timeout``: seconds for all of
    it, retries included, but not the start of a new process or a stop of this one. ``known``: the records of cells that
    are not even tried. ``unchecked``: measure also a variant that claims to be exact and is not.
    """
    with_error = any("error" in cell.measure for cell in cells)
    found = Length(dict(known), with_error=with_error, even_if_off=unchecked)
    visit = _Visit(workers, cells, rules, timeout, clock, found, found.records)
    visit.look()
    visit.take_turns()
    return found


def measure_again(
    workers: Sequence[Worker],
    cells: Sequence[Cell],
    rules: TimingRules,
    found: Length,
    which: Collection[int],
    *,
    timeout: float,
    process: int,
) -> None:
    """Let ``which`` cells take turns in one more process, after ``process`` others, and complete ``found``.

    ``timeout`` is as for :func:`measure_length`.
    """
    visit = _Visit(workers, cells, rules, timeout, time.monotonic, found, {i: found.records[i] for i in which}, process)
    visit.take_turns()
    found.lost += [(i, record) for i, record in visit.records.items() if record.status is not Status.OK]


_OWN_TOO_LONG = "own error: its formula takes too long here; a larger --timeout measures it"


@dataclass
class _Visit:
    workers: Sequence[Worker]
    cells: Sequence[Cell]
    rules: TimingRules
    timeout: float
    clock: Callable[[], float]
    found: Length
    records: dict[int, Record]
    """Outcomes of the cells of this process, by position."""
    process: int = 0

    def __post_init__(self) -> None:
        self.left = self.timeout
        """Seconds left of the time limit."""

    def look(self) -> None:
        ahead = [i for i in range(len(self.cells)) if i not in self.records]
        for place, i in enumerate(ahead):
            self.records[i] = self._outcome(i, shares=len(ahead) - place + 1)

    def _outcome(self, i: int, shares: int) -> Record:
        """Measure with both errors in half of the share; without that against the own formula, and at last without
        any, if that is too little or the variant is not fitted."""
        with_error, bare = self.cells[i], without_error(self.cells[i])
        distance = _without(with_error, "own_error")
        asked = self.found.with_error and "error" in with_error.measure
        learned = asked and error_kind(with_error.entry, with_error.variant) == "learned"
        for cell in dict.fromkeys((with_error, distance)) if asked and not learned else ():
            try:
                record = self._look(i, cell, self.left / shares / 2)
            except CellFailed as failed:
                if not failed.late:
                    return self._failed(i, failed)
            else:
                return record if cell is with_error else replace(record, own_error_note=_OWN_TOO_LONG)
        if learned:  # what it is against its own formula has a meaning all the same
            bare = _without(with_error, "error")
        try:
            record = self._look(i, bare, self.left / shares)
        except CellFailed as failed:
            reason = f"its share of {self.timeout:g} s is too little for a few calls; raise --timeout"
            return Record.of(bare, failed.status, reason) if failed.late else self._failed(i, failed)
        if learned:
            return replace(record, error_kind="learned") if record.status is Status.OK else record
        # It was the exact answer that took too long, as it would for the others.
        self.found.with_error &= not asked
        return record

    def _look(self, i: int, cell: Cell, limit: float) -> Record:
        worker = self.workers[i]
        request = VisitCell(cell, replace(self.rules, quick=True), unchecked=self.found.even_if_off)
        visited = self._in_time([worker], limit, lambda: request.ask(worker, limit))
        record, seconds = visited.record, visited.record.time_median_s
        if record.status is Status.DISTURBED:  # of the time all that counts is how many turns will fit
            record = replace(record, status=Status.OK, reason="")
            seconds = min((float(one["seconds"]) for one in visited.taken), default=0.0)
        elif record.status is Status.OK and not seconds:
            raise worker.garbage()
        self.found.seconds[i] = seconds or 0.0
        return replace(record, quick=False, **_OF_ONE_CALL)

    def take_turns(self) -> None:
        self._leave_out_the_slow()
        while alive := self._alive():
            try:
                pairs = self._turns(alive, self.left)
            except CellFailed as together:
                self.records |= self._culprits(self._ended(alive) or alive, together)
            else:
                self.found.pairs.append(pairs)
                for place, status, reason in pairs.left_out:
                    self.records[alive[place]] = Record.of(self.cells[alive[place]], Status(status), reason)
                said = ((alive[place], warning) for place, warning in pairs.warnings)
                known = {i: f"{EAGER}: {record.launch_note}" for i, record in self.records.items()}
                new = [(i, warning) for i, warning in said if warning != known[i]]
                self.found.unchecked += [one for one in new if one not in self.found.unchecked]
                for place, share in pairs.prompts:
                    self.found.prompts.setdefault(alive[place], []).append(share)
                columns = zip(*pairs.blocks, strict=True)
                self.found.times.append(
                    {alive[place]: list(one) for place, one in zip(pairs.ran, columns, strict=True)}
                )
                return

    def _alive(self) -> list[int]:
        return [i for i, record in sorted(self.records.items()) if record.status is Status.OK]

    def _leave_out_the_slow(self) -> None:
        """Leave out cells that exceed an equal share of the time that the quicker ones leave.

        So two about equally slow cells stay or go together, whatever the noise.
        """
        turns = TURNS + WARM_UP_CALLS
        left, seconds = self.left, self.found.seconds
        by_need = sorted(self._alive(), key=lambda i: seconds[i])
        for place, i in enumerate(by_need):
            if turns * seconds[i] > left / (len(by_need) - place):
                for slow in by_need[place:]:
                    reason = f"{turns} calls of {seconds[slow]:.2g} s do not fit into its share of the time; "
                    self.records[slow] = Record.of(self.cells[slow], Status.TIMEOUT, reason + "raise --timeout")
                return
            left -= turns * seconds[i]

    def _turns(self, positions: Sequence[int], limit: float) -> Pairs:
        warm_up = sum(WARM_UP_CALLS * self.found.seconds[i] + self.rules.warmup_time for i in positions)
        rules = replace(self.rules, max_time=min(self.rules.max_time, max(0.0, 0.9 * limit - warm_up)))
        cells = [self.cells[i] for i in positions]
        request = TakeTurns(cells, rules, TURNS, self.process, self.found.even_if_off)
        workers = [self.workers[i] for i in positions]
        pairs = self._in_time(workers, limit, lambda: lead(workers, request, limit))
        self.found.traces = self.found.traces or next(filter(None, (one.traces for one in workers)), "")
        return pairs

    def _ended(self, alive: Sequence[int]) -> list[int]:
        """The cells of the process that failed, if several took turns; the others wait in vain, and are stopped."""
        workers = {self.workers[i] for i in alive}
        ended = {one for one in workers if not one.served} if len(workers) > 1 else set()
        for worker in workers if ended else ():
            worker.stop()
        return [i for i in alive if self.workers[i] in ended]

    def _culprits(self, alive: Sequence[int], together: CellFailed) -> dict[int, Record]:
        failed: dict[int, CellFailed] = {}
        if not together.late:
            for place, i in enumerate(alive):
                try:
                    self._turns([i], self.left / (len(alive) - place + 1))
                except CellFailed as alone:
                    failed[i] = alone
        else:
            reason = f"did not finish its turns within {self.timeout:g} s; raise --timeout"
            together = CellFailed(Status.TIMEOUT, reason)
            self.found.unsure |= set(alive)
        failed = failed or dict.fromkeys(alive, together)
        return {i: self._failed(i, one) for i, one in failed.items()}

    def _failed(self, i: int, failed: CellFailed) -> Record:
        self.found.unsure |= {i} if FIRST_CALL in failed.reason else set()
        return Record.of(self.cells[i], failed.status, failed.reason)

    def _in_time(self, workers: Sequence[Worker], limit: float, ask: Callable[[], Answer]) -> Answer:
        """The answer of these workers within ``limit`` seconds of the time left.

        A new process, a stop of this one, and first calls that may compile do not count.
        """
        start = self.clock()
        try:
            return ask()
        finally:
            compiled = sum(worker.compiled for worker in set(workers))
            self.left -= min(limit, max(0.0, self.clock() - start - compiled))


def without_error(cell: Cell) -> Cell:
    """The same cell, but its errors are not measured."""
    return _without(cell, "error", "own_error")


def _without(cell: Cell, *measures: str) -> Cell:
    return replace(cell, measure=tuple(what for what in cell.measure if what not in measures))


def lead(workers: Sequence[Worker], request: TakeTurns, limit: float) -> Pairs:
    """The pairs of a request whose cells are in ``workers``, one for each; the answer takes ``limit`` seconds at most.

    While one process takes its sample, the others wait.

    Raises CellFailed if a process fails, which is then the one that was thrown away.
    """
    if len(sides := dict.fromkeys(workers)) == 1:
        return request.ask(workers[0], limit)
    end, ready = time.monotonic() + limit, dict[Worker, int]()
    places = {worker: [i for i, one in enumerate(workers) if one is worker] for worker in sides}
    parts = {worker: replace(request, cells=[request.cells[i] for i in of], led=True) for worker, of in places.items()}

    def left() -> float:
        return max(1.0, end - time.monotonic())

    def take(worker: Worker, column: int) -> Sample:
        told = worker.ask({"take": column}, left(), further=True)
        if not are_samples([told]) or not told["seconds"]:
            raise worker.garbage()
        return Sample(**told)

    def read(worker: Worker, told: dict[str, Any], how: Callable[[dict[str, Any]], Answer]) -> Answer:
        try:
            return how(told)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise worker.garbage() from None

    for worker in list(sides)[:: -1 if request.process % 2 else 1]:
        told = worker.ask({"do": request.do, **parts[worker].to_json()}, left())
        ready[worker] = read(worker, told, lambda told: int(told["ready"]))
    load = OtherLoad(lambda: sum(worker.seconds_used() for worker in sides))
    whose = [(worker, column) for worker in sides for column in range(ready[worker])]
    turns = Turns([], 0, 0, 0)
    if whose:
        seed = request.cells[0].seed + request.process
        turns = take_turns([partial(take, *one) for one in whose], request.rules, seed=seed, fewest=request.fewest)
    found = Pairs([], [[] for _ in turns.blocks], [], turns.disturbed, turns.taken, turns.stopped, load.cores())
    for worker, of in places.items():
        own = [[row[i] for i, (one, _) in enumerate(whose) if one is worker] for row in turns.blocks]
        pairs = read(worker, worker.ask({"blocks": own}, left(), further=True), parts[worker].answered)
        found.ran.extend(of[i] for i in pairs.ran)
        found.left_out.extend((of[i], status, reason) for i, status, reason in pairs.left_out)
        found.warnings.extend((of[i], warning) for i, warning in pairs.warnings)
        found.prompts.extend((of[i], share) for i, share in pairs.prompts)
        for row, more in zip(found.blocks, pairs.blocks, strict=False):  # none if all its cells are left out
            row.extend(more)
    return replace(found, blocks=found.blocks if found.ran else [])
