"""How often a table of ratios is wrong, and what it finds: the procedure of ``compare`` on machines that are simulated.

With more tables in ``make selfcheck``. The rates in the documentation are those that the file
``tests/benchmarks/compare_rates.py`` writes.
"""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest

from tests.benchmarks.compare_rates import CASES, COLUMNS, FAST, SLOW, Machine, rates, row, table
from tests.committed import REFERENCE

FILE = REFERENCE.parents[1] / "docs/data/compare-rates.csv"
PAGE = REFERENCE.parents[1] / "docs/measuring/time.md"
TABLES = 25
CALM, BUSY = Machine(0.01), Machine(0.02, ar=0.5, noise=0.2, busy=True)


@pytest.mark.parametrize("machine", [Machine(0.02), Machine(0.02, kind="two places"), Machine(0.01, ar=0.9, noise=0.1)])
def test_identical_programs_get_no_verdict_from_their_place_in_memory_or_from_samples_that_depend_on_each_other(
    machine: Machine,
) -> None:
    found = rates(machine, 0.0, TABLES)
    assert found.wrong <= 0.08  # two of 25; before processes were told apart it was 85 % of tables at 2 %
    assert found.crossed == 0


@pytest.mark.parametrize(("machine", "difference"), [(CALM, 0.05), (BUSY, 0.2)])
def test_a_true_difference_is_found_in_nine_of_ten(machine: Machine, difference: float) -> None:
    found = rates(machine, difference, TABLES)
    assert found.found >= 0.9
    assert found.wrong == 0


@pytest.mark.parametrize("count", [3, 12])
def test_a_true_crossing_is_found_and_lies_within_its_interval(count: int) -> None:
    rng = np.random.default_rng(count)
    lengths = np.geomspace(256, 16384, count).round().astype(int).tolist()
    for truth in np.exp(rng.uniform(math.log(1000), math.log(4000), 8)).tolist():
        comparison = table(CALM, rng, lambda n, truth=truth: 0.5 * math.log(n / truth), lengths)
        found = comparison.crossovers[SLOW, FAST]
        assert found.n is not None
        assert found.low is not None
        assert found.high is not None
        assert found.low < truth < found.high
        assert found.note == f"{SLOW} is faster below, {FAST} above"


def test_a_line_of_the_file_says_what_was_simulated() -> None:
    line = row((BUSY, 0.2), 2)
    assert tuple(line) == COLUMNS
    said = [line[name] for name in ("difference_percent", "placement_percent", "noise_percent", "ar", "busy", "tables")]
    assert said == ["20", "2", "20", "0.5", "yes", "2"]


def test_the_committed_rates_are_those_that_the_documentation_promises() -> None:
    with FILE.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(CASES)
    for line, (machine, difference) in zip(lines, CASES, strict=True):
        assert float(line["difference_percent"]) == pytest.approx(100 * difference)
        assert float(line["placement_percent"]) == pytest.approx(100 * machine.placement)
        assert int(line["tables"]) >= 300
        assert float(line["wrong_tables_percent"]) <= 5
        assert difference or float(line["crossovers_percent"]) <= 5
        assert _as_told(line) in PAGE.read_text(encoding="utf-8")
        if (difference >= 0.05 and machine.placement <= 0.01) or difference >= 0.2:
            assert float(line["found_percent"]) >= 90


def _as_told(line: dict[str, str]) -> str:
    """The line of the page."""
    none = line["difference_percent"] == "0"
    place = f"{line['placement_percent']} %" + f", {line['placement_kind']}" * (line["placement_kind"] != "normal")
    noise = (
        f"{line['noise_percent']} %"
        + f", AR(1) {line['ar']}" * (line["ar"] != "0")
        + ", busy" * (line["busy"] == "yes")
    )
    found = "-" if none else f"{line['found_percent']} %"
    difference = "none" if none else f"{line['difference_percent']} %"
    wrong = f"{line['wrong_tables_percent']} %"
    return f"| {' | '.join((difference, place, noise, wrong, found, line['processes']))} |"
