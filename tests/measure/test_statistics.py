from __future__ import annotations

import gc
import math

import numpy as np
import pytest

from attnbench.measure.statistics import (
    BETWEEN_RUNS,
    BUSY_MACHINE,
    CONFIDENCE,
    LEAST_SPREAD,
    LOOKS,
    Ratio,
    Visited,
    effective,
    error_interval,
    expected_half_width,
    interquartile_range,
    interval_of_visit,
    interval_over_rounds,
    joint_ratio,
    judged,
    median_interval,
    noise_floor,
    paired_ratio,
    ratios_over_visits,
    spread_of_visits,
    student,
)
from attnbench.measure.time import Sample, TimingRules, measure_time, summarise
from tests.bare import in_bare_process


@pytest.mark.parametrize("n", [6, 7, 20, 31, 100, 1000])
def test_the_interval_is_the_narrowest_symmetric_one_with_exact_coverage(n: int) -> None:
    from scipy.stats import binom

    interval = median_interval(list(range(n)))
    assert interval is not None
    low, high = (int(end) for end in interval)
    assert low == n - 1 - high
    covered = float(binom.cdf(high, n, 0.5) - binom.cdf(low, n, 0.5))
    assert covered >= CONFIDENCE
    narrower = float(binom.cdf(high - 1, n, 0.5) - binom.cdf(low + 1, n, 0.5))
    assert narrower < CONFIDENCE


def test_tails_that_hold_exactly_what_may_be_missed_are_left_out() -> None:
    six = list(map(float, range(6)))
    missed = 2 * (1 + 6) / 2**6  # by the second of six from either end
    assert median_interval(six, 1 - missed) == (1, 4)
    assert median_interval(six, 1 - missed + 1e-9) == (0, 5)


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


@pytest.mark.parametrize(
    ("sd", "rounds"),
    [
        (0.1, 1),
        (0.2, 3),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0.03, 1), (0.2, 1), (0.03, 3), (0.1, 3))),
    ],
)
def test_the_interval_in_the_row_holds_what_it_says_though_its_width_decides_when_to_stop(
    sd: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "collect", lambda: 0)  # most of the time otherwise
    rules = TimingRules(min_time=0.2, max_time=1.2, warmup_time=0, rounds=rounds)
    misses = 0
    draws = 600
    for seed in range(draws):
        watch, taken = Lognormal(seed, sd), list[tuple[Sample, ...]]()
        for _ in range(rounds):
            taken.append(measure_time(lambda: None, rules, stopwatch=watch).samples)
        found = summarise(taken).interval if rounds > 1 else median_interval([one.seconds for one in taken[0]])
        low, high = found or (math.nan, math.nan)
        misses += not low <= 0.01 <= high
    assert misses / draws <= 1.1 * (1 - CONFIDENCE) + 5 / 300


@pytest.mark.parametrize("freedom", [1, 2, 3, 2.5])
@pytest.mark.parametrize("family", [1, 3, 72, 10_000])
def test_the_quantile_is_students_with_or_without_scipy(freedom: float, family: int) -> None:
    from scipy.stats import t

    assert student(freedom, family) == pytest.approx(float(t.isf(0.025 / family, freedom)), rel=1e-9)


def test_a_row_of_three_visits_needs_no_scipy() -> None:
    call = "from attnbench.measure.statistics import *; print(interval_over_rounds([[1.0], [1.1], [1.2]])[0] < 1.1"
    assert in_bare_process(f"import sys; {call}, 'scipy' in sys.modules)").stdout == "True False\n"


def test_the_interval_over_rounds_is_students_of_the_logarithms_of_the_visits_medians() -> None:
    from scipy.stats import t

    visits = [[0.9, 1.0, 1.1], [1.2], [0.8, 0.9], []]
    logs = np.log([1.0, 1.2, 0.85])
    low, high = t.interval(0.95, 2, logs.mean(), logs.std(ddof=1) / math.sqrt(3))
    assert interval_over_rounds(visits) == pytest.approx((math.exp(low), math.exp(high)))


def row_of(visits: list[float]) -> tuple[float, float, int]:
    return *(interval_over_rounds([[one] for one in visits]) or (0.0, 0.0)), len(visits)


