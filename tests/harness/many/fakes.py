"""A cluster in this process only: its machines answer at once, die, fall silent or thaw, as they are told."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnbench.contract.plugins.load import provenance
from attnbench.harness.many.driver import execute_on, ours
from attnbench.harness.plan import Options, make_plan
from attnbench.harness.runner import Watcher
from attnbench.harness.wire.process import environment_for
from attnbench.harness.wire.protocol import Outcome, VisitCell
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
    """A machine of the cluster. ``says`` and ``state`` change what it answers to hello and begin."""

    name: str
    index: int = 0
    says: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    listed: bool = True
    """Whether the engine counts it."""
    up: bool = True
    owner: int | None = None
    """The machine, as the engine calls it, that it is now."""

    def hello(self) -> dict[str, Any]:
        versions = ours({"input_files": {}, "plugins": provenance(())})
        usual: dict[str, Any] = {
            "host": f"{self.name}-digest",
            "name": self.name,
            "niceness": 5,
            "niceness_of_parent": 5,
            "threads": 2,
        }
        usual |= {"processor": self.begin()["state"]["environment"]["processor"]}
        return {**versions, **usual, "variables": variables(environment_for(2)), **self.says}

    def begin(self) -> dict[str, Any]:
        known = {"window_products": "default", "exp_rate": {"float32": 1e9}, **state(self.index), **self.state}
        return {"state": {**known, "machine_class": machine_class({**known, "threads": 2})}}


def visited(cell: Cell, round_: int, **columns: Any) -> dict[str, Any]:
    """What a machine answers where all goes well."""
    seconds = cell.shape.N / 7
    record = Record.of(cell, Status.OK, **{"time_median_s": seconds, "time_rounds": round_ + 1, **columns})
    record.process = "tuned"
    samples = {"cell_id": cell.cell_id, "round": round_, "samples": [{"seconds": seconds, "calls": 1}]}
    return {"outcome": Outcome(record, samples).to_json()}


def crashed(cell: Cell, reason: str = "it ended") -> dict[str, Any]:
    """What a machine answers where the cell's process crashed, but not the machine."""
    record = Record.of(cell, Status.CRASH, reason)
    return {"outcome": Outcome(record, None, record, ["the last line"]).to_json()}


@dataclass(frozen=True)
class Asked:
    """One call as a machine got it."""

    host: str
    method: str
    label: str = ""
    round: int = 0


Reaction = str | dict[str, Any]
"""``answer``, ``die`` (the actor), ``vanish`` (the node with it), ``silent`` (never a word), ``freeze`` (the engine
takes it for dead, and three answers later it answers all the same), or the answer itself."""


Message = dict[str, Any]
Event = tuple[int, Message | str]


class Cluster:
    """An engine. Time passes only while nothing happens, and a tenth of a second for each answer."""

    name = "fake"

    def __init__(self, *hosts: Host, react: Callable[[Asked], Reaction] = lambda asked: "answer") -> None:
        self.hosts, self.react = list(hosts), react
        self.time = 0.0
        self.log: list[Asked] = []
        self.ended: list[int] = []
        self.started = 0
        self._placed: dict[int, Host] = {}
        self._inbox: dict[int, tuple[str, Message]] = {}
        self._later: list[Event] = []
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

    def call(self, machine: int, method: str, message: Mapping[str, Any]) -> None:
        assert machine not in self._inbox, "one call at a time"
        assert machine not in self.ended
        self._inbox[machine] = (method, deepcopy(dict(message)))

    def wait(self, seconds: float) -> Sequence[Event]:
        for due in [moment for moment in self.at if moment <= self.time]:
            self.at.pop(due)()
        if self._later and len(self.log) >= self._thaws_at:
            return [self._later.pop(0)]
        for machine in list(self._inbox):
            host = self._placed.get(machine) or self._place(machine)
            if host is None:
                continue
            method, message = self._inbox.pop(machine)
            self.time += 0.1
            event = self._react(machine, host, method, message)
            if event is not None:
                return [event]
        self.time += seconds
        return []

    def _place(self, machine: int) -> Host | None:
        free = next((host for host in self.hosts if host.up and host.owner is None), None)
        if free is not None:
            free.owner, self._placed[machine] = machine, free
        return free

    def _react(self, machine: int, host: Host, method: str, message: dict[str, Any]) -> Event | None:
        request = VisitCell.from_json(message["request"]) if method == "visit" else None
        asked = Asked(host.name, method, *((request.cell.label, request.round) if request else ()))
        self.log.append(asked)
        reaction = self.react(asked)
        if reaction == "silent":
            return None
        if reaction in ("die", "vanish"):
            self._free(machine)
            host.up = host.listed = reaction == "die"
            return machine, "the node is gone"
        value = reaction if isinstance(reaction, dict) else self._answer(host, method, message)
        answer = machine, json.loads(json.dumps({"notes": [], **value}))
        if reaction == "freeze":
            self._later.append(answer)
            self._thaws_at = len(self.log) + 3
            host.up = host.listed = False
            self._free(machine)
            return machine, "no sign of life"
        return answer

    def _answer(self, host: Host, method: str, message: dict[str, Any]) -> dict[str, Any]:
        if method == "hello":
            return host.hello()
        if method == "begin":
            return host.begin()
        if method == "visit":
            request = VisitCell.from_json(message["request"])
            return visited(request.cell, request.round)
        return {}

    def _free(self, machine: int) -> None:
        host = self._placed.pop(machine, None)
        if host is not None:
            host.owner = None

    def end(self, machine: int) -> None:
        self.ended.append(machine)
        self._inbox.pop(machine, None)
        self._free(machine)

    def visits(self, host: str | None = None) -> list[Asked]:
        """The visits that machines were asked for."""
        return [one for one in self.log if one.method == "visit" and host in (None, one.host)]


class Listening(Watcher):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.numbers: tuple[int, ...] = ()
        self.rows: list[Record] = []

    def begun(self, folder: Path, *, cells: int, visits: int, resumed: int) -> None:
        self.numbers = cells, visits, resumed

    def visited(self, record: Record) -> None:
        self.rows.append(record)

    def warned(self, message: str) -> None:
        self.warnings.append(message)


def measure(
    folder: Path, cluster: Cluster, watcher: Watcher | None = None, suite: str = SUITE, **options: Any
) -> list[tuple[RunFolder, list[Record]]]:
    """Run the suite on the cluster, with results in ``folder / "out"``."""
    file = folder / "s.yaml"
    file.write_text(suite)
    settings = {"device": "cpu", "on": "fake", "out": folder / "out", "rounds": 2, **options}
    return execute_on(cluster, make_plan(file, Options(**settings)), watcher, cluster.clock)
