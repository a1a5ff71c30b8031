"""What pairs find in noise that is known, by the rule that stops them."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest

from attnbench.harness.inside import pairs
from attnbench.harness.inside.pairs import Turns, measure_noise, take_turns
from attnbench.measure.standstill import Moment
from attnbench.measure.statistics import LOOKS, Ratio, paired_ratio
from attnbench.measure.stopwatch import WallClock
from attnbench.measure.time import REST, Sample, Sampler, TimingRules
from tests.harness.samplers import takes

NOISES = ("independent", "autocorrelated", "drifting", "spiky")
RULES = TimingRules(min_time=0.2, max_time=3.0)


@pytest.fixture
def never_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks the kernel, before and after each of thousands of samples of no length, whether they stood still."""
    still = Moment.now()
    monkeypatch.setattr(Moment, "now", lambda: still)


class NoisyWatch:
    """Calls say how many seconds of work they are; what a sample takes is that with noise of standard deviation ``sd``.

    autocorrelated: a level that keeps nine tenths of itself from sample to sample wanders by ``sd`` as well; drifting:
    half a per cent slower with each hundredth of a second; spiky: one sample in ten takes five times as long.
    """

    def __init__(self, noise: str, seed: int, sd: float) -> None:
        rng = np.random.default_rng([seed, NOISES.index(noise)])
        self._noise, self._sd = noise, sd
        self._normal, self._uniform = iter(rng.standard_normal(8192).tolist()), iter(rng.random(4096).tolist())
        self._level = self.now = 0.0

    def cost(self) -> float:
        return 0.0

    def time(self, call: Callable[[], object], calls: int) -> tuple[float, int]:
        work = call()
        if not isinstance(work, float):  # a real call
            work = 0.001
        seconds = calls * work * math.exp(self._sd * next(self._normal))
        if self._noise == "autocorrelated":
            self._level = 0.9 * self._level + self._sd * next(self._normal)
            seconds *= math.exp(self._level)
        elif self._noise == "drifting":
            seconds *= 1 + 0.5 * self.now
        elif self._noise == "spiky" and next(self._uniform) < 0.1:
            seconds *= 5
        self.now += seconds
        return seconds, 0


def ratio(noise: str, seed: int, *, work: float = 1.0, sd: float = 0.02, rules: TimingRules = RULES) -> Ratio:
    """The measured ratio of a program that does ``work`` times as much as the other, in nine processes."""
    calls = [lambda: 0.005 * work, lambda: 0.005]
    took: tuple[list[list[float]], list[list[float]]] = ([], [])
    for process in range(LOOKS[-1]):
        watch = NoisyWatch(noise, LOOKS[-1] * seed + process, sd)
        blocks = take_turns(takes(watch, calls), rules, seed=process, clock=lambda watch=watch: watch.now).blocks
        for side, times in zip(took, zip(*blocks, strict=True), strict=True):
            side.append(list(times))
    return paired_ratio(*took)


def excludes(found: Ratio, truth: float) -> bool:
    assert found.low is not None
    assert found.high is not None
    return not found.low <= truth <= found.high


@pytest.mark.usefixtures("never_stopped")
@pytest.mark.parametrize(
    "noise",
    ["independent", *(pytest.param(one, marks=pytest.mark.slow) for one in NOISES[1:])],
)
def test_a_program_against_itself_is_found_different_about_once_in_twenty_and_gets_no_verdict(noise: str) -> None:
    found = [ratio(noise, seed) for seed in range(100)]
    assert sum(excludes(one, 1.0) for one in found) <= 11  # more of 100 come once in a hundred times, were it 5 %
    assert not any(one.verdict in ("faster", "slower") for one in found)


@pytest.mark.usefixtures("never_stopped")
def test_much_noise_does_not_make_the_interval_miss_more_often_though_it_decides_when_to_stop() -> None:
    found = [ratio("independent", seed, sd=0.05) for seed in range(70)]
    assert len({one.pairs for one in found}) > 3  # it did decide
    assert sum(excludes(one, 1.0) for one in found) <= 8
    assert not any(one.verdict in ("faster", "slower") for one in found)


@pytest.mark.usefixtures("never_stopped")
@pytest.mark.parametrize("noise", NOISES)
def test_ten_per_cent_more_work_is_found_and_two_per_cent_never_called_less(noise: str) -> None:
    ten = [ratio(noise, seed, work=1.10) for seed in range(10)]
    assert all(one.verdict == "slower" for one in ten)
    assert sum(not excludes(one, 1.10) for one in ten) >= 8
    assert not any(ratio(noise, seed, work=1.02).verdict == "faster" for seed in range(10))


