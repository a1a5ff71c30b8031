"""Turn a suite into a run folder: order, rounds, resuming, and a row for everything that fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, cast

from attnbench.cell import Cell
from attnbench.errors import StoreError
from attnbench.files import make_folder
from attnbench.lock import held
from attnbench.machine import load_warning, machine_id, oom_kills, thread_warnings
from attnbench.record import (
    Record,
    has_lost_round,
    inferred,
    one_line,
    with_lost_round,
    with_traces,
    without_lost_rounds,
)
from attnbench.run.calibration import doubts
from attnbench.run.identity import identity
from attnbench.run.isolation import CellFailed, Worker
from attnbench.run.libraries import products_before
from attnbench.run.order import family, in_order
from attnbench.run.plan import Plan
from attnbench.run.protocol import MeasureLimits, Ready, Train, VisitCell
from attnbench.run.resume import find_folder, new_folder, stored_rows
from attnbench.run.trainings import Begun, Ended, Step, at_chosen_rates, of_any, phases, run_all, threads_of
from attnbench.status import STOPPING, Status
from attnbench.store import CHECKPOINTS, RunFolder
from attnbench.verify import foreign_to_samples


class Watcher:
    """Told what a run does while it goes on; every method may be overridden, none does anything here."""

    def begun(self, folder: Path, *, cells: int, visits: int, resumed: int) -> None:
        """The folder is open; ``visits`` cell visits are ahead, ``resumed`` cells were measured before."""

    def visiting(self, cell: Cell) -> None:
        """This cell runs now."""

    def trained(self, cell: Cell, step: int, steps: int) -> None:
        """``step`` of a training's ``steps`` are done."""

    def visited(self, record: Record) -> None:
        """The row of a visit is stored."""

    def warned(self, message: str) -> None:
        """Something about the machine that the reader of the numbers should know."""


def execute(plan: Plan, watcher: Watcher | None = None, worker: Worker | None = None) -> tuple[RunFolder, list[Record]]:
    """Measure every cell that is not measured yet, storing each row as it comes.

    Args:
        worker: one with the plan's number of threads, which has begun already.

    Raises:
        StoreError and its kinds: the folder cannot be made, written or locked.
        CorruptResults: the run to be continued is damaged.
        KeyboardInterrupt: passed on after what is finished has been written.
    """
    watcher = watcher or Watcher()
    with ExitStack() as ours, worker or Worker(plan.settings) as worker:
        worker.settings, worker.warn = plan.settings, watcher.warned
        # Setting the worker up takes seconds, and the folder is held before that. On a GPU only the worker may ask
        # which machine it is, since asking takes memory there.
        on_cpu = plan.settings.device == "cpu"
        facts = identity(plan, machine_id("cpu") if on_cpu else worker.start()["machine_id"])
        make_folder(plan.options.out)
        with held(plan.options.out, patience=30):  # of two that begin at once, the second finds the first one's folder
            folder = find_folder(plan, facts, watcher.warned) or new_folder(plan, facts)
            ours.enter_context(folder.lock())
        if on_cpu and plan.settings.process == "tuned" and plan.settings.products is None:
            worker.settings = replace(plan.settings, products=products_before(folder))
        state = worker.start()
        folder.describe(state)
        return folder, _Run(plan, worker, state, folder, watcher).go()


def go_on(plan: Plan, folder: RunFolder, worker: Worker, watcher: Watcher | None = None) -> list[Record]:
    """Visit cells of a run that is already there, in its own folder, and return all its rows.

    Args:
        plan: with all cells of the run; :attr:`~attnbench.run.plan.Plan.only` says which to visit.
        worker: set up as the one that measured the run.

    Raises:
        StoreError and its kinds: the folder cannot be written or is locked.
        CorruptResults: the run is damaged.
    """
    watcher = watcher or Watcher()
    worker.warn = watcher.warned
    with folder.lock():
        return _Run(plan, worker, worker.start(), folder, watcher).go()


@dataclass(slots=True)
class _Outcome:
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


class _Pending:
    """What came of the last visit. Its row is written while the worker builds the next cell."""

    def __init__(self, folder: RunFolder, watcher: Watcher) -> None:
        self._folder, self._watcher = folder, watcher
        self._outcome: _Outcome | None = None

    def hold(self, outcome: _Outcome) -> None:
        """Keep it until :meth:`flush`."""
        self._outcome = outcome

    def flush(self) -> None:
        """Store the row, if that is not done yet."""
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            return
        self._folder.add(outcome.record, outcome.samples, outcome.failure, outcome.stderr, outcome.points)
        if outcome.record.status is not Status.INTERRUPTED:
            self._watcher.visited(outcome.record)


