from __future__ import annotations

import gc
import math

import numpy as np
import pytest
from scipy.stats import binom

from attnbench.measure.statistics import (
    CONFIDENCE,
    Ratio,
    crossover,
    interval_over_rounds,
    median_interval,
    paired_ratio,
)
from attnbench.measure.time import Sample, TimingRules, measure_time, summarise


@pytest.mark.parametrize("n", [6, 7, 20, 31, 100, 1000])
def test_the_interval_is_the_narrowest_symmetric_one_with_exact_coverage(n: int) -> None:
    interval = median_interval(list(range(n)))
    assert interval is not None
    low, high = (int(end) for end in interval)
    assert low == n - 1 - high
    covered = float(binom.cdf(high, n, 0.5) - binom.cdf(low, n, 0.5))
    assert covered >= CONFIDENCE
    narrower = float(binom.cdf(high - 1, n, 0.5) - binom.cdf(low + 1, n, 0.5))
    assert narrower < CONFIDENCE


@pytest.mark.parametrize("n", range(6))
def test_fewer_than_six_samples_have_no_interval(n: int) -> None:
    assert median_interval(list(range(n))) is None


@pytest.mark.parametrize("n", [20, 50])
def test_the_interval_misses_the_median_no_more_often_than_it_says(n: int) -> None:
    rng = np.random.default_rng(n)
    draws = 1000
    misses = 0
    for sample in rng.lognormal(size=(draws, n)):
        low, high = median_interval(list(sample)) or (math.nan, math.nan)
        misses += not low <= 1.0 <= high
    assert misses / draws <= 1.1 * (1 - CONFIDENCE) + 5 / 300


class Lognormal:
    """Calls of 10 ms in the median, with noise."""

    def __init__(self, seed: int, sd: float) -> None:
        self._noise = iter(np.random.default_rng([seed, 3]).lognormal(0, sd, 512).tolist())

    def cost(self) -> float:
        return 0.0

    def time(self, call: object, calls: int) -> tuple[float, int]:
        return 0.01 * next(self._noise) * calls, 0


@pytest.mark.parametrize("sd", [0.03, 0.1, 0.2])
@pytest.mark.parametrize("rounds", [1, 3])
def test_the_interval_in_the_row_holds_what_it_says_though_its_width_decides_when_to_stop(
    sd: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "collect", lambda: 0)  # most of the time otherwise
    rules = TimingRules(min_time=0.2, max_time=1.2, warmup_time=0, rounds=rounds)
    misses = 0
    draws = 300
    for seed in range(draws):
        watch, taken = Lognormal(seed, sd), list[tuple[Sample, ...]]()
        for _ in range(rounds):
            earlier = [sample for samples in taken for sample in samples]
            taken.append(measure_time(lambda: None, rules, stopwatch=watch, earlier=earlier).samples)
        low, high = summarise(taken).interval or (math.nan, math.nan)
        misses += not low <= 0.01 <= high
    assert misses / draws <= 1.1 * (1 - CONFIDENCE) + 5 / 300


def test_visits_between_which_the_machine_changed_widen_the_interval() -> None:
    steady, slower = [1.0, 1.01, 1.02] * 20, [1.2, 1.21, 1.22] * 20
    assert interval_over_rounds([steady]) == median_interval(steady)
    low, high = interval_over_rounds([steady, steady, slower]) or (0, 0)
    assert low <= 1.01
    assert high == 1.21
    # From six visits on a stray one is no longer believed: the interval of their medians is exact.
    assert interval_over_rounds([steady] * 8 + [slower]) == median_interval(steady * 8 + slower)
    assert interval_over_rounds([[1.0, 1.1], [1.2]]) is None


@pytest.mark.parametrize("rounds", [6, 9])
def test_the_interval_over_rounds_holds_the_true_time_of_a_machine_that_changes_its_speed(rounds: int) -> None:
    rng = np.random.default_rng(0)
    misses = narrow = 0
    for _ in range(300):
        samples = [np.exp(rng.normal(0, 0.1) + rng.normal(0, 0.02, 30)).tolist() for _ in range(rounds)]
        low, high = interval_over_rounds(samples) or (math.nan, math.nan)
        misses += not low <= 1 <= high
        low, high = median_interval([one for visit in samples for one in visit]) or (math.nan, math.nan)
        narrow += not low <= 1 <= high
    assert misses / 300 <= 1.1 * (1 - CONFIDENCE) + 5 / 300
    assert narrow / 300 > 0.3  # what all samples as one lot would say