def test_the_joint_interval_of_a_ratio_is_welchs_of_the_logarithms_of_visits() -> None:
    from scipy.stats import t

    a, b, family = [1.0, 1.1, 1.3, 1.2], [2.0, 2.1, 2.4], 48
    parts = [float(np.var(np.log(one), ddof=1)) / len(one) for one in (a, b)]
    freedom = sum(parts) ** 2 / sum(part**2 / (len(one) - 1) for part, one in zip(parts, (a, b), strict=True))
    half = t.ppf(1 - 0.025 / family, freedom) * math.sqrt(sum(parts))
    middle = float(np.log(a).mean() - np.log(b).mean())
    found = joint_ratio(row_of(a), row_of(b), family, (0.0, 0))
    assert found == pytest.approx((math.exp(middle - half), math.exp(middle + half)))


def test_the_rows_of_a_length_say_together_how_visits_vary_at_most() -> None:
    from scipy.stats import chi2

    visits = [[1.0, 1.1, 1.3, 1.2], [2.0, 2.1, 2.4], [5.0, 5.0, 5.0]]
    squares = sum(float(np.var(np.log(one)) * len(one)) for one in visits)
    found = spread_of_visits([*map(row_of, visits), (1.0, 2.0, 1)])  # one visit tells nothing
    assert found == (pytest.approx(squares / chi2.ppf(0.2, 7)), 7)
    assert spread_of_visits([(1.0, 2.0, 1)]) == (0.0, 0)


def test_visits_that_agree_by_chance_are_as_uncertain_as_those_beside_them() -> None:
    from scipy.stats import t

    alike, shared = row_of([1.0, 1.0, 1.0]), (0.01, 20)
    half = t.ppf(1 - 0.025 / 12, 40) * math.sqrt(2 * 0.01 / 3)
    assert joint_ratio(alike, alike, 12, shared) == pytest.approx((math.exp(-half), math.exp(half)))
    assert joint_ratio(alike, alike, 12, (0.0, 0)) == (1.0, 1.0)


@pytest.mark.parametrize("visits", [1, 2])
def test_below_three_visits_a_ratio_is_uncertain_by_the_modes_of_a_machine(visits: int) -> None:
    low, high = joint_ratio((1.0, 1.0, visits), (1.0, 1.0, 5), 1, (0.0, 0))
    assert (low, high) == pytest.approx((1 / 1.3, 1.3))


def test_one_visit_has_no_interval_however_many_samples_it_has() -> None:
    assert interval_over_rounds([[1.0, 1.01, 1.02] * 20]) is None
    assert interval_over_rounds([[1.0, 1.01, 1.02] * 20, []]) is None
    assert interval_over_rounds([[0.0, 1.0, 0.0], [1.0]]) is None  # nothing takes no time


def test_the_interval_over_rounds_holds_the_median_of_all_samples_and_stays_finite() -> None:
    low, high = interval_over_rounds([[1.0] * 50, [2.0], [2.0], [2.0], [2.0], [2.0], [2.0]]) or (0, 0)
    assert low == 1.0
    assert high > 2
    low, high = interval_over_rounds([[1e-9], [1e9]]) or (0, 0)
    assert 0 < low < high < math.inf


def test_the_interval_of_an_error_is_students_of_its_draws_as_wide_as_a_median_takes() -> None:
    half = 1.25 * 2.776 * 0.02 / math.sqrt(5)
    assert error_interval(0.1, 0.02, 5) == pytest.approx((0.1 - half, 0.1 + half), abs=1e-5)
    assert error_interval(0.1, None, 1) == error_interval(0.1, None, None) == (0.1, 0.1)
    assert error_interval(0.1, 1.0, 2)[0] == 0.0


@pytest.mark.parametrize("draws", [3, 5, 15])
def test_the_interval_of_an_error_misses_no_more_often_than_it_says(draws: int) -> None:
    taken = np.random.default_rng(draws).normal(10, 1, (5000, draws))
    ends = [error_interval(float(np.median(one)), float(one.std(ddof=1)), draws) for one in taken]
    assert sum(not low <= 10 <= high for low, high in ends) < 0.06 * len(ends)


def test_quartiles_of_a_hundred_steps_are_fifty_apart_and_one_sample_has_no_spread() -> None:
    assert interquartile_range([float(i) for i in range(101)]) == 50
    assert interquartile_range([7.0]) == 0


