"""One visit of a cell: ask the process that measures, and ask again where it may not be the cell that failed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from attnbench.cell import Cell
from attnbench.measure.time import TimingRules
from attnbench.record import Record, one_line, with_traces
from attnbench.run.gate import Gate, Verdict
from attnbench.run.isolation import CellFailed, Settings, Worker
from attnbench.run.protocol import Outcome, Train, VisitCell
from attnbench.status import Status

_FAULTS = (Status.ERROR, Status.CRASH, Status.NONFINITE)


class Visitor:
    """Visits cells, and trains them, in processes that it is given."""

    def __init__(self, settings: Settings, rules: TimingRules, cell_timeout: float, *, unchecked: bool = False) -> None:
        """Begin.

        Args:
            settings: of the process that measures.
            cell_timeout: seconds that each part of a visit may take, such as its timed calls, and each law.
            unchecked: visit without holding variants to their laws.
        """
        self._settings, self._rules, self._cell_timeout = settings, rules, cell_timeout
        self.gate = Gate(cell_timeout, unchecked=unchecked)

    def visit(self, worker: Worker, request: VisitCell, meanwhile: Callable[[], None] = lambda: None) -> Outcome:
        """Visit a cell whose setting keeps its laws, and once more where it may not be the cell that failed.

        The second visit is in a fresh process. Memory may be short because of what other cells left behind, they may
        have left what breaks this one, and a process may be killed by anybody.

        Args:
            meanwhile: called while the process builds the cell.
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

        outcome = self._ask(request.cell, worker, measure)
        short = outcome.record.status is Status.OOM and not self._has_its_own_process(request.cell)
        if outcome.killed or short or (used and outcome.record.status in _FAULTS):
            outcome = self._again(request.cell, worker, measure)
        if verdict:
            outcome.record.laws = verdict.laws
        return outcome

    def train(self, worker: Worker, cell: Cell, folder: Path, tell: Callable[[int, int], None]) -> Outcome:
        """Train a cell whose setting keeps its laws, and try again where it may not be the cell that failed.

        The second try resumes the first.

        Args:
            folder: for the checkpoint.
            tell: called with the steps done and all steps.
        """
        verdict = self.gate.verdict(worker, cell)
        if verdict.status is not Status.OK:
            return self._refused(cell, verdict)

        def told(progress: dict[str, Any]) -> None:
            tell(int(progress["done"]), int(progress["of"]))

        def measure() -> Outcome:
            trained = Train(cell, folder, self._rules.quick).ask(worker, self._cell_timeout, told=told)
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

    def _ask(self, cell: Cell, worker: Worker, measure: Callable[[], Outcome]) -> Outcome:
        try:
            outcome = measure()
        except CellFailed as failed:
            remedy = "; raise --cell-timeout" if failed.late else ""
            record = Record.of(cell, failed.status, failed.reason + remedy, quick=self._rules.quick)
            return Outcome(record, None, record, failed.stderr, failed.killed)
        outcome.record = outcome.failure = with_traces(outcome.record, worker.traces)
        if outcome.record.status not in (Status.OK, Status.UNSUPPORTED, Status.DISTURBED):
            outcome.stderr = worker.said()
        return outcome

    def _has_its_own_process(self, cell: Cell) -> bool:
        """Whether the cell starts in a fresh process, like the script that would call it: where it is timed as shipped.

        There the heap that other cells leave behind would spare it its page faults.
        """
        settings = self._settings
        return settings.device == "cpu" and settings.process == "as-shipped" and "time" in cell.measure
