"""The machine's side: an actor that measures lots of cells as a run on one machine does, and sends what comes of it."""

from __future__ import annotations

import os
import platform
import queue
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from attnbench.contract.plugins.discovery import load, provenance
from attnbench.errors import AttnbenchError, UsageError, said
from attnbench.harness.outside.isolation import START_TIMEOUT, CellFailed, Settings, Worker
from attnbench.harness.outside.visit import Visitor
from attnbench.harness.plan import Plan
from attnbench.harness.rows import Known, Rows
from attnbench.harness.run_identity import read_files
from attnbench.harness.runner import Run, Watcher
from attnbench.harness.wire.process import environment_for, memory_limit
from attnbench.harness.wire.protocol import Outcome, Ready
from attnbench.measure.machine import available_cores, host, load_warning, thread_warnings, variables
from attnbench.measure.time import TimingRules
from attnbench.results.record import Record
from attnbench.results.store import RunFolder
from attnbench.suite.cell import Cell
from attnbench.text import one_line
from attnbench.version import __version__

ALIVE_EVERY = 10.0
"""Most seconds between two events of a machine at work."""
Event = tuple[Any, ...]
"""A word and its details: ``visiting`` and the cell's id, ``add`` and an outcome as JSON, ``done`` and an answer ..."""


class Machine:
    """One machine, as a whole."""

    def __init__(self) -> None:
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        self._thread = ThreadPoolExecutor(1)  # lasting, since the worker ends with the thread that started it
        self._events = queue.SimpleQueue[Event]()
        self._most_s = 3 * START_TIMEOUT
        """Seconds between two events after which it is no longer said to be alive."""
        # Both are made by begin().
        self._worker = Worker(Settings())
        self._visitor = Visitor(Settings(), TimingRules(), 0.0)

    def work(self, method: str, *arguments: Any) -> Iterator[Event]:
        """Run ``method`` and yield its events, at last ``done`` with its answer, or ``failed`` with the reason."""

        def finished() -> Event:
            try:
                return "done", getattr(self, method)(*arguments)
            except (AttnbenchError, CellFailed) as error:
                return "failed", str(error)
            except Exception as error:  # the driver tells it; here nobody would read it
                return "failed", said(error)

        self._thread.submit(lambda: self._events.put(finished()))
        event: Event = ("alive", platform.node())
        quiet = 0.0
        while True:
            yield event
            if event[0] in ("done", "failed"):
                return
            try:
                event, quiet = self._events.get(timeout=ALIVE_EVERY if quiet <= self._most_s else None), 0.0
            except queue.Empty:
                event, quiet = ("alive", platform.node()), quiet + ALIVE_EVERY

    def begin(
        self, folder: str, plan: Plan, wanted: Mapping[str, str], known: Mapping[str, Ready]
    ) -> tuple[dict[str, Any], Ready]:
        """Set the worker up, which measures the machine; return the facts of the process, and those of the worker.

        ``folder`` is the driver's current one, with the files that the cells of ``plan`` read. ``wanted`` are its
        :func:`requirements`, and ``known`` the earlier facts of each host, with the limits to take over: a run has one
        set for each host. Raises UsageError: this machine may not take part.
        """
        with suppress(OSError):  # then files that are named relatively are missing, which is told
            os.chdir(folder)
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets it to the number of cores that it reserves
        for source in plan.settings.plugins:
            load(source)
        if (levels := os.nice(0) - os.getpriority(os.PRIO_PROCESS, os.getppid())) > 0:
            raise UsageError(
                f"the engine runs its processes {levels} levels nicer, so anything else there goes first; set "
                "RAY_worker_niceness=0 before ray start"
            )
        if why := misfit(requirements(read_files(plan.cells), provenance(plan.settings.plugins)), wanted):
            raise UsageError(why)
        threads, limit = plan.options.threads or available_cores(), plan.options.memory_limit
        settings = replace(plan.settings, threads=threads, memory_limit=memory_limit(plan.settings.device, limit))
        self._visitor = Visitor(settings, plan.rules, plan.options.cell_timeout, unchecked=plan.options.unchecked)
        self._worker.stop()
        self._worker = Worker(settings)
        self._worker.warn = _Sent(self._events).warned
        self._worker.state = before = known.get(host(), cast(Ready, {}))
        state = self._worker.start()
        if before and state["machine_id"] != before["machine_id"]:  # the same name, but another machine
            self._worker.stop()
            self._worker.state = cast(Ready, {})
            state = self._worker.start()
        for note in (load_warning(), *thread_warnings(settings.threads), *state["process_notes"]):
            if note:
                self._worker.warn(note)
        variables_ = variables(environment_for(threads))
        return {"host": host(), "threads": threads, "variables": variables_}, state

    def measure(self, plan: Plan, known: Known) -> None:
        """Measure :attr:`~attnbench.harness.plan.Plan.only` of a plan's cells; ``known`` are their earlier rounds, and
        rows that stand for longer sequences."""
        plan = replace(plan, settings=self._worker.settings)
        each, first = plan.options.cell_timeout, plan.options.first_call_timeout
        self._most_s = START_TIMEOUT + 2 * (each + first) + len(plan.cells) * each  # the last for the limits of all
        with tempfile.TemporaryDirectory(prefix="attnbench-", ignore_cleanup_errors=True) as path:
            rows = Rows(plan, _SentFolder(Path(path), self._events), known)
            _Lot(rows, self._visitor, self._worker, self._worker.start(), _Sent(self._events)).measure()


