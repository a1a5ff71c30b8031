"""Several variants at one length, taking turns in random order in one process, inside the worker."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch

from attnbench.cell import Cell
from attnbench.machine import NOISY
from attnbench.measure.statistics import FEWEST, expected_half_width, noise_floor
from attnbench.measure.time import Sample, Stopwatch, TimingRules, checked, garbage_collection_off, measure_time
from attnbench.record import Record
from attnbench.run.call import Call, prepare
from attnbench.run.execute import run_cell, status_of, stopwatch
from attnbench.status import Status

NOISE_TIME = 0.3
"""Seconds for the noise floor at the start of a run."""
NOISE_TRIES = 3


@dataclass(slots=True)
class Pairs:
    """One record per cell (no times in it), and for each block the seconds of every cell that ran."""

    records: list[dict[str, Any]]
    ran: list[int]
    """Which cells have times: positions in ``records``."""
    blocks: list[list[float]] = field(default_factory=list)
    """One list a block: seconds in the order of ``ran``."""
    disturbed: int = 0
    """Blocks left out because another process took the core."""


def measure_pairs(cells: Sequence[Cell], rules: TimingRules) -> Pairs:
    """Memory and error of each cell, then their times in turn until every ratio is narrow or the budget is spent."""
    records = [_without_time(cell, rules) for cell in cells]
    calls: dict[int, Call] = {}
    for position, (cell, record) in enumerate(zip(cells, records, strict=True)):
        if record.status is Status.OK:
            try:
                calls[position] = prepare(cell)
            except Exception as error:
                record.status, record.reason = status_of(error)
    watch = stopwatch(cells[0].device)
    batches = {position: _calls_per_sample(watch, call.run, rules) for position, call in calls.items()}
    result = Pairs([record.to_json() for record in records], sorted(calls))
    if calls:
        turns = {position: call.run for position, call in calls.items()}
        with garbage_collection_off():
            result.blocks, result.disturbed = take_turns(watch, turns, batches, rules, seed=cells[0].seed)
    return result


def measure_noise(device: str, watch: Stopwatch | None = None) -> float | None:
    """By how much this machine finds a small product slower than the same product, by the method of ``compare``.

    The least of a few tries, where the first is above 2 %: a short disturbance says nothing of the run.
    """
    watch = watch or stopwatch(device)
    n = 2048 if device.startswith("cuda") else 256  # long beside the resolution of an event
    a = torch.randn(n, n, generator=torch.Generator().manual_seed(0)).to(device)
    out = torch.empty_like(a)
    call = lambda: torch.mm(a, a, out=out)  # noqa: E731  # the same object on both sides
    rules = TimingRules(min_time=NOISE_TIME, max_time=NOISE_TIME, warmup_time=0.05)
    least: float | None = None
    with torch.inference_mode():
        batch = _calls_per_sample(watch, call, rules)
        for _ in range(NOISE_TRIES):
            with garbage_collection_off():
                blocks, _ = take_turns(watch, {0: call, 1: call}, {0: batch, 1: batch}, rules, seed=0)
            noise = noise_floor([first for first, _ in blocks], [second for _, second in blocks])
            if noise is None:
                return None
            least = noise if least is None else min(least, noise)
            if least <= NOISY:
                break
    return least


def _without_time(cell: Cell, rules: TimingRules) -> Record:
    record, _ = run_cell(cell, rules, round_=0, earlier=(), previous=None, resident=False, with_time=False)
    return record


def _calls_per_sample(watch: Stopwatch, call: Callable[[], object], rules: TimingRules) -> int:
    """Warm up and size the batch as for a single measurement."""
    one_of = 6  # as many rounds as samples are needed, so that one is enough here
    warm = TimingRules(
        min_time=0,
        max_time=0,
        min_samples=1,
        warmup_time=one_of * rules.warmup_time,
        warmup_calls=rules.warmup_calls,
        rounds=one_of,
    )
    return measure_time(call, warm, stopwatch=watch).samples[0].calls


def take_turns(
    watch: Stopwatch,
    calls: Mapping[int, Callable[[], object]],
    batches: Mapping[int, int],
    rules: TimingRules,
    *,
    seed: int,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[list[float]], int]:
    """Blocks of one sample of each call. A random order is followed by its reverse, so that no position is favoured.

    Args:
        calls: what to time, by position; blocks hold the positions in rising order.
        batches: calls in one sample.
        clock: seconds, for the budget.

    Returns:
        Seconds per call, a list a block, and how many blocks were left out because another process took the core.

    Raises:
        ClockError: a duration of zero, below zero or not finite.
    """
    shuffler = random.Random(seed)
    positions = sorted(calls)
    clean: list[list[float]] = []
    disturbed: list[list[float]] = []
    order: list[int] = []
    wanted = 0
    start = clock()
    while True:
        if order:
            order.reverse()
        else:
            order = shuffler.sample(positions, len(positions))
        samples: dict[int, Sample] = {}
        for position in order:
            seconds, switches = checked(watch, calls[position], batches[position])
            samples[position] = Sample(seconds / batches[position], batches[position], switches)
        if len(clean + disturbed) % 2:
            order = []
        row = [samples[position].seconds for position in positions]
        (clean if all(s.clean for s in samples.values()) else disturbed).append(row)
        seconds = clock() - start
        if _spent(len(clean), len(disturbed), seconds, rules):
            break
        if not wanted and len(clean) >= rules.min_samples and seconds >= rules.min_time:
            wanted = _blocks_needed(clean, rules.width)
        if wanted and len(clean) >= wanted:
            break
    if len(clean) < min(rules.min_samples, len(disturbed)):
        # On a machine this busy the clean blocks are too few to speak for it; the interval shows the noise.
        return clean + disturbed, 0
    return clean, len(disturbed)


def _spent(clean: int, disturbed: int, seconds: float, rules: TimingRules) -> bool:
    """Whether nothing more may be measured."""
    taken = clean + disturbed
    if rules.quick or taken >= rules.max_samples:
        return True
    return seconds >= rules.max_time and taken >= min(rules.min_samples, FEWEST)


def _blocks_needed(blocks: list[list[float]], width: float) -> int:
    """How many blocks make the interval of every ratio narrow enough, by the spread of those taken so far.

    Asked once. Who asks after each block stops where the interval is narrow by chance, and such an interval misses the
    truth more often than it says.
    """
    n = len(blocks)
    pairs = combinations(range(len(blocks[0])), 2)
    widths = [expected_half_width([math.log(row[i] / row[j]) for row in blocks]) for i, j in pairs]
    return max([n, *(math.ceil(n * (one / width) ** 2) for one in widths)])
