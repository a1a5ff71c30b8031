"""The work of a machine, lot by lot, and its rows. Only this module writes rows."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from attnbench.harness.inside.call import may_compile
from attnbench.harness.many.kinds import Kind
from attnbench.harness.many.queue import Group, Queue
from attnbench.harness.outside.isolation import START_TIMEOUT
from attnbench.harness.outside.trainings import at_chosen_rates, phases, threads_of
from attnbench.harness.plan import Plan, in_order
from attnbench.harness.rows import beyond_in_words, now, rows_of
from attnbench.harness.runner import Watcher
from attnbench.harness.wire.protocol import MeasureLimits, Outcome, Ready, VisitCell
from attnbench.measure.status import Status
from attnbench.suite.cell import Cell

TOOK = "took three machines with it"
"""Start of the reason of a row whose cell is not tried again."""


@dataclass(slots=True)
class Call:
    """A method of :class:`~attnbench.harness.many.machine.Machine` and its arguments."""

    method: str
    message: dict[str, Any] = field(default_factory=dict)
    most_s: float = START_TIMEOUT
    """Seconds that it may take."""
    cells: Sequence[Cell] = ()
    """Cells that the machine measures meanwhile, and may die of."""
    started_at: str = field(default_factory=now)
    since: float = 0.0
    """Time of the call, in seconds of the driver's clock."""


Script = Generator[Call | None, dict[str, Any], None]
"""A machine's script: it yields calls and is sent their answers; it yields None to wait for a second."""


class Lost(Exception):  # the machine's own failure, not an error of the run
    """A call failed; carries the reason."""


@dataclass(eq=False, slots=True)
class Member:
    """A machine, from its start to its end."""

    number: int
    name: str = ""
    """Name of its host, for people; empty until it has answered."""
    refused: str = ""
    script: Script = field(init=False)
    call: Call | None = None
    host: str = ""
    """Digest of its host; empty until it takes part."""
    kind: Kind = field(init=False)
    state: Ready = field(init=False)


def is_complete(kind: Kind, cells: Sequence[Cell]) -> bool:
    """True if all rounds of a group are there, from one host."""
    rows = kind.rows
    records = [rows.records[cell.cell_id] for cell in cells if cell.cell_id in rows.records]
    if len({record.host for record in records if not record.reason.startswith(TOOK)}) > 1:
        return False
    return not any(rows.due(round_, cells) for round_ in range(kind.plan.rules.rounds)) and all(
        cell.cell_id in rows.records for phase in _phases(kind, cells) for cell in phase
    )


def _phases(kind: Kind, cells: Sequence[Cell]) -> Iterator[Sequence[Cell]]:
    trainings = kind.rows.trainings(cells)
    yield phases(trainings)[0]
    yield at_chosen_rates(trainings, kind.rows.records)


