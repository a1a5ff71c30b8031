"""A run in progress: the progress bar, and a line for each cell that fails."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnbench.cli.screen import console
from attnbench.harness.runner import Watcher, execute_beside
from attnbench.suite.describe import name, varying

if TYPE_CHECKING:
    from rich.progress import Progress

    from attnbench.harness.many.ray import RayEngine
    from attnbench.harness.outside.isolation import Worker
    from attnbench.harness.plan import Plan
    from attnbench.results.record import Record
    from attnbench.results.store import RunFolder
    from attnbench.suite.cell import Cell


AGAIN = "--retry-failed repeats those that failed, --fresh all"


class Screen(Watcher):
    """A bar of cells by variant, length and the axes that differ between them."""

    folder: Path | None = None

    def __init__(self, plan: Plan, bar: Progress) -> None:
        self._bar, self._again = bar, "--fresh repeats all" if plan.options.retry_failed else AGAIN
        axes = varying(plan.cells)
        self._names = {cell.cell_id: name(cell, axes) for cell in plan.cells}
        self._done = self._visits = 0
        self._parts: dict[str, float] = {}

    def begun(self, folder: Path, *, cells: int, visits: int, resumed: int) -> None:
        self.folder = self.folder or folder
        self._visits += visits
        self._bar.update(self._bar.task_ids[0], total=self._visits)
        if resumed:
            console.note(f"resuming {folder}: {resumed} of {cells} cells have rows ({self._again})")

    def visiting(self, cell: Cell) -> None:
        self._bar.update(self._bar.task_ids[0], description=self._names[cell.cell_id])

    def doing(self, cell: Cell, part: str) -> None:
        self._show(f"{self._names[cell.cell_id]}: {part}")

    def trained(self, cell: Cell, step: int, steps: int) -> None:
        self._parts[cell.cell_id] = step / steps
        self._show(f"{self._names[cell.cell_id]}: step {step} of {steps}")

    def _show(self, description: str | None = None) -> None:
        told: dict[str, Any] = {} if description is None else {"description": description}
        self._bar.update(self._bar.task_ids[0], completed=self._done + sum(self._parts.values()), **told)

    def visited(self, record: Record) -> None:
        self._parts.pop(record.cell_id, None)
        self._done += 1
        self._show()
        if record.status not in ("ok", "unsupported"):
            console.note(f"{self._names[record.cell_id]}: {record.status}: {record.reason}")

    def warned(self, message: str) -> None:
        console.warning(message)


def measured(
    plan: Plan, worker: Worker | None = None, engine: RayEngine | None = None, *, what: str = "cells"
) -> list[tuple[RunFolder, list[Record]]]:
    """Execute a plan with a bar, and print the finished part's folder if it is stopped; return folders and rows."""
    with console.progress(total=len(plan.cells)) as bar:
        screen = Screen(plan, bar)
        try:
            if engine is None:
                return execute_beside(plan, screen, worker)
            from attnbench.harness.many.driver import execute_on
            from attnbench.harness.many.ray import hushed

            with hushed(1), closing(engine):  # a thread of Ray's says at length that a node is gone
                return execute_on(engine, plan, screen)
        except KeyboardInterrupt:
            bar.stop()
            if screen.folder is not None:
                console.note(f"stopped; finished {what} are in {screen.folder}; the same command resumes the run")
            raise