def test_the_half_width_that_is_expected_is_that_of_intervals_of_normal_samples() -> None:
    rng = np.random.default_rng(0)
    expected, found = 0.0, 0.0
    for sample in rng.normal(5, 3, (300, 400)).tolist():
        low, high = median_interval(sample) or (math.nan, math.nan)
        expected, found = expected + expected_half_width(sample), found + (high - low) / 2
    assert expected == pytest.approx(found, rel=0.08)


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
    a, b = rng.lognormal(size=(4, 30)).tolist(), rng.lognormal(0.3, size=(4, 30)).tolist()
    one, other = paired_ratio(a, b), paired_ratio(b, a)
    assert one.estimate * other.estimate == pytest.approx(1, abs=1e-12)
    assert one.low is not None
    assert other.high is not None
    assert one.low * other.high == pytest.approx(1, abs=1e-12)
    mirror = {"faster": "slower", "slower": "faster", "same": "same", "inconclusive": "inconclusive"}
    assert mirror[one.verdict] == other.verdict


@pytest.mark.parametrize(
    ("joint", "verdict"),
    [
        ((0.5, 0.9), "faster"),
        ((0.5, 0.995), "inconclusive"),
        ((1.2, 1.3), "slower"),
        ((1.005, 1.3), "inconclusive"),
        ((0.99, 1.015), "same"),
        ((0.9, 1.1), "inconclusive"),
        (None, "inconclusive"),
    ],
)
def test_a_verdict_needs_the_whole_interval(joint: tuple[float, float] | None, verdict: str) -> None:
    assert Ratio(1.0, 0.999, 1.001, 30, joint).verdict == verdict


@pytest.mark.parametrize(
    ("interval", "noise", "busy", "said"),
    [
        ((0.5, 0.9), 0.0, "", ("faster", "")),
        ((1.2, 1.3), 0.15, "", ("slower", "")),
        ((1.2, 1.3), 0.15, "1.7 of 2 cores", ("slower", BUSY_MACHINE)),
        ((1.2, 1.3), 0.25, "", ("inconclusive", "")),
        ((1.2, 1.3), 0.25, "1.7 of 2 cores", ("withheld", "the machine was busy (1.7 of 2 cores)")),
        ((0.99, 1.01), 0.0, "", ("same", "")),
        ((0.99, 1.01), 0.0, "1.7 of 2 cores", ("withheld", "the machine was busy (1.7 of 2 cores)")),
        (None, 0.0, "", ("withheld", "a verdict needs 3 processes")),
    ],
)
def test_one_rule_gives_a_verdict_marks_it_or_withholds_it_with_the_reason(
    interval: tuple[float, float] | None, noise: float, busy: str, said: tuple[str, str]
) -> None:
    assert judged(interval, noise, busy=busy) == said
    assert judged(interval, noise, busy=busy, doubt="impossible") == ("withheld", "impossible")


@pytest.mark.parametrize("family", [1, 3, 24])
@pytest.mark.parametrize("processes", LOOKS)
def test_the_intervals_are_students_of_one_number_for_each_process(family: int, processes: int) -> None:
    from scipy.stats import ttest_1samp

    rng = np.random.default_rng(family)
    middles = rng.normal(0.3, 0.1, processes)
    # Samples of a process are as many as one likes, and as unlike each other: its median alone counts.
    a = [
        np.exp(middle + rng.permutation([-spread, 0, spread])).tolist()
        for middle in middles
        for spread in [rng.uniform()]
    ]
    found = paired_ratio(a, [[1.0] * 3] * processes, family=family)
    test = ttest_1samp(middles, 0)
    assert (found.low, found.high) == pytest.approx(tuple(np.exp(test.confidence_interval(CONFIDENCE))))
    joint = test.confidence_interval(1 - (1 - CONFIDENCE) / family / len(LOOKS))
    assert found.joint == pytest.approx(tuple(np.exp(joint)))
    assert found.estimate == pytest.approx(math.exp(middles.mean()))
    assert (found.pairs, found.processes) == (3 * processes, processes)


