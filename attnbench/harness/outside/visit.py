"""Measure a cell in the worker; retry once if the failure may not be the cell's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnbench.harness.outside.gate import Gate, Verdict
from attnbench.harness.outside.isolation import CellFailed, Settings, Worker
from attnbench.harness.wire.protocol import Outcome, Train, VisitCell
from attnbench.measure.scheduler import CLOSE_OTHERS
from attnbench.measure.status import Status
from attnbench.measure.time import TimingRules
from attnbench.results.record import Record, with_traces
from attnbench.suite.cell import Cell
from attnbench.text import one_line

_LONG_WAIT = 0.25
"""Share of its limit for which a thread waits for a core in a cell that may well have ended in time without that."""
_FAULTS = (Status.ERROR, Status.CRASH, Status.NONFINITE)


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
            if failed.late and comes_again and failed.waited > _LONG_WAIT:
                status = Status.DISTURBED
                remedy = f", in {failed.waited:.0%} of which one of its threads waited for a core; {CLOSE_OTHERS}"
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
