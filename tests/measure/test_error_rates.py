"""What the docs promise of intervals and verdicts, in few simulated cases; in many in `make selfcheck`."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.benchmarks import error_rates
from tests.benchmarks.error_rates import Machine, Rate, gate, normal, power, report, row, seldom, visit

TIMES = 200


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def is_kept(found: int, promised: str = "<= 5 %", of: int = TIMES) -> bool:
    return Rate("", "", promised, found, of).is_kept


@pytest.mark.parametrize("rounds", [2, 3, 4, 5, 6])
def test_the_interval_of_a_row_misses_the_true_time_in_one_of_twenty(rounds: int) -> None:
    assert is_kept(row(rng(rounds), rounds, 0.02, TIMES))


@pytest.mark.parametrize("alike", [0.0, 0.3, 0.5, 0.9])
def test_the_interval_within_a_visit_allows_for_neighbours_that_are_alike(alike: float) -> None:
    assert is_kept(visit(rng(1), alike, 200, TIMES))


@pytest.mark.parametrize("cells", [16, 60])
@pytest.mark.parametrize(
    "machine", [Machine(0.02), Machine(0.05, 0.02), Machine(0.2), Machine(0.05, 0.0, 1.0)], ids=str
)
def test_one_gate_of_equals_in_twenty_fails_at_most(cells: int, machine: Machine) -> None:
    assert is_kept(gate(rng(2), machine, TIMES, cells=cells))


@pytest.mark.parametrize("runs", [0.0, 0.02, 0.05])
def test_several_old_runs_say_how_runs_differ_however_much_that_is(runs: float) -> None:
    assert is_kept(gate(rng(3), Machine(0.05, runs), TIMES, cells=48, olds=3))


@pytest.mark.parametrize(("spread", "factor"), [(0.01, 1.05), (0.05, 1.2)])
def test_a_true_loss_is_found_in_nine_gates_of_ten(spread: float, factor: float) -> None:
    assert is_kept(gate(rng(4), Machine(spread), TIMES, cells=16, slower=factor, limit=1.0), ">= 90 %")


@pytest.mark.parametrize("rounds", [2, 3, 5])
@pytest.mark.parametrize("variants", [3, 13])
@pytest.mark.parametrize("share", [0.2, 0.5])
def test_one_report_of_equals_in_twenty_tells_two_apart_at_most(rounds: int, variants: int, share: float) -> None:
    visits = partial(seldom, share=share, longer=0.2)
    assert is_kept(report(rng(7), visits, TIMES, variants=variants, rounds=rounds))
    assert is_kept(report(rng(8), partial(normal, unlike=share), TIMES, variants=variants, rounds=rounds))


def test_a_report_finds_what_differs() -> None:
    assert is_kept(report(rng(9), partial(normal, spread=0.05), TIMES, rounds=5, true=1.3), ">= 90 %")


@pytest.mark.parametrize("noise", [0.1, 0.2])
@pytest.mark.parametrize("visits", [0, 5])
def test_a_linear_variant_is_not_said_to_grow_faster_than_claimed(noise: float, visits: int) -> None:
    assert is_kept(power(rng(5), noise, TIMES, visits=visits))
    assert power(rng(6), 0.05, TIMES, visits=5, true=1.6) > 0.9 * TIMES


def test_a_promise_is_kept_or_not_by_more_than_the_error_of_the_simulation() -> None:
    assert [is_kept(found) for found in (0, 10, 19, 20)] == [True, True, True, False]
    assert [is_kept(found, ">= 90 %") for found in (200, 180, 168, 167)] == [True, True, True, False]


def test_the_committed_rates_are_those_of_these_simulations_and_keep_what_is_promised() -> None:
    committed = error_rates.read()
    assert [(one.what, one.setting, one.promised) for one in error_rates.rates(1)] == [
        (one.what, one.setting, one.promised) for one in committed
    ]
    assert all(one.is_kept for one in committed)
