"""How often intervals and verdicts are wrong if nothing differs, and what they find if something does, by simulation.

    python -m tests.benchmarks.error_rates

writes docs/data/error-rates.csv with the counts of ``FULL``, which takes some minutes. Visits to a cell are normal on
the log scale around the cell's time in that run. What runs differ by beyond that is normal too, for each cell and run
(where a program lies in memory). Everything is judged by the tool's own functions.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from attnbench.figures.series import LARGER, half_of_power, power_of_n
from attnbench.measure.statistics import (
    Visited,
    interval_of_visit,
    interval_over_rounds,
    joint_ratio,
    judged,
    ratios_over_visits,
    spread_of_visits,
)
from attnbench.results.intervals import Summary, comparisons, difference, over_tasks

FILE = Path(__file__).resolve().parents[2] / "docs/data/error-rates.csv"
FULL = 1000
LIMIT = 1.05


@dataclass(frozen=True)
class Rate:
    """How often something happened."""

    what: str
    setting: str
    promised: str
    """Largest share of wrong answers, or smallest of right ones; empty if nothing is promised."""
    found: int
    of: int

    @property
    def share(self) -> float:
        return self.found / self.of

    @property
    def error(self) -> float:
        """Three standard errors of the share that is promised."""
        promised = float(self.promised.strip("<>= %")) / 100
        return 3 * math.sqrt(promised * (1 - promised) / self.of)

    @property
    def is_kept(self) -> bool:
        """Whether the promise is kept, but for the error of the simulation."""
        if not self.promised:
            return True
        promised = float(self.promised.strip("<>= %")) / 100
        return self.share >= promised - self.error if ">" in self.promised else self.share <= promised + self.error


def row(rng: np.random.Generator, rounds: int, spread: float, times: int) -> int:
    """Intervals of a row that miss the true time, of ``times``; samples within a visit differ by 2 %."""
    missed = 0
    for _ in range(times):
        visits = np.exp(rng.normal(0, spread, (rounds, 1)) + rng.normal(0, 0.02, (rounds, 20)))
        low, high = interval_over_rounds(visits.tolist()) or (0.0, math.inf)
        missed += not low <= 1 <= high
    return missed


def visit(rng: np.random.Generator, alike: float, samples: int, times: int) -> int:
    """Intervals within a visit that miss the median, of ``times``; neighbours correlate by ``alike``."""
    missed = 0
    for _ in range(times):
        taken, noise = [float(rng.normal())], rng.normal(0, math.sqrt(1 - alike**2), samples - 1)
        for one in noise.tolist():
            taken.append(alike * taken[-1] + one)
        found = interval_of_visit(taken)
        missed += found is not None and not found[0] <= 0 <= found[1]
    return missed


@dataclass(frozen=True)
class Machine:
    """How visits and runs differ, as standard deviations of logarithms."""

    visits: float
    runs: float = 0.0
    unlike: float = 0.0
    """By how much cells differ in the spread of their visits: standard deviation of its logarithm."""


def gate(
    rng: np.random.Generator,
    machine: Machine,
    times: int,
    *,
    cells: int,
    olds: int = 1,
    slower: float = 1.0,
    limit: float = LIMIT,
    confirm: int = 0,
) -> int:
    """Gates of ``times`` in which a cell is called slower, or the first one if it is ``slower`` times as slow.

    ``confirm``: after ``--confirm`` with so many rounds of the cells that seem slower.
    """
    found = 0
    for _ in range(times):
        spread = machine.visits * np.exp(rng.normal(0, machine.unlike, (cells, 1)))
        logs = rng.normal(0, 1, (1 + olds, cells, 5)) * spread
        more, run = rng.normal(0, 1, (cells, confirm)) * spread, rng.normal(0, machine.runs, (1 + olds, cells, 1))
        more[0] += math.log(slower)
        logs[0, 0] += math.log(slower)
        more, logs = more + run[0], logs + run
        taken = np.exp(logs).tolist()
        visited = [Visited(taken[0][i], [old[i] for old in taken[1:]]) for i in range(cells)]
        ratios = ratios_over_visits(visited).ratios
        if confirm:
            seem = [ratio > limit for ratio, _, _ in ratios]
            both = zip(visited, np.exp(more).tolist(), seem, strict=True)
            visited = [replace(one, new=[*one.new, *again]) if seems else one for one, again, seems in both]
            also = np.exp(more.mean(axis=1) - logs[1:].mean(axis=(0, 2))) > limit
            ratios = tuple(
                (ratio, low if seems and again else 0.0, high)
                for (ratio, low, high), seems, again in zip(ratios_over_visits(visited).ratios, seem, also, strict=True)
            )
        found += any(low > limit for _, low, _ in (ratios[:1] if slower > 1 else ratios))
    return found


Visits = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
"""Logarithms of the times of visits to equal programs: lengths, variants, visits."""


def normal(
    rng: np.random.Generator, shape: tuple[int, ...], *, spread: float = 0.05, unlike: float = 0.0
) -> np.ndarray:
    return rng.normal(0, 1, shape) * spread * np.exp(rng.normal(0, unlike, (*shape[:-1], 1)))


def seldom(rng: np.random.Generator, shape: tuple[int, ...], *, share: float, longer: float) -> np.ndarray:
    """A ``share`` of the visits takes ``longer``; the others differ by half a percent."""
    return math.log1p(longer) * (rng.random(shape) < share) + rng.normal(0, 0.005, shape)


def report(
    rng: np.random.Generator,
    visits: Visits,
    times: int,
    *,
    variants: int = 13,
    lengths: int = 4,
    rounds: int = 3,
    true: float = 1.0,
) -> int:
    """Reports of ``times`` that call one of equal variants faster or slower than softmax.

    ``true``: one of the longest length takes so many times as long, and it counts whether that one is called slower.
    """
    found, family = 0, (variants - 1) * lengths
    for _ in range(times):
        logs = visits(rng, (lengths, variants, rounds))
        logs[-1, -1] += math.log(true)
        said = []
        for at in np.exp(logs).tolist():
            ends = [(*(interval_over_rounds([[one] for one in of]) or (0.0, 0.0)), rounds) for of in at]
            shared = spread_of_visits(ends)
            said += [judged(joint_ratio(ends[0], one, family, shared)).word for one in ends[1:]]
        found += said[-1] == "faster" if true > 1 else bool({"faster", "slower"} & set(said))
    return found


def scores(rng: np.random.Generator, *, tasks: int, seeds: int, times: int) -> tuple[int, int]:
    """Suites of ``times`` with a false better or worse, each with softmax and twelve equals on every task.

    Returns:
        With the joint intervals of the tool, and if each difference stood for itself.
    """
    joint = alone = 0
    for _ in range(times):
        tables = []
        for _ in range(tasks):
            shared, own = rng.normal(0.5, 0.05, seeds), rng.normal(0, 0.02, (13, seeds))
            parts = [_summary(place, (shared + one).tolist()) for place, one in enumerate(own)]
            tables.append((parts, parts[0]))
        means = [one for of in zip(*(parts for parts, _ in tables), strict=True) if (one := over_tasks(of))]
        for family in (comparisons([*tables, *[(means, means[0])] * (tasks > 1)]), 1):
            said = {difference(one, first, family).verdict for parts, first in tables for one in parts[1:]}
            wrong = bool(said & {"better", "worse"})
            joint, alone = (joint + wrong, alone) if family > 1 else (joint, alone + wrong)
    return joint, alone


def _summary(place: int, of: Sequence[float]) -> Summary:
    name = "softmax" if place == 0 else f"equal{place}"
    return Summary(name, name, "exact", "task", (), None, dict(enumerate(of)), 0.0, None, None, None, None)


def power(rng: np.random.Generator, noise: float, times: int, *, visits: int = 0, true: float = 1.0) -> int:
    """Variants of ``times`` that grow as n to ``true`` and are printed in bold as growing faster than linear.

    Args:
        visits: rounds of which each time has its interval; 0 for times without one.
    """
    lengths, bold = np.array([1024.0, 2048.0, 4096.0]), 0
    for _ in range(times):
        logs = true * np.log(lengths)[:, None] + rng.normal(0, noise, (3, max(1, visits)))
        taken = np.exp(np.median(logs, axis=1))
        ends = np.array(
            [interval_over_rounds([[one] for one in of]) or (math.nan,) * 2 for of in np.exp(logs).tolist()]
        )
        found = power_of_n(lengths, taken)
        half = half_of_power(lengths, taken, (ends[:, 0], ends[:, 1]) if visits else None)
        bold += found > 1 + LARGER and found - half > 1
    return bold


def rates(times: int = FULL) -> Iterator[Rate]:
    """Every rate of the docs, each of about as many simulated cases as are named; seeded."""
    counted = _counter(times)
    for rounds in (2, 3, 4, 5, 6):
        yield counted("interval of a row misses", f"{rounds} rounds, visits differ by 2 %", "<= 5 %", row, rounds, 0.02)
    for alike in (0.0, 0.3, 0.5, 0.9):
        said = f"200 samples, neighbours correlate by {alike:g}"
        yield counted("interval within a visit misses", said, "<= 5 %", visit, alike, 200)
    for cells in (16, 48, 60):
        for spread in (0.02, 0.05, 0.1, 0.2):
            for runs in (0.0, 0.02):
                said = f"{cells} cells, visits {100 * spread:g} %, runs {100 * runs:g} %"
                yield counted("gate of equals fails", said, "<= 5 %", gate, Machine(spread, runs), cells=cells)
    for unlike in (0.3, 1.0):
        said = f"48 cells, visits 5 % in the middle, cells unlike by a factor of {math.exp(unlike):.1f}"
        yield counted("gate of equals fails", said, "<= 5 %", gate, Machine(0.05, 0.0, unlike), cells=48)
    for olds in (2, 3):
        for runs in (0.0, 0.02, 0.05):
            said = f"48 cells, visits 5 %, runs {100 * runs:g} %, {olds} old runs"
            yield counted("gate of equals fails", said, "<= 5 %", gate, Machine(0.05, runs), cells=48, olds=olds)
    for limit in (1.0, LIMIT):
        for spread, factors in ((0.01, (1.03, 1.05, 1.1)), (0.05, (1.1, 1.15, 1.2, 1.3)), (0.08, (1.2, 1.3, 1.4))):
            for factor in factors:
                is_promised = limit == 1 and (spread, factor) in ((0.01, 1.05), (0.05, 1.2))
                said = f"16 cells, visits {100 * spread:g} %, x{factor:g}, `--fail-above {limit:g}`"
                promised = ">= 90 %" if is_promised else ""
                machine = Machine(spread)
                yield counted(
                    "gate finds one slower cell", said, promised, gate, machine, cells=16, slower=factor, limit=limit
                )
    for factor in (1.15, 1.2, 1.3):
        said = f"16 cells, visits 5 %, x{factor:g}, `--fail-above {LIMIT:g}`, 2 old runs"
        yield counted("gate finds one slower cell", said, "", gate, Machine(0.05), cells=16, olds=2, slower=factor)
    for tasks in (1, 4):
        for seeds in (3, 5):
            rng, cases = np.random.default_rng([tasks, seeds]), max(20, times // 2)
            joint, alone = scores(rng, tasks=tasks, seeds=seeds, times=cases)
            said = f"13 variants, {tasks} task{'s' * (tasks > 1)}, {seeds} seeds"
            yield Rate("scores of equals hold a better or worse", said, "<= 5 %", joint, cases)
            yield Rate("the same, if each difference stood for itself", said, "", alone, cases)
    for noise in (0.1, 0.2):
        yield counted("linear variant in bold", f"times differ by {100 * noise:g} %, one round", "<= 5 %", power, noise)
        yield counted(
            "linear variant in bold",
            f"times differ by {100 * noise:g} %, five rounds",
            "<= 5 %",
            power,
            noise,
            visits=5,
        )
    yield counted("variant of n^1.6 in bold", "times differ by 5 %, five rounds", "", power, 0.05, visits=5, true=1.6)
    for olds, runs in ((1, 0.0), (3, 0.0), (3, 0.02), (3, 0.05)):
        said = f"48 cells, visits 5 %, runs {100 * runs:g} %, {olds} old run{'s' * (olds > 1)}, `--fail-above 1`"
        machine = Machine(0.05, runs)
        yield counted("gate of equals fails", said, "<= 5 %", gate, machine, cells=48, olds=olds, limit=1.0)
    for spread, runs in ((0.02, 0.02), (0.05, 0.0), (0.1, 0.0), (0.2, 0.02)):
        said = f"48 cells, visits {100 * spread:g} %, runs {100 * runs:g} %, `--confirm 5`"
        yield counted("gate of equals fails", said, "<= 5 %", gate, Machine(spread, runs), cells=48, confirm=5)
    for spread, factor in ((0.01, 1.1), (0.05, 1.15), (0.05, 1.2), (0.08, 1.3)):
        said = f"16 cells, visits {100 * spread:g} %, x{factor:g}, `--fail-above {LIMIT:g} --confirm 5`"
        promised = ">= 90 %" if factor == 1.2 else ""
        machine = Machine(spread)
        yield counted("gate finds one slower cell", said, promised, gate, machine, cells=16, slower=factor, confirm=5)
    equals, finds = "report calls equals faster or slower", "report finds one variant of another speed"
    kinds: dict[str, Visits] = {
        **{f"visits differ by {spread:g} %": partial(normal, spread=spread / 100) for spread in (2, 10, 20)},
        "visits differ by 5 % in the middle, cells unlike by a factor of 2.7": partial(normal, unlike=1.0),
        "half of the visits take 20 % longer": partial(seldom, share=0.5, longer=0.2),
        "a fifth of the visits takes 20 % longer": partial(seldom, share=0.2, longer=0.2),
        "a fifth of the visits takes 30 % longer": partial(seldom, share=0.2, longer=0.3),
    }
    for variants, lengths in ((13, 4), (3, 4), (3, 1)):
        for said, visits in kinds.items() if variants > 3 else [*kinds.items()][-3:]:
            for rounds in (2, 3, 5):
                of = f"{variants} variants, {lengths} length{'s' * (lengths > 1)}, {rounds} rounds, {said}"
                size = {"variants": variants, "lengths": lengths, "rounds": rounds}
                yield counted(equals, of, "<= 5 %", report, visits, **size)
    for spread, factors in ((0.01, (1.05, 1.1)), (0.05, (1.2, 1.3, 1.5))):
        for true in factors:
            for rounds in (2, 3, 5):
                of = f"13 variants, 4 lengths, {rounds} rounds, visits differ by {100 * spread:g} %, x{true:g}"
                yield counted(finds, of, "", report, partial(normal, spread=spread), rounds=rounds, true=true)


def _counter(times: int) -> Callable[..., Rate]:
    seeds = iter(range(10**6))

    def counted(what: str, setting: str, promised: str, of: Callable[..., int], *given: object, **more: object) -> Rate:
        rng, cases = (
            np.random.default_rng([next(seeds), 7]),
            times if of in (gate, report) else 5 * times,
        )  # of what takes a moment
        return Rate(what, setting, promised, of(rng, *given, cases, **more), cases)

    return counted


def read() -> list[Rate]:
    """The committed rates."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return [
            Rate(one["what"], one["setting"], one["promised"], int(one["found"]), int(one["of"]))
            for one in csv.DictReader(file)
        ]


def main() -> None:
    with FILE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["what", "setting", "promised", "found", "of"])
        for one in rates():
            writer.writerow([one.what, one.setting, one.promised, one.found, one.of])
            file.flush()


if __name__ == "__main__":
    main()
