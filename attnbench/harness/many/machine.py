"""The machine's side: it owns the process that measures, and answers one call at a time."""

from __future__ import annotations

import os
import platform
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from attnbench.contract.plugins.load import load, provenance
from attnbench.errors import AttnbenchError, said
from attnbench.harness.identity import read_files
from attnbench.harness.outside.isolation import CellFailed, Settings, Worker
from attnbench.harness.outside.trainings import Begun, Ended, Event, Step, run_all
from attnbench.harness.outside.visit import Visitor
from attnbench.harness.wire.process import environment_for, memory_limit
from attnbench.harness.wire.protocol import MeasureLimits, Outcome, Ready, VisitCell
from attnbench.measure.machine import available_cores, host, load_warning, processor, thread_warnings, variables
from attnbench.measure.time import TimingRules
from attnbench.suite.cell import Cell
from attnbench.version import __version__

_AT_A_TIME = 5.0
"""Seconds of training news in one answer, about."""


class Machine:
    """One machine, as a whole. Call it in one lasting thread: the worker ends with the thread that started it."""

    def __init__(self) -> None:
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        self._notes: list[str] = []
        self._events: Iterator[Event] = iter(())
        # Both are made by begin().
        self._worker = Worker(Settings())
        self._visitor = Visitor(Settings(), TimingRules(), 0.0)

    def call(self, method: str, message: dict[str, Any]) -> dict[str, Any]:
        """Run ``method`` with the arguments ``message``.

        Returns its answer, with ``notes`` for the user; after a failure ``failed`` has the reason and ``name`` the
        machine.
        """
        try:
            value = getattr(self, method)(**message)
        except (AttnbenchError, CellFailed) as error:
            value = {"failed": str(error), "name": platform.node()}
        except Exception as error:  # the driver tells it; here nobody would read it
            value = {"failed": said(error), "name": platform.node()}
        notes, self._notes[:] = self._notes.copy(), []
        return {**value, "notes": notes}

    def hello(
        self, folder: str, threads: int | None, plugins: Sequence[str], cells: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        """State the facts that decide about this machine's part; measure nothing yet.

        ``folder`` is the driver's current one, with the files; ``threads`` None means the cores of this machine;
        ``cells`` are those that may read files, as JSON.
        """
        with suppress(OSError):  # then files that are named relatively are missing, which is told
            os.chdir(folder)
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets it to the number of cores that it reserves
        for source in plugins:
            load(source)
        import attnbench.catalogue.attention
        import attnbench.catalogue.inputs  # noqa: F401  # their tables are filled by import

        threads = threads or available_cores()
        return {
            "attnbench": __version__,
            "python": platform.python_version(),
            "torch": version("torch"),
            "host": host(),
            "name": platform.node(),
            "processor": processor(),
            "niceness": os.nice(0),
            "niceness_of_parent": os.getpriority(os.PRIO_PROCESS, os.getppid()),
            "threads": threads,
            "variables": variables(environment_for(threads)),
            "input_files": read_files([Cell.from_json(cell) for cell in cells]),
            "plugins": provenance(plugins),
        }

    def begin(
        self, settings: Settings, rules: TimingRules, cell_timeout: float, known: Ready | None, *, unchecked: bool
    ) -> dict[str, Any]:
        """Set the worker up, which measures the machine; return its facts.

        ``known`` are its earlier facts, with the limits to take over: a run has one set for each host.
        """
        settings = replace(settings, memory_limit=memory_limit(settings.device, settings.memory_limit))
        self._visitor = Visitor(settings, rules, cell_timeout, unchecked=unchecked)
        self._worker = Worker(settings)
        self._worker.warn = self._notes.append
        if known:
            self._worker.state = known
        state = self._worker.start()
        if known and state["machine_id"] != known["machine_id"]:  # the same name, but another machine
            self._worker.stop()
            self._worker.state = cast(Ready, {})
            state = self._worker.start()
        notes = [load_warning(), *thread_warnings(settings.threads), *state["process_notes"]]
        self._notes += [note for note in notes if note]
        return {"state": state}

    def fresh(self) -> dict[str, Any]:
        """Start a new process: a round begins."""
        self._worker.stop()
        self._worker.start()
        return {}

    def visit(self, request: dict[str, Any]) -> dict[str, Any]:
        """Make a :class:`~attnbench.harness.wire.protocol.VisitCell`."""
        return {"outcome": self._visitor.visit(self._worker, VisitCell.from_json(request)).to_json()}

    def limits(self, request: dict[str, Any], most_s: float) -> dict[str, Any]:
        """Make a :class:`~attnbench.harness.wire.protocol.MeasureLimits` within ``most_s`` seconds."""
        found = MeasureLimits.from_json(request).ask(self._worker, most_s)
        self._worker.state = cast(Ready, {**self._worker.state, **found.limits})
        return {"limits": found.limits, "rows": [record.to_json() for record in found.records]}

    def train(self, cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Begin to train cells, as many at once as there are threads; answer as :meth:`more`."""
        self._worker.stop()  # the trainings get its memory and its core
        self._events = self._trainings([Cell.from_json(cell) for cell in cells])
        return self.more()

    def _trainings(self, cells: Sequence[Cell]) -> Iterator[Event]:
        with tempfile.TemporaryDirectory(prefix="attnbench-", ignore_cleanup_errors=True) as folder:
            yield from run_all(
                cells,
                self._worker.settings,
                self._worker.state,
                lambda cell, worker, tell: self._visitor.train(worker, cell, Path(folder), tell),
                self._notes.append,
            )

    def more(self) -> dict[str, Any]:
        """Training news of five seconds, or up to the end of one of them."""
        told = list[dict[str, Any]]()
        began = time.monotonic()
        for event in self._events:
            told.append(_told(event))
            if isinstance(event, Ended) or time.monotonic() - began > _AT_A_TIME:
                return {"events": told, "over": False}
        return {"events": told, "over": True}


def _end_with(parent: int) -> None:
    """End this process and all that it started once ``parent`` has ended: an actor may outlive its Ray."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _told(event: Event) -> dict[str, Any]:
    match event:
        case Begun(cell):
            return {"what": "begun", "cell_id": cell.cell_id}
        case Step(cell, done, of):
            return {"what": "step", "cell_id": cell.cell_id, "done": done, "of": of}
        case Ended(cell, outcome):
            return {"what": "ended", "cell_id": cell.cell_id, "outcome": cast(Outcome, outcome).to_json()}
