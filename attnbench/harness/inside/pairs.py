"""Time several variants at one length, in turns of random order, in one worker process."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from time import sleep
from typing import Any, NamedTuple

import torch

from attnbench.harness.inside.call import Call, always_compiled, held_to_formula, may_compile, prepare
from attnbench.harness.inside.execute import status_of, stopwatch
from attnbench.harness.inside.fresh_inputs import Look, hold_to, hold_to_unseen, look
from attnbench.harness.inside.launch import EAGER, Launch, launch
from attnbench.harness.inside.turns import SEEN
from attnbench.harness.wire.protocol import Pairs
from attnbench.measure.card import Card
from attnbench.measure.machine import NOISY, OtherLoad
from attnbench.measure.statistics import FEWEST, expected_half_width, median, noise_floor
from attnbench.measure.stopwatch import Stopwatch
from attnbench.measure.time import (
    REST,
    Paced,
    Sample,
    Sampler,
    Timing,
    TimingRules,
    garbage_collection_off,
    measure_time,
    slowed_warning,
    unslowed,
)
from attnbench.measure.yardstick import Pace
from attnbench.suite.cell import Cell

NOISE_TIME = 0.3
"""Seconds for the noise floor at the start of a run."""
NOISE_TRIES = 3
_HELD = (64, 2**16)
"""Memory held before a cell is built: from 4 KiB to 4 MiB, in pieces of 64 bytes."""


class Turns(NamedTuple):
    """The result of :func:`take_turns`."""

    blocks: list[list[float]]
    """Seconds per call: one list for each block, in the order of those that take turns."""
    disturbed: int
    """Blocks in which another process took the core; left out of ``blocks`` if enough clean ones remain."""
    taken: int
    """All blocks, disturbed ones included."""
    stopped: int
    """Blocks in which this process stood still: no times, and counted in none of the above."""
    slowed: str = ""
    """The card's effect on slowed blocks; those count as disturbed, unless they are most."""


