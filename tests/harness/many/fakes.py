"""A cluster in this process only: its machines answer at once, die, fall silent or thaw, as they are told."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnbench.harness.many.actor import Event, misfit
from attnbench.harness.many.driver import execute_on
from attnbench.harness.many.ray import RayEngine
from attnbench.harness.outside.trainers import at_chosen_rates, phases
from attnbench.harness.plan import Options, Plan, in_order, make_plan
from attnbench.harness.rows import Known, Rows, now
from attnbench.harness.runner import Watcher
from attnbench.harness.wire.process import environment_for
from attnbench.harness.wire.protocol import Outcome
from attnbench.measure.machine import machine_class, variables
from attnbench.measure.status import Status
from attnbench.results.record import Record
from attnbench.results.store import RunFolder
from attnbench.suite.cell import Cell
from tests.answers.machines import state

SUITE = """\
name: s
sweeps: [{name: w, matrix: {variant: [softmax, linear], seq_len: [2, 4, 8, 16]}}]
"""


@dataclass(eq=False)
class Host:
    """A machine of the cluster. ``says`` are requirements that it does not meet, ``state`` changes its facts."""

    name: str
    index: int = 0
    says: dict[str, str] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    listed: bool = True
    """Whether the engine counts it."""
    up: bool = True
    owner: int | None = None
    """The machine, as the engine calls it, that it is now."""

    def facts(self) -> dict[str, Any]:
        """What its measuring process says."""
        known = {"window_products": "default", "exp_rate": {"float32": 1e9}, **state(self.index), **self.state}
        return {**known, "machine_class": machine_class({**known, "threads": 2})}

    def begin(self, wanted: Mapping[str, str]) -> Iterator[Event]:
        if why := misfit({**wanted, **self.says}, wanted):
            yield "failed", why
            return
        for note in self.notes:
            yield "warned", note
        process = {"host": f"{self.name}-digest", "threads": 2, "variables": variables(environment_for(2))}
        yield "done", (process, self.facts())


def visited(cell: Cell, round_: int, **columns: Any) -> Message:
    """The outcome of a visit where all goes well."""
    seconds = cell.shape.N / 7
    record = Record.of(cell, Status.OK, **{"time_median_s": seconds, "time_rounds": round_ + 1, **columns})
    record.process = "tuned"
    samples = {"cell_id": cell.cell_id, "round": round_, "samples": [{"seconds": seconds, "calls": 1}]}
    return Outcome(record, samples).to_json()


def crashed(cell: Cell, status: Status = Status.CRASH, reason: str = "it ended") -> Message:
    """The outcome where the cell's process crashed, but not the machine."""
    record = Record.of(cell, status, reason)
    return Outcome(record, None, record, ["the last line"]).to_json()


def trained(cell: Cell) -> Message:
    """The outcome of a training, which is the better the higher its rate."""
    assert cell.training is not None
    rate = cell.training.learning_rate
    known = {"val_score": 0.5 + 10 * rate, "score": 0.5, "best_step": 6, "learning_rate": rate, "train_s": 1.0}
    record = Record.of(cell, Status.OK, **known, score_low=0.4, score_high=0.6, chance_score=0.25, test_examples=32)
    record.process, record.threads = "as-shipped", 1
    point = {"step": 6, "train_loss": 1.0, "val_score": 0.5, "val_loss": 1.0, "learning_rate": 0.0, "cpu_s": 1.0}
    return Outcome(record, points=[point]).to_json()


@dataclass(frozen=True)
class Asked:
    """One step of a machine: ``begin``, ``measure``, ``fresh`` (a process), ``visit``, ``limits`` or ``train``."""

    host: str
    method: str
    label: str = ""
    round: int = 0
    cell: Cell | None = field(default=None, repr=False)


Message = dict[str, Any]
Reaction = str | Message | Event
"""``answer``, ``die`` (the actor), ``vanish`` (the node with it), ``silent`` (never a word), ``freeze`` (the engine
takes it for dead, and three answers later it answers all the same), the outcome, or an event in its place."""


