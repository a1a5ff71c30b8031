"""The machine's side: it owns the process that measures, and answers one call at a time.

All its methods must be called in one thread, which lasts: the system ends the process that measures with the thread
that started it.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from attnbench import __version__
from attnbench.cell import Cell
from attnbench.errors import AttnbenchError, said
from attnbench.machine import available_cores, host, load_warning, processor, thread_warnings, variables
from attnbench.measure.time import TimingRules
from attnbench.plugins import load, provenance
from attnbench.run.descendants import end_orphans
from attnbench.run.identity import read_files
from attnbench.run.isolation import CellFailed, Settings, Worker
from attnbench.run.many.engine import Message
from attnbench.run.many.lease import Lease
from attnbench.run.process import Products, environment_for, memory_limit
from attnbench.run.protocol import MeasureLimits, Outcome, Ready, VisitCell
from attnbench.run.trainings import Begun, Ended, Event, Step, run_all
from attnbench.run.visit import Visitor

_OURS = b"-m attnbench.run.worker"
"""Part of the command line of each process that measures."""
_AT_A_TIME = 5.0
"""Seconds of news of trainings that one answer holds, about."""


class Machine:
    """One machine, as a whole. Every method takes and gives plain JSON."""

    def __init__(self, lease: Lease | None = None) -> None:
        self._lease = lease or Lease()
        self._lease.watch(_end)
        self._notes: list[str] = []
        self._events: Iterator[Event] = iter(())
        self._checkpoints: Path | None = None
        # Both are made by begin().
        self._worker = Worker(Settings())
        self._visitor = Visitor(Settings(), TimingRules(), 0.0)

    def call(self, method: str, message: Message) -> dict[str, Any]:
        """Do what is asked and renew the lease. The answer has the number of the call, and ``failed`` if it failed.

        Args:
            message: what the method takes, ``attempt`` (the number of the call) and ``most_s`` (seconds that it may
                take).
        """
        self._lease.renew(message["most_s"])
        methods: dict[str, Callable[[Message], dict[str, Any]]] = {
            "hello": self._hello,
            "begin": self._begin,
            "fresh": self._fresh,
            "visit": self._visit,
            "train": self._train,
            "more": self._more,
            "limits": self._limits,
            "ping": lambda message: {},
        }
        try:
            value = methods[method](message)
        except AttnbenchError as error:
            value = {"failed": str(error), "name": platform.node()}
        except Exception as error:  # the driver tells it; here nobody would read it
            value = {"failed": said(error), "name": platform.node()}
        self._lease.renew()
        notes = self._notes.copy()
        self._notes.clear()
        return {**value, "attempt": message["attempt"], "notes": notes}

    def _hello(self, message: Message) -> dict[str, Any]:
        """Say what decides whether this machine may take part; measure nothing yet."""
        with suppress(OSError):  # then files that are named relatively are missing, which is told
            os.chdir(message["folder"])
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets it to the number of cores that it reserves
        left = end_orphans(_OURS)
        if left:
            self._notes.append(f"ended {left} measuring process{'es' * (left > 1)} that an earlier run left behind")
        for source in message["plugins"]:
            load(source)
        import attnbench.attention
        import attnbench.inputs  # noqa: F401  # their tables are filled by import

        cells = [Cell.from_json(cell) for cell in message["cells"]]
        threads = message["threads"] or available_cores()
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
            "input_files": read_files(cells),
            "plugins": provenance(message["plugins"]),
        }

    def _begin(self, message: Message) -> dict[str, Any]:
        """Set the process up that measures, which measures the machine; give what it says of itself."""
        wanted = message["settings"]
        settings = Settings(
            device=wanted["device"],
            threads=wanted["threads"],
            process=wanted["process"],
            memory_limit=memory_limit(wanted["device"], wanted["memory_limit"]),
            plugins=tuple(wanted["plugins"]),
            files=tuple(wanted["files"]),
            dtypes=tuple(wanted["dtypes"]),
            models=tuple(wanted["models"]),
            products=Products(*wanted["products"]) if wanted["products"] else None,
            first_call_timeout=wanted["first_call_timeout"],
        )
        rules, timeout = TimingRules(**message["rules"]), message["cell_timeout"]
        self._visitor = Visitor(settings, rules, timeout, unchecked=message["unchecked"])
        self._worker = Worker(settings)
        self._worker.warn = self._notes.append
        known = message["known"]
        if known:  # a run has one set of limits for each host, as a process takes over those of the one before it
            self._worker.state = cast(Ready, known)
        state = self._worker.start()
        if known and state["machine_id"] != known["machine_id"]:  # the same name, but another machine
            self._worker.stop()
            self._worker.state = cast(Ready, {})
            state = self._worker.start()
        notes = [load_warning(), *thread_warnings(settings.threads), *state["process_notes"]]
        self._notes += [note for note in notes if note]
        return {"state": state}

    def _fresh(self, message: Message) -> dict[str, Any]:
        """Measure in another process from now on: a round begins."""
        self._worker.stop()
        self._worker.start()
        return {}

    def _visit(self, message: Message) -> dict[str, Any]:
        request = VisitCell.from_json(message["request"])
        return {"outcome": self._visitor.visit(self._worker, request).to_json()}

    def _limits(self, message: Message) -> dict[str, Any]:
        request = MeasureLimits.from_json(message["request"])
        try:
            found = request.ask(self._worker, message["most_s"])
        except CellFailed as failed:
            return {"reason": failed.reason}
        self._worker.state = cast(Ready, {**self._worker.state, **found.limits})
        return {"limits": found.limits, "rows": [record.to_json() for record in found.records]}

    def _train(self, message: Message) -> dict[str, Any]:
        """Begin to train cells, as many at once as there are threads; :meth:`_more` tells how far they are."""
        self._worker.stop()  # the trainings get its memory and its core
        self._checkpoints = Path(tempfile.mkdtemp(prefix="attnbench-"))
        cells = [Cell.from_json(cell) for cell in message["cells"]]
        attempt = partial(_trained, self._visitor, self._checkpoints)
        self._events = run_all(cells, self._worker.settings, self._worker.state, attempt, self._notes.append)
        return {}

    def _more(self, message: Message) -> dict[str, Any]:
        """News of the trainings since: of five seconds, or up to the end of one of them."""
        told = list[dict[str, Any]]()
        began = time.monotonic()
        for event in self._events:
            told.append(_told(event))
            if isinstance(event, Ended) or time.monotonic() - began > _AT_A_TIME:
                return {"events": told, "over": False}
        if self._checkpoints is not None:
            shutil.rmtree(self._checkpoints, ignore_errors=True)
        return {"events": told, "over": True}


def _trained(visitor: Visitor, folder: Path, cell: Cell, worker: Worker, tell: Callable[[int, int], None]) -> Outcome:
    return visitor.train(worker, cell, folder, tell)


def _told(event: Event) -> dict[str, Any]:
    match event:
        case Begun(cell):
            return {"what": "begun", "cell_id": cell.cell_id}
        case Step(cell, done, of):
            return {"what": "step", "cell_id": cell.cell_id, "done": done, "of": of}
        case Ended(cell, outcome):
            return {"what": "ended", "cell_id": cell.cell_id, "outcome": outcome.to_json()}


def _end(why: str) -> None:
    """End at once; the processes that measure end with this one."""
    os._exit(1)
