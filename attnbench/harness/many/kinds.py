"""Kinds of machines, each with a run folder of its own: machines of one class whose rates agree.

The folders of one command lie side by side, ``results/SUITE/STAMP-CLASS``, and the same command finds them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from attnbench.errors import CorruptResults
from attnbench.files import make_folder
from attnbench.harness.identity import identity, run_key
from attnbench.harness.plan import Plan
from attnbench.harness.rows import Rows, new_folder, stamp
from attnbench.harness.wire.process import Products
from attnbench.harness.wire.protocol import Ready
from attnbench.measure.machine import MEMORY_TOLERANCE, PRODUCTS, RATES_WITHIN, memory_bytes, rates
from attnbench.results.lock import held
from attnbench.results.manifest import ENGINE, TOGETHER
from attnbench.results.record import Record
from attnbench.results.runs import find_runs, suite_folder
from attnbench.results.sources import OURS, changed
from attnbench.results.store import RunFolder
from attnbench.units import format_bytes, format_count


@dataclass(eq=False, slots=True)
class Kind:
    """Machines of one class whose rates agree, and the rows that they measured."""

    plan: Plan
    machine_class: str
    folder: RunFolder
    rows: Rows
    machines: list[dict[str, Any]] = field(default_factory=list)
    """Facts of each host when it first took part; twice if they have changed since."""

    def facts_of(self, host: str, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """The entry of a machine in :attr:`machines`; None before it has taken part."""
        same = (one for one in self.machines if (one["host"], one["machine_id"]) == (host, state["machine_id"]))
        return next(same, None)

    def join(self, host: str, state: Ready) -> None:
        """Let a host measure here. Its facts are written before its first row."""
        self.folder.describe(state)
        if self.facts_of(host, state) is None:
            self.machines.append({**state, "host": host})
            self._write()

    def correct(self, host: str, state: Ready, limits: Mapping[str, Any]) -> None:
        """Replace a joined host's rates by newer ones."""
        (self.facts_of(host, state) or {}).update(limits)
        self._write()

    def _write(self) -> None:
        ids = list(dict.fromkeys(one["machine_id"] for one in self.machines))
        floors = [one["noise_floor"] for one in self.machines if one.get("noise_floor") is not None]
        self.folder.correct(
            {
                "machines": self.machines,
                "machine_id": ids[0] if len(ids) == 1 else f"{ids[0]} and {len(ids) - 1} more",
                "noise_floor": max(floors, default=None),
            }
        )

    def unlike(self, state: Mapping[str, Any]) -> str:
        """The difference that keeps a machine of this class out of the folder; empty without one."""
        mine, *others = ({"memory": memory_bytes(one) or 0, **dict(rates(one))} for one in (state, *self.machines))
        for name, value in mine.items():
            theirs = [sizes[name] for sizes in others if sizes.get(name)]
            within = MEMORY_TOLERANCE if name == "memory" else RATES_WITHIN
            if value and theirs and max(value, *theirs) > (1 + within) * min(value, *theirs):
                shown = format_bytes if name == "memory" else _a_second
                return f"{name} is {shown(value)}, that of the others {shown(theirs[0])}"
        return ""


def _a_second(rate: float) -> str:
    return f"{format_count(rate)}/s"


_OF_A_KIND = ("threads", "variables", *PRODUCTS, TOGETHER)


