"""A suite to a run folder: order, rounds, resuming, and a row for everything that fails."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnbench import __version__
from attnbench.cell import METHOD_VERSION, Cell
from attnbench.errors import CannotCreate, StoreError
from attnbench.lock import held, make_folder
from attnbench.machine import load_warning, machine_id
from attnbench.record import Record, inferred
from attnbench.run.invocation import digest
from attnbench.run.isolation import CellFailed, Worker
from attnbench.run.order import family, in_order
from attnbench.run.plan import Options, Plan, make_plan
from attnbench.status import STOPPING, Status
from attnbench.store import RunFolder, are_samples, checked, find_runs, suite_folder
from attnbench.suite.schema import Suite

if TYPE_CHECKING:
    import pandas as pd


class Watcher:
    """What a run tells while it goes on; every method may be overridden, none does anything here."""

    def begun(self, folder: Path, *, cells: int, visits: int, resumed: int) -> None:
        """The folder is open; ``visits`` cell visits are ahead, ``resumed`` cells were measured before."""

    def visiting(self, cell: Cell) -> None:
        """This cell runs now."""

    def visited(self, record: Record) -> None:
        """Its row is stored."""

    def warned(self, message: str) -> None:
        """Something about the machine that the reader of the numbers should know."""


def execute(plan: Plan, watcher: Watcher | None = None, worker: Worker | None = None) -> tuple[RunFolder, list[Record]]:
    """Measure every cell that is not measured yet, storing each row as it comes.

    Args:
        worker: one with as many threads that has begun already.

    Raises:
        StoreError and its kinds: the folder cannot be made, written or locked.
        CorruptResults: the run to be continued is damaged.
        KeyboardInterrupt: passed on after what is finished has been written.
    """
    watcher = watcher or Watcher()
    with ExitStack() as ours, worker or Worker(plan.settings) as worker:
        worker.settings = plan.settings
        # Setting the worker up takes seconds, and the folder is held before that. On a GPU only the worker may ask for
        # the machine, for asking takes memory there.
        on_cpu = plan.settings.device == "cpu"
        key = _run_key(plan, machine_id("cpu") if on_cpu else worker.start()["machine_id"])
        make_folder(plan.options.out)
        with held(plan.options.out, patience=30):  # of two that begin at once, the second finds the first one's folder
            folder = _find_folder(plan, key) or _new_folder(plan, key)
            ours.enter_context(folder.lock())
        state = worker.start()
        folder.describe(state)
        return folder, _Run(plan, worker, state, folder, watcher).go()


def run(suite: Suite | str | Path, **options: Any) -> pd.DataFrame:
    """Run a suite (object, path or shipped name) and return its rows; the same as ``attnbench run``.

    Args:
        options: fields of :class:`Options`, such as ``device="cpu"`` or ``out=Path("results")``.
    """
    import pandas as pd

    folder, _ = execute(make_plan(suite, Options(**options)))
    return pd.read_csv(folder.path / "results.csv", keep_default_na=False, na_values=[""])


class _Run:
    """The state of one execution."""

    def __init__(self, plan: Plan, worker: Worker, state: dict[str, Any], folder: RunFolder, watcher: Watcher) -> None:
        self.plan, self.worker, self.state, self.folder, self.watcher = plan, worker, state, folder, watcher
        self.rules = plan.rules
        self.stopped: dict[tuple[object, ...], tuple[int, Status]] = {}
        """By family: the shortest length that ran out of memory or time."""
        self.unwritten: tuple[Record, dict[str, Any] | None, Sequence[str]] | None = None
        """The row of the last visit, which is written while the worker builds the next cell."""
        self.records = folder.records()
        self.samples = {cell_id: _by_round(rows) for cell_id, rows in folder.samples().items()}
        if plan.options.retry_failed:
            self.records = {k: r for k, r in self.records.items() if r.status is Status.OK}
        self.records = {k: r for k, r in self.records.items() if r.status is not Status.INTERRUPTED}
        for cell in plan.cells:
            if cell.cell_id in self.records:
                self._note_failure(cell, self.records[cell.cell_id])

    def go(self) -> list[Record]:
        visits = [self._due(round_) for round_ in range(self.rules.rounds)]
        # Later rounds visit the cells that turn out ok; all that are not known to fail are expected to.
        expected = sum(len(due) for due in visits)
        finished = sum(1 for cell in self.plan.cells if cell.cell_id in self.records)
        self.watcher.begun(self.folder.path, cells=len(self.plan.cells), visits=expected, resumed=finished)
        for note in (*self.folder.repairs, load_warning(), *self.state["process_notes"]):
            if note:
                self.watcher.warned(note)
        try:
            for round_ in range(self.rules.rounds):
                for cell in in_order(self._due(round_), f"{self.plan.suite.name}{round_}"):
                    self._visit(cell, round_)
            self._write()
        except BaseException:
            with suppress(StoreError):  # what stopped the run is told, not that the table failed as well
                self._write()
                self.folder.write_csv(self._rows())
            raise
        self.folder.write_csv(self._rows())
        return self._rows()

    def _rows(self) -> list[Record]:
        """Rows of this plan in its order."""
        return [self.records[cell.cell_id] for cell in self.plan.cells if cell.cell_id in self.records]

    def _due(self, round_: int) -> list[Cell]:
        """Cells that this round still has to visit."""
        due = []
        for cell in self.plan.cells:
            record = self.records.get(cell.cell_id)
            if round_ == 0:
                if record is None:
                    due.append(cell)
            elif "time" in cell.measure and (
                record is None or (record.status is Status.OK and (record.time_rounds or 0) <= round_)
            ):
                due.append(cell)
        return due

    def _visit(self, cell: Cell, round_: int) -> None:
        previous = self.records.get(cell.cell_id)
        if round_ and (previous is None or previous.status is not Status.OK):
            return
        self.watcher.visiting(cell)
        started = _now()
        samples: dict[str, Any] | None = None
        stderr: list[str] = []
        known = self._known(cell) if round_ == 0 else None
        if known is not None:
            record = known
        else:
            try:
                record, samples = self._measure(cell, round_, previous)
                if record.status not in (Status.OK, Status.UNSUPPORTED):
                    stderr = self.worker.said()
            except CellFailed as failed:
                remedy = "; raise --cell-timeout" if failed.status is Status.TIMEOUT else ""
                record = Record.of(cell, failed.status, failed.reason + remedy, quick=self.rules.quick)
                stderr = failed.stderr
            except KeyboardInterrupt:
                self.worker.stop()
                if previous is None:
                    self._store(cell, Record.of(cell, Status.INTERRUPTED, "stopped by the user"), None, started)
                raise
        self._store(cell, record, samples, previous.started_at if previous else started, stderr)

    def _measure(self, cell: Cell, round_: int, previous: Record | None) -> tuple[Record, dict[str, Any] | None]:
        earlier = self.samples.get(cell.cell_id, {})
        if self.plan.settings.device == "cpu" and self.plan.settings.process == "as-shipped" and "time" in cell.measure:
            # The heap that other cells leave behind spares the next one its page faults: it starts in a fresh process,
            # like the script that would call it.
            self.worker.stop()
        answer = self.worker.ask(
            {
                "do": "cell",
                "cell": cell.to_json(),
                "rules": asdict(self.rules),
                "round": round_,
                "earlier": [taken for r, taken in sorted(earlier.items()) if r < round_],
                "previous": previous.to_json() if previous else None,
            },
            self.plan.options.cell_timeout,
            meanwhile=self._write,
        )
        try:
            record, samples = checked(Record.from_json(answer["record"])), answer["samples"]
            taken = samples["samples"] if samples else []
        except (KeyError, TypeError, ValueError):
            raise self.worker.garbage() from None
        if record.cell_id != cell.cell_id or not are_samples(taken):
            raise self.worker.garbage()
        if samples:
            self.samples.setdefault(cell.cell_id, {})[round_] = taken
        return record, samples

    def _known(self, cell: Cell) -> Record | None:
        """The outcome of a shorter length of the same thing that ran out of memory or time."""
        n, status = self.stopped.get(family(cell), (cell.shape.N, Status.OK))
        return inferred(cell, n, status, quick=self.rules.quick) if n < cell.shape.N else None

    def _note_failure(self, cell: Cell, record: Record) -> None:
        if record.status in STOPPING:
            known = self.stopped.get(family(cell))
            if known is None or known[0] > cell.shape.N:
                self.stopped[family(cell)] = (cell.shape.N, record.status)

    def _store(
        self,
        cell: Cell,
        record: Record,
        samples: dict[str, Any] | None,
        started_at: str,
        stderr: Sequence[str] = (),
    ) -> None:
        record.machine_id = self.state["machine_id"]
        record.torch_version = self.state["environment"]["torch"]
        record.process = record.process or self.state["process"]
        record.threads = self.plan.settings.threads
        record.started_at = started_at
        self._write()
        # Without this row, which is not written yet, and not later: a long table would take a core from the next cell.
        self.folder.write_csv(self._rows(), at_most_every=2.0)
        self._note_failure(cell, record)
        self.records[record.cell_id] = record
        self.unwritten = record, samples, stderr

    def _write(self) -> None:
        """Store the row of the last visit, if that is not done yet."""
        if self.unwritten is not None:
            record, samples, stderr = self.unwritten
            self.unwritten = None
            self.folder.add(record, samples, stderr)
            if record.status is not Status.INTERRUPTED:
                self.watcher.visited(record)


def _by_round(rows: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Samples as they are stored; a round that was repeated after a crash counts once, with its last samples."""
    return {row["round"]: row["samples"] for row in rows}


