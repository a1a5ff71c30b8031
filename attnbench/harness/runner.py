"""Turn a suite into a run folder: order, rounds, resuming, and a row for everything that fails. Add rounds to it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from heapq import merge
from pathlib import Path
from typing import Any, cast

from attnbench.errors import StoreError, UsageError
from attnbench.files import make_folder
from attnbench.harness.libraries import products_before
from attnbench.harness.outside.isolation import CellFailed, Worker
from attnbench.harness.outside.trainers import at_chosen_rates, count_trainings, phases, run_all
from attnbench.harness.outside.visit import Visitor
from attnbench.harness.plan import Options, Plan, make_plan
from attnbench.harness.repeat import keep, time_limits_of
from attnbench.harness.rows import Rows, find_folder, new_folder, now, take_over
from attnbench.harness.run_identity import identity
from attnbench.harness.trial import load_all
from attnbench.harness.wire.process import Products
from attnbench.harness.wire.protocol import MeasureLimits, Outcome, Ready, Train
from attnbench.measure.machine import load_warning, machine_id, thread_warnings
from attnbench.measure.status import Status
from attnbench.measure.time import TimingRules
from attnbench.results.lock import held
from attnbench.results.manifest import BESIDE, RUN_ID
from attnbench.results.record import Record
from attnbench.results.store import CHECKPOINTS, SUITE, RunFolder
from attnbench.suite.cell import METHOD_VERSION, Cell
from attnbench.text import quantity, without_secrets


class Watcher:
    """Progress of a run; every method may be overridden, none does anything here."""

    def begun(self, folder: Path, *, cells: int, visits: int, resumed: int) -> None:
        """The folder is open; ``visits`` cell visits are ahead, ``resumed`` cells were measured before."""

    def visiting(self, cell: Cell) -> None:
        """This cell runs now."""

    def doing(self, cell: Cell, part: str) -> None:
        """This part of its visit runs now: a law, its error, its timed calls."""

    def trained(self, cell: Cell, step: int, steps: int) -> None:
        """``step`` of a training's ``steps`` are done."""

    def visited(self, record: Record) -> None:
        """The row of a visit is stored."""

    def warned(self, message: str) -> None:
        """Something about the machine that the reader of the numbers should know."""


def execute(plan: Plan, watcher: Watcher | None = None, worker: Worker | None = None) -> tuple[RunFolder, list[Record]]:
    """Measure every missing cell, storing each row as it comes; ``worker`` has the plan's threads and has begun.

    Raises:
        StoreError and its kinds: the folder cannot be made, written or locked.
        CorruptResults: the run to be continued is damaged.
        KeyboardInterrupt: passed on after finished work is written.
    """
    return execute_beside(plan, watcher, worker)[0]


def execute_beside(
    plan: Plan, watcher: Watcher | None = None, worker: Worker | None = None
) -> list[tuple[RunFolder, list[Record]]]:
    """As :func:`execute`, and also in the other environment of a plan with one: its run is the second one.

    Visit by visit the two environments take turns, so that both meet the machine in the same state.
    """
    watcher = watcher or Watcher()
    with ExitStack() as ours:
        runs = [here := _opened(ours, plan, watcher, worker or Worker(plan.settings))]
        if plan.options.beside:
            runs.append(_opened(ours, plan, watcher, Worker(plan.settings, plan.options.beside), here))
        if here.rows.records and not all(run.folder.history() for run in runs):
            raise UsageError(f"{here.folder.path}: the run beside it is gone, or of another environment; add --fresh")
        for run in runs:
            run.together = runs
            run.tell_begun()
        here.go()
        return [(run.folder, run.rows.in_order()) for run in runs]