class Kinds:
    """All kinds of machines of one command."""

    def __init__(self, plan: Plan, engine: str, ours: ExitStack, warn: Callable[[str], None]) -> None:
        """Read the state of an earlier command of the same kind; make nothing yet.

        ``ours`` closes the folders; ``warn`` gets faults of folders. Raises StoreError and its kinds, CorruptResults.
        """
        self._plan, self._engine, self._ours, self._warn = plan, engine, ours, warn
        self.base = identity(plan, "")
        self.all: list[Kind] = []
        self._together = stamp()
        if not plan.options.fresh and suite_folder(plan.options.out, plan.suite.name).is_dir():
            with held(plan.options.out, patience=30):
                self._take_up()

    def _take_up(self) -> None:
        found: dict[str, list[tuple[RunFolder, dict[str, Any]]]] = {}
        for folder in find_runs(suite_folder(self._plan.options.out, self._plan.suite.name)):
            try:
                environment = folder.environment
            except CorruptResults as error:
                self._warn(f"{error}; the run is not continued")
                continue
            is_ours = environment.get(ENGINE) == self._engine and environment.keys() >= {"machine_class", *_OF_A_KIND}
            ours = {name: seen for name, seen in environment.get("sources", {}).items() if name == OURS}
            if changed(ours):
                self._warn(f"{folder.path}: measured before attnbench's own code changed, so a new run begins")
                continue
            is_itself = environment.get("folder") == folder.path.name  # a copy for safe keeping stays as it is
            if is_ours and is_itself and environment.get("run_key") == run_key(self._facts(environment)):
                found.setdefault(environment[TOGETHER], []).append((folder, environment))
        self._together = max(found, default=self._together)
        for folder, environment in found.get(self._together, []):
            machines = environment.get("machines", [])
            self._open(folder, environment["machine_class"], environment["threads"], machines)

    def _facts(self, known: Mapping[str, Any]) -> dict[str, Any]:
        of_the_kind = {name: known[name] for name in _OF_A_KIND}
        return {**self.base, "machine_id": f"class {known['machine_class']}", **of_the_kind, ENGINE: self._engine}

    def _open(self, folder: RunFolder, name: str, threads: int, machines: list[dict[str, Any]]) -> Kind:
        self._ours.enter_context(folder.lock())
        plan = replace(self._plan, settings=replace(self._plan.settings, threads=threads))
        kind = Kind(plan, name, folder, Rows(plan, folder), machines)
        for note in (*folder.repairs, *kind.rows.notes):
            self._warn(note)
        self.all.append(kind)
        return kind

    def known(self, host: str) -> dict[str, Any] | None:
        """A host's facts from when it last joined; None for others."""
        return {machine["host"]: machine for kind in self.all for machine in kind.machines}.get(host)

    def products_on(self, processor: str) -> Products | None:
        """The libraries of this processor in this run; None before they are known."""
        machines = (machine for kind in self.all for machine in kind.machines)
        alike = (machine for machine in machines if machine["environment"].get("processor") == processor)
        return next((Products(*(machine[name] for name in PRODUCTS)) for machine in alike), None)

    def admit(self, hello: Mapping[str, Any], state: Ready) -> Kind:
        """The kind of a machine, which joins it; a new one if none fits. Raises StoreError and its kinds."""
        of_the_process = {name: hello[name] for name in ("threads", "variables")}
        facts = self._facts({**state, **of_the_process, TOGETHER: self._together})
        alike = [kind for kind in self.all if kind.folder.environment.get("run_key") == run_key(facts)]
        kind = next((one for one in alike if one.facts_of(hello["host"], state)), None)
        kind = kind or next((one for one in alike if not one.unlike(state)), None)
        if kind is None:
            taken = any(one.machine_class == state["machine_class"] for one in self.all)
            name = "-".join([self._together, state["machine_class"], *([hello["host"]] if taken else [])])
            make_folder(self._plan.options.out)
            folder = new_folder(self._plan, facts, name)
            kind = self._open(folder, state["machine_class"], hello["threads"], [])
            if alike:
                why = alike[0].unlike(state)
                self._warn(f"{hello['name']} is kept apart in {folder.path}: its {why}; something else may run there")
        kind.join(hello["host"], state)
        return kind

    def rows_of(self, cell_id: str) -> list[tuple[Kind, Record]]:
        """Each kind that has a row of a cell, with the row."""
        return [(kind, kind.rows.records[cell_id]) for kind in self.all if cell_id in kind.rows.records]
