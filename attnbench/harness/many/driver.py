"""The driver: it shares the cells out and reads the machines' answers.

A script makes one machine's calls in order. If a machine dies, its unfinished work goes back to the queue.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib.metadata import version
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from attnbench.errors import AttnbenchError, Exit, StoreError, UsageError
from attnbench.harness.many.kinds import Kinds
from attnbench.harness.many.queue import Queue
from attnbench.harness.many.work import TOOK, Call, Lost, Member, Script, Work, is_complete
from attnbench.harness.outside.isolation import START_TIMEOUT
from attnbench.harness.outside.trainings import count_trainings
from attnbench.harness.plan import Plan
from attnbench.harness.runner import Watcher
from attnbench.harness.wire.process import Products
from attnbench.harness.wire.protocol import Outcome
from attnbench.measure.status import Status
from attnbench.results.record import Record
from attnbench.results.store import RunFolder
from attnbench.suite.cell import Cell
from attnbench.text import one_line
from attnbench.version import __version__

DEATHS = 3
"""Machines that may die with a cell before it is given up."""
_TICK = 1.0
"""Seconds between checks for changes without news."""
_SLACK = 120.0
"""Seconds past a call's limit after which a silent machine is given up."""
_COME = 120.0
"""Seconds that a machine may take to come: one that was there when a run was stopped, or any at all."""


class Engine(Protocol):
    """Owns machines, each as a whole, and asks each of them one thing at a time. It knows nothing of cells."""

    name: str

    def places(self) -> int:
        """The number of machines, busy or free. A death may be noticed late here."""

    def start(self) -> int:
        """Own one more machine and return its number at once; its calls wait until one is free."""

    def call(self, machine: int, method: str, message: Mapping[str, Any]) -> None:
        """Call a method of :class:`~attnbench.harness.many.machine.Machine` and return at once."""

    def wait(self, seconds: float) -> Sequence[tuple[int, dict[str, Any] | str]]:
        """Answers of machines since, or why they died; waits no longer than ``seconds`` for one."""

    def end(self, machine: int) -> None:
        """Give a machine back and end its work. No news of it follows."""


class NoMachine(AttnbenchError):
    """Cells are left, and none of the machines may measure them."""

    exit_code = Exit.FAILED


def execute_on(
    engine: Engine, plan: Plan, watcher: Watcher | None = None, clock: Callable[[], float] = monotonic
) -> list[tuple[RunFolder, list[Record]]]:
    """Measure every missing cell on the machines of an engine, storing each row as it comes.

    Args:
        plan: with :attr:`~attnbench.harness.plan.Options.on`; threads and memory limit default to each machine's.
        clock: seconds that pass for the engine.

    Returns:
        The run folder of each kind of machines, with its rows.

    Raises:
        NoMachine: cells are left without a machine; finished ones are kept.
        UsageError: no machine may measure anything; nothing is written.
        StoreError and its kinds, CorruptResults: for a folder.
        KeyboardInterrupt: passed on after finished work is written.
    """
    with ExitStack() as ours:
        return _Driver(engine, plan, watcher or Watcher(), clock, ours).go()