class _Run:
    """The state of one execution."""

    def __init__(self, plan: Plan, worker: Worker, state: Ready, folder: RunFolder, watcher: Watcher) -> None:
        self.plan, self.worker, self.state, self.folder, self.watcher = plan, worker, state, folder, watcher
        self.rules = plan.rules
        self.stopped: dict[tuple[object, ...], tuple[int, Status]] = {}
        """The shortest length that ran out of memory or time, and of which, by family."""
        self.pending = _Pending(folder, watcher)
        self.notes: list[str] = []
        """What is wrong with the rows that are there already."""
        self.records = stored_rows(plan, folder, self.notes.append)
        self.samples = folder.samples()
        if plan.options.retry_failed:
            ok = (record for record in self.records.values() if record.status is Status.OK)
            self.records = {record.cell_id: without_lost_rounds(record) for record in ok}
        self.records = {k: r for k, r in self.records.items() if r.status is not Status.INTERRUPTED}
        for cell in plan.cells:
            if cell.cell_id in self.records:
                self._note_failure(cell, self.records[cell.cell_id])

    def go(self) -> list[Record]:
        visits = [self._due(round_) for round_ in range(self.rules.rounds)]
        # Later rounds visit the cells that turn out ok; all that are not known to fail are expected to.
        trainings, ahead = self._count_trainings()
        expected = sum(len(due) for due in visits) + ahead
        cells = sum(cell.training is None for cell in self.plan.cells) + trainings
        finished = sum(1 for cell in self.plan.cells if cell.cell_id in self.records)
        self.watcher.begun(self.folder.path, cells=cells, visits=expected, resumed=finished)
        about_cores = (load_warning(), *thread_warnings(self.plan.settings.threads))
        for note in (*self.folder.repairs, *self.notes, *about_cores, *self.state["process_notes"]):
            if note:
                self.watcher.warned(note)
        try:
            for round_ in range(self.rules.rounds):
                for cell in in_order(self._due(round_), f"{self.plan.suite.name}{round_}"):
                    self._visit(cell, round_)
            self.pending.flush()
            self._hold_to_limits()
            self._train(phases(self._trainings())[0])
            self._train(at_chosen_rates(self._trainings(), self.records))
            self._doubt_tasks()
            self.folder.refuse_changes()
        except BaseException:
            with suppress(StoreError):  # what stopped the run is told, not that the table failed as well
                self.pending.flush()
            with suppress(StoreError):
                self.folder.write_csv([record for record in self._rows() if record.seal])
            raise
        self.folder.write_csv(self._rows())
        self.folder.conclude()
        return self._rows()

    def _hold_to_limits(self) -> None:
        """Where something was faster than the machine, measure the machine once more and correct all rows."""
        from attnbench.measure.limits import IMPOSSIBLE

        timed = [cell for cell in self.plan.cells if self._has_time(cell)]
        rows = [self.records[cell.cell_id] for cell in timed]
        impossible = sum((row.peak_fraction or 0.0) > IMPOSSIBLE for row in rows)
        if not impossible:
            return
        try:
            found = MeasureLimits(timed, rows).ask(self.worker, (1 + impossible) * self.plan.options.cell_timeout)
        except CellFailed as failed:
            self.watcher.warned(f"the limits of the machine could not be measured again: {failed.reason}")
            return
        self.state = cast(Ready, {**self.state, **found.limits})
        self.folder.correct(found.limits)
        rows_were = "1 row was" if impossible == 1 else f"{impossible} rows were"
        self.watcher.warned(f"{rows_were} faster than the limits of the machine, so these are measured again")
        for record in found.records:
            self.records[record.cell_id] = record
            self.folder.add(record)

    def _has_time(self, cell: Cell) -> bool:
        record = self.records.get(cell.cell_id)
        return record is not None and record.status is Status.OK and record.time_median_s is not None

    def _rows(self) -> list[Record]:
        """Rows of this plan in its order."""
        return [self.records[cell.cell_id] for cell in self.plan.cells if cell.cell_id in self.records]

    def _due(self, round_: int) -> list[Cell]:
        """Cells that this round still has to visit."""
        due = []
        for cell in self.plan.cells:
            record = self.records.get(cell.cell_id)
            if cell.training is not None or not self.plan.visits(cell):
                continue
            if round_ == 0:
                if record is None:
                    due.append(cell)
            elif "time" in cell.measure and (
                record is None
                or (record.status is Status.OK and (record.time_rounds or 0) <= round_ and not has_lost_round(record))
            ):
                due.append(cell)
        return due

    def _trainings(self) -> list[Cell]:
        """Cells that are trained, those with the lowest seed first."""
        cells = [cell for cell in self.plan.cells if cell.training is not None and self.plan.visits(cell)]
        return sorted(cells, key=lambda cell: (cell.seed, cell.shape.N))

    def _count_trainings(self) -> tuple[int, int]:
        """How many trainings there are in all, and how many are ahead; later seeds are trained at one rate only."""
        first, late = phases(self._trainings())
        begun = {of_any(cell) for cell in late if cell.cell_id in self.records}
        waiting = {of_any(cell) for cell in late} - begun
        due = [cell for cell in first if cell.cell_id not in self.records]
        return len(first) + len(begun) + len(waiting), len(due) + len(waiting)

    def _train(self, cells: Sequence[Cell]) -> None:
        """Train the cells that have no row yet, several at once."""
        due = [cell for cell in cells if cell.cell_id not in self.records]
        if not due:
            return
        self.worker.stop()  # the trainings get its memory and its core
        at_work: dict[str, tuple[Cell, str]] = {}
        try:
            for event in run_all(due, self.plan.settings, self.state, self._try_training, self.watcher.warned):
                match event:
                    case Begun(cell):
                        at_work[cell.cell_id] = cell, _now()
                        self.watcher.visiting(cell)
                    case Step(cell, done, of):
                        self.watcher.trained(cell, done, of)
                    case Ended(cell, outcome):
                        self._finish(cell, outcome, at_work.pop(cell.cell_id)[1])
                        self.pending.flush()
        except KeyboardInterrupt:
            for cell, started in at_work.values():
                self._finish(cell, _Outcome(Record.of(cell, Status.INTERRUPTED, "stopped by the user")), started)
                self.pending.flush()
            raise
        with suppress(OSError):  # other checkpoints may be in it
            (self.folder.path / CHECKPOINTS).rmdir()

    def _doubt_tasks(self) -> None:
        """Where a task does not tell variants apart here, say so in each of its rows."""
        said = doubts(self._trainings(), self.records)
        for warning in dict.fromkeys(said.values()):
            tasks = dict.fromkeys(str(self.records[cell_id].task) for cell_id, one in said.items() if one == warning)
            self.watcher.warned(f"{', '.join(tasks)}: {warning}; train longer, or choose other learning rates")
        for cell_id, warning in said.items():
            record = self.records[cell_id]
            if warning not in record.warnings:
                record = replace(record, warnings="; ".join(filter(None, [record.warnings, warning])))
                self.records[cell_id] = record
                self.folder.add(record)

    def _try_training(self, cell: Cell, worker: Worker, tell: Callable[[int, int], None]) -> _Outcome:
        """Train one cell, and try again where it may not be the cell that failed; the second try resumes the first."""
        known = self._known(cell)
        if known is not None:
            return _Outcome(known)
        points: list[dict[str, Any]] = []

        def measure() -> tuple[Record, None]:
            nonlocal points
            request = Train(cell, self.folder.path / CHECKPOINTS, self.rules.quick)
            told = lambda progress: tell(int(progress["done"]), int(progress["of"]))  # noqa: E731
            trained = request.ask(worker, self.plan.options.cell_timeout, told=told)
            record, points = trained.record, trained.points
            record.process, record.threads = worker.state["process"], worker.settings.threads
            return with_traces(record, worker.traces), None

        outcome = self._ask(cell, worker, measure)
        if outcome.killed or outcome.record.status is Status.OOM:
            worker.stop()
            outcome = self._ask(cell, worker, measure)
            if outcome.killed or outcome.record.status is Status.OOM:
                outcome.record.reason = one_line(f"{outcome.record.reason} (twice, the second time in a fresh process)")
        return replace(outcome, points=points if outcome.record.status is Status.OK else ())

    def _visit(self, cell: Cell, round_: int) -> None:
        previous = self.records.get(cell.cell_id)
        if round_ and (previous is None or previous.status is not Status.OK):
            return
        self.watcher.visiting(cell)
        started = _now()
        known = self._known(cell) if round_ == 0 else None
        try:
            outcome = _Outcome(known) if known else self._try(cell, round_, previous)
        except KeyboardInterrupt:
            self.worker.stop()
            if previous is None:
                self._finish(cell, _Outcome(Record.of(cell, Status.INTERRUPTED, "stopped by the user")), started)
            raise
        if previous and outcome.record.status is not Status.OK:
            lost = f"round {round_ + 1} failed: {outcome.record.status}: {outcome.record.reason}"
            self.watcher.warned(f"{cell.label}: {lost}; the row keeps the numbers of the rounds before")
            outcome.record = with_lost_round(previous, lost)
        self._finish(cell, outcome, previous.started_at if previous else started)

    def _try(self, cell: Cell, round_: int, previous: Record | None) -> _Outcome:
        """Visit a cell, and once more in a fresh process where it may not be the cell that failed.

        Memory may be short because of what other cells left behind, and a process may be killed by anybody.
        """
        measure = partial(self._measure, cell, round_, previous)
        outcome = self._ask(cell, self.worker, measure)
        if outcome.killed or (outcome.record.status is Status.OOM and not self._has_its_own_process(cell)):
            self.worker.stop()
            outcome = self._ask(cell, self.worker, measure)
            if outcome.killed or outcome.record.status is Status.OOM:
                outcome.record.reason = one_line(f"{outcome.record.reason} (twice, the second time in a fresh process)")
        return outcome

    def _ask(self, cell: Cell, worker: Worker, measure: Callable[[], tuple[Record, dict[str, Any] | None]]) -> _Outcome:
        oom_kills_before = oom_kills()
        try:
            record, samples = measure()
        except CellFailed as failed:
            remedy = "; raise --cell-timeout" if failed.status is Status.TIMEOUT else ""
            status = Status.OOM if failed.killed and oom_kills() > oom_kills_before else failed.status
            record = Record.of(cell, status, failed.reason + remedy, quick=self.rules.quick)
            return _Outcome(record, None, record, failed.stderr, failed.killed)
        failed_inside = record.status not in (Status.OK, Status.UNSUPPORTED)
        return _Outcome(record, samples, record, worker.said() if failed_inside else ())

    def _has_its_own_process(self, cell: Cell) -> bool:
        """Whether the cell starts in a fresh process, like the script that would call it: where it is timed as shipped.

        There the heap that other cells leave behind would spare it its page faults.
        """
        settings = self.plan.settings
        return settings.device == "cpu" and settings.process == "as-shipped" and "time" in cell.measure

    def _measure(self, cell: Cell, round_: int, previous: Record | None) -> tuple[Record, dict[str, Any] | None]:
        earlier = self.samples.get(cell.cell_id, {})
        if self._has_its_own_process(cell):
            self.worker.stop()
        before = [taken for r, taken in sorted(earlier.items()) if r < round_]
        request = VisitCell(cell, self.rules, round_, before, previous)
        visited = request.ask(self.worker, self.plan.options.cell_timeout, meanwhile=self.pending.flush)
        if visited.samples:
            if foreign_to_samples(visited.record, [*earlier.values(), visited.taken]):
                raise self.worker.garbage()
            self.samples.setdefault(cell.cell_id, {})[round_] = visited.taken
        return with_traces(visited.record, self.worker.traces, previous), visited.samples

    def _known(self, cell: Cell) -> Record | None:
        """The outcome of a shorter length of the same thing that ran out of memory or time."""
        n, status = self.stopped.get(family(cell), (cell.shape.N, Status.OK))
        return inferred(cell, n, status, quick=self.rules.quick) if n < cell.shape.N else None

    def _note_failure(self, cell: Cell, record: Record) -> None:
        if record.status in STOPPING:
            known = self.stopped.get(family(cell))
            if known is None or known[0] > cell.shape.N:
                self.stopped[family(cell)] = (cell.shape.N, record.status)

    def _finish(self, cell: Cell, outcome: _Outcome, started_at: str) -> None:
        """Complete the row of a visit and hold it; store that of the visit before."""
        record = outcome.record
        record.machine_id = self.state["machine_id"]
        record.torch_version = self.state["environment"]["torch"]
        record.process = record.process or self.state["process"]
        record.threads = record.threads or threads_of(cell, self.plan.settings)
        record.started_at = started_at
        self.pending.flush()
        # Without this row, which is not stored yet. Later, writing a long table would take a core from the next cell.
        self.folder.write_csv(self._rows(), at_most_every=2.0)
        self._note_failure(cell, record)
        self.records[record.cell_id] = record
        self.pending.hold(outcome)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
