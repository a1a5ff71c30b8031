"""Measure a cell in the worker, if its variant keeps its laws; retry once if the failure may not be the cell's own.

The laws come first, so that no row reports the time of a broken implementation. They run in the worker: a variant that
crashes or hangs fails a law instead of ending the run. The verdict on a setting, a variant with its options, causal or
not, holds for all its cells and, by its rows, for a resumed run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from attnbench.contract.variant import VARIANTS
from attnbench.harness.outside.isolation import CellFailed, Settings, Worker
from attnbench.harness.wire.process import choose_products
from attnbench.harness.wire.protocol import Outcome, Request, Train, VisitCell
from attnbench.measure.status import Status
from attnbench.measure.time import CLOSE_OTHERS, TimingRules
from attnbench.results.record import HELD, NOT_TRIED, UNCHECKED, Record, with_traces
from attnbench.suite.cell import UNTOUCHED, Cell
from attnbench.text import one_line

_ROUNDING = 1e-3
"""A smaller fault, of outputs of size 1 in float64, may be float32 arithmetic: float32 then decides about the timing,
though ``attnbench check`` reports the lost digits."""
_LONGEST = 110
_FAULTS = (Status.ERROR, Status.CRASH, Status.NONFINITE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a setting, as its rows state it."""

    laws: str
    status: Status = Status.OK
    reason: str = ""
    stderr: Sequence[str] = ()

    def row(self, cell: Cell, *, quick: bool = False) -> Record:
        """The row of a cell that its verdict keeps from being measured."""
        return Record.of(cell, self.status, self.reason, quick=quick, laws=self.laws)


@dataclass(frozen=True, slots=True)
class HoldSetting(Request[Verdict]):
    """Hold the setting of a cell to its laws, up to the first broken one."""

    cell: Cell

    def found(self, tell: Callable[[int, int], None]) -> dict[str, Any]:
        """The answer, in the worker. ``tell`` is called before each law with its place and the number of gating
        laws."""
        from attnbench.laws import first_fault, setting_of  # the laws take a while to import

        case = setting_of(self.cell.variant, causal=self.cell.shape.causal, level=self.cell.level)
        choose_products(of_one_row=False)  # the library that will be timed
        if case.traits.compiled or case.refused or (self.cell.device != "cpu" and not case.runs()):
            return {"tried": 0, "fault": None}
        tried, fault = first_fault(case, tell)
        if fault is not None and fault.number is not None and fault.number <= _ROUNDING:
            tried, fault = first_fault(replace(case, single=True), tell)
        return {"tried": tried, "fault": None if fault is None else asdict(fault)}

    def answered(self, answer: dict[str, Any]) -> Verdict:
        from attnbench.laws import Finding
        from attnbench.laws.influence import PADDED

        found = answer["found"]
        if found["fault"] is None:
            return Verdict(HELD if int(found["tried"]) else NOT_TRIED)
        fault = Finding(**found["fault"])
        if fault.law == PADDED and fault.number is not None and not math.isfinite(fault.number):
            return Verdict(fault.law)  # no input that is measured holds NaN
        number = "" if fault.number is None else f" ({fault.number:.2g}, at most {fault.bound:.2g})"
        what = f"it breaks the law {fault.law!r}{number}: {one_line(fault.fault, _LONGEST)}"
        return Verdict(fault.law, Status.ERROR, _in_words(what))


class Gate:
    """Knows which settings may be measured, and tries unknown ones."""

    def __init__(self, timeout: float, *, unchecked: bool = False) -> None:
        self._timeout, self._unchecked = timeout, unchecked
        self._known: dict[tuple[str, bool, bool], Verdict] = {}
        self.doing: Callable[[Cell, str], None] = lambda cell, part: None
        """Called with the part of a visit that begins, such as a law."""

    def learn(self, records: Iterable[Record]) -> None:
        """Take over the verdicts of rows: a broken law is the reason of its row, unless it is tolerated."""
        for one in records:
            if one.laws:
                broken = one.laws not in (HELD, UNCHECKED, NOT_TRIED) and repr(one.laws) in one.reason
                verdict = Verdict(one.laws, one.status, one.reason) if broken else Verdict(one.laws)
                self._known[one.label, one.causal, _of_core(one.variant, one.level)] = verdict

    def verdict(self, worker: Worker, cell: Cell) -> Verdict:
        """The verdict on the setting of a cell, known or found now."""
        if self._unchecked:
            return Verdict(UNCHECKED)
        if cell.variant.name == UNTOUCHED:  # a trained model as it is, which claims nothing
            return Verdict("")
        setting = cell.variant.label, cell.shape.causal, _of_core(cell.variant.name, cell.level)
        if setting not in self._known:
            used = worker.served > 0
            found = self._found(worker, cell)
            if used and found.status in (Status.ERROR, Status.CRASH):  # it may be the fault of cells before it
                worker.stop()
                found = self._found(worker, cell)
            if found.status is Status.DISTURBED:  # the next cell may have its core
                return found
            self._known[setting] = found
        return self._known[setting]

    def _found(self, worker: Worker, cell: Cell) -> Verdict:
        at = 0

        def told(progress: dict[str, Any]) -> None:
            nonlocal at
            at = int(progress["done"])
            self.doing(cell, f"law {at + 1} of {progress['of']}")

        request = HoldSetting(cell)
        try:
            try:
                return request.ask(worker, self._timeout, told=told)
            except CellFailed as failed:
                if not failed.killed:
                    raise
                return request.ask(worker, self._timeout, told=told)  # a process may be killed by anybody
        except CellFailed as failed:
            from attnbench.laws import gating_laws

            law, status = gating_laws()[at], Status.DISTURBED if failed.starved else failed.status
            words = _in_words(f"the law {law!r} could not be asked: {failed.reason}")
            return Verdict(law, status, words, failed.stderr)