def _opened(ours: ExitStack, plan: Plan, watcher: Watcher, worker: Worker, here: Run | None = None) -> Run:
    """The run of a plan in its folder; that of the other environment, if ``here`` is the one beside it."""
    beside, name = plan.options.beside and without_secrets(plan.options.beside.path), ""
    if here is not None:  # both multiply by the same libraries, and the newest run stays that of here
        plan = replace(plan, settings=replace(plan.settings, products=Products.of(here.state)))
        beside, name = here.folder.environment[RUN_ID], here.folder.path.name.replace("-", f"-{BESIDE}-", 1)
    ours.enter_context(worker)
    worker.settings, worker.warn = plan.settings, watcher.warned
    # Setting the worker up takes seconds, and the folder is held before that. On a GPU only the worker may ask which
    # machine it is, since asking takes memory there; and it alone knows its own torch.
    on_cpu = plan.settings.device == "cpu"
    facts = identity(plan, worker.start()["machine_id"] if here or not on_cpu else machine_id("cpu"))
    facts |= {BESIDE: beside} if beside else {}
    make_folder(plan.options.out)
    with held(plan.options.out, patience=30):  # of two that begin at once, the second finds the first one's folder
        folder = find_folder(plan, facts, watcher.warned) or new_folder(plan, facts, name)
        ours.enter_context(folder.lock())
        take_over(plan, folder, facts)
    if on_cpu and plan.settings.process == "tuned" and plan.settings.products is None:
        worker.settings = replace(plan.settings, products=products_before(folder))
    state = worker.start()
    folder.describe(state)
    return Run(Rows(plan, folder), _visitor(plan), worker, state, watcher)


def go_on(plan: Plan, folder: RunFolder, worker: Worker, watcher: Watcher | None = None) -> list[Record]:
    """Visit :attr:`~attnbench.harness.plan.Plan.only` of a run's cells in its own folder, once more; return all rows.

    ``worker`` is set up as in the run. Raises StoreError and its kinds, CorruptResults.
    """
    watcher = watcher or Watcher()
    worker.warn = watcher.warned
    with folder.lock():
        return Run(Rows(plan, folder), _visitor(plan), worker, worker.start(), watcher).go()


def _visitor(plan: Plan) -> Visitor:
    return Visitor(plan.settings, plan.rules, plan.options.cell_timeout, unchecked=plan.options.unchecked)


