"""What a run will do: the suite as the command line changes it, its cells, and the process that measures them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from attnbench.cell import Cell
from attnbench.errors import UsageError
from attnbench.machine import available_cores, available_memory_bytes, resolve_device
from attnbench.measure.time import TimingRules
from attnbench.run.isolation import Settings
from attnbench.run.process import Process
from attnbench.suite.expand import apply_overrides, expand
from attnbench.suite.load import load_suite
from attnbench.suite.schema import Suite
from attnbench.suite.select import matches

MEMORY_SHARE = 0.85
"""Of the memory available at the start; the rest keeps the machine alive."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line may change about a run. Times in seconds, memory in bytes."""

    device: str = "auto"
    dtype: str | None = None
    overrides: Mapping[str, str] = field(default_factory=dict)
    """``--set axis=values``."""
    select: str | None = None
    """``-k``: only cells whose label matches."""
    out: Path = Path("results")
    plugins: tuple[str, ...] = ()
    threads: int | None = None
    seed: int | None = None
    cell_timeout: float = 60.0
    memory_limit: int | None = None
    min_time: float | None = None
    """None: what the suite says."""
    process: Process = "tuned"
    rounds: int | None = None
    """None: what the suite says. Each cell is visited so often, in a new order each time, so that a slow minute does
    not hit one variant alone."""
    quick: bool = False
    fresh: bool = False
    retry_failed: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will do: the suite as overridden, its cells, and the state of the process that measures."""

    suite: Suite
    cells: list[Cell]
    settings: Settings
    rules: TimingRules
    options: Options


def make_plan(suite: Suite | str | Path, options: Options) -> Plan:
    """Load, override, expand, select.

    Raises:
        SuiteError: the suite file; UsageError: options, devices, an empty selection.
    """
    device = resolve_device(options.device)
    overrides = dict(options.overrides)
    if options.dtype is not None:
        overrides["dtype"] = options.dtype
    if isinstance(suite, str | Path):
        suite = load_suite(suite)
    if options.seed is not None:
        overrides["seed"] = str(options.seed)
    if overrides:
        suite = apply_overrides(suite, overrides)
    cells = expand(suite, device=device)
    if options.select:
        cells = [cell for cell in cells if matches(options.select, f"{cell.sweep}/{cell.label}")]
        if not cells:
            raise UsageError(f"-k {options.select!r} selects no cell of suite {suite.name!r}")
    settings = Settings(
        device=device,
        threads=options.threads or available_cores(),
        process=options.process,
        memory_limit=options.memory_limit or default_memory_limit(device),
        plugins=options.plugins,
        dtypes=tuple(sorted({cell.dtype for cell in cells})),
    )
    min_time = suite.min_time if options.min_time is None else options.min_time
    rounds = 1 if options.quick else options.rounds or suite.rounds
    rules = TimingRules(
        min_time=min_time,
        max_time=6 * min_time,
        warmup_time=min(0.2, 0.4 * min_time),
        rounds=rounds,
        quick=options.quick,
    )
    return Plan(suite, cells, settings, rules, options)


def default_memory_limit(device: str) -> int | None:
    """Most of what is free now; on other devices than the CPU their own allocator refuses in time."""
    available = available_memory_bytes() if device == "cpu" else None
    return int(available * MEMORY_SHARE) if available else None