def test_the_ratio_mirrors_when_the_sides_are_swapped() -> None:
    rng = np.random.default_rng(0)
    a, b = list(rng.lognormal(size=30)), list(rng.lognormal(0.3, size=30))
    one, other = paired_ratio(a, b), paired_ratio(b, a)
    assert one.estimate * other.estimate == pytest.approx(1, abs=1e-12)
    assert one.low is not None
    assert other.high is not None
    assert one.low * other.high == pytest.approx(1, abs=1e-12)
    mirror = {"faster": "slower", "slower": "faster", "same": "same", "inconclusive": "inconclusive"}
    assert mirror[one.verdict] == other.verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.5, 0.9, "faster"),
        (0.5, 0.995, "inconclusive"),
        (1.2, 1.3, "slower"),
        (1.005, 1.3, "inconclusive"),
        (0.99, 1.015, "same"),
        (0.9, 1.1, "inconclusive"),
        (None, None, "inconclusive"),
    ],
)
def test_a_verdict_needs_the_whole_interval(low: float | None, high: float | None, verdict: str) -> None:
    assert Ratio(1.0, low, high, 30).verdict == verdict


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_no_time_gives_an_error_instead_of_a_ratio(bad: float) -> None:
    with pytest.raises(ValueError, match="not positive"):
        paired_ratio([1.0, bad], [1.0, 1.0])


def test_unequal_or_empty_sides_are_refused() -> None:
    for a, b in (([], []), ([1.0], [1.0, 2.0])):
        with pytest.raises(ValueError, match="as many"):
            paired_ratio(a, b)


def _noisy(times: list[float], seed: int) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    return [list(t * rng.lognormal(0, 0.03, 30)) for t in times]


def test_the_crossover_of_a_linear_and_a_quadratic_method_is_found_with_an_interval() -> None:
    lengths = [512, 1024, 2048, 4096, 8192]
    linear = _noisy([n / 1000 for n in lengths], 0)
    quadratic = _noisy([n**2 / 3_000_000 for n in lengths], 1)
    found = crossover(lengths, linear, quadratic, names=("linear", "quadratic"))
    assert found.n is not None
    assert found.low < 3000 < found.high
    assert found.high / found.low < 1.1
    assert found.note == "quadratic is faster below, linear above"
    swapped = crossover(lengths, quadratic, linear, names=("quadratic", "linear"))
    assert swapped.n == pytest.approx(found.n)
    assert swapped.note == found.note


def test_a_curve_that_does_not_cross_is_not_extrapolated() -> None:
    lengths = [1024, 2048]
    found = crossover(lengths, _noisy([1.0, 2.0], 0), _noisy([2.0, 2.1], 1), names=("a", "b"))
    assert found.n is None
    assert found.note == "not in range: a is faster throughout"


@pytest.mark.parametrize(
    ("ratios", "noise", "note"),
    [
        ([1.0, 1.0], 0.0, "neither is faster by more than chance"),
        ([0.5, 1.0], 0.0, "a is faster, at n = 2048 by no more than chance"),
        ([0.5, 0.9], 0.3, "a is faster, at n = 2048 by no more than chance"),
        ([0.5, 0.9], 0.0, "a is faster throughout"),
    ],
)
def test_a_difference_that_may_be_chance_is_not_said_to_be_one(ratios: list[float], noise: float, note: str) -> None:
    a = [[ratio * (1 + 0.01 * (-1) ** i) - 0.0001 for i in range(30)] for ratio in ratios]
    found = crossover([1024, 2048], a, [[1.0] * 30] * 2, names=("a", "b"), noise=noise)
    assert found.note == f"not in range: {note}"


def test_a_crossing_at_the_edge_has_an_open_interval() -> None:
    lengths = [1024, 2048]
    rng = np.random.default_rng(3)
    a = [list(rng.lognormal(-0.5, 0.05, 30)), list(rng.lognormal(0.005, 0.1, 30))]
    b = [list(rng.lognormal(0, 0.05, 30)), list(rng.lognormal(0, 0.1, 30))]
    found = crossover(lengths, a, b, names=("a", "b"))
    assert math.isinf(found.high)


def test_several_crossings_are_named() -> None:
    lengths = [1, 2, 4]
    found = crossover(lengths, [[1.0] * 6, [3.0] * 6, [1.0] * 6], [[2.0] * 6] * 3, names=("a", "b"))
    assert found.note.startswith("first of 2 crossings")