def measure_pairs(
    cells: Sequence[Cell],
    rules: TimingRules,
    fewest: int,
    process: int = 0,
    *,
    unchecked: bool = False,
    begins: Callable[..., None] = lambda part, first=False: None,
    hear: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Pairs:
    """Time the cells in turn until every ratio is narrow or the budget is spent, but at least ``fewest`` times each.

    Places in memory can favour one cell for as long as the process lives. So every other ``process`` builds the cells
    in reversed order, and memory of a random size is held before each.

    ``unchecked``: time also a variant that claims to be exact and is not, with a warning. ``begins``: called before
    first calls that may compile, with ``first``, and after them. ``hear``: another process leads; it gets each turn and
    gives the next message.
    """
    place, held = random.Random(f"{cells[0].seed} {cells[0].shape.N} {process}"), list[torch.Tensor]()
    watch = stopwatch(cells[0].device)
    ready: dict[int, _ReadyCell] = {}
    ran: dict[int, int] = {}
    """Position of each cell that has times, and its column in the blocks."""
    left_out, warnings, slow = list[tuple[int, str, str]](), list[tuple[int, str]](), False

    def leave_out(position: int, error: Exception) -> None:
        status, reason = status_of(error)
        left_out.append((position, str(status), reason))

    for position, cell in list(enumerate(cells))[:: -1 if process % 2 else 1]:
        try:
            if may_compile(cell):
                slow = True
                begins(f"the first calls of {cell.variant.label}", first=True)
            held.append(torch.empty(64 * place.randrange(*_HELD), dtype=torch.uint8, device=cell.device))
            ready[position] = _ReadyCell.of(cell, watch, rules, unchecked=unchecked)
        except Exception as error:
            leave_out(position, error)
    ready = dict(sorted(ready.items()))
    if slow:
        begins("the turns")
    others, turns = OtherLoad(), Turns([], 0, 0, 0)
    laps = {position: (one.call.laps, one.call.laps.made) for position, one in ready.items() if one.call.laps}
    if hear is not None:
        turns = _led(watch, list(ready.values()), hear)
    elif ready:
        takes = [one.sampler(watch) for one in ready.values()]
        with garbage_collection_off():
            pace = Card.of(cells[0].device)
            turns = take_turns(takes, rules, seed=place.randrange(2**32), fewest=fewest, pace=pace)
        del takes
    busy = others.cores()
    shares = {position: noted.of_calls(before, noted.made) for position, (noted, before) in laps.items()}
    prompts = [(position, median(found)) for position, found in shares.items() if found]
    for one in ready.values():
        one.timed = one.timed.without_graphs(one.call)
    for column, (position, one) in enumerate(ready.items()):
        try:
            said = one.unchecked(watch, median([block[column] for block in turns.blocks]))
        except Exception as error:
            leave_out(position, error)
        else:
            warnings += [(position, warning) for warning in said]
            ran[position] = column
    blocks = [[block[column] for column in ran.values()] for block in turns.blocks if ran]
    told = turns.disturbed, turns.taken, turns.stopped
    return Pairs(list(ran), blocks, left_out, *told, busy, warnings, turns.slowed, prompts)


@dataclass(slots=True)
class _ReadyCell:
    cell: Cell
    call: Call
    looks: list[Look]
    timed: Launch
    warm: Timing
    off: str
    """The fault of its rows, or the reason why they were not held to the formula."""

    @classmethod
    def of(cls, cell: Cell, watch: Stopwatch, rules: TimingRules, *, unchecked: bool) -> _ReadyCell:
        call = prepare(cell)
        looks = [look(call.on(number)()) for number in range(SEEN)]
        off = held_to_formula(call, unchecked=unchecked)
        timed = launch(cell, call)
        return cls(cell, call, looks, timed, _warm(watch, timed.run, rules), off)

    def sampler(self, watch: Stopwatch) -> Callable[[], Sample]:
        return partial(Sampler(watch, self.timed.run).take, self.warm.samples[0].calls)

    def unchecked(self, watch: Stopwatch, seconds: float) -> list[str]:
        """Impossible checks of its calls of ``seconds``; raise BrokenContract if it did not compute in each."""
        cell, call = self.cell, self.call
        seconds = self.timed.seconds_by_host(watch, seconds)
        number, unseen, undecided = hold_to_unseen(cell, call, watch, seconds, self.looks)
        by_host = f"{EAGER}: {self.timed.note}" if self.timed.note else ""
        again = call if always_compiled(cell) else prepare(replace(cell, compile=False))
        said = (self.off, by_host, undecided, hold_to(unseen, again.on(number), cell))
        return list(filter(None, said))


def _led(watch: Stopwatch, ready: Sequence[_ReadyCell], hear: Callable[[dict[str, Any]], dict[str, Any]]) -> Turns:
    """Take the samples that another process asks for, which gives the blocks at the end."""
    takes = [one.sampler(watch) for one in ready]
    with garbage_collection_off():
        asked = hear({"ready": len(ready)})
        while "take" in asked:
            one = ready[asked["take"]]
            if one.warm.samples[0].seconds < 0.05:  # to wake threads that slept while others had their turns
                one.timed.run()
            sample, busy, tries = takes[asked["take"]](), REST, 20
            while busy > REST / 5 and (tries := tries - 1):
                began = time.process_time()
                sleep(REST)  # threads of OpenMP look out for work for a while, on a core that the next process needs
                busy = time.process_time() - began
            asked = hear(sample.to_json())
    return Turns(asked["blocks"], 0, 0, 0)


def measure_noise(device: str, watch: Stopwatch | None = None) -> float | None:
    """The share by which this machine finds a small product slower than itself, by the method of ``compare``.

    The least of a few tries if the first is above 2 %: a short disturbance says nothing about the run.
    """
    watch = watch or stopwatch(device)
    n = 2048 if device.startswith("cuda") else 256  # long compared with the resolution of an event
    a = torch.randn(n, n, generator=torch.Generator().manual_seed(0)).to(device)
    out = torch.empty_like(a)
    call = lambda: torch.mm(a, a, out=out)  # noqa: E731  # the same object on both sides
    rules = TimingRules(min_time=NOISE_TIME, max_time=NOISE_TIME, warmup_time=0.05)
    least: float | None = None
    with torch.inference_mode():
        batch = _warm(watch, call, rules).samples[0].calls
        for _ in range(NOISE_TRIES):
            with garbage_collection_off():
                turns = take_turns([partial(Sampler(watch, call).take, batch) for _ in "ab"], rules, seed=0)
            noise = noise_floor([first for first, _ in turns.blocks], [second for _, second in turns.blocks])
            if noise is None:
                return None
            least = noise if least is None else min(least, noise)
            if least <= NOISY:
                break
    return least


def _warm(watch: Stopwatch, call: Callable[[], object], rules: TimingRules) -> Timing:
    one_of = FEWEST  # as many rounds as samples are needed, so that one sample is enough here
    seconds = one_of * rules.warmup_time
    warm = TimingRules(max_time=0, warmup_time=seconds, warmup_calls=rules.warmup_calls, rounds=one_of)
    return measure_time(call, warm, stopwatch=watch)


def take_turns(
    takes: Sequence[Callable[[], Sample]],
    rules: TimingRules,
    *,
    seed: int,
    fewest: int = FEWEST,
    clock: Callable[[], float] = time.monotonic,
    pace: Pace | None = None,
) -> Turns:
    """Take blocks of one sample of each call, a random order and its reverse, so as to favour no position.

    ``takes``: takes a sample of one call, in the order of the times in blocks. ``fewest``: blocks to be taken even if
    the budget is spent. ``clock``: seconds, for the budget. ``pace``: read between blocks, for the card's speed. Raises
    ClockError: a duration of zero, below zero or not finite, or the process is stopped again and again.
    """
    shuffler = random.Random(seed)
    places = range(len(takes))
    stopped = 0
    clean: list[list[float]] = []
    disturbed: list[list[float]] = []
    order: list[int] = []
    wanted, paced = 0, Paced(pace)
    start = clock()
    while True:
        if order:
            order.reverse()
        else:
            order = shuffler.sample(places, len(places))
        samples = {place: takes[place]() for place in order}
        if any(sample.stopped for sample in samples.values()):
            stopped += 1
            order.reverse()  # this block again, in the same order
            continue
        if len(clean + disturbed) % 2:
            order = []
        row = [samples[place].seconds for place in places]
        undisturbed = all(sample.clean for sample in samples.values())
        (clean if undisturbed else disturbed).append(row)
        paced.add(Sample(sum(one.seconds * one.calls for one in samples.values()), 1, stopped=not undisturbed))
        seconds = clock() - start
        taken = len(clean) + len(disturbed)
        if rules.quick or taken >= rules.max_samples:
            break
        if seconds >= rules.max_time and taken >= min(rules.min_samples, fewest):
            break
        if not wanted and len(clean) >= rules.min_samples and seconds >= rules.min_time:
            wanted = _blocks_needed(clean, rules.width)
        if wanted and len(clean) >= wanted:
            break
        if not undisturbed:
            sleep(REST)
    paced.close()
    by_card = [sample for sample in paced.samples if not sample.stopped]
    free = set(map(id, unslowed(by_card)))
    disturbed += [row for row, sample in zip(clean, by_card, strict=True) if id(sample) not in free]
    clean = [row for row, sample in zip(clean, by_card, strict=True) if id(sample) in free]
    said = slowed_warning(by_card) or ""
    return Turns(clean if len(clean) >= fewest else clean + disturbed, len(disturbed), taken, stopped, said)


def _blocks_needed(blocks: list[list[float]], width: float) -> int:
    """Blocks for narrow intervals of all ratios, by the spread of those taken so far.

    Asked once: to stop at the first narrow interval is to stop by chance, and misses the truth more often than it says.
    """
    n = len(blocks)
    pairs = combinations(range(len(blocks[0])), 2)
    widths = [expected_half_width([math.log(row[i] / row[j]) for row in blocks]) for i, j in pairs]
    return max([n, *(math.ceil(n * (one / width) ** 2) for one in widths)])
