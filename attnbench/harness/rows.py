"""The rows of a run: which exist, which visits remain, and how an outcome becomes a row."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from attnbench.errors import CannotCreate, CorruptResults, ResultsError, StoreError
from attnbench.harness.outside.trainers import threads_of
from attnbench.harness.plan import Plan, family
from attnbench.harness.repeat import COMMAND, command_of, keep
from attnbench.harness.run_identity import run_key
from attnbench.harness.wire.protocol import Outcome, Ready, VisitCell
from attnbench.measure.status import FIRST_CALL, STOPPING, UNFINISHED, Status
from attnbench.results.intervals import NO_MIXING, REFERENCE, Summary, summary
from attnbench.results.record import Record, has_lost_round, inferred, with_lost_round, without_lost_rounds
from attnbench.results.runs import find_runs, has_rows, suite_folder
from attnbench.results.sources import changed, said
from attnbench.results.store import ENVIRONMENT, RECORDS, RunFolder
from attnbench.results.trainings import choose, trained
from attnbench.results.validation import foreign_to_cell
from attnbench.suite.cell import Cell
from attnbench.version import __version__

_LATE = re.compile(r"no answer within ([\d.e+]+) s")
_TIMED = (Status.OK, Status.DISTURBED)
"""Outcomes after which a later round takes more samples."""
_AS_BEFORE = (Status.OK, Status.UNSUPPORTED)
"""Outcomes that another try would not change."""


Known = tuple[dict[str, Record], dict[str, dict[int, list[dict[str, Any]]]]]
"""Rows by cell, and samples by cell and round."""


class Rows:
    """Rows and samples of a run folder now; raise CorruptResults if it is damaged."""

    def __init__(self, plan: Plan, folder: RunFolder, known: Known | None = None) -> None:
        """Read the rows of finished cells, unless they are ``known``.

        Left out are cells that took too long, if this plan has more time, and failed ones with ``--retry-failed``.
        """
        self.plan, self.folder = plan, folder
        self.notes: list[str] = []
        """Warnings about the rows that are there already."""
        if known is None:
            known = stored_rows(plan, folder, self.notes.append), folder.samples()
        self.records, self.samples = known
        self._stopped: dict[tuple[object, ...], list[tuple[int, int, Status]]] = {}
        """Queries and keys that ran out of memory or time, and of which, by family."""
        if plan.options.retry_failed:
            kept = _AS_BEFORE if plan.options.joins else (Status.OK,)
            ok = (record for record in self.records.values() if record.status in kept)
            self.records = {record.cell_id: without_lost_rounds(record) for record in ok}
        again = {k for k, r in self.records.items() if r.status in UNFINISHED}
        for first, limit in ((False, plan.options.cell_timeout), (True, plan.options.first_call_timeout)):
            timeouts = {k: r.reason for k, r in self.records.items() if r.status is Status.TIMEOUT}
            late = {k: why for k, why in timeouts.items() if (FIRST_CALL in why) is first}
            if any(float(one) < limit for why in late.values() for one in _LATE.findall(why)):
                again |= late.keys()
        self.forget(cell for cell in plan.cells if cell.cell_id in again and plan.visits(cell))
        for cell in plan.cells:
            if cell.cell_id in self.records:
                self._note_failure(cell, self.records[cell.cell_id])

    def in_order(self) -> list[Record]:
        """Rows of the plan in its order."""
        return [self.records[cell.cell_id] for cell in self.plan.cells if cell.cell_id in self.records]

    def due(self, round_: int, cells: Iterable[Cell] | None = None) -> list[Cell]:
        """Cells of the plan, or of ``cells``, for this round, unless an earlier one failed.

        A cell that waited for a core until its time limit has no round yet: only its first round measures all else.
        """
        due = []
        for cell in self.plan.cells if cells is None else cells:
            record = self.records.get(cell.cell_id)
            if cell.training is not None or not self.plan.visits(cell):
                continue
            if record is None:
                wanted = round_ == 0 or "time" in cell.measure
            else:
                wanted = 0 < (record.time_rounds or 0) <= round_
                wanted = wanted and record.status in _TIMED and not has_lost_round(record)
            if wanted:
                due.append(cell)
        return due

    def forget(self, cells: Iterable[Cell]) -> None:
        """Drop the rows and samples of cells from memory, not from the store."""
        for cell in cells:
            self.records.pop(cell.cell_id, None)
            self.samples.pop(cell.cell_id, None)

    def disturbed(self) -> list[Cell]:
        """Visited cells of the plan without a time because they waited for a core."""
        among = ((cell, self.records.get(cell.cell_id)) for cell in self.plan.cells if self.plan.visits(cell))
        return [cell for cell, record in among if record is not None and record.status is Status.DISTURBED]

    def known(self, cell: Cell) -> Record | None:
        """The row of an untried cell, if the same thing of fewer queries and no more keys ran out of memory or time."""
        N, M, quick = cell.shape.N, cell.shape.M, self.plan.rules.quick
        shorter = [(n, status) for n, m, status in self._stopped.get(family(cell), ()) if n < N and m <= M]
        return inferred(cell, *min(shorter), quick=quick) if shorter else None

    def request(self, cell: Cell, round_: int) -> VisitCell:
        """The request of this round to the worker."""
        earlier = [taken for r, taken in sorted(self.samples.get(cell.cell_id, {}).items()) if r < round_]
        previous, unchecked = self.records.get(cell.cell_id), self.plan.options.unchecked
        return VisitCell(cell, self.plan.rules, round_, earlier, previous, unchecked)

    def settle(self, cell: Cell, round_: int, outcome: Outcome) -> str:
        """Keep a visit's samples, and earlier rounds' numbers if a later one failed; return that failure in one line,
        else empty."""
        if outcome.samples:
            self.samples.setdefault(cell.cell_id, {})[round_] = outcome.samples["samples"]
        previous = self.records.get(cell.cell_id)
        if previous is None or outcome.record.status in _TIMED:
            return ""
        lost = f"round {round_ + 1} failed: {outcome.record.status}: {outcome.record.reason}"
        outcome.record = with_lost_round(previous, lost)
        return f"{cell.label}: {lost}; the row keeps the numbers of the rounds before"

    def put(self, cell: Cell, record: Record, state: Ready, started_at: str) -> None:
        """Complete a row by the facts of its process, and count it as the cell's."""
        previous = self.records.get(cell.cell_id)
        record.machine_id = state["machine_id"]
        record.torch_version = state["environment"]["torch"]
        record.process = record.process or state["process"]
        record.threads = threads_of(cell, self.plan.settings)
        record.started_at = previous.started_at if previous else started_at
        self._note_failure(cell, record)
        self.records[record.cell_id] = record

    def _note_failure(self, cell: Cell, record: Record) -> None:
        if record.status in STOPPING and FIRST_CALL not in record.reason:
            self._stopped.setdefault(family(cell), []).append((cell.shape.N, cell.shape.M, record.status))

    def trainings(self, cells: Iterable[Cell] | None = None) -> list[Cell]:
        """Trained cells of the plan, or of ``cells``, lowest seed first."""
        among = self.plan.cells if cells is None else cells
        found = [cell for cell in among if cell.training is not None and self.plan.visits(cell)]
        return sorted(found, key=lambda cell: (cell.seed, cell.shape.N))

    def beyond_limits(self) -> tuple[list[Cell], int]:
        """Timed cells of the plan, and the number of impossibly fast ones; no cells without these."""
        from attnbench.measure.limits import IMPOSSIBLE

        timed = [cell for cell in self.plan.cells if self._has_time(cell)]
        impossible = sum((self.records[cell.cell_id].peak_fraction or 0.0) > IMPOSSIBLE for cell in timed)
        return (timed if impossible else []), impossible

    def _has_time(self, cell: Cell) -> bool:
        record = self.records.get(cell.cell_id)
        return record is not None and record.status is Status.OK and record.time_median_s is not None

    def correct(self, records: Iterable[Record]) -> None:
        """Store rows that were corrected."""
        for record in records:
            self.records[record.cell_id] = record
            self.folder.add(record)

    def doubt_tasks(self, warn: Callable[[str], None]) -> None:
        """Mark each row of a task that does not separate variants here, and warn once."""
        said = doubts(self.trainings(), self.records)
        for warning in dict.fromkeys(said.values()):
            tasks = dict.fromkeys(str(self.records[cell_id].task) for cell_id, one in said.items() if one == warning)
            warn(f"{', '.join(tasks)}: {warning}; train longer, or choose other learning rates")
        self.correct(
            replace(record, warnings="; ".join(filter(None, [record.warnings, warning])))
            for record, warning in ((self.records[cell_id], one) for cell_id, one in said.items())
            if warning not in record.warnings
        )

    @contextmanager
    def concluded(self, warn: Callable[[str], None]) -> Iterator[None]:
        """A block after which the folder is concluded; after a fault, its table holds the stored rows."""
        try:
            yield
            self.doubt_tasks(warn)
            self.folder.refuse_changes()
        except BaseException:
            with suppress(StoreError):  # the fault that ended the run is told, not this one
                self.folder.write_csv([record for record in self.in_order() if record.seal])
            raise
        self.folder.write_csv(self.in_order())
        self.folder.conclude()


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def doubts(cells: Sequence[Cell], records: Mapping[str, Record]) -> dict[str, str]:
    """Reasons against all scores of a task, by cell id, if the suite sets softmax's least score.

    Empty before softmax or identity was trained.
    """
    wanted = {
        cell.cell_id: cell.training.solved
        for cell in cells
        if cell.training is not None
        and cell.training.solved is not None
        and cell.cell_id in records
        and cell.test_len is None  # to fail at other lengths is a finding
    }
    choices = choose(trained(records[cell_id] for cell_id in wanted))
    found: dict[str, str] = {}
    for problem in dict.fromkeys(choice.problem for choice in choices):
        here = [choice for choice in choices if choice.problem == problem]
        cell_ids = [one.cell_id for choice in here for one in choice.rows]
        scores = {one.variant: one for choice in here if (one := summary(choice)) is not None}
        said = _said(scores, max((wanted[cell_id] or 0.0 for cell_id in cell_ids), default=0.0))
        found |= dict.fromkeys(cell_ids, said) if said else {}
    tested = {cell.cell_id: cell.whole_training.cell_id for cell in cells if cell.cell_id in records}
    return {cell_id: found[training] for cell_id, training in tested.items() if training in found}