class _Driver:
    def __init__(
        self, engine: Engine, plan: Plan, watcher: Watcher, clock: Callable[[], float], ours: ExitStack
    ) -> None:
        self.engine, self.plan, self.watcher, self.clock = engine, plan, watcher, clock
        self.kinds = Kinds(plan, engine.name, ours, watcher.warned)
        self.queue = Queue(plan.cells)
        self.work = Work(plan, self.queue, watcher)
        self.members: dict[int, Member] = {}
        self.deaths: Counter[str] = Counter()
        self.stillborn = 0
        """Machines in a row that died before they took part."""
        self.why = "the engine has none"
        """The fate of the last lost machine."""
        self.begun_at = self.busy_at = clock()
        """Times of the run's begin, and of the last work."""
        self.looked_at: float | None = None
        """Time of the last count of machines."""
        self._take_up()
        self.expected = {group.host for group in self.queue.waiting if group.host}
        """Hosts that have begun something."""

    def _take_up(self) -> None:
        for group in self.queue.waiting:
            found = [(kind, row) for cell in group.cells for kind, row in self.kinds.rows_of(cell.cell_id)]
            if found:
                group.kind, newest = max(found, key=lambda one: one[1].started_at)
                group.host = newest.host
        self.queue.waiting = [
            group for group in self.queue.waiting if not group.kind or not is_complete(group.kind, group.cells)
        ]

    def go(self) -> list[tuple[RunFolder, list[Record]]]:
        self._tell_begun()
        try:
            while not self.queue.is_empty:
                self._hire()
                for number, answer in self.engine.wait(_TICK):
                    if number in self.members:  # else it was given up
                        self._hear(self.members[number], answer)
                for member in list(self.members.values()):
                    if member.call is None:
                        self._advance(member, {})
                    elif (waited := self.clock() - member.call.since) > member.call.most_s + _SLACK:
                        self._bury(member, f"no answer for {waited:.0f} s")
                self._refuse_to_wait_for_ever()
            for kind in self.kinds.all:
                kind.rows.doubt_tasks(self.watcher.warned)
                kind.folder.refuse_changes()
        except BaseException as stop:
            with suppress(StoreError):  # what stopped the run is told, not that the table failed as well
                if isinstance(stop, KeyboardInterrupt):
                    self._note_interrupted()
                for kind in self.kinds.all:
                    kind.folder.write_csv(kind.rows.in_order())
            raise
        finally:
            for member in list(self.members.values()):
                self._let_go(member)
        for kind in self.kinds.all:
            kind.folder.write_csv(kind.rows.in_order())
            kind.folder.conclude()
        return [(kind.folder, kind.rows.in_order()) for kind in self.kinds.all]

    def _tell_begun(self) -> None:
        waiting = [cell for group in self.queue.waiting for cell in group.cells]
        records = {id_: record for kind in self.kinds.all for id_, record in kind.rows.records.items()}
        ahead = 0
        for cell in waiting:
            if cell.training is None:
                rounds = self.plan.rules.rounds if "time" in cell.measure else 1
                row = records.get(cell.cell_id)
                ahead += rounds - (min(rounds, row.time_rounds or rounds) if row else 0)
        ahead += count_trainings([cell for cell in waiting if cell.training is not None], records)[1]
        root = self.plan.options.out / self.plan.suite.name
        self.watcher.begun(root, cells=len(self.plan.cells), visits=ahead, resumed=len(records))

    # Machines

    def _hire(self) -> None:
        if self.looked_at is not None and self.clock() - self.looked_at < _TICK:  # asking takes milliseconds
            return
        self.looked_at, places = self.clock(), self.engine.places()
        while len(self.members) < places and not self._is_hopeless():
            member = Member(self.engine.start())
            self.members[member.number], member.script = member, self._script(member)
            self._advance(member, None)

    def _is_hopeless(self) -> bool:
        return self.stillborn >= DEATHS + sum(bool(member.host) for member in self.members.values())

    def _hear(self, member: Member, answer: dict[str, Any] | str) -> None:
        if isinstance(answer, str):
            self._bury(member, answer)
            return
        member.name = one_line(str(answer.get("name") or member.name))
        for note in answer.get("notes", ()):
            self.watcher.warned(f"{member.name}: {one_line(str(note))}")
        self._advance(member, answer)

    def _advance(self, member: Member, answer: dict[str, Any] | None) -> None:
        script = member.script
        try:
            if answer and answer.get("failed"):
                call = script.throw(Lost(one_line(str(answer["failed"]))))
            else:
                call = next(script) if answer is None else script.send(answer)
        except Lost as lost:
            self._bury(member, str(lost))
        except StopIteration:  # nothing is left to do
            self._let_go(member)
        else:
            member.call = call
            if call is not None:
                call.since = self.clock()
                self.engine.call(member.number, call.method, call.message)

    def _bury(self, member: Member, reason: str) -> None:
        """Give a machine up. Its unfinished work moves on, except for a cell that took three with it."""
        self.why = one_line(reason)
        if not member.host:
            self.stillborn += 1
            self.watcher.warned(f"a machine was lost before it took part: {self.why}")
        else:
            self.watcher.warned(f"{member.name} was lost: {self.why}; its cells go to another machine")
        for cell in member.call.cells if member.call else ():
            self.deaths[cell.cell_id] += 1
            if self.deaths[cell.cell_id] == DEATHS:
                self._give_row(member, cell, Status.CRASH, f"{TOOK}, the last one: {reason}")
        self._let_go(member)

    def _give_row(self, member: Member, cell: Cell, status: Status, reason: str) -> None:
        assert member.call is not None
        outcome = Outcome(Record.of(cell, status, reason, quick=self.plan.rules.quick))
        self.work.finish(member, cell, outcome, member.call.started_at)

    def _note_interrupted(self) -> None:
        for member in self.members.values():
            for cell in member.call.cells if member.call else ():
                if cell.cell_id not in member.kind.rows.records:
                    self._give_row(member, cell, Status.INTERRUPTED, "stopped by the user")

    def _let_go(self, member: Member) -> None:
        del self.members[member.number]
        member.script.close()
        for group in self.queue.give_back(member.number):
            if group.kind and not any(cell.cell_id in group.kind.rows.records for cell in group.cells):
                group.kind, group.host = None, ""
        self.engine.end(member.number)

    def _refuse_to_wait_for_ever(self) -> None:
        """Stop if no machine works or is about to, and none of them may take what waits.

        Raises NoMachine after two minutes or for good, UsageError if no machine has taken part.
        """
        members = self.members.values()
        if self.queue.is_worked_on or any(one.call and one.call.method == "begin" for one in members):
            self.busy_at = self.clock()
        refused = [member.refused for member in members if member.refused]
        nobody_may = len(refused) == len(members) and (self._is_hopeless() or 0 < len(members) >= self.engine.places())
        if self.clock() - self.busy_at <= _COME and not nobody_may:
            return
        left = sum(len(group.cells) for group in self.queue.waiting)
        if not left:
            return
        cells = f"{left} cell{'s wait' if left != 1 else ' waits'}"
        classes = ", ".join(sorted({group.kind.machine_class for group in self.queue.waiting if group.kind}))
        if classes and any(member.host for member in members):
            raise NoMachine(
                f"{cells} for a machine of class {classes}, where they were begun, and none is left; the same command "
                "goes on when there is one"
            )
        why = next(iter(refused), self.why)
        if not self.kinds.all:
            raise UsageError(f"{cells} and no machine may measure them: {why}; nothing was written")
        raise NoMachine(f"{cells} and no machine may measure them: {why}; the same command goes on")

    # The work of a machine

    def _script(self, member: Member) -> Script:
        try:
            yield from self._take_in(member)
        except Lost as why:
            member.refused = f"{member.name or 'a machine'} cannot take part: {why}"
            self.watcher.warned(member.refused)
            while not self.queue.is_empty:  # a machine that was refused is kept, so that nobody is given it again
                yield None
        number, host = member.number, member.host
        while not self.queue.is_empty:
            lot = self.queue.take(number, kind=member.kind, host=host, keeps=self._keeps, machines=len(self.members))
            if lot:
                yield from self.work.measure(member, lot)
            else:
                yield None

    def _take_in(self, member: Member) -> Script:
        hello = yield Call("hello", hello_of(self.plan), inf)  # no time limit: it waits until a machine is free
        if why := misfit(hello, ours(self.kinds.base)):
            raise Lost(why)
        products = self.plan.settings.products
        while products is None and (products := self.kinds.products_on(hello["processor"])) is None:
            # The first one alone finds out which libraries are faster: rows of different libraries are not compared.
            if not any(one.call and one.call.method == "begin" for one in self.members.values()):
                break
            yield None
        message = begin_of(self.plan, hello["threads"], self.kinds.known(hello["host"]), products)
        begin = yield Call("begin", message, 3 * START_TIMEOUT)
        member.state = begin["state"]
        member.kind = self.kinds.admit(hello, member.state)
        member.host = hello["host"]
        self.stillborn = 0

    def _keeps(self, host: str) -> bool:
        members = self.members.values()
        comes = any(member.call and not member.host for member in members)
        return any(member.host == host for member in members) or (
            host in self.expected and comes and self.clock() - self.begun_at <= _COME
        )


