"""Trainings in processes of one thread each, as many at once as the run has threads and memory.

Sums of one thread do not depend on the number of cores: the same machine and torch give the same weights, bit for bit.
Their libraries are torch's default, since probes disagree. A GPU runs one training at a time.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from attnbench.harness.outside.isolation import Settings, Worker
from attnbench.harness.wire.process import LEAST_MEMORY
from attnbench.harness.wire.protocol import Ready
from attnbench.results.record import Record
from attnbench.results.trainings import choose, trained
from attnbench.suite.cell import Cell
from attnbench.suite.shard import comparison_group

THREADS = 1

Event = tuple[Any, ...]
"""A word, the cell of a training, and details: ``begun``; ``step``, the steps done and all steps; ``ended``, the
outcome."""
Try = Callable[[Cell, Worker, Callable[[int, int], None], bool], Any]
"""Trains a cell in a worker, and says how far it is meanwhile; at last, if other tests of this training follow."""


def at_once(settings: Settings) -> int:
    """Trainings that may run at the same time: one for each thread, if each gets the memory that torch itself needs."""
    if settings.device != "cpu":
        return 1
    room = settings.memory_limit // LEAST_MEMORY if settings.memory_limit else settings.threads
    return max(1, min(settings.threads, room))


def threads_of(cell: Cell, settings: Settings) -> int:
    """The number of threads of a cell's measurement or training."""
    return THREADS if cell.training is not None and settings.device == "cpu" else settings.threads


def settings_of_one(settings: Settings) -> Settings:
    """Settings of a process that trains."""
    limit = settings.memory_limit
    return replace(
        settings,
        threads=THREADS if settings.device == "cpu" else settings.threads,
        process="as-shipped",
        memory_limit=limit // at_once(settings) if limit else None,
        rates=False,
    )


def run_all(
    cells: Sequence[Cell],
    settings: Settings,
    known: Ready,
    attempt: Try,
    warn: Callable[[str], None],
) -> Iterator[Event]:
    """Train all cells in order, and yield events as they happen; all processes end when the caller stops listening.

    The tests of one training follow each other in one process, where the first that comes trains.

    ``known``: the worker's facts, which spare the others a measurement. Raises WorkerFailed.
    """
    tests: dict[Cell, list[Cell]] = {}
    for cell in cells:
        tests.setdefault(cell.whole_training, []).append(cell)
    waiting, events = deque(tests.values()), queue.Queue[Event | BaseException | None]()
    count = min(at_once(settings), len(tests))
    workers = [Worker(replace(settings_of_one(settings), alone=count == 1)) for _ in range(count)]
    for worker in workers:
        worker.state, worker.warn = known.copy(), warn

    def tell(cell: Cell, done: int, of: int) -> None:
        events.put(("step", cell, done, of))

    def work(worker: Worker) -> None:
        try:
            while True:
                try:
                    of_one = waiting.popleft()
                except IndexError:
                    break
                for cell in of_one:
                    events.put(("begun", cell))
                    outcome = attempt(cell, worker, partial(tell, cell), cell is not of_one[-1])
                    events.put(("ended", cell, outcome))
        except BaseException as error:  # raised again where the events are read
            events.put(error)
        finally:
            events.put(None)

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    at_work = len(threads)
    try:
        while at_work:
            try:
                event = events.get(timeout=0.2)  # in slices, so that Ctrl-C comes through
            except queue.Empty:
                continue
            if event is None:
                at_work -= 1
            elif isinstance(event, BaseException):
                raise event
            else:
                yield event
    finally:
        waiting.clear()
        for worker in workers:
            worker.stop()


def phases(cells: Sequence[Cell]) -> tuple[list[Cell], list[Cell]]:
    """Cells that are trained whatever the others give, and cells of later seeds, trained at only one of their rates."""
    seeds: dict[tuple[str, Cell], set[int]] = {}
    for cell in cells:
        seeds.setdefault(_alike(cell), set()).add(cell.seed)
    ranks = {alike: {seed: rank for rank, seed in enumerate(sorted(used))} for alike, used in seeds.items()}
    first, late = list[Cell](), list[Cell]()
    for cell in cells:
        assert cell.training is not None
        waits = cell.training.protocol == "sweep" and ranks[_alike(cell)][cell.seed] >= cell.training.sweep_seeds
        (late if waits else first).append(cell)
    return first, late


def _alike(cell: Cell) -> tuple[str, Cell]:
    """The key of trainings with seeds that count together: those of one sweep that any shard has all of."""
    return cell.sweep, comparison_group(cell)


def at_chosen_rates(cells: Sequence[Cell], records: Mapping[str, Record]) -> list[Cell]:
    """Cells of the second phase at the learning rate that the first phase chose."""
    first, late = phases(cells)
    groups: dict[Cell, list[Record]] = {}
    for cell in first:
        if cell.cell_id in records:
            groups.setdefault(of_any(cell, seed=0), []).append(records[cell.cell_id])
    chosen = {group: choose(trained(rows))[0].rate for group, rows in groups.items()}
    return [cell for cell in late if cell.training and cell.training.learning_rate == chosen.get(of_any(cell, seed=0))]


def of_any(cell: Cell, **same: Any) -> Cell:
    """A cell that stands for all learning rates of one training."""
    assert cell.training is not None
    return replace(cell, training=replace(cell.training, learning_rate=0.0), **same)


def count_trainings(cells: Sequence[Cell], records: Mapping[str, Record]) -> tuple[int, int]:
    """The number of trainings in all, and ahead; later seeds are trained at one rate only."""
    first, late = phases(cells)
    begun = {of_any(cell) for cell in late if cell.cell_id in records}
    waiting = {of_any(cell) for cell in late} - begun
    due = [cell for cell in first if cell.cell_id not in records]
    return len(first) + len(begun) + len(waiting), len(due) + len(waiting)