def requirements(files: Mapping[str, str], plugins: Mapping[str, str]) -> dict[str, str]:
    """Versions and digests, by name, that must be the same on every machine."""
    torch = version("torch").partition("+")[0]  # the build for a GPU and the one without are one version
    python = ".".join(platform.python_version_tuple()[:2])
    return {
        "attnbench": __version__,
        "torch": torch,
        "python": python,
        "plug-ins": " ".join(sorted(plugins.values())),
    } | {f"file {name}": digest for name, digest in files.items()}


def misfit(theirs: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """The reason, with the remedy, why a machine with these requirements cannot take part; empty if it can."""
    for name in sorted(theirs.keys() | wanted.keys()):
        there, here = (one_line(one.get(name) or "none", 40) for one in (theirs, wanted))
        if there != here:
            return f"{name}: {there}, and {here} of the driver; install the same on all machines"
    return ""


class _Lot(Run):
    def note_sources(self) -> None:
        """Store nothing: each machine has sources of its own."""


class _Sent(Watcher):
    def __init__(self, events: queue.SimpleQueue[Event]) -> None:
        self._put = events.put

    def visiting(self, cell: Cell) -> None:
        self._put(("visiting", cell.cell_id))

    def trained(self, cell: Cell, step: int, steps: int) -> None:
        self._put(("trained", cell.cell_id, step, steps))

    def visited(self, record: Record) -> None:
        self._put(("visited", record.cell_id))

    def warned(self, message: str) -> None:
        self._put(("warned", message))


class _SentFolder(RunFolder):
    """A folder whose rows the command stores; its path is for what a training keeps meanwhile."""

    def __init__(self, path: Path, events: queue.SimpleQueue[Event]) -> None:
        super().__init__(path)
        self._put = events.put

    def add(
        self,
        record: Record,
        samples: dict[str, Any] | None = None,
        failure: Record | None = None,
        stderr: Sequence[str] = (),
        points: Sequence[dict[str, Any]] = (),
    ) -> None:
        self._put(("add", Outcome(record, samples, failure, stderr, points=points).to_json()))

    def correct(self, facts: dict[str, Any]) -> None:
        self._put(("correct", facts))

    def write_csv(self, records: Sequence[Record], *, at_most_every: float = 0.0) -> None:
        """Write nothing: the command does."""


def _end_with(parent: int) -> None:
    """End this process and all that it started once ``parent`` has ended: an actor may outlive its Ray."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