def hello_of(plan: Plan) -> dict[str, Any]:
    """The first message to every machine. Files are named relative to the current folder here."""
    reading = {
        (cell.variant, cell.inputs, cell.pretrained, cell.task and (cell.task, cell.shape)): cell for cell in plan.cells
    }
    return {
        "folder": str(Path.cwd()),
        "threads": plan.options.threads,
        "plugins": _plugins(plan),
        "cells": [cell.to_json() for cell in reading.values()],
    }


def begin_of(
    plan: Plan, threads: int, known: Mapping[str, Any] | None = None, products: Products | None = None
) -> dict[str, Any]:
    """The message to a machine that may take part: its earlier facts, and its processor's libraries."""
    settings = replace(
        plan.settings,
        threads=threads,
        memory_limit=plan.options.memory_limit,
        plugins=tuple(_plugins(plan)),
        products=products,
    )
    how = {"cell_timeout": plan.options.cell_timeout, "unchecked": plan.options.unchecked}
    return {"settings": settings, "rules": plan.rules, **how, "known": known}


def _plugins(plan: Plan) -> list[str]:
    return [str(Path.cwd() / one) if one.endswith(".py") else one for one in plan.options.plugins]


def ours(base: Mapping[str, Any]) -> dict[str, Any]:
    """The requirements for every machine; ``base``, the run's identity, has files and plug-ins."""
    return {**base, "attnbench": __version__, "python": platform.python_version(), "torch": version("torch")}


def misfit(facts: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The reason, with the remedy, why a machine with ``facts`` cannot take part; empty if it can."""

    def release(text: str, parts: int) -> str:
        """``2.13.0+cpu`` -> ``2.13.0``: the build for a GPU and the one without are one version."""
        return ".".join(str(text).partition("+")[0].split(".")[:parts])

    for name, parts in (("attnbench", 3), ("torch", 3), ("python", 2)):
        theirs, here = (release(one[name], parts) for one in (facts, wanted))
        if theirs != here:
            return f"it has {name} {one_line(theirs, 40)}, the driver {here}; install the same version on all machines"
    if (levels := facts["niceness"] - facts["niceness_of_parent"]) > 0:
        return (
            f"the engine runs its processes {levels} levels nicer, so anything else there goes first; set "
            "RAY_worker_niceness=0 before ray start"
        )
    for name in sorted(facts["input_files"].keys() | wanted["input_files"].keys()):
        theirs, here = facts["input_files"].get(name), wanted["input_files"].get(name)
        if theirs != here:
            how = "is missing there" if theirs is None else "has other contents there"
            return f"{one_line(name, 80)} {how}; put the same file at the same place on all machines"
    if sorted(facts["plugins"].values()) != sorted(wanted["plugins"].values()):
        return "its plug-ins are not those of the driver; install the same on all machines"
    return ""