class Cluster(RayEngine):
    """An engine. Time passes only while nothing happens, and a tenth of a second for each answer."""

    device = "cpu"

    def __init__(self, *hosts: Host, react: Callable[[Asked], Reaction] = lambda asked: "answer") -> None:
        self.hosts, self.react = list(hosts), react
        self.time = 0.0
        self.log: list[Asked] = []
        self.lots: list[list[int]] = []
        """The lengths in each lot, in the order in which machines took them."""
        self.ended: list[int] = []
        self.started = 0
        self._placed: dict[int, Host] = {}
        self._streams: dict[int, Iterator[Event | str | None]] = {}
        self._later: list[tuple[int, Event]] = []
        self._thaws_at = 0
        self.at: dict[float, Callable[[], None]] = {}
        """What happens to the cluster when so many seconds have passed."""

    def clock(self) -> float:
        return self.time

    def places(self) -> int:
        return sum(host.listed for host in self.hosts)

    def start(self) -> int:
        self.started += 1
        return self.started

    def ask(self, machine: int, method: str, *arguments: Any) -> None:
        assert machine not in self._streams, "one thing at a time"
        assert machine not in self.ended
        self._streams[machine] = self._work(machine, method, *pickle.loads(pickle.dumps(arguments)))

    def wait(self, seconds: float) -> Sequence[tuple[int, Event | str]]:
        for due in [moment for moment in self.at if moment <= self.time]:
            self.at.pop(due)()
        if self._later and len(self.log) >= self._thaws_at:
            return [self._later.pop(0)]
        for machine in list(self._streams):
            if machine not in self._placed and not self._place(machine):
                continue
            stream = self._streams.pop(machine)
            event = next(stream, None)
            if event is not None:
                if event[:1] not in (("done",), ("failed",)):
                    self._streams[machine] = stream
                return [(machine, event if isinstance(event, str) else tuple(json.loads(json.dumps(event))))]
        self.time += seconds
        return []

    def _place(self, machine: int) -> bool:
        free = next((host for host in self.hosts if host.up and host.owner is None), None)
        if free is not None:
            free.owner, self._placed[machine] = machine, free
        return free is not None

    def _work(self, machine: int, method: str, *arguments: Any) -> Iterator[Event | str | None]:
        host = self._placed[machine]
        yield "alive", host.name
        events = self._begin(host, *arguments) if method == "begin" else self._measure(host, *arguments)
        for event in events:
            if event in ("die", "vanish", "freeze"):
                host.up = host.listed = event == "die"
                self._free(machine)
                yield "no sign of life" if event == "freeze" else "the node is gone"
                return
            yield event
            if event is None or isinstance(event, str) or event[0] == "failed":
                return

    def _asked(self, host: Host, method: str, cell: Cell | None = None, round_: int = 0) -> Reaction:
        asked = Asked(host.name, method, cell.label if cell else "", round_, cell)
        self.log.append(asked)
        self.time += 0.1
        return self.react(asked)

    def _begin(self, host: Host, folder: str, plan: Plan, wanted: Any, known: Any) -> Iterator[Event | str | None]:
        reaction = self._asked(host, "begin")
        yield from host.begin(wanted) if reaction == "answer" else self._instead(reaction)

    def _instead(self, reaction: Reaction) -> Iterator[Event | str | None]:
        if reaction == "silent":
            yield None
        elif reaction != "answer":
            assert not isinstance(reaction, dict)
            yield reaction

    def _measure(self, host: Host, plan: Plan, known: Known) -> Iterator[Event | str | None]:
        assert plan.only is not None
        rows = Rows(plan, RunFolder(Path("nowhere")), known)
        self.lots.append(sorted({cell.shape.N for cell in plan.cells if cell.cell_id in plan.only}))
        yield from self._instead(self._asked(host, "measure"))
        for round_ in range(plan.rules.rounds):
            due = rows.due(round_)
            if round_ and due:
                yield from self._instead(self._asked(host, "fresh"))
            for cell in in_order(due, f"{plan.suite.name}{round_}"):
                yield from self._visit(host, rows, cell, round_)
        timed, impossible = rows.beyond_limits()
        if impossible:
            self._asked(host, "limits")
            yield "correct", BETTER
            for record in [rows.records[cell.cell_id] for cell in timed]:
                record.peak_fraction = 0.9
                yield "add", Outcome(record).to_json()
        for cells in (phases(rows.trainings())[0], at_chosen_rates(rows.trainings(), rows.records)):
            for cell in cells:
                if cell.cell_id not in rows.records:
                    yield from self._visit(host, rows, cell, None)
        yield "done", None

    def _visit(self, host: Host, rows: Rows, cell: Cell, round_: int | None) -> Iterator[Event | str | None]:
        yield "visiting", cell.cell_id
        if round_ == 0 and (known := rows.known(cell)):
            answer: Message = Outcome(known).to_json()
        else:
            answer = trained(cell) if round_ is None else visited(cell, round_)
            if round_ is None:
                yield "trained", cell.cell_id, 3, 6
            reaction = self._asked(host, "train" if round_ is None else "visit", cell, round_ or 0)
            if reaction == "freeze":
                self._later.append((host.owner or 0, ("add", answer)))
                self._thaws_at = len(self.log) + 3
            if not isinstance(reaction, dict):
                yield from self._instead(reaction)
            else:
                answer = reaction
        try:
            outcome = Outcome.from_json(answer, cell)
        except (AttributeError, KeyError, TypeError, ValueError):
            yield "add", answer
            return
        rows.settle(cell, round_ or 0, outcome)
        threads = outcome.record.threads
        rows.put(cell, outcome.record, host.facts(), now())  # type: ignore[arg-type]  # the facts that are read
        outcome.record.threads = threads or outcome.record.threads
        yield "add", outcome.to_json()
        yield "visited", cell.cell_id

    def _free(self, machine: int) -> None:
        host = self._placed.pop(machine, None)
        if host is not None:
            host.owner = None

    def end(self, machine: int) -> None:
        self.ended.append(machine)
        self._streams.pop(machine, None)
        self._free(machine)

    def visits(self, host: str | None = None) -> list[Asked]:
        """The visits that machines were asked for."""
        return [one for one in self.log if one.method == "visit" and host in (None, one.host)]


BETTER = {"matmul_rate": {"float32": 9e11}, "exp_rate": {"float32": 2e9}, "copy_rates": [[262_144, 6e10]]}
"""The limits of a machine that was measured once more."""


def measure(
    folder: Path, cluster: Cluster, watcher: Watcher | None = None, suite: str = SUITE, **options: Any
) -> list[tuple[RunFolder, list[Record]]]:
    """Run the suite on the cluster, with results in ``folder / "out"``."""
    file = folder / "s.yaml"
    file.write_text(suite)
    settings = {"device": "cpu", "on": "ray", "out": folder / "out", "rounds": 2, **options}
    return execute_on(cluster, make_plan(file, Options(**settings)), watcher, cluster.clock)