def test_the_floor_of_a_noisy_machine_is_above_that_of_a_quiet_one() -> None:
    floors = [measure_noise("cpu", NoisyWatch("independent", 0, sd)) for sd in (0.0, 0.02, 0.2)]
    assert floors[0] == 0
    assert floors[1] is not None
    assert floors[2] is not None
    assert 0 < floors[1] < 0.02 < floors[2]


def test_a_disturbance_while_the_floor_is_measured_does_not_stand_for_the_whole_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[float] = []
    watch = NoisyWatch("independent", 0, 0.0)

    def turns(*args: Any, **named: Any) -> Turns:
        watch._sd = 0.0002 if tries else 0.5
        tries.append(watch._sd)
        return take_turns(*args, **named)

    monkeypatch.setattr(pairs, "take_turns", turns)
    floor = measure_noise("cpu", watch)
    assert floor is not None
    assert floor < 0.001
    assert len(tries) == 2


@pytest.mark.parametrize(
    ("low", "high", "noise", "verdict"),
    [
        (1.03, 1.05, 0.0, "slower"),
        (1.03, 1.05, 0.029, "slower"),
        (1.03, 1.05, 0.031, "inconclusive"),
        (1 / 1.05, 1 / 1.03, 0.029, "faster"),
        (1 / 1.05, 1 / 1.03, 0.031, "inconclusive"),
        (1.005, 1.02, 0.0, "inconclusive"),
        (0.99, 1.01, 0.1, "same"),
    ],
)
def test_no_verdict_lies_below_the_noise_floor(low: float, high: float, noise: float, verdict: str) -> None:
    assert Ratio(math.sqrt(low * high), low, high, 30, (low, high), noise).verdict == verdict


IDLE = [lambda: None] * 2


def disturb(every: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let threads wait for a core in every so many samples; return the seconds of each rest, which takes none."""
    taken, rests = count(1), list[float]()

    class Waiting(Sampler):
        def take(self, calls: int) -> Sample:
            return Sample(1.0, calls, waited=1.0) if next(taken) % every == 0 else Sample(0.01, calls, waited=0.0)

    monkeypatch.setattr(pairs, "Sampler", Waiting)
    monkeypatch.setattr(pairs, "sleep", rests.append)
    return rests


def test_pairs_of_a_process_that_loses_its_core_are_left_out_while_enough_remain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rests = disturb(10, monkeypatch)
    turns = take_turns(takes(WallClock(), IDLE), TimingRules(max_samples=50), seed=0, clock=lambda: 0.0)
    assert (len(turns.blocks), turns.disturbed, turns.taken) == (40, 10, 50)
    assert rests == [REST] * 9  # the last block is the last of all
    assert {seconds for row in turns.blocks for seconds in row} == {0.01}


def test_where_too_few_pairs_are_clean_all_are_kept_and_still_counted_as_disturbed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disturb(2, monkeypatch)
    turns = take_turns(takes(WallClock(), IDLE), TimingRules(max_samples=50), seed=0, clock=lambda: 0.0)
    assert (len(turns.blocks), turns.disturbed, turns.taken) == (50, 50, 50)


def test_a_turn_in_which_the_process_stood_still_is_taken_again_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopping(Sampler):
        taken = 0

        def take(self, calls: int) -> Sample:
            Stopping.taken += 1
            return Sample(5.0, calls, 0, True) if Stopping.taken % 10 == 0 else Sample(0.01, calls)

    monkeypatch.setattr(pairs, "Sampler", Stopping)
    turns = take_turns(takes(WallClock(), IDLE), TimingRules(max_samples=20), seed=0, clock=lambda: 0.0)
    assert (len(turns.blocks), turns.taken, turns.disturbed, turns.stopped) == (20, 20, 0, 4)
    assert {seconds for row in turns.blocks for seconds in row} == {0.01}


def test_where_leaving_out_would_leave_too_few_for_an_interval_all_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    disturb(8, monkeypatch)
    turns = take_turns(takes(WallClock(), IDLE), TimingRules(max_samples=8), seed=0, clock=lambda: 0.0, fewest=8)
    assert (len(turns.blocks), turns.disturbed) == (8, 2)


@pytest.mark.parametrize("fewest", [6, 10, 13])
def test_when_the_budget_is_spent_as_many_pairs_are_taken_as_a_verdict_needs(fewest: int) -> None:
    watch = NoisyWatch("independent", 0, 0.02)
    turns = take_turns(takes(watch, [lambda: 1.0] * 2), RULES, seed=0, fewest=fewest, clock=lambda: watch.now)
    assert turns.taken == fewest
