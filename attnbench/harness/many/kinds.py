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
from attnbench.harness.plan import Plan
from attnbench.harness.rows import Rows, new_folder, stamp
from attnbench.harness.run_identity import identity, run_key
from attnbench.harness.wire.process import Products
from attnbench.harness.wire.protocol import Ready
from attnbench.measure.machine import MEMORY_TOLERANCE, PRODUCTS, RATES_WITHIN, memory_bytes, rates
from attnbench.results.lock import held
from attnbench.results.manifest import ENGINE, TOGETHER, of_machines
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

    def facts_of(self, host: str, state: Ready) -> dict[str, Any] | None:
        """The entry of a machine in :attr:`machines`; None before it has taken part."""
        same = (one for one in self.machines if (one["host"], one["machine_id"]) == (host, state["machine_id"]))
        return next(same, None)

    def describe(self, host: str, state: Ready) -> None:
        """Write the facts of a host, which are there before its first row."""
        self.folder.describe(state)
        known = self.facts_of(host, state)
        if known is None:
            self.machines.append(known := {})
        known |= {**state, "host": host}
        self.folder.correct(of_machines(self.machines))

    def unlike(self, state: Mapping[str, Any]) -> str:
        """The difference that keeps a machine of this class out of the folder; empty without one."""
        mine, *others = ({"memory": memory_bytes(one) or 0, **dict(rates(one))} for one in (state, *self.machines))
        for name, value in mine.items():
            theirs = [sizes[name] for sizes in others if sizes.get(name)]
            within = MEMORY_TOLERANCE if name == "memory" else RATES_WITHIN
            if value and theirs and max(value, *theirs) > (1 + within) * min(value, *theirs):
                shown = format_bytes if name == "memory" else lambda rate: f"{format_count(rate)}/s"
                return f"{name} is {shown(value)}, that of the others {shown(theirs[0])}"
        return ""


class Kinds:
    """All kinds of machines of one command."""

    def __init__(self, plan: Plan, ours: ExitStack, warn: Callable[[str], None]) -> None:
        """Read the state of an earlier command of the same kind; make nothing yet.

        ``ours`` concludes and closes the folders; ``warn`` gets faults of folders. Raises StoreError and its kinds,
        CorruptResults.
        """
        self._plan, self._ours, self._warn = plan, ours, warn
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
                known = folder.environment
                is_same = known["run_key"] == run_key(self._facts(known))
            except CorruptResults as error:
                self._warn(f"{error}; the run is not continued")
            except KeyError:  # a run of one machine
                pass
            else:
                if is_same and changed({name: seen for name, seen in known.get("sources", {}).items() if name == OURS}):
                    self._warn(f"{folder.path}: measured before attnbench's own code changed, so a new run begins")
                elif is_same and known["folder"] == folder.path.name:  # a copy for safe keeping stays as it is
                    found.setdefault(known[TOGETHER], []).append((folder, known))
        self._together = max(found, default=self._together)
        for folder, known in found.get(self._together, []):
            kind = self._open(folder, known["machine_class"], self._plan_with(known["threads"]))
            kind.machines += known.get("machines", [])

    def _facts(self, known: Mapping[str, Any]) -> dict[str, Any]:
        of_the_kind = {name: known[name] for name in ("threads", "variables", *PRODUCTS, TOGETHER)}
        return {**self.base, "machine_id": f"class {known['machine_class']}", **of_the_kind, ENGINE: "ray"}

    def _plan_with(self, threads: int) -> Plan:
        return replace(self._plan, settings=replace(self._plan.settings, threads=threads))

    def _open(self, folder: RunFolder, name: str, plan: Plan) -> Kind:
        self._ours.enter_context(folder.lock())
        kind = Kind(plan, name, folder, Rows(plan, folder))
        self._ours.enter_context(kind.rows.concluded(self._warn))
        for note in (*folder.repairs, *kind.rows.notes):
            self._warn(note)
        self.all.append(kind)
        return kind

    def known(self) -> dict[str, Any]:
        """The facts of each host from when it last joined."""
        return {machine["host"]: machine for kind in self.all for machine in kind.machines}

    def products_on(self, processor: str | None) -> Products | None:
        """The libraries of this processor in this run; None before they are known."""
        alike = (one for one in self.known().values() if one["environment"].get("processor") == processor)
        return next(map(Products.of, alike), None)

    def admit(self, name: str, process: Mapping[str, Any], state: Ready) -> Kind:
        """The kind of a machine, which joins it; a new one if none fits.

        ``process`` has its host, threads and variables. Raises StoreError and its kinds.
        """
        host = process["host"]
        facts = self._facts({**state, **process, TOGETHER: self._together})
        alike = [kind for kind in self.all if kind.folder.environment.get("run_key") == run_key(facts)]
        kind = next((one for one in alike if one.facts_of(host, state)), None)
        kind = kind or next((one for one in alike if not one.unlike(state)), None)
        if kind is None:
            taken = any(one.machine_class == state["machine_class"] for one in self.all)
            make_folder(self._plan.options.out)
            parts = [self._together, state["machine_class"], *([host] if taken else [])]
            plan = self._plan_with(process["threads"])
            kind = self._open(new_folder(plan, facts, "-".join(parts)), state["machine_class"], plan)
            if alike:
                why = alike[0].unlike(state)
                self._warn(f"{name} is kept apart in {kind.folder.path}: its {why}; something else may run there")
        kind.describe(host, state)
        return kind
