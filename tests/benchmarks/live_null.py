"""What `compare` claims on simulated machines, many times, by its own procedure. See `make selfcheck`.

SELFCHECK_RUNS=20 makes it a tenth as long, for a look at whether it works.
"""

from __future__ import annotations

import os

import pytest

from tests.benchmarks.compare_rates import CASES, Machine, rates

TABLES = 2 * int(os.environ.get("SELFCHECK_RUNS", "200"))


@pytest.mark.parametrize(("machine", "difference"), CASES)
def test_at_most_one_table_in_twenty_is_wrong_and_what_can_be_found_is(machine: Machine, difference: float) -> None:
    found = rates(machine, difference, TABLES, seed=1)
    print(f"\n{difference:.0%} of difference, {machine}: {found}")
    assert found.wrong <= 0.05
    assert difference or found.crossed <= 0.05
    if (difference >= 0.05 and machine.placement <= 0.01) or difference >= 0.2:
        assert found.found >= 0.9
