"""The plan of a run: the suite as the command line changes it, its cells and their order, and the process."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from operator import attrgetter
from pathlib import Path

from attnbench.contract.inputs import look_at
from attnbench.contract.problem.shape import Shape
from attnbench.errors import UsageError
from attnbench.harness.libraries import products_like
from attnbench.harness.outside.interpreter import Interpreter
from attnbench.harness.outside.isolation import Settings
from attnbench.harness.wire.process import Process, memory_limit
from attnbench.measure.machine import default_threads, refuse_graph, resolve_device
from attnbench.measure.time import TimingRules
from attnbench.suite.cell import Cell
from attnbench.suite.expand import Override, apply_overrides, check_names, expand
from attnbench.suite.load import read_suite
from attnbench.suite.schema import Suite
from attnbench.suite.select import choose
from attnbench.suite.shard import Shard, part


@dataclass(frozen=True, slots=True)
class Options:
    """Changes of a run by the command line. Times in seconds, memory in bytes."""

    device: str = "auto"
    overrides: Mapping[str, Override] = field(default_factory=dict)
    """Axis -> values, as after ``--set``."""
    named: Mapping[str, str] = field(default_factory=dict)
    """Axis -> the option that overrides it, of those with one of their own: ``--dtype``."""
    select: str | None = None
    """``-k``: only cells that match, as :func:`attnbench.suite.select.choose` reads it: ``performer and not n4096``."""
    shard: Shard | None = None
    """``--shard``: only this part of the cells, where several machines share a suite; it may be empty."""
    on: str | None = None
    """``--on``: the engine that shares the cells out among machines: ``ray``, ``ray:ADDRESS``."""
    beside: Interpreter | None = None
    """``--beside``: another environment, which measures each cell in turn with this one."""
    out: Path = Path("results")
    plugins: tuple[str, ...] = ()
    threads: int | None = None
    cell_timeout: float = 60.0
    first_call_timeout: float = 600.0
    memory_limit: int | None = None
    min_time: float | None = None
    """None: the time in the suite."""
    process: Process = "tuned"
    like: Path | None = None
    """``--like``: a run with the libraries to use; None to find the faster ones."""
    rounds: int | None = None
    """Visits to each cell, in a new order each time, so that a slow minute hits no variant alone. None: the suite's."""
    quick: bool = False
    fresh: bool = False
    retry_failed: bool = False
    repeats: str | None = None
    """Id of the run that this one repeats."""
    unchecked: bool = False
    """Measure variants whatever laws they break."""
    joins: bool = False
    """A new run takes over rows of earlier ones that differ from it in their choice of cells alone. With
    ``retry_failed`` no cell is visited again that cannot be measured."""
    dry: bool = False
    """Nothing will run: the device may be that of another machine."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A run ahead: the suite as overridden, its cells, and the state of the worker."""

    suite: Suite
    cells: list[Cell]
    """The cells of this run; none if its shard is empty."""
    settings: Settings
    rules: TimingRules
    options: Options
    whole: int
    """Number of cells of all shards together."""
    only: frozenset[str] | None = None
    """Ids of the cells to visit, if all others are to stay as they are; None for all cells."""
    mirror: int = 0
    """Number of rounds that the further ones mirror: the order of the last one reversed, then that before; 0: none."""

    def in_order(self, round_: int) -> list[Cell]:
        """The cells that are not trained, in the order of a round."""
        reversed_ = 0 < self.mirror <= round_
        seed = 2 * self.mirror - 1 - round_ if reversed_ else round_
        cells = [cell for cell in self.cells if cell.training is None]
        return list(in_order(cells, f"{self.suite.name}{seed}"))[:: -1 if reversed_ else 1]

    def visits(self, cell: Cell) -> bool:
        """True if this cell is to be visited at all."""
        return self.only is None or cell.cell_id in self.only