def test_processes_that_agree_by_chance_are_not_believed_to_do_so_and_two_say_nothing() -> None:
    found = paired_ratio([[1.02] * 9] * 3, [[1.0] * 9] * 3)
    assert (found.low, found.high) == pytest.approx(
        (1.02 * math.exp(-4.3027 * LEAST_SPREAD / 3**0.5), 1.02 * math.exp(4.3027 * LEAST_SPREAD / 3**0.5)), rel=1e-5
    )
    two = paired_ratio([[2.0] * 90] * 2, [[1.0] * 90] * 2)
    assert (two.estimate, two.low, two.high, two.joint, two.verdict) == (2.0, None, None, None, "inconclusive")


@pytest.mark.parametrize(
    ("estimate", "joint", "noise", "undecided"),
    [
        (1.3, None, 0.0, True),  # too few processes
        (1.3, (0.9, 1.9), 0.0, True),
        (1.3, (1.2, 1.4), 0.0, False),
        (1.3, (0.9, 1.9), 0.5, False),  # no number of processes lifts it above the noise of the machine
        (1.001, (0.9, 1.1), 0.0, True),
        (1.001, (0.99, 1.01), 0.0, False),
    ],
)
def test_more_processes_are_asked_for_what_they_may_decide(
    estimate: float, joint: tuple[float, float] | None, noise: float, undecided: bool
) -> None:
    assert Ratio(estimate, None, None, 30, joint, noise).undecided is undecided


def test_processes_that_differ_beyond_measure_have_a_finite_interval() -> None:
    found = paired_ratio([[1e-9], [1.0], [1e9]], [[1.0]] * 3, family=10**4)
    assert found.joint is not None
    assert 0 < found.joint[0] < found.joint[1] < math.inf
    assert found.verdict == "inconclusive"


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_no_time_gives_an_error_instead_of_a_ratio(bad: float) -> None:
    with pytest.raises(ValueError, match=r"^a time is not positive and finite$"):
        paired_ratio([[1.0, bad]], [[1.0, 1.0]])
    with pytest.raises(ValueError, match=r"^a time is not positive and finite$"):
        noise_floor([1.0, 1.0], [bad, 1.0])


def test_unequal_or_empty_sides_are_refused() -> None:
    for a, b in (([], []), ([1.0], [1.0, 2.0])):
        with pytest.raises(ValueError, match=rf"^need as many samples of each, got {len(a)} and {len(b)}$"):
            paired_ratio([[1.0], a], [[1.0], b])
        with pytest.raises(ValueError, match=rf"^need as many samples of each, got {len(a)} and {len(b)}$"):
            noise_floor(a, b)
    with pytest.raises(ValueError, match="no process"):
        paired_ratio([], [])


def test_the_ratio_of_one_cell_has_the_interval_of_welchs_test_on_logarithms_and_what_runs_may_differ() -> None:
    from scipy.stats import ttest_ind

    new, old = [1.3, 1.21, 1.25, 1.4, 1.2], [1.0, 1.02, 0.97, 1.05]
    found = ratios_over_visits([Visited(new, [old])])
    ((ratio, low, high),) = found.ratios
    test = ttest_ind(np.log(new), np.log(old), equal_var=False)
    wide = math.log(1 + BETWEEN_RUNS)
    assert found.between is None
    half = pytest.approx(list(test.confidence_interval(0.90)))
    assert [math.log(low) + wide, math.log(high) - wide] == half
    assert math.log(ratio) == pytest.approx(np.log(new).mean() - np.log(old).mean())
    (backwards,) = ratios_over_visits([Visited(old, [new])]).ratios
    assert backwards == pytest.approx((1 / ratio, 1 / high, 1 / low))


def test_what_is_doubted_widens_the_interval_of_a_ratio_and_moves_it_nowhere() -> None:
    ((sure,), (unsure,)) = (
        ratios_over_visits([Visited([1.0, 1.01, 1.02], [[2.0, 2.03, 2.01]], doubt)]).ratios for doubt in (0.0, 0.04)
    )
    assert unsure[0] == sure[0]
    assert unsure[1] < sure[1] < sure[2] < unsure[2]
    (same,) = ratios_over_visits([Visited([1.0] * 3, [[2.0] * 3], 0.01)]).ratios
    half = 0.1 * 1.64485 + math.log(1.02)
    assert np.log(same) - math.log(0.5) == pytest.approx([0, -half, half], abs=1e-4)


