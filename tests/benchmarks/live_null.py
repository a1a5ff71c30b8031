"""What `compare` claims of identical programs in simulated noise, many times. See `make selfcheck`.

SELFCHECK_RUNS=20 makes it a tenth as long, for a look at whether it works.
"""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path

import numpy as np
import pytest

CASES = 5 * int(os.environ.get("SELFCHECK_RUNS", "200"))

_spec = importlib.util.spec_from_file_location(
    "simulation", Path(__file__).parents[1] / "measure" / "test_crossover.py"
)
assert _spec is not None
assert _spec.loader is not None
simulation = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(simulation)


@pytest.mark.parametrize("count", simulation.COUNTS)
@pytest.mark.parametrize("kind", simulation.NOISES)
@pytest.mark.parametrize("sd", [0.02, 0.3])
def test_identical_programs_get_a_crossover_in_at_most_one_of_a_hundred(sd: float, kind: str, count: int) -> None:
    rng = np.random.default_rng([simulation.NOISES.index(kind), count, 2])
    found = [simulation.simulated(rng, kind, count, crossing=None, sd=sd) for _ in range(CASES)]
    crossings = sum(one.n is not None or "crossings" in one.note for one in found)
    verdicts = sum("faster" in one.note for one in found)
    print(f"\nnull, {count} lengths, {kind}, sd {sd}: {crossings} crossovers, {verdicts} verdicts in {CASES} tables")
    assert crossings <= 0.01 * CASES
    assert verdicts <= 0.05 * CASES


@pytest.mark.parametrize("count", simulation.COUNTS)
@pytest.mark.parametrize("kind", simulation.NOISES)
def test_a_true_crossing_is_found_within_its_interval_in_nineteen_of_twenty(kind: str, count: int) -> None:
    rng = np.random.default_rng([simulation.NOISES.index(kind), count, 3])
    truths = np.exp(rng.uniform(math.log(1000), math.log(4000), CASES)).tolist()
    found = [(truth, simulation.simulated(rng, kind, count, crossing=truth, sd=0.05)) for truth in truths]
    held = sum(one.n is not None and one.low < truth < one.high for truth, one in found)
    print(f"\ncrossing, {count} lengths, {kind}: {held} of {CASES} found within their interval")
    assert held >= 0.95 * CASES
