"""Which folder a run writes to: that of the same run, to go on with it, or a new one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from attnbench import __version__
from attnbench.errors import CannotCreate, CorruptResults
from attnbench.record import Record
from attnbench.run.identity import run_key
from attnbench.run.plan import Plan
from attnbench.runs import find_runs, suite_folder
from attnbench.store import ENVIRONMENT, RECORDS, RunFolder
from attnbench.verify import foreign_to_cell


def find_folder(plan: Plan, identity: dict[str, Any], warn: Callable[[str], None]) -> RunFolder | None:
    """The newest folder of the same run, unless a new one is wanted; ``warn`` is told of folders that cannot be read.

    Raises:
        CannotCreate: a link stands in the place of the suite's folder.
    """
    root = suite_folder(plan.options.out, plan.suite.name)
    same = []
    for file in [] if plan.options.fresh else sorted(root.glob(f"*/{ENVIRONMENT}")):
        if not (file.parent / RECORDS).is_file():
            warn(f"{file.parent}: {RECORDS} is missing; the run is not continued")
    for folder in [] if plan.options.fresh else find_runs(root):
        try:
            environment = folder.environment
        except CorruptResults as error:
            warn(f"{error}; the run is not continued")
        else:
            if environment.get("run_key") == run_key(identity):
                # Prefer one that still has its own name: a copy for safe keeping stays as it is.
                same.append((environment.get("folder") == folder.path.name, folder))
    same.sort(key=lambda found: found[0])
    return same[-1][1] if same else None


def new_folder(plan: Plan, identity: dict[str, Any], name: str = "") -> RunFolder:
    """A folder named after the time, the device and the shard.

    Args:
        name: its name, if it is to have another one.

    Raises:
        CannotCreate: it cannot be made.
    """
    root = suite_folder(plan.options.out, plan.suite.name)
    shard = plan.options.shard
    parts = [stamp(), plan.settings.device.replace(":", ""), f"{shard.index}of{shard.of}" if shard else ""]
    name = name or "-".join(filter(None, parts))
    environment = {
        "attnbench": __version__,
        "run_key": run_key(identity),
        **identity,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "memory_limit_bytes": plan.settings.memory_limit,
    }
    for attempt in range(100):
        path = root / (name if not attempt else f"{name}-{attempt}")
        if not path.exists():
            environment["folder"] = path.name
            return RunFolder.create(path, environment=environment, suite_text=plan.suite.to_yaml())
    raise CannotCreate(f"cannot find a free name for a new run in {root}")


def stamp() -> str:
    """The time in UTC, as the names of run folders begin."""
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")


def stored_rows(plan: Plan, folder: RunFolder, warn: Callable[[str], None]) -> dict[str, Record]:
    """The last row of every cell, except those whose samples are lost; ``warn`` is told of these.

    Raises:
        CorruptResults: a row does not belong to the plan's cell with its id, or is otherwise not as it was written.
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