def test_cells_that_vary_alike_tell_each_other_how_visits_vary_and_others_do_not() -> None:
    """By chance one cell's visits agree: among cells that vary by 2 % that is not believed, alone it is."""
    rng = np.random.default_rng(0)
    many = [Visited(np.exp(rng.normal(0, 0.02, 5)), [np.exp(rng.normal(0, 0.02, 5))]) for _ in range(30)]
    quiet = Visited([1.0, 1.0001, 1.0, 1.0, 1.0], [[1.0, 1.0, 1.0001, 1.0, 1.0]])
    alone, among = ratios_over_visits([quiet]).ratios[0], ratios_over_visits([*many, quiet]).ratios[-1]
    assert math.log(alone[2]) - math.log(1.02) < 1e-3
    assert math.log(among[2]) - math.log(1.02) > 0.005
    freedoms = [math.log(high / ratio) for ratio, _, high in ratios_over_visits(many).ratios]
    assert max(freedoms) < 2 * min(freedoms)


def test_two_visits_say_nothing_of_how_visits_vary() -> None:
    with pytest.raises(ValueError, match="need 3 visits of each"):
        ratios_over_visits([Visited([1.0] * 2, [[1.0] * 5])])
    assert ratios_over_visits([]).ratios == ()


def test_older_runs_that_differ_widen_the_interval_of_a_few_cells_by_as_much() -> None:
    near = ratios_over_visits([Visited([1.0] * 5, [[1.0] * 5, [1.01] * 5])]).ratios[0]
    apart = ratios_over_visits([Visited([1.0] * 5, [[1.0] * 5, [1.2] * 5])]).ratios[0]
    assert near[2] / near[0] == pytest.approx(1.02, rel=1e-4)
    assert apart[2] / apart[0] == pytest.approx(1.2, rel=1e-4)


def test_visits_that_differ_beyond_measure_have_a_finite_interval() -> None:
    ((_, low, high),) = ratios_over_visits([Visited([1e-150, 1e150, 1e-150], [[1.0, 1.001, 0.999]])]).ratios
    assert 0 < low < high < math.inf


def test_samples_that_follow_their_neighbours_are_worth_fewer() -> None:
    rng = np.random.default_rng(0)
    independent = rng.normal(1, 0.01, 400)
    noise = rng.normal(0, 0.01 * math.sqrt(1 - 0.9**2), 400)
    following = [1.0]
    for one in noise:
        following.append(1 + 0.9 * (following[-1] - 1) + float(one))
    assert effective(independent.tolist()) > 300
    assert effective(following) == pytest.approx(400 * 0.1 / 1.9, rel=0.5)
    assert effective([1.0] * 20) == 20
    exact, wide = median_interval(following), interval_of_visit(following)
    assert exact is not None
    assert wide is not None
    assert wide[1] - wide[0] > 2 * (exact[1] - exact[0])
    assert interval_of_visit(independent.tolist()[:5]) is None


def test_the_noise_floor_is_the_far_end_of_the_interval_on_either_side() -> None:
    slow = [1.0 + 0.01 * i for i in range(6)]
    assert noise_floor(slow, [1.0] * 6) == pytest.approx(0.05)
    assert noise_floor([1.0] * 6, slow) == pytest.approx(0.05)
    assert noise_floor(slow[:5], slow[:5]) is None


@pytest.mark.parametrize("lengths", [[5, 5, 5, 5, 5, 1], [2] * 5, [5, 1], [1] * 5, [1] * 3])
def test_an_older_run_of_few_rounds_hides_no_difference_between_runs(lengths: list[int]) -> None:
    """Visits differ by 2 % and runs by 10 %: of 200 gates of equal programs at most one in twenty may call a loss."""
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(200):
        runs = [np.exp(rng.normal(0, 0.1, (16, 1)) + rng.normal(0, 0.02, (16, rounds))) for rounds in [5, *lengths]]
        found = ratios_over_visits([Visited(new, olds) for new, *olds in zip(*runs, strict=True)])
        assert found.between == pytest.approx(0.1, rel=0.8)
        wrong += any(low > 1 for _, low, _ in found.ratios)
    assert wrong <= 10