def make_plan(suite: Suite | str | Path, options: Options, *, sized: bool = False) -> Plan:
    """Load, override, expand, select, take the shard. A ``sized`` suite has the sizes of its trained models.

    Raises SuiteError for the suite file; UsageError for options, devices, an empty selection or an unreadable input
    file.
    """
    # Each of many machines looks for itself.
    device = options.device if options.on else resolve_device(options.device, elsewhere=options.dry)
    refuse_graph(str(options.overrides["launch"]) if "launch" in options.named else "auto", device)
    if isinstance(suite, str | Path):
        suite = read_suite(suite)
    check_names(suite)
    if options.overrides:
        suite = apply_overrides(suite, options.overrides, options=options.named)
    if not sized and any(sweep.trained is not None for sweep in suite.sweeps):
        from attnbench.models.pretrained.sizes import (
            with_sizes,  # not for the other suites: it brings what opens models
        )

        suite = with_sizes(suite)
    cells = expand(suite, device=device)
    if options.select:
        cells = choose(options.select, cells)
    if options.quick:
        cells = _first_trainings(cells)
    if options.beside and any(cell.training is not None for cell in cells):
        raise UsageError("--beside: only times are compared between environments; leave trainings out with -k")
    whole = len(cells)
    if options.shard is not None:
        cells = part(cells, options.shard)
    for inputs in dict.fromkeys(cell.inputs for cell in cells):
        look_at(inputs)
    settings = Settings(
        device=device,
        threads=options.threads or default_threads(),
        process=options.process,
        memory_limit=memory_limit(device, options.memory_limit),
        plugins=options.plugins,
        dtypes=tuple(sorted({cell.dtype for cell in cells})),
        files=tuple(files_named(cells)),
        models=tuple(dict.fromkeys(cell.pretrained.name for cell in cells if cell.pretrained is not None)),
        first_call_timeout=options.first_call_timeout,
        products=None if options.like is None else products_like(options.like, device=device, process=options.process),
    )
    min_time = suite.min_time if options.min_time is None else options.min_time
    rounds = 1 if options.quick else options.rounds or suite.rounds
    rules = replace(TimingRules.lasting(min_time, 6), rounds=rounds, quick=options.quick)
    return Plan(suite, cells, settings, rules, options, whole)


def files_named(cells: Iterable[Cell]) -> list[str]:
    """The files that options of variants or inputs name, as written."""
    specs = {spec for cell in cells for spec in (cell.variant, cell.inputs)}
    return sorted({value for spec in specs for _, value in spec.options if isinstance(value, str) and _is_file(value)})


def _is_file(name: str) -> bool:
    with suppress(OSError, ValueError, RuntimeError):  # not the name of a file at all
        return Path(name).expanduser().is_file()
    return False


def _first_trainings(cells: list[Cell]) -> list[Cell]:
    kept, seen = [], set[Cell]()
    for cell in cells:
        if cell.training is None:
            kept.append(cell)
            continue
        only = replace(cell.training, protocol="fixed")
        group = replace(cell, seed=0, training=replace(only, learning_rate=0.0))
        if group not in seen:
            seen.add(group)
            kept.append(replace(cell, training=only))
    return kept


_ALL_BUT_SHAPE = attrgetter(*(field.name for field in fields(Cell) if field.name != "shape"))
_ALL_BUT_LENGTH = attrgetter(*(field.name for field in fields(Shape) if field.name not in ("seq_len", "kv_len")))
_ALL_BUT_VARIANT = attrgetter(*(field.name for field in fields(Cell) if field.name != "variant"))


def family(cell: Cell) -> tuple[object, ...]:
    """Everything about a cell but its length."""
    return _ALL_BUT_SHAPE(cell), _ALL_BUT_LENGTH(cell.shape)


def in_order(cells: Sequence[Cell], seed: str) -> Iterator[Cell]:
    """Cells in random order, but those that differ by variant alone together, in the same minute.

    Shorter lengths come first, so that a failure can stand for the longer ones. Losses of trained models are not timed:
    their cells come as they stand, so that each training goes on from cell to cell.
    """
    yield from (cell for cell in cells if cell.measure == ("loss",))
    cells = [cell for cell in cells if cell.measure != ("loss",)]
    beside: dict[object, list[Cell]] = {}
    for cell in random.Random(seed).sample(list(cells), len(cells)):
        beside.setdefault(_ALL_BUT_VARIANT(cell), []).append(cell)
    waiting: dict[object, list[Cell]] = {}
    for cell in sorted(cells, key=lambda one: one.shape.N):
        waiting.setdefault(family(cell), []).append(cell)
    for cell in chain.from_iterable(beside.values()):
        yield waiting[family(cell)].pop(0)
