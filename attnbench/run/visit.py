"""One visit of a cell: ask the process that measures, and ask again where it may not be the cell that failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from attnbench.cell import Cell
from attnbench.measure.time import TimingRules
from attnbench.record import Record, one_line, with_traces
from attnbench.run.gate import Gate, Verdict
from attnbench.run.isolation import CellFailed, Settings, Worker
from attnbench.run.protocol import Train, VisitCell, row_of
from attnbench.status import Status
from attnbench.verify import are_points, are_samples, foreign_to_samples


@dataclass(slots=True)
class Outcome:
    """What came of a visit, which becomes a cell's row."""

    record: Record
    samples: dict[str, Any] | None = None
    failure: Record | None = None
    """The row that the visit alone would give; not :attr:`record` where an earlier round was ok."""
    stderr: Sequence[str] = ()
    killed: bool = False
    """Whether it was killed from outside, as far as can be told."""
    points: Sequence[dict[str, Any]] = ()
    """The learning curve of a training."""

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        return {
            "record": self.record.to_json(),
            "samples": self.samples,
            "failure": self.failure.to_json() if self.failure else None,
            "stderr": list(self.stderr),
            "killed": self.killed,
            "points": list(self.points),
        }

    @classmethod
    def from_json(
        cls, data: dict[str, Any], cell: Cell, *, threads: int | None = None, request: VisitCell | None = None
    ) -> Self:
        """Inverse of :meth:`to_json`, for what came of a visit of ``cell``.

        Args:
            threads: with how many the cell is measured, if that is known.
            request: what was asked, unless the cell was trained.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: it cannot have come of one.
        """
        record = row_of(cell, data["record"])
        failure = row_of(cell, data["failure"]) if data["failure"] else None
        samples, points = data["samples"], data["points"]
        taken = samples["samples"] if samples else []
        if not are_samples(taken) or not are_points(points) or record.threads not in (None, threads or record.threads):
            raise ValueError("no samples, no learning curve, or other threads")
        if samples and samples["cell_id"] != cell.cell_id:
            raise ValueError("the samples of another cell")
        if request and samples and samples["round"] != request.round:
            raise ValueError("the samples of another round")
        if request and record.status is Status.OK and foreign_to_samples(record, [*map(list, request.earlier), taken]):
            raise ValueError("a time that is not that of its samples")
        return cls(record, samples, failure, [str(line) for line in data["stderr"]], bool(data["killed"]), points)


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
        measure = partial(self._measure, worker, request, meanwhile)
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
        points: list[dict[str, Any]] = []

        def measure() -> tuple[Record, None]:
            nonlocal points
            told = lambda progress: tell(int(progress["done"]), int(progress["of"]))  # noqa: E731
            trained = Train(cell, folder, self._rules.quick).ask(worker, self._cell_timeout, told=told)
            record, points = trained.record, trained.points
            record.process, record.threads = worker.state["process"], worker.settings.threads
            return with_traces(record, worker.traces), None

        outcome = self._ask(cell, worker, measure)
        if outcome.killed or outcome.record.status is Status.OOM:
            outcome = self._again(cell, worker, measure)
        outcome.record.laws = verdict.laws
        return replace(outcome, points=points if outcome.record.status is Status.OK else ())

    def _refused(self, cell: Cell, verdict: Verdict) -> Outcome:
        refused = verdict.row(cell, quick=self._rules.quick)
        return Outcome(refused, None, refused, verdict.stderr)

    def _again(self, cell: Cell, worker: Worker, measure: Callable[[], tuple[Record, Any]]) -> Outcome:
        worker.stop()
        outcome = self._ask(cell, worker, measure)
        if outcome.killed or outcome.record.status is Status.OOM:
            outcome.record.reason = one_line(f"{outcome.record.reason} (twice, the second time in a fresh process)")
        return outcome

    def _ask(self, cell: Cell, worker: Worker, measure: Callable[[], tuple[Record, Any]]) -> Outcome:
        try:
            record, samples = measure()
        except CellFailed as failed:
            remedy = "; raise --cell-timeout" if failed.late else ""
            record = Record.of(cell, failed.status, failed.reason + remedy, quick=self._rules.quick)
            return Outcome(record, None, record, failed.stderr, failed.killed)
        failed_inside = record.status not in (Status.OK, Status.UNSUPPORTED, Status.DISTURBED)
        return Outcome(record, samples, record, worker.said() if failed_inside else ())

    def _has_its_own_process(self, cell: Cell) -> bool:
        """Whether the cell starts in a fresh process, like the script that would call it: where it is timed as shipped.

        There the heap that other cells leave behind would spare it its page faults.
        """
        settings = self._settings
        return settings.device == "cpu" and settings.process == "as-shipped" and "time" in cell.measure

    def _measure(
        self, worker: Worker, request: VisitCell, meanwhile: Callable[[], None]
    ) -> tuple[Record, dict[str, Any] | None]:
        if self._has_its_own_process(request.cell):
            worker.stop()

        def told(progress: dict[str, Any]) -> None:
            self.gate.doing(request.cell, str(progress["at"]))

        visited = request.ask(worker, self._cell_timeout, meanwhile=meanwhile, told=told)
        if visited.samples and foreign_to_samples(visited.record, [*map(list, request.earlier), visited.taken]):
            raise worker.garbage()
        return with_traces(visited.record, worker.traces), visited.samples
