"""The work of a machine that takes part, lot by lot, and the rows that come of it. Only this writes rows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from attnbench.cell import Cell
from attnbench.record import Record, one_line
from attnbench.run.call import may_compile
from attnbench.run.isolation import START_TIMEOUT
from attnbench.run.many.kinds import Kind
from attnbench.run.many.queue import Group, Queue
from attnbench.run.many.script import Call, Lost, Member, Script, failure, outcome_of
from attnbench.run.plan import Plan, in_order
from attnbench.run.protocol import MeasureLimits, Outcome, Ready
from attnbench.run.rows import beyond_in_words, now, rows_of
from attnbench.run.runner import Watcher
from attnbench.run.trainings import at_chosen_rates, phases
from attnbench.status import Status

TOOK = "took three machines with it"
"""Start of the reason of a row whose cell is not tried again."""


def is_complete(kind: Kind, cells: Sequence[Cell]) -> bool:
    """Whether all rounds of a group are there, and of one host."""
    rows = kind.rows
    records = [rows.records[cell.cell_id] for cell in cells if cell.cell_id in rows.records]
    if len({record.host for record in records if not record.reason.startswith(TOOK)}) > 1:
        return False
    trainings = rows.trainings(cells)
    trained = [*phases(trainings)[0], *at_chosen_rates(trainings, rows.records)]
    return not any(rows.due(round_, cells) for round_ in range(kind.plan.rules.rounds)) and all(
        cell.cell_id in rows.records for cell in trained
    )


class Work:
    """What machines do with their lots."""

    def __init__(self, plan: Plan, queue: Queue, watcher: Watcher) -> None:
        self._plan, self._queue, self._watcher = plan, queue, watcher
        self._next_table: dict[int, float] = {}
        """When the table of a kind may be written again."""

    def measure(self, member: Member, lot: Sequence[Group]) -> Script:
        """Visit all cells of a lot round by round, then train those that are trained."""
        rows = member.kind.rows
        for group in lot:  # what another host has begun is measured anew, since ratios are of one host
            rows.forget(cell for cell in group.cells if not _stays(member, cell))
        cells = [cell for group in lot for cell in group.cells]
        for round_ in range(self._plan.rules.rounds):
            due = rows.due(round_, cells)
            if round_ and due:  # as in a run on one machine, each round has a process of its own
                answer = yield Call("fresh", most_s=START_TIMEOUT)
                if why := failure(answer):
                    raise Lost(why)
            for cell in in_order(due, f"{self._plan.suite.name}{round_}{cells[0].cell_id}"):
                yield from self._visit(member, cell, round_)
        yield from self._hold_to_limits(member, cells)
        for group in lot:
            trainings = rows.trainings(group.cells)
            yield from self._train(member, phases(trainings)[0])
            yield from self._train(member, at_chosen_rates(trainings, rows.records))
            self._queue.finish(member.machine, group)

    def _visit(self, member: Member, cell: Cell, round_: int) -> Script:
        rows, started_at = member.kind.rows, now()
        if rows.is_over(cell, round_):
            return
        self._watcher.visiting(cell)
        known = rows.known(cell) if round_ == 0 else None
        if known:
            self.finish(member, cell, Outcome(known), started_at)
            return
        request = rows.request(cell, round_)
        answer = yield Call("visit", {"request": request.to_json()}, self._most([cell]), [cell], started_at)
        outcome = outcome_of(answer, cell, member, request)
        if lost := rows.settle(cell, round_, outcome):
            self._watcher.warned(lost)
        self.finish(member, cell, outcome, started_at)

    def _most(self, cells: Sequence[Cell]) -> float:
        """Seconds that a visit may take: it may be tried twice, the second time in a fresh process."""
        options = self._plan.options
        return 2 * (options.cell_timeout + any(map(may_compile, cells)) * options.first_call_timeout) + START_TIMEOUT

    def finish(self, member: Member, cell: Cell, outcome: Outcome, started_at: str) -> None:
        """Store the row of a visit.

        Raises:
            StoreError: it cannot be written.
        """
        kind, record = member.kind, outcome.record
        record.host = member.host
        kind.rows.put(cell, record, member.state, started_at)
        kind.folder.add(record, outcome.samples, outcome.failure, outcome.stderr, outcome.points)
        self._write_table(kind)
        if record.status is not Status.INTERRUPTED:
            self._watcher.visited(record)

    def _write_table(self, kind: Kind) -> None:
        """Write the table anew, unless that would take more than a twentieth of the time: it may be long."""
        began = time.monotonic()
        if began >= self._next_table.get(id(kind), 0.0):
            kind.folder.write_csv(kind.rows.in_order())
            took = time.monotonic() - began
            self._next_table[id(kind)] = began + max(2.0, 20 * took)

    def _hold_to_limits(self, member: Member, lot: Sequence[Cell]) -> Script:
        """If a cell of a lot was impossibly fast, measure the machine again and correct the lot's rows."""
        rows = member.kind.rows
        timed, impossible = rows.beyond_limits(lot)
        if not impossible:
            return
        request = MeasureLimits(timed, rows_of(rows, timed))
        most = (1 + impossible) * self._plan.options.cell_timeout
        answer = yield Call("limits", {"request": request.to_json()}, most)
        if why := failure(answer) or answer.get("reason"):
            self._watcher.warned(f"{member.name}: its limits could not be measured again: {one_line(str(why))}")
            return
        try:
            found = request.answered(dict(answer))
        except (AttributeError, KeyError, TypeError, ValueError):
            raise Lost("it sent garbage") from None
        member.state = cast(Ready, {**member.state, **found.limits})
        member.kind.correct(member.host, member.state)
        self._watcher.warned(f"{member.name}: {beyond_in_words(impossible)}")
        rows.correct(found.records)

    def _train(self, member: Member, cells: Sequence[Cell]) -> Script:
        """Train the cells that have no row yet, as many at once as the machine has threads."""
        rows = member.kind.rows
        for cell in cells:
            if cell.cell_id not in rows.records and (known := rows.known(cell)):
                self.finish(member, cell, Outcome(known), now())
        due = {cell.cell_id: cell for cell in cells if cell.cell_id not in rows.records}
        if not due:
            return
        started = dict[str, str]()
        at_once = member.kind.plan.settings.threads
        at_work = list(due.values())[:at_once]
        answer = yield Call(
            "train", {"cells": [cell.to_json() for cell in due.values()]}, self._most(at_work), at_work, now()
        )
        while not answer.get("over"):
            if why := failure(answer):
                raise Lost(why)
            at_work = [cell for cell in due.values() if cell.cell_id not in rows.records][:at_once]
            answer = yield Call("more", {}, self._most(at_work), at_work, now())
            for event in answer.get("events", ()):
                self._hear_of_training(member, due, started, event)

    def _hear_of_training(
        self, member: Member, due: Mapping[str, Cell], started: dict[str, str], event: Mapping[str, Any]
    ) -> None:
        try:
            cell = due[event["cell_id"]]
            outcome = outcome_of(event, cell, member) if event["what"] == "ended" else None
        except (KeyError, TypeError):
            raise Lost("it sent garbage") from None
        if outcome is not None:
            self.finish(member, cell, outcome, started.get(cell.cell_id, now()))
        elif event["what"] == "begun":
            started[cell.cell_id] = now()
            self._watcher.visiting(cell)
        else:
            self._watcher.trained(cell, int(event["done"]), int(event["of"]))


def _stays(member: Member, cell: Cell) -> bool:
    """Whether a row need not be measured anew by this machine."""
    record: Record | None = member.kind.rows.records.get(cell.cell_id)
    return record is None or record.host == member.host or record.reason.startswith(TOOK)