class Work:
    """The work of machines on their lots."""

    def __init__(self, plan: Plan, queue: Queue, watcher: Watcher) -> None:
        self._plan, self._queue, self._watcher = plan, queue, watcher

    def measure(self, member: Member, lot: Sequence[Group]) -> Script:
        """Visit all cells of a lot round by round, then train those that are trained.

        Raises Lost if the machine cannot go on, StoreError if a row cannot be written.
        """
        rows = member.kind.rows
        cells = [cell for group in lot for cell in group.cells]
        earlier = [(cell, rows.records[cell.cell_id]) for cell in cells if cell.cell_id in rows.records]
        # Ratios are of one host, so another host's rows are measured anew.
        rows.forget(cell for cell, row in earlier if row.host != member.host and not row.reason.startswith(TOOK))
        for round_ in range(self._plan.rules.rounds):
            due = rows.due(round_, cells)
            if round_ and due:  # as in a run on one machine, each round has a process of its own
                yield Call("fresh")
            for cell in in_order(due, f"{self._plan.suite.name}{round_}{cells[0].cell_id}"):
                yield from self._visit(member, cell, round_)
        yield from self._hold_to_limits(member, cells)
        for group in lot:
            for phase in _phases(member.kind, group.cells):
                yield from self._train(member, phase)
            self._queue.finish(member.number, group)

    def _visit(self, member: Member, cell: Cell, round_: int) -> Script:
        rows = member.kind.rows
        if rows.is_over(cell, round_):
            return
        self._watcher.visiting(cell)
        if round_ == 0 and (known := rows.known(cell)):
            self.finish(member, cell, Outcome(known), now())
            return
        request = rows.request(cell, round_)
        call = Call("visit", {"request": request.to_json()}, self._most_s([cell]), [cell])
        outcome = _outcome(member, cell, (yield call), request)
        if lost := rows.settle(cell, round_, outcome):
            self._watcher.warned(lost)
        self.finish(member, cell, outcome, call.started_at)

    def _most_s(self, cells: Sequence[Cell]) -> float:
        options = self._plan.options
        return 2 * (options.cell_timeout + any(map(may_compile, cells)) * options.first_call_timeout) + START_TIMEOUT

    def finish(self, member: Member, cell: Cell, outcome: Outcome, started_at: str) -> None:
        """Store the row of a visit; raise StoreError if it cannot be written."""
        kind, record = member.kind, outcome.record
        record.host = member.host
        kind.rows.put(cell, record, member.state, started_at)
        kind.folder.add(record, outcome.samples, outcome.failure, outcome.stderr, outcome.points)
        kind.folder.write_csv(kind.rows.in_order(), at_most_every=10.0)
        if record.status is not Status.INTERRUPTED:
            self._watcher.visited(record)

    def _hold_to_limits(self, member: Member, lot: Sequence[Cell]) -> Script:
        rows = member.kind.rows
        timed, impossible = rows.beyond_limits(lot)
        if not impossible:
            return
        request = MeasureLimits(timed, rows_of(rows, timed))
        most = (1 + impossible) * self._plan.options.cell_timeout
        try:
            answer = yield Call("limits", {"request": request.to_json(), "most_s": most}, most)
        except Lost as lost:
            self._watcher.warned(f"{member.name}: its limits could not be measured again: {lost}")
            return
        try:
            found = request.answered(answer)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise Lost("it sent garbage") from None
        member.state = cast(Ready, {**member.state, **found.limits})
        member.kind.correct(member.host, member.state, found.limits)
        self._watcher.warned(f"{member.name}: {beyond_in_words(impossible)}")
        rows.correct(found.records)

    def _train(self, member: Member, cells: Sequence[Cell]) -> Script:
        records = member.kind.rows.records
        due = {cell.cell_id: cell for cell in cells if cell.cell_id not in records}
        for cell in list(due.values()):
            if known := member.kind.rows.known(cell):
                self.finish(member, due.pop(cell.cell_id), Outcome(known), now())
        started = dict[str, str]()
        call = Call("train", {"cells": [cell.to_json() for cell in due.values()]})
        is_over = not due
        while not is_over:
            left = [cell for cell in due.values() if cell.cell_id not in records]
            call.cells = left[: member.kind.plan.settings.threads]
            call.most_s = self._most_s(call.cells)
            answer = yield call
            for event in answer.get("events", ()):
                self._hear_of_training(member, due, started, event)
            call, is_over = Call("more"), answer.get("over", False)

    def _hear_of_training(
        self, member: Member, due: Mapping[str, Cell], started: dict[str, str], event: Mapping[str, Any]
    ) -> None:
        try:
            cell = due[event["cell_id"]]
            outcome = _outcome(member, cell, event) if event["what"] == "ended" else None
        except (KeyError, TypeError):
            raise Lost("it sent garbage") from None
        if outcome is not None:
            self.finish(member, cell, outcome, started.get(cell.cell_id, now()))
        elif event["what"] == "begun":
            started[cell.cell_id] = now()
            self._watcher.visiting(cell)
        else:
            self._watcher.trained(cell, int(event["done"]), int(event["of"]))


def _outcome(member: Member, cell: Cell, answer: Mapping[str, Any], request: VisitCell | None = None) -> Outcome:
    try:
        threads = threads_of(cell, member.kind.plan.settings)
        return Outcome.from_json(answer["outcome"], cell, threads=threads, request=request)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise Lost("it sent garbage") from None