def _of_core(name: str, level: str) -> bool:
    return level == "operator" and name in VARIANTS and VARIANTS.get(name).core is not None


def _in_words(what: str) -> str:
    return one_line(f"{what}; --unchecked measures it all the same")


class Visitor:
    """Visits and trains cells in given processes."""

    def __init__(self, settings: Settings, rules: TimingRules, cell_timeout: float, *, unchecked: bool = False) -> None:
        """``cell_timeout``: seconds for each part of a visit, and each law. ``unchecked``: skip the laws."""
        self._settings, self._rules, self._cell_timeout = settings, rules, cell_timeout
        self.gate = Gate(cell_timeout, unchecked=unchecked)

    def visit(self, worker: Worker, request: VisitCell, meanwhile: Callable[[], None] = lambda: None) -> Outcome:
        """Visit a cell with a setting that keeps its laws; retry once if the failure may not be its own.

        The retry is in a fresh process: other cells may have left too little memory or a broken state, and anybody may
        kill a process. ``meanwhile`` is called while the process builds the cell.
        """
        used = worker.served > 0
        verdict = self.gate.verdict(worker, request.cell) if request.round == 0 else None
        if verdict and verdict.status is not Status.OK:
            meanwhile()
            return self._refused(request.cell, verdict)

        def told(progress: dict[str, Any]) -> None:
            self.gate.doing(request.cell, str(progress["at"]))

        def measure() -> Outcome:
            if self._has_its_own_process(request.cell):
                worker.stop()
            return request.ask(worker, self._cell_timeout, meanwhile=meanwhile, told=told)

        outcome = self._ask(request.cell, worker, measure, comes_again=request.round == 0)
        short = outcome.record.status is Status.OOM and not self._has_its_own_process(request.cell)
        if outcome.killed or short or (used and outcome.record.status in _FAULTS):
            outcome = self._again(request.cell, worker, measure)
        if verdict:
            outcome.record.laws = verdict.laws
        return outcome

    def train(self, worker: Worker, request: Train, tell: Callable[[int, int], None]) -> Outcome:
        """Train a cell with a setting that keeps its laws; retry, from its checkpoint, if the failure may not be its
        own.

        ``tell`` is called with the steps done and all steps.
        """
        cell = request.cell
        verdict = self.gate.verdict(worker, cell)
        if verdict.status is not Status.OK:
            return self._refused(cell, verdict)

        def told(progress: dict[str, Any]) -> None:
            tell(int(progress["done"]), int(progress["of"]))

        def measure() -> Outcome:
            trained = request.ask(worker, self._cell_timeout, told=told)
            trained.record.process, trained.record.threads = worker.state["process"], worker.settings.threads
            return trained

        outcome = self._ask(cell, worker, measure)
        if outcome.killed or outcome.record.status is Status.OOM:
            outcome = self._again(cell, worker, measure)
        outcome.record.laws = verdict.laws
        outcome.points = outcome.points if outcome.record.status is Status.OK else ()
        return outcome

    def _refused(self, cell: Cell, verdict: Verdict) -> Outcome:
        refused = verdict.row(cell, quick=self._rules.quick)
        return Outcome(refused, None, refused, verdict.stderr)

    def _again(self, cell: Cell, worker: Worker, measure: Callable[[], Outcome]) -> Outcome:
        worker.stop()
        outcome = self._ask(cell, worker, measure)
        if outcome.killed or outcome.record.status is Status.OOM:
            outcome.record.reason = one_line(f"{outcome.record.reason} (twice, the second time in a fresh process)")
        return outcome

    def _ask(self, cell: Cell, worker: Worker, measure: Callable[[], Outcome], *, comes_again: bool = False) -> Outcome:
        try:
            outcome = measure()
        except CellFailed as failed:
            status, remedy = failed.status, "; raise --cell-timeout" if failed.late else ""
            if failed.late and comes_again and failed.starved:
                status = Status.DISTURBED
                remedy = f"; {CLOSE_OTHERS}"
            record = Record.of(cell, status, failed.reason + remedy, quick=self._rules.quick)
            return Outcome(record, None, record, failed.stderr, failed.killed)
        outcome.record = outcome.failure = with_traces(outcome.record, worker.traces)
        if outcome.record.status not in (Status.OK, Status.UNSUPPORTED, Status.DISTURBED):
            outcome.stderr = worker.said()
        return outcome

    def _has_its_own_process(self, cell: Cell) -> bool:
        """True if the cell needs a fresh process, like a user's script: it is timed as shipped.

        The heap of other cells would spare it its page faults.
        """
        settings = self._settings
        return settings.device == "cpu" and settings.process == "as-shipped" and "time" in cell.measure
