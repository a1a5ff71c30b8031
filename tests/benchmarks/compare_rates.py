"""How often ``attnbench compare`` is wrong about identical programs, and what it finds, on machines that are simulated.

    python -m tests.benchmarks.compare_rates docs/data/compare-rates.csv

The tool's own procedure, from its first process to its verdicts; only the worker is made up. Where the things of a cell
lie in memory makes it slower or faster in each process anew, and the samples of a process may depend on each other.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.harness.compare import compare
from attnbench.harness.compare.compare import Comparison, Contest
from attnbench.harness.outside.isolation import Settings
from attnbench.measure.statistics import noise_floor
from attnbench.measure.status import Status
from attnbench.measure.time import TimingRules
from attnbench.results.record import Record
from attnbench.suite.cell import Cell

PAIRS = 30
"""Pairs of one length in one process."""
LENGTHS = (1024, 2048, 4096)
SLOW, FAST = "softmax", "linear"


@dataclass(frozen=True)
class Machine:
    """How times vary; shares of a time, as standard deviations."""

    placement: float
    """Between processes, of each cell by itself."""
    noise: float = 0.02
    """Between samples of a process."""
    ar: float = 0.0
    """Correlation of a sample with the one before it."""
    kind: str = "normal"
    """How placement is distributed: normal, uniform, or two places that are equally likely."""
    busy: bool = False
    """Whether other programs are said to have had a core."""

    def placed(self, rng: np.random.Generator) -> float:
        """The logarithm of what placement does to one cell in one process."""
        if self.kind == "uniform":
            return self.placement * math.sqrt(3) * float(rng.uniform(-1, 1))
        return self.placement * float(rng.choice([-1, 1]) if self.kind == "two places" else rng.standard_normal())

    def turns(self, rng: np.random.Generator, cells: int, pairs: int = PAIRS) -> np.ndarray:
        """Logarithms of the noise of turns, each order followed by its reverse: (pairs, cells)."""
        steps = self.noise * rng.standard_normal(pairs * cells)
        for place in range(1, len(steps)):
            steps[place] = self.ar * steps[place - 1] + math.sqrt(1 - self.ar**2) * steps[place]
        turns = steps.reshape(pairs, cells)
        turns[1::2] = turns[1::2, ::-1]
        return turns

    def floor(self, rng: np.random.Generator) -> float:
        """The noise floor as it is measured at the start: the least of three tries."""
        tries = (np.exp(self.turns(rng, 2, 150)).T.tolist() for _ in range(3))
        return min(noise_floor(a, b) or 0.0 for a, b in tries)


def table(
    machine: Machine, rng: np.random.Generator, faster: Callable[[int], float], lengths: Sequence[int] = LENGTHS
) -> Comparison:
    """One comparison; at length n the first program takes exp(``faster(n)``) times as long as the other."""

    class Simulated:
        traces = ""
        served = 0
        compiled = 0.0
        state: ClassVar[dict[str, Any]] = {}

        def __init__(self, settings: Settings, python: object = None) -> None:
            self.stop()

        def __enter__(self) -> Simulated:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def start(self) -> dict[str, Any]:
            return {"noise_floor": machine.floor(rng)}

        def stop(self) -> None:
            self.places: dict[str, float] = {}

        def seconds_used(self) -> float:
            return 0.0

        def ask(self, request: dict[str, Any], timeout: float, **_: object) -> dict[str, Any]:
            if request["do"].endswith("HoldSetting"):
                return {"found": {"tried": 1, "fault": None}}
            if request["do"].endswith("VisitCell"):
                record = Record.of(Cell.from_json(request["cell"]), Status.OK, time_median_s=1e-3, quick=True)
                return {"record": record.to_json(), "samples": None}
            cells = [Cell.from_json(cell) for cell in request["cells"]]
            logs = machine.turns(rng, len(cells))
            for column, cell in enumerate(cells):
                place = self.places.setdefault(f"{cell.variant} {cell.shape.N}", machine.placed(rng))
                logs[:, column] += place + faster(cell.shape.N) * (cell.variant.name == SLOW)
                logs[:, column] += math.log(cell.shape.N * 1e-6)
            counts = {"disturbed": PAIRS * machine.busy, "taken": PAIRS, "stopped": 0, "others": 0.0}
            return {"ran": list(range(len(cells))), "blocks": np.exp(logs).tolist(), "left_out": [], **counts}

    cells = [Cell("s", "w", Spec(name), Shape(heads=1, seq_len=8, head_dim=4)) for name in (SLOW, FAST)]
    with patch.object(compare, "Worker", Simulated):
        return Contest(cells, lengths, Settings(), TimingRules()).answer()


@dataclass(frozen=True)
class Rates:
    """What so many tables said, as shares."""

    tables: int
    wrong: float
    """Tables with a verdict that is not so; of a true difference the opposite one."""
    crossed: float
    """Tables with a crossover."""
    found: float
    """Ratios that were called slower, as they are where there is a difference."""
    processes: float
    """In how many a table was measured at most, on average."""


def rates(machine: Machine, difference: float, tables: int, *, seed: int = 0) -> Rates:
    """Rates of tables in which the first program takes ``1 + difference`` times as long at each length."""
    rng = np.random.default_rng([seed, round(1e4 * difference), round(1e4 * machine.placement)])
    wrong = crossed = found = processes = 0
    for _ in range(tables):
        comparison = table(machine, rng, lambda n: math.log1p(difference))
        verdicts = [row.verdict for row in comparison.rows[SLOW, FAST]]
        wrong += bool({"faster", "slower"} & set(verdicts)) if not difference else "faster" in verdicts
        found += verdicts.count("slower")
        (one,) = comparison.crossovers.values()
        crossed += one.n is not None or "crossings" in one.note
        processes += max(comparison.processes)
    return Rates(tables, wrong / tables, crossed / tables, found / tables / len(LENGTHS), processes / tables)


CASES = [
    *((Machine(placement), 0.0) for placement in (0.005, 0.01, 0.02, 0.05)),
    *((Machine(0.02, kind=kind), 0.0) for kind in ("uniform", "two places")),
    *((Machine(0.01, ar=ar, noise=0.1), 0.0) for ar in (0.3, 0.5, 0.9)),
    (Machine(0.02, ar=0.5, noise=0.2, busy=True), 0.0),
    *((Machine(0.005), difference) for difference in (0.02, 0.03, 0.05)),
    *((Machine(0.01), difference) for difference in (0.02, 0.03, 0.05, 0.1)),
    *((Machine(0.02), difference) for difference in (0.05, 0.1, 0.2)),
    *((Machine(0.02, ar=0.5, noise=0.2, busy=True), difference) for difference in (0.05, 0.1, 0.2, 0.3)),
]
COLUMNS = (
    *("difference_percent", "placement_percent", "placement_kind", "noise_percent", "ar", "busy", "tables"),
    *("wrong_tables_percent", "crossovers_percent", "found_percent", "processes"),
)


def row(case: tuple[Machine, float], tables: int) -> dict[str, str]:
    """One line of the file."""
    machine, difference = case
    got = rates(machine, difference, tables)
    numbers = [100 * difference, 100 * machine.placement, machine.kind, 100 * machine.noise, machine.ar]
    shares = [100 * got.wrong, 100 * got.crossed, 100 * got.found, got.processes]
    said = [*numbers, "yes" if machine.busy else "no", got.tables, *(round(one, 1) for one in shares)]
    return dict(zip(COLUMNS, (f"{one:g}" if isinstance(one, float) else str(one) for one in said), strict=True))


def main(path: Path, tables: int = 600) -> None:
    with ProcessPoolExecutor(2) as pool:
        rows = list(pool.map(row, CASES, [tables] * len(CASES)))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
