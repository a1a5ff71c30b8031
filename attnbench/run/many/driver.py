"""The driver: it shares the cells out and hears the machines.

What each machine does one after the other is a script, which makes the calls. A call has a number, and only the answer
with the number of the machine's last call counts: what a machine sends that was given up is dropped. So a visit may
happen twice, but is accepted once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import cast

from attnbench.cell import Cell
from attnbench.errors import AttnbenchError, Exit, StoreError, UsageError
from attnbench.record import Record, one_line
from attnbench.run.isolation import START_TIMEOUT
from attnbench.run.many.engine import Answer, Engine, Event, Message
from attnbench.run.many.kinds import Kind, Kinds
from attnbench.run.many.lease import PATIENCE, clock
from attnbench.run.many.order import Order, misfit
from attnbench.run.many.order import ours as wanted_of
from attnbench.run.many.queue import Group, Queue
from attnbench.run.many.script import Call, Lost, Member, Script, failure
from attnbench.run.many.work import TOOK, Work, is_complete
from attnbench.run.plan import Plan
from attnbench.run.protocol import Outcome, Ready
from attnbench.run.rows import now
from attnbench.run.runner import Watcher
from attnbench.run.trainings import count_trainings
from attnbench.status import Status
from attnbench.store import RunFolder

DEATHS = 3
"""A cell is not tried again after this number of machines died with it."""
_TICK = 1.0
"""Seconds between two looks at what may have changed without news."""
_PING = 20.0
"""Seconds after which a machine that has nothing to do is called, so that it keeps its lease."""
_COME = 120.0
"""Seconds that a machine may take to come: one that was there when a run was stopped, or any at all."""


class NoMachine(AttnbenchError):
    """Cells are left, and none of the machines may measure them."""

    exit_code = Exit.FAILED


def execute_on(
    engine: Engine, plan: Plan, watcher: Watcher | None = None, clock: Callable[[], float] = clock
) -> list[tuple[RunFolder, list[Record]]]:
    """Measure every cell that is not measured yet on the machines of an engine, storing each row as it comes.

    Args:
        plan: with :attr:`~attnbench.run.plan.Options.on`. Threads and memory limit, where they are not given, are those
            of each machine.
        clock: seconds that pass for the engine.

    Returns:
        The run folder of each kind of machines, with its rows.

    Raises:
        NoMachine: cells are left, and there is no machine for them; what is measured is kept.
        UsageError: no machine may measure anything; nothing is written.
        StoreError and its kinds: a folder cannot be made, written or locked.
        CorruptResults: a run to be continued is damaged.
        KeyboardInterrupt: passed on after what is finished has been written.
    """
    with ExitStack() as ours:
        return _Driver(engine, plan, watcher or Watcher(), clock, ours).go()


class _Driver:
    def __init__(
        self, engine: Engine, plan: Plan, watcher: Watcher, clock: Callable[[], float], ours: ExitStack
    ) -> None:
        self.engine, self.plan, self.watcher, self.clock = engine, plan, watcher, clock
        self.kinds = Kinds(plan, engine.name, ours, watcher.warned)
        self.order = Order.of(plan)
        self.wanted = wanted_of(self.kinds.base)
        self.queue = Queue(plan.cells)
        self.scripts: dict[int, Script] = {}
        self.calls: dict[int, Call] = {}
        """What each machine is asked now."""
        self.members: dict[int, Member] = {}
        self.refused: dict[int, str] = {}
        """Machines that may not take part, and why. They are kept: what is given back would only be given again."""
        self.probing: dict[str, int] = {}
        """Processor -> the machine that set its process up last."""
        self.deaths: Counter[str] = Counter()
        self.attempts = 0
        self.stillborn = 0
        """Machines in a row that died before they took part."""
        self.why = "the engine has none"
        """What became of the last machine that is not there."""
        self.begun_at = clock()
        self.idle_since: float | None = None
        """Since when nobody has worked, although cells wait."""
        self._looked_at: float | None = None
        """When the engine was last asked how many machines there are."""
        self.work = Work(plan, self.queue, watcher)
        self.expected = self._take_up()

    def _take_up(self) -> set[str]:
        """Bind groups to where they were begun, and drop those that are complete; the hosts that left some."""
        for group in self.queue.waiting:
            rows = [found for cell in group.cells if (found := self.kinds.row_of(cell.cell_id))]
            if rows:
                kind, newest = max(rows, key=lambda one: one[1].started_at)
                group.kind, group.host = kind, newest.host
        self.queue.drop(self._is_complete)
        return {group.host for group in self.queue.waiting if group.host}

    def _is_complete(self, group: Group) -> bool:
        return isinstance(group.kind, Kind) and is_complete(group.kind, group.cells)

    def go(self) -> list[tuple[RunFolder, list[Record]]]:
        self._tell_begun()
        try:
            while not self.queue.is_empty:
                self._hire()
                for event in self.engine.wait(_TICK):
                    self._hear(event)
                self._give_up_overdue()
                for machine in [one for one in self.scripts if one not in self.calls]:
                    self._advance(machine, {})
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
            for machine in list(self.scripts):
                self._let_go(machine)
        for kind in self.kinds.all:
            kind.folder.write_csv(kind.rows.in_order())
            kind.folder.conclude()
        return [(kind.folder, kind.rows.in_order()) for kind in self.kinds.all]

    def _tell_begun(self) -> None:
        """Tell the watcher how much is ahead: all of it is expected to turn out ok."""
        waiting = [cell for group in self.queue.waiting for cell in group.cells]
        records = {id_: record for kind in self.kinds.all for id_, record in kind.rows.records.items()}
        timed = [cell for cell in waiting if cell.training is None]
        visits = sum(len(self._rounds_of(cell)) for cell in timed)
        _, ahead = count_trainings([cell for cell in waiting if cell.training is not None], records)
        root = self.plan.options.out / self.plan.suite.name
        self.watcher.begun(root, cells=len(self.plan.cells), visits=visits + ahead, resumed=len(records))

    def _rounds_of(self, cell: Cell) -> range:
        found = self.kinds.row_of(cell.cell_id)
        last = self.plan.rules.rounds if "time" in cell.measure else 1
        return range(0 if found is None else min(last, found[1].time_rounds or last), last)

    # Machines

    def _hire(self) -> None:
        """Own all machines that there are, unless those that came last did not live long enough to take part."""
        if self._looked_at is not None and self.clock() - self._looked_at < _TICK:  # asking takes milliseconds
            return
        self._looked_at, places = self.clock(), self.engine.places()
        while len(self.scripts) < places and not self._is_hopeless():
            machine = self.engine.start()
            self.scripts[machine] = self._script(machine)
            self._advance(machine, None)

    def _advance(self, machine: int, answer: Message | None) -> None:
        """Let a machine's script go on to its next call."""
        script = self.scripts[machine]
        try:
            call = next(script) if answer is None else script.send(answer)
        except Lost as lost:
            self._bury(machine, str(lost))
            return
        except StopIteration:  # nothing is left to do
            self._let_go(machine)
            return
        if call is None:
            self.calls.pop(machine, None)
            return
        self.attempts += 1
        call.attempt, call.since, call.started_at = self.attempts, self.clock(), call.started_at or now()
        self.calls[machine] = call
        self.engine.call(machine, call.method, {**call.message, "attempt": call.attempt, "most_s": call.most_s})

    def _hear(self, event: Event) -> None:
        if event.machine not in self.scripts:  # it was given up
            return
        if not isinstance(event, Answer):
            self._bury(event.machine, event.reason)
            return
        call = self.calls.get(event.machine)
        if call is None or event.value.get("attempt") != call.attempt:  # to a call that does not count any more
            return
        if member := self.members.get(event.machine):
            self._tell_notes(member.name, event.value)
        self._advance(event.machine, event.value)

    def _tell_notes(self, name: str, answer: Message) -> None:
        for note in answer.get("notes", ()):
            self.watcher.warned(f"{name}: {one_line(str(note))}")

    def _give_up_overdue(self) -> None:
        """Give up machines that have not answered although their lease is over, whatever the engine thinks of them."""
        for machine, call in list(self.calls.items()):
            late = self.clock() - call.since > call.most_s + 2 * PATIENCE
            if late and call.method != "hello":  # which waits until a machine is free
                self._bury(machine, f"no answer for {self.clock() - call.since:.0f} s")

    def _bury(self, machine: int, reason: str) -> None:
        """Give a machine up. What it has not completed goes to another one; a cell that took three with it does not."""
        call, member = self.calls.get(machine), self.members.get(machine)
        self.why = one_line(reason)
        if member is None:
            self.stillborn += 1
            self.watcher.warned(f"a machine was lost before it took part: {self.why}")
        else:
            self.watcher.warned(f"{member.name} was lost: {self.why}; its cells go to another machine")
            for cell in call.cells if call else ():
                self.deaths[cell.cell_id] += 1
                if self.deaths[cell.cell_id] == DEATHS:
                    why = f"{TOOK}, the last one: {reason}"
                    record = Record.of(cell, Status.CRASH, why, quick=self.plan.rules.quick)
                    self.work.finish(member, cell, Outcome(record), call.started_at if call else now())
        self._let_go(machine)

    def _let_go(self, machine: int) -> None:
        self.scripts.pop(machine).close()
        self.calls.pop(machine, None)
        self.refused.pop(machine, None)
        self.members.pop(machine, None)
        for group in self.queue.give_back(machine):
            if isinstance(group.kind, Kind) and not any(c.cell_id in group.kind.rows.records for c in group.cells):
                group.kind, group.host = None, ""
        self.engine.end(machine)

    def _refuse_to_wait_for_ever(self) -> None:
        """Stop where nobody works, nobody is about to, and nothing that waits may be given to those who are there.

        Raises:
            NoMachine: so it is, for two minutes or for good.
        """
        sets_up = any(call.method == "begin" for call in self.calls.values())
        if self.queue.is_empty or self.queue.is_worked_on or sets_up:
            self.idle_since = None
            return
        if self.idle_since is None:
            self.idle_since = self.clock()
        all_refused = 0 < len(self.refused) == len(self.scripts) >= self.engine.places()
        lives_nobody = not self.scripts and self._is_hopeless()
        if not (all_refused or lives_nobody) and self.clock() - self.idle_since <= _COME:
            return
        left = sum(len(group.cells) for group in self.queue.waiting)
        cells = f"{left} cell{'s wait' if left != 1 else ' waits'}"
        kinds = {group.kind.machine_class for group in self.queue.waiting if isinstance(group.kind, Kind)}
        if self.members and kinds:
            classes = ", ".join(sorted(kinds))
            raise NoMachine(
                f"{cells} for a machine of class {classes}, where they were begun, and none is left; the same command "
                "goes on when there is one"
            )
        why = next(iter(self.refused.values()), self.why)
        if not self.kinds.all:
            raise UsageError(f"{cells} and no machine may measure them: {why}; nothing was written")
        raise NoMachine(f"{cells} and no machine may measure them: {why}; the same command goes on")

    def _is_hopeless(self) -> bool:
        """Whether no more machines are tried, since too many in a row died before they took part."""
        return self.stillborn >= DEATHS + len(self.members)

    # What a machine does

    def _script(self, machine: int) -> Script:
        hello = yield Call("hello", self.order.hello, START_TIMEOUT)
        begin: Message = {}
        if not (why := failure(hello) or misfit(hello, self.wanted)):
            processor = hello["processor"]
            yield from self._wait(lambda: self._knows_products(processor))
            self.probing[processor] = machine
            known, products = self.kinds.known(hello["host"]), self.kinds.products_on(processor)
            order = self.order.begin(hello["threads"], known, products)
            begin = yield Call("begin", order, 3 * START_TIMEOUT)
            why = failure(begin)
        if why:
            name = one_line(str(hello.get("name", "a machine")))
            self.refused[machine] = f"{name} cannot take part: {why}"
            self.watcher.warned(self.refused[machine])
            yield from self._wait(lambda: False)  # kept, so that nobody is given it again
            return
        state = cast(Ready, begin["state"])
        member = Member(machine, one_line(str(hello["name"])), hello["host"], self.kinds.admit(hello, state), state)
        self.members[machine] = member
        self.stillborn = 0
        for answer in (hello, begin):
            self._tell_notes(member.name, answer)
        last = self.clock()
        while not self.queue.is_empty:
            lot = self.queue.take(
                machine, kind=member.kind, host=member.host, keeps=self._keeps, machines=len(self.scripts)
            )
            if lot:
                yield from self.work.measure(member, lot)
                last = self.clock()
            elif self.clock() - last > _PING:
                yield Call("ping", most_s=_PING)
                last = self.clock()
            else:
                yield None

    def _wait(self, is_over: Callable[[], bool]) -> Script:
        """Wait, and keep the machine's lease meanwhile."""
        last = self.clock()
        while not is_over():
            if self.clock() - last > _PING:
                yield Call("ping", most_s=_PING)
                last = self.clock()
            else:
                yield None

    def _knows_products(self, processor: str) -> bool:
        """Whether a machine with this processor may set its process up.

        The first one alone finds out which libraries are faster, and the others use them: rows of different libraries
        are not compared.
        """
        call = self.calls.get(self.probing.get(processor, -1))
        return self.kinds.products_on(processor) is not None or call is None or call.method != "begin"

    def _keeps(self, host: str) -> bool:
        """Whether a host goes on with what it has begun: it is there, or may come again after the run was stopped."""
        if any(member.host == host for member in self.members.values()):
            return True
        comes = any(machine in self.calls for machine in self.scripts if machine not in self.members)
        return host in self.expected and comes and self.clock() - self.begun_at <= _COME

    def _note_interrupted(self) -> None:
        """Give cells that are at work, and have no row yet, one that says so."""
        for machine, call in self.calls.items():
            for cell in call.cells if machine in self.members else ():
                member = self.members[machine]
                if cell.cell_id not in member.kind.rows.records:
                    record = Record.of(cell, Status.INTERRUPTED, "stopped by the user")
                    self.work.finish(member, cell, Outcome(record), call.started_at)