def _said(scores: Mapping[str, Summary], solved: float) -> str:
    exact, still = scores.get(REFERENCE), scores.get(NO_MIXING)
    parts = []
    if exact is not None and exact.over_seeds.mean < solved:
        parts.append(f"softmax scores {exact.over_seeds.mean:.2f} of the {solved:g} that this task needs to tell apart")
    if still is not None and still.ends is not None and still.chance is not None and still.ends[0] > still.chance:
        parts.append(f"identity scores {still.over_seeds.mean:.2f} without mixing, above chance ({still.chance:.2f})")
    return " and ".join(parts)


def find_folder(plan: Plan, identity: dict[str, Any], warn: Callable[[str], None]) -> RunFolder | None:
    """The newest folder of the same run, unless a new one is wanted; ``warn`` gets unreadable folders.

    Raises CannotCreate if a link stands in the place of the suite's folder.
    """
    root = suite_folder(plan.options.out, plan.suite.name)
    same = []
    for file in [] if plan.options.fresh else sorted(root.glob(f"*/{ENVIRONMENT}")):
        if not has_rows(file.parent):
            warn(f"{file.parent}: {RECORDS} is missing; the run is not continued")
    for folder in [] if plan.options.fresh else find_runs(root):
        try:
            environment = folder.environment
        except CorruptResults as error:
            warn(f"{error}; the run is not continued")
        else:
            if environment.get("run_key") == run_key(identity):
                if altered := changed(environment.get("sources", {})):
                    warn(f"{folder.path}: measured before {said(altered[0])} changed, so a new run begins")
                    continue
                # Prefer one that still has its own name: a copy for safe keeping stays as it is.
                same.append((environment.get("folder") == folder.path.name, folder))
    same.sort(key=lambda found: found[0])
    return same[-1][1] if same else None