def _run_key(plan: Plan, machine_id: str) -> str:
    """Equal for two invocations whose rows may stand in one folder."""
    same = [
        METHOD_VERSION,
        sorted(cell.cell_id for cell in plan.cells),
        machine_id,
        plan.settings.threads,
        plan.settings.process,
        asdict(plan.rules),
        sorted((source, digest(source)) for source in plan.options.plugins),
    ]
    return hashlib.sha256(json.dumps(same).encode()).hexdigest()[:16]


def _find_folder(plan: Plan, key: str) -> RunFolder | None:
    """The newest folder of the same run, unless a new one is wanted."""
    root = suite_folder(plan.options.out, plan.suite.name)
    if not plan.options.fresh:
        same = [folder for folder in find_runs(root) if folder.environment.get("run_key") == key]
        # The last of them, but rather one that has its own name: a copy for safe keeping stays as it is.
        same.sort(key=lambda folder: folder.environment.get("folder") == folder.path.name)
        return same[-1] if same else None
    return None


def _new_folder(plan: Plan, key: str) -> RunFolder:
    root = suite_folder(plan.options.out, plan.suite.name)
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    name = f"{stamp}-{plan.settings.device.replace(':', '')}"
    environment = {
        "attnbench": __version__,
        "run_key": key,
        "method_version": METHOD_VERSION,
        "started_at": _now(),
        "threads": plan.settings.threads,
        "memory_limit_bytes": plan.settings.memory_limit,
    }
    for attempt in range(100):
        path = root / (name if not attempt else f"{name}-{attempt}")
        if not path.exists():
            environment["folder"] = path.name
            return RunFolder.create(path, environment=environment, suite_text=plan.suite.to_yaml())
    raise CannotCreate(f"cannot find a free name for a new run in {root}")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
