"""The driver: it deals lots of cells to the machines of a Ray cluster, and stores what they send.

Cells that differ by the variant alone are a group, which one host measures from its first round to its last. A machine
measures a lot, some groups at once, as a run on one machine does. If it dies, its unfinished groups go to another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from time import monotonic
from typing import Any, cast

from attnbench.errors import AttnbenchError, Exit, StoreError, UsageError
from attnbench.harness.many.actor import Event, requirements
from attnbench.harness.many.kinds import Kind, Kinds
from attnbench.harness.many.ray import RayEngine
from attnbench.harness.outside.trainers import at_chosen_rates, count_trainings, phases, threads_of
from attnbench.harness.plan import Plan
from attnbench.harness.rows import now
from attnbench.harness.runner import Watcher
from attnbench.harness.wire.process import Products
from attnbench.harness.wire.protocol import Outcome, Ready
from attnbench.measure.status import STOPPING, Status
from attnbench.results.record import Record
from attnbench.results.store import RunFolder
from attnbench.suite.cell import Cell
from attnbench.suite.schema import Suite
from attnbench.suite.shard import groups, weight
from attnbench.text import one_line

DEATHS = 3
"""Machines that may die with a cell before it is given up."""
TOOK = "took three machines with it"
"""Start of the reason of a row whose cell is not tried again."""
_TICK = 1.0
"""Seconds between checks for changes without news."""
_PATIENCE = 120.0
"""Seconds without a word of a machine at work, or without any machine, after which it is given up."""
_MOST = 600.0
"""Most seconds of one round of a lot, about: a death costs its unfinished groups."""
_LIMITS = {"matmul_rate", "exp_rate", "copy_rates"}
"""Facts of a machine that may change while it measures."""


class NoMachine(AttnbenchError):
    """Cells are left, and none of the machines may measure them."""

    exit_code = Exit.FAILED


@dataclass(eq=False, slots=True)
class _CellGroup:
    """Cells that differ by the variant alone. Once one has a row, the others go where it was measured."""

    cells: list[Cell]
    weight: float
    kind: Kind | None = None
    host: str = ""

    def is_complete(self, rounds: int) -> bool:
        """True if the rows of so many rounds are there, from one host."""
        if self.kind is None:
            return False
        rows, trainings = self.kind.rows, self.kind.rows.trainings(self.cells)
        found = [rows.records[cell.cell_id] for cell in self.cells if cell.cell_id in rows.records]
        hosts = {record.host for record in found if not record.reason.startswith(TOOK)}
        trained = (*phases(trainings)[0], *at_chosen_rates(trainings, rows.records))
        is_due = any(rows.due(round_, self.cells) for round_ in range(rounds))
        return len(hosts) <= 1 and not is_due and all(cell.cell_id in rows.records for cell in trained)


@dataclass(eq=False, slots=True)
class _Member:
    """A machine, from its start to its end."""

    number: int
    heard: float | None = None
    """Time of its last event; None while it waits for a free node."""
    name: str = "a machine"
    refused: str = ""
    products: Products | None = None
    """The libraries that it was told to take."""
    host: str = ""
    """Digest of its host; empty until it takes part."""
    kind: Kind = field(init=False)
    state: Ready = field(init=False)
    lot: list[_CellGroup] = field(default_factory=list)
    cells: dict[str, Cell] = field(default_factory=dict)
    """The cells of its lot, by id."""
    at_work: dict[str, str] = field(default_factory=dict)
    """Cells that it measures now, and may die of -> when they began."""

    @property
    def is_setting_up(self) -> bool:
        return not self.host and not self.refused


def execute_on(
    engine: RayEngine, plan: Plan, watcher: Watcher | None = None, clock: Callable[[], float] = monotonic
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
        driver = _Driver(engine, plan, watcher or Watcher(), clock, ours)
        driver.go()
    return [(kind.folder, kind.rows.in_order()) for kind in driver.kinds.all]


class _Driver:
    def __init__(
        self, engine: RayEngine, plan: Plan, watcher: Watcher, clock: Callable[[], float], ours: ExitStack
    ) -> None:
        self.engine, self.plan, self.watcher, self.clock = engine, plan, watcher, clock
        self.kinds = Kinds(plan, ours, watcher.warned)
        self.members: dict[int, _Member] = {}
        self.deaths: Counter[str] = Counter()
        self.stillborn = 0
        """Machines in a row that died before they took part."""
        self.why = "the engine has none"
        """The fate of the last lost machine."""
        self.begun_at = self.busy_at = clock()
        """Times of the run's begin, and of the last work."""
        self.places, self.counted_at = 0, self.begun_at - _TICK
        """The number of machines, and when it was asked for."""
        found = [_CellGroup(cells, sum(map(weight, cells))) for cells in groups(plan.cells)]
        # Short sequences come first, since their failures stand for longer ones.
        found.sort(key=lambda group: max(cell.shape.N for cell in group.cells))
        rows = {id_: (kind, row) for kind in self.kinds.all for id_, row in kind.rows.records.items()}
        for group in found:
            if mine := [rows[cell.cell_id] for cell in group.cells if cell.cell_id in rows]:
                group.kind, newest = max(mine, key=lambda one: one[1].started_at)
                group.host = newest.host
        self.waiting = [group for group in found if not group.is_complete(plan.rules.rounds)]
        self.expected = {group.host for group in self.waiting if group.host}
        """Hosts that have begun something."""
        self._tell_begun({id_: row for id_, (_, row) in rows.items()})

    def _tell_begun(self, rows: dict[str, Record]) -> None:
        waiting = [cell for group in self.waiting for cell in group.cells]
        ahead = count_trainings([cell for cell in waiting if cell.training is not None], rows)[1]
        for cell in [cell for cell in waiting if cell.training is None]:
            most = self.plan.rules.rounds if "time" in cell.measure else 1
            ahead += most - (min(most, rows[cell.cell_id].time_rounds or most) if cell.cell_id in rows else 0)
        root = self.plan.options.out / self.plan.suite.name
        self.watcher.begun(root, cells=len(self.plan.cells), visits=ahead, resumed=len(rows))

    @property
    def is_at_work(self) -> bool:
        return any(member.lot for member in self.members.values())

    def go(self) -> None:
        try:
            while self.waiting or self.is_at_work:
                self._hire()
                for number, event in self.engine.wait(_TICK):
                    if number in self.members:  # else it was given up
                        self._hear(self.members[number], event)
                for member in list(self.members.values()):
                    if member.host and not member.lot:
                        self._deal(member)
                    elif not member.refused and member.heard and self.clock() - member.heard > _PATIENCE:
                        self._bury(member, f"no word of it for {self.clock() - member.heard:.0f} s")
                self._refuse_to_wait_for_ever()
        except KeyboardInterrupt:
            with suppress(StoreError):  # the interrupt is told, not this fault
                for member in self.members.values():
                    for cell_id in [one for one in member.at_work if one not in member.kind.rows.records]:
                        self._give_row(member, cell_id, Status.INTERRUPTED, "stopped by the user")
            raise
        finally:
            for number in self.members:
                self.engine.end(number)

    # Machines

    def _hire(self) -> None:
        if self.clock() - self.counted_at < _TICK:  # counting takes milliseconds
            return
        self.counted_at, self.places = self.clock(), self.engine.places()
        while len(self.members) < self.places and not self._is_hopeless():
            member = _Member(self.engine.start())
            self.members[member.number] = member
            self._set_up(member)

    def _set_up(self, member: _Member) -> None:
        plan, base = self.plan, self.kinds.base
        # Cells that may read different files are enough.
        cells = {
            (one.variant, one.inputs, one.pretrained, one.task and (one.task, one.shape)): one for one in plan.cells
        }
        plugins = tuple(str(Path.cwd() / one) if one.endswith(".py") else one for one in plan.options.plugins)
        settings = replace(plan.settings, plugins=plugins, products=plan.settings.products or member.products)
        wanted = requirements(base["input_files"], base["plugins"])
        plan = _light(replace(plan, settings=settings), cells.values())
        self.engine.ask(member.number, "begin", str(Path.cwd()), plan, wanted, self.kinds.known())

    def _is_hopeless(self) -> bool:
        return self.stillborn >= DEATHS + sum(bool(member.host) for member in self.members.values())

    def _hear(self, member: _Member, event: Event | str) -> None:
        member.heard = self.clock()
        try:
            match event:
                case ("alive", name):
                    member.name = one_line(str(name))
                case ("warned", message):
                    self.watcher.warned(f"{member.name}: {one_line(str(message))}")
                case ("visiting", cell_id):
                    if member.cells[cell_id].training is None:  # trainings run several at once
                        member.at_work.clear()
                    member.at_work[cell_id] = now()
                    self.watcher.visiting(member.cells[cell_id])
                case ("trained", cell_id, step, steps):
                    self.watcher.trained(member.cells[cell_id], int(step), int(steps))
                case ("add", outcome):
                    self._store(member, _checked(member, outcome))
                case ("visited", cell_id):
                    self.watcher.visited(member.kind.rows.records[cell_id])
                case ("correct", dict(limits)) if limits.keys() <= _LIMITS:
                    member.state = cast(Ready, {**member.state, **limits})
                    member.kind.describe(member.host, member.state)
                case ("done", (process, state)) if not member.host:
                    self._admit(member, process, state)
                case ("done", None) if all(group.is_complete(1) for group in member.lot):
                    member.lot = []
                case ("failed", reason) if not member.host:  # it is kept, so that nobody is given it again
                    member.refused = f"{member.name} cannot take part: {one_line(str(reason))}"
                    self.watcher.warned(member.refused)
                case str(reason) | ("failed", str(reason)):
                    self._bury(member, reason)
                case _:
                    raise ValueError
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            self._bury(member, "it sent garbage")

    def _admit(self, member: _Member, process: dict[str, Any], state: Ready) -> None:
        known = self.kinds.products_on(state["environment"].get("processor"))
        if known not in (None, member.products, Products.of(state)):  # rows of different libraries are not compared
            member.products = known
            self._set_up(member)
            return
        member.state, member.kind = state, self.kinds.admit(member.name, process, state)
        member.host, self.stillborn = process["host"], 0

    def _bury(self, member: _Member, reason: str) -> None:
        """Give a machine up. Its unfinished work moves on, except for a cell that took three with it."""
        self.why = one_line(reason)
        if not member.host:
            self.stillborn += 1
            self.watcher.warned(f"a machine was lost before it took part: {self.why}")
        else:
            self.watcher.warned(f"{member.name} was lost: {self.why}; its cells go to another machine")
        for cell_id in list(member.at_work):
            self.deaths[cell_id] += 1
            if self.deaths[cell_id] == DEATHS:
                self._give_row(member, cell_id, Status.CRASH, f"{TOOK}, the last one: {self.why}")
        left = [group for group in member.lot if not group.is_complete(self.plan.rules.rounds)]
        for group in left:
            if group.kind and not any(cell.cell_id in group.kind.rows.records for cell in group.cells):
                group.kind, group.host = None, ""
        self.waiting = [*left, *self.waiting]
        del self.members[member.number]
        self.engine.end(member.number)

    def _refuse_to_wait_for_ever(self) -> None:
        """Stop if no machine works or is about to, and none of them may take what waits.

        Raises NoMachine after two minutes or for good, UsageError if no machine has taken part.
        """
        members = self.members.values()
        if self.is_at_work or any(one.is_setting_up and one.heard is not None for one in members):
            self.busy_at = self.clock()
        refused = [member.refused for member in members if member.refused]
        nobody_may = len(refused) == len(members) and (self._is_hopeless() or 0 < len(members) >= self.places)
        if not self.waiting or (self.clock() - self.busy_at <= _PATIENCE and not nobody_may):
            return
        why = next(iter(refused), self.why)
        classes = ", ".join(sorted({group.kind.machine_class for group in self.waiting if group.kind}))
        if classes and any(member.host for member in members):
            why = f"they were begun on machines of class {classes}, and none is left"
        left = sum(len(group.cells) for group in self.waiting)
        said = f"{left} cell{'s wait' if left != 1 else ' waits'} and no machine may measure them: {why}"
        if not self.kinds.all:
            raise UsageError(f"{said}; nothing was written")
        raise NoMachine(f"{said}; the same command goes on when there is one")

    # Their work

    def _deal(self, member: _Member) -> None:
        """Let a machine measure the next lot, if any waiting group may be measured there now."""
        begun = [one for one in self.waiting if one.kind is member.kind]
        mine = [one for one in begun if one.host == member.host or not self._keeps(one.host)]
        mine += [one for one in self.waiting if one.kind is None]
        # Lots become smaller towards the end, so that machines end together.
        most = min(_MOST, sum(group.weight for group in mine) / (2 * len(self.members)))
        loads = accumulate(group.weight for group in mine)
        member.lot = [group for group, load in zip(mine, loads, strict=True) if load <= most] or mine[:1]
        if not member.lot:
            return
        self.waiting = [group for group in self.waiting if group not in member.lot]
        for group in member.lot:
            group.kind, group.host = member.kind, member.host
        member.cells = {cell.cell_id: cell for group in member.lot for cell in group.cells}
        member.at_work.clear()
        rows = member.kind.rows
        # Ratios are of one host, so another host's rows are measured anew.
        earlier = [(cell, rows.records[id_]) for id_, cell in member.cells.items() if id_ in rows.records]
        rows.forget(cell for cell, row in earlier if row.host != member.host and not row.reason.startswith(TOOK))
        known = {id_: row for id_, row in rows.records.items() if id_ in member.cells or row.status in STOPPING}
        samples = {id_: rows.samples[id_] for id_ in member.cells if id_ in rows.samples}
        cells = [cell for cell in self.plan.cells if cell.cell_id in known or cell.cell_id in member.cells]
        plan = replace(_light(member.kind.plan, cells), only=frozenset(member.cells))
        self.engine.ask(member.number, "measure", plan, (known, samples))
        member.heard = self.clock()

    def _keeps(self, host: str) -> bool:
        """True for a host that keeps its own groups, being here or expected."""
        members = self.members.values()
        is_expected = host in self.expected and self.clock() - self.begun_at <= _PATIENCE
        return any(member.host == host or (is_expected and member.is_setting_up) for member in members)

    def _store(self, member: _Member, outcome: Outcome) -> None:
        """Store a row; raise StoreError if it cannot be written."""
        kind, record = member.kind, outcome.record
        if outcome.samples:
            kind.rows.samples.setdefault(record.cell_id, {})[outcome.samples["round"]] = outcome.taken
        record.host = member.host
        kind.rows.put(member.cells[record.cell_id], record, member.state, record.started_at)
        kind.folder.add(record, outcome.samples, outcome.failure, outcome.stderr, outcome.points)
        kind.folder.write_csv(kind.rows.in_order(), at_most_every=10.0)
        member.at_work.pop(record.cell_id, None)

    def _give_row(self, member: _Member, cell_id: str, status: Status, reason: str) -> None:
        record = Record.of(member.cells[cell_id], status, reason, quick=self.plan.rules.quick)
        record.started_at = member.at_work[cell_id]
        self._store(member, Outcome(record))
        if status is not Status.INTERRUPTED:
            self.watcher.visited(record)


def _checked(member: _Member, data: Any) -> Outcome:
    """The outcome in an event; raises as :meth:`Outcome.from_json` if it is none of the machine's lot."""
    rows, cell = member.kind.rows, member.cells[data["record"]["cell_id"]]
    round_ = data["samples"]["round"] if data["samples"] else rows.plan.rules.rounds
    if round_ not in range(rows.plan.rules.rounds + 1):
        raise ValueError("no such round")
    if round_ == 0:  # perhaps once more
        rows.samples.pop(cell.cell_id, None)
    request = rows.request(cell, round_)
    return Outcome.from_json(data, cell, threads=threads_of(cell, rows.plan.settings), request=request)


def _light(plan: Plan, cells: Iterable[Cell]) -> Plan:
    """The plan as a machine needs it: some of its cells, and the name of its suite alone."""
    options = replace(plan.options, retry_failed=False)  # what failed in this run is not tried again
    return replace(plan, suite=Suite.model_construct(name=plan.suite.name), cells=list(cells), options=options)