class Run:
    """The visits and trainings of a plan in one worker, which has ``state``."""

    def __init__(self, rows: Rows, visitor: Visitor, worker: Worker, state: Ready, watcher: Watcher) -> None:
        self.rows, self.visitor, self.worker, self.state, self.watcher = rows, visitor, worker, state, watcher
        self.plan, self.folder, self.sources = rows.plan, rows.folder, dict[str, list[str]]()
        self.visitor.gate.doing = watcher.doing
        self.visitor.gate.learn(rows.records.values())
        self._pending: Outcome | None = None
        """The last outcome, whose row is written while the worker builds the next cell."""
        self.together: Sequence[Run] = [self]
        """The runs that take turns, this one included."""

    def tell_begun(self) -> None:
        """Tell the visits ahead, and notes about the rows that are there and the machine."""
        rows = self.rows
        visits = [rows.due(round_) for round_ in range(self.plan.rules.rounds)]
        # Later rounds visit the cells that turn out ok; all that are not known to fail are expected to.
        trainings, ahead = count_trainings(rows.trainings(), rows.records)
        expected = sum(len(due) for due in visits) + ahead
        cells = sum(cell.training is None for cell in self.plan.cells) + trainings
        finished = sum(1 for cell in self.plan.cells if cell.cell_id in rows.records)
        self.watcher.begun(self.folder.path, cells=cells, visits=expected, resumed=finished)
        about_cores = (load_warning(), *thread_warnings(self.plan.settings.threads))
        for note in (*self.folder.repairs, *rows.notes, *about_cores, *self.state["process_notes"]):
            if note:
                self.watcher.warned(note)

    def _flush(self) -> None:
        outcome, self._pending = self._pending, None
        if outcome is not None:
            self.folder.add(outcome.record, outcome.samples, outcome.failure, outcome.stderr, outcome.points)
            if outcome.record.status is not Status.INTERRUPTED:
                self.watcher.visited(outcome.record)

    def go(self) -> list[Record]:
        """Measure what is missing and conclude the folders; return the rows of this one."""
        with ExitStack() as ends:
            for run in self.together:
                ends.enter_context(run._concluded())
            self.measure()
        return self.rows.in_order()

    @contextmanager
    def _concluded(self) -> Iterator[None]:
        with self.rows.concluded(self.watcher.warned):
            try:
                yield
                if "during" in (card := self.worker.state.get("card", {})):
                    self.folder.correct({"card": card})
            except BaseException:
                with suppress(StoreError):  # the fault that ended the run is told, not this one
                    self._flush()
                raise

    def measure(self) -> None:
        """Visit cells round by round, in turn with other runs, hold rows to the machine's limits, then train."""
        for _ in merge(*(run._steps(side) for side, run in enumerate(self.together))):
            pass

    def _steps(self, side: int) -> Iterator[tuple[int, ...]]:
        """Measure, with a pause before each visit that gives its place in the order of all sides."""
        rows = self.rows
        yield from self._visits(0, side)
        yield 1, -1, -1, side  # until each has been through its rounds
        if waited := {cell for run in self.together for cell in run.rows.disturbed()}:
            they = quantity(len(waited), "cell")
            self.watcher.warned(f"{they} waited for a core in nearly all samples: measured once more, at the end")
            for run in self.together:
                run.rows.forget(waited)
                run.worker.stop()
        yield from self._visits(1, side)
        self._hold_to_limits()
        self._train(phases(rows.trainings())[0])
        self._train(at_chosen_rates(rows.trainings(), rows.records))

    def _visits(self, go: int, side: int) -> Iterator[tuple[int, ...]]:
        for round_ in range(self.plan.rules.rounds):
            yield go, round_, -1, side
            due = {cell.cell_id for cell in self.rows.due(round_)}
            if round_ and due:
                # A fresh process: memory addresses change the speed of one by some percent for its life, and in one
                # process no interval could show it.
                self._flush()
                self.worker.stop()
            for place, cell in enumerate(self.plan.in_order(round_) if due else ()):
                if cell.cell_id in due:
                    yield go, round_, place, (side + place + round_) % 2  # none is always the first
                    self._visit(cell, round_)
        self._flush()

    def _hold_to_limits(self) -> None:
        timed, impossible = self.rows.beyond_limits()
        if not impossible:
            return
        request = MeasureLimits(timed, [self.rows.records[cell.cell_id] for cell in timed])
        try:
            limits, records = request.ask(self.worker, (1 + impossible) * self.plan.options.cell_timeout)
        except CellFailed as failed:
            self.watcher.warned(f"the limits of the machine could not be measured again: {failed.reason}")
            return
        self.state = cast(Ready, {**self.state, **limits})
        self.folder.correct(limits)
        were = "1 row was" if impossible == 1 else f"{impossible} rows were"
        self.watcher.warned(f"{were} faster than the limits of the machine, so these are measured again")
        self.rows.correct(records)

    def _train(self, cells: Sequence[Cell]) -> None:
        due = [cell for cell in cells if cell.cell_id not in self.rows.records]
        if not due:
            return
        self.worker.stop()  # the trainings get its memory and its core
        at_work: dict[str, tuple[Cell, str]] = {}
        try:
            for event in run_all(due, self.plan.settings, self.state, self._try_training, self.watcher.warned):
                match event:
                    case ("begun", cell):
                        at_work[cell.cell_id] = cell, now()
                        self.watcher.visiting(cell)
                    case ("step", cell, done, of):
                        self.watcher.trained(cell, done, of)
                    case ("ended", cell, outcome):
                        self._finish(cell, outcome, at_work.pop(cell.cell_id)[1])
                        self._flush()
        except KeyboardInterrupt:
            for cell, started in at_work.values():
                self._finish(cell, Outcome(Record.of(cell, Status.INTERRUPTED, "stopped by the user")), started)
                self._flush()
            raise
        with suppress(OSError):  # other checkpoints may be in it
            (self.folder.path / CHECKPOINTS).rmdir()

    def note_sources(self) -> None:
        """Store the code and data used since."""
        found = self.worker.state.get("sources", {})
        if found.keys() - self.sources.keys():
            self.sources = {**self.folder.environment.get("sources", {}), **found}
            self.folder.correct({"sources": self.sources})
            keep(self.folder.path, self.plan.options.plugins, found)

    def _try_training(self, cell: Cell, worker: Worker, tell: Callable[[int, int], None], keep: bool) -> Outcome:
        if known := self.rows.known(cell):
            return Outcome(known)
        request = Train(cell, self.folder.path / CHECKPOINTS, self.plan.rules.quick, keep)
        return self.visitor.train(worker, request, tell)

    def _visit(self, cell: Cell, round_: int) -> None:
        self.watcher.visiting(cell)
        started = now()
        known = self.rows.known(cell) if round_ == 0 else None
        try:
            request = self.rows.request(cell, round_)
            outcome = Outcome(known) if known else self.visitor.visit(self.worker, request, self._flush)
        except KeyboardInterrupt:
            self.worker.stop()
            if cell.cell_id not in self.rows.records:
                self._finish(cell, Outcome(Record.of(cell, Status.INTERRUPTED, "stopped by the user")), started)
            raise
        if lost := self.rows.settle(cell, round_, outcome):
            self.watcher.warned(lost)
        self._finish(cell, outcome, started)

    def _finish(self, cell: Cell, outcome: Outcome, started_at: str) -> None:
        self._flush()
        # Without this row, which is not stored yet. Later, writing a long table would take a core from the next cell.
        self.folder.write_csv(self.rows.in_order(), at_most_every=2.0)
        self.note_sources()
        self.rows.put(cell, outcome.record, self.state, started_at)
        self._pending = outcome