def take_over(plan: Plan, folder: RunFolder, identity: Mapping[str, Any]) -> None:
    """Copy into a new folder the rows that :func:`rows_alike` finds; the folder must be locked."""
    for record in rows_alike(plan, identity).values() if plan.options.joins and not folder.history() else ():
        folder.add(record)


def rows_alike(plan: Plan, identity: Mapping[str, Any]) -> dict[str, Record]:
    """Rows of the plan's cells in runs of the suite with the same ``identity``, whichever other cells they have.

    Failed ones are left out, and so are all rows of a damaged run, or of one whose code has changed since.
    """
    cells, found = {cell.cell_id: cell for cell in plan.cells}, dict[str, Record]()
    facts = {name: value for name, value in json.loads(json.dumps(identity)).items() if name != "cells"}
    for folder in [] if plan.options.fresh else find_runs(suite_folder(plan.options.out, plan.suite.name)):
        with suppress(ResultsError):
            environment = folder.environment
            same = all(environment.get(name) == value for name, value in facts.items())
            if same and not changed(environment.get("sources", {})) and not folder.doubts():
                rows = [row for row in folder.records().values() if row.status in _AS_BEFORE]
                known = [row for row in rows if row.cell_id in cells and not foreign_to_cell(row, cells[row.cell_id])]
                found |= {row.cell_id: row for row in known}
    return found