_SAME = ("method_version", "machine_id", "threads", "process", "variables", "input_files", "plugins")
"""Facts of a run's identity that must be equal today; its cells and rules are its own."""


def more_rounds(
    path: Path,
    cells: Collection[str],
    rounds: int,
    *,
    plugins: Sequence[str] = (),
    watcher: Watcher | None = None,
) -> None:
    """Visit each of ``cells``, by id, ``rounds`` times more, for as long as each earlier visit took.

    Each round has a fresh process and the reversed order of an earlier one, that of the last one first. The worker uses
    the libraries, rates and time limits with which the run began.

    Raises UsageError if the run cannot go on here, StoreError and its kinds or CorruptResults for its folder.
    """
    folder = RunFolder(path)
    environment = folder.environment
    rules = environment.get("rules")
    if environment.get("method_version") != METHOD_VERSION or not isinstance(rules, dict):
        raise UsageError(f"{path}: measured by another version, so it cannot go on; measure it again")
    if BESIDE in environment:
        raise UsageError(f"{path}: measured in turn with another environment; measure both again with more --rounds")
    for doubt in folder.doubts():
        raise UsageError(doubt)
    load_all(plugins)
    plan = _as_planned(folder, environment, TimingRules(**rules), plugins)
    counts = {id_: row.time_rounds or 0 for id_, row in folder.records().items() if id_ in cells}
    with Worker(plan.settings) as worker:
        worker.state = cast("Ready", {name: environment[name] for name in Ready.__annotations__ if name in environment})
        here = machine_id("cpu") if plan.settings.device == "cpu" else worker.start()["machine_id"]
        facts = identity(plan, here)
        if differ := ", ".join(name for name in _SAME if environment.get(name) != facts[name]):
            raise UsageError(f"{path}: cannot go on here, with other {differ}; measure it again, without --confirm")
        for visited in sorted(set(counts.values())):
            only = frozenset(id_ for id_, count in counts.items() if count == visited)
            rules = _stretched(plan.rules, visited + rounds)
            go_on(replace(plan, only=only, mirror=visited, rules=rules), folder, worker, watcher)


def _as_planned(folder: RunFolder, environment: Mapping[str, Any], rules: TimingRules, plugins: Sequence[str]) -> Plan:
    options = Options(
        device=environment["environment"]["device"],
        plugins=tuple(plugins),
        threads=environment["threads"],
        process=environment["process"],
        memory_limit=environment.get("memory_limit_bytes"),
        quick=rules.quick,
        **time_limits_of(environment),
    )
    return replace(make_plan(folder.path / SUITE, options), rules=rules)


def _stretched(rules: TimingRules, rounds: int) -> TimingRules:
    """Rules for ``rounds`` more visits: their amounts are for all rounds together."""
    more = rounds / rules.rounds
    return replace(
        rules,
        rounds=rounds,
        min_time=rules.min_time * more,
        max_time=rules.max_time * more,
        warmup_time=rules.warmup_time * more,
        min_samples=round(rules.min_samples * more),
        max_samples=round(rules.max_samples * more),
    )