def new_folder(plan: Plan, identity: dict[str, Any], name: str = "") -> RunFolder:
    """A folder called ``name``, else after the time, the device and the shard. Raises CannotCreate."""
    root = suite_folder(plan.options.out, plan.suite.name)
    shard = plan.options.shard
    parts = [stamp(), plan.settings.device.replace(":", ""), f"{shard.index}of{shard.of}" if shard else ""]
    name = name or "-".join(filter(None, parts))
    environment = {
        "attnbench": __version__,
        "run_key": run_key(identity),
        **identity,
        COMMAND: command_of(plan),
        "started_at": now(),
        "memory_limit_bytes": plan.settings.memory_limit,
    }
    for attempt in range(100):
        path = root / (name if not attempt else f"{name}-{attempt}")
        if not path.exists():
            environment["folder"] = path.name
            folder = RunFolder.create(path, environment=environment, suite_text=plan.suite.to_yaml())
            keep(path, plan.options.plugins, ())
            return folder
    raise CannotCreate(f"cannot find a free name for a new run in {root}")


def stamp() -> str:
    """The time in UTC that begins a run folder's name."""
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")


def stored_rows(plan: Plan, folder: RunFolder, warn: Callable[[str], None]) -> dict[str, Record]:
    """The last row of every cell, except those with lost samples, which go to ``warn``.

    Raises CorruptResults if a row is not the plan's cell with its id, or is not as it was written.
    """
    cells = {cell.cell_id: cell for cell in plan.cells}
    history = folder.history()
    for number, record in enumerate(history, start=1):
        cell = cells.get(record.cell_id)
        foreign = foreign_to_cell(record, cell) if cell else f"no cell of this run has the id {record.cell_id!r}"
        if foreign:
            raise CorruptResults(f"{folder.path / RECORDS}:{number}: {foreign}; restore it or start with --fresh")
    records = {record.cell_id: record for record in history}
    for record in folder.without_samples(records.values()):
        warn(f"{record.label} n={record.seq_len}: its samples are lost, so it is measured again")
        del records[record.cell_id]
    _, altered = folder.compare_table(history)
    if altered:
        warn(f"{altered}: not what {RECORDS} holds; the table is written anew, and cells that lack a row are measured")
    for line in folder.doubts():
        warn(line)
    return records
