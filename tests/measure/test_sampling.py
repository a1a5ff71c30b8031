"""Samples, warm-up, stopping and statistics to the unit, on a stopwatch that says what it is told."""

from __future__ import annotations

import gc
import itertools
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from attnbench.measure import time as timing
from attnbench.measure.statistics import interval_over_rounds
from attnbench.measure.stopwatch import ClockError
from attnbench.measure.time import (
    LONGEST_WAIT,
    PATIENCE,
    REST,
    Disturbed,
    OutputKeeper,
    Sample,
    Sampler,
    TimeSummary,
    TimingRules,
    garbage_collection_off,
    measure_time,
    summarise,
)


@dataclass
class Told:
    """It makes the calls, and says that each of them took what it is told."""

    seconds: float = 0.25
    first: list[float] = field(default_factory=list)
    """Seconds of each call in the first samples, before ``seconds`` hold."""
    price: float = 0.0
    """Seconds that looking at the clock takes."""
    switches: int = 0
    asked: list[int] = field(default_factory=list)

    def cost(self) -> float:
        return self.price

    def time(self, call: Callable[[], object], calls: int) -> tuple[float, int]:
        self.asked.append(calls)
        assert len(self.asked) < 3000, "it goes on without end"
        for _ in range(calls):
            call()
        return calls * (self.first.pop(0) if self.first else self.seconds), self.switches


class Stops:
    """Says of each sample in turn whether the process stood still, and never again once it has said all."""

    def __init__(self, *answers: bool, waits: Sequence[float] = ()) -> None:
        self.answers, self.calls = list(answers), list[int]()
        self.waits, self.waited = list(waits), 0.0

    def __call__(self) -> Stops:
        return self

    def between(self, start: object, end: object, calls: int = 1) -> bool:
        self.calls.append(calls)
        self.waited = self.waits.pop(0) if self.waits else 0.0
        return bool(self.answers) and self.answers.pop(0)


def nothing() -> None:
    pass


@pytest.fixture(autouse=True)
def _never_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where a busy machine lets the tests wait; a test that wants stops says so."""
    monkeypatch.setattr(timing, "Standstill", Stops())


def test_a_sample_is_stored_with_all_that_is_known_of_it() -> None:
    plain = Sample(0.5, 2, 3)
    assert plain.to_json() == {"seconds": 0.5, "calls": 2, "switches": 3}
    beside = replace(plain, stopped=True, yardstick=(0.00123456, 2e-7))
    assert beside.to_json() == {
        "seconds": 0.5,
        "calls": 2,
        "switches": 3,
        "yardstick": [0.001235, 2e-7],
        "stopped": 1,
    }


@pytest.mark.parametrize(
    ("sample", "clean"),
    [
        (Sample(0.125, 2, 10**6, waited=0.0025), True),
        (Sample(0.125, 2, 0, waited=0.0026), False),
        (Sample(0.125, 2, 0, waited=0.0, stopped=True), False),
        (Sample(0.01, 1, 1), True),
        (Sample(0.01, 1, 2), False),
        (Sample(0.125, 2, 13), True),  # one, and fifty a second
        (Sample(0.125, 2, 14), False),
        (Sample(0.125, 2, 0, stopped=True), False),
    ],
)
def test_a_sample_is_clean_if_threads_waited_for_a_hundredth_of_it_and_in_older_ones_by_their_switches(
    sample: Sample, clean: bool
) -> None:
    assert sample.clean is clean


def test_the_next_of_several_calls_is_made_each_time_and_what_the_last_returned_is_kept() -> None:
    kept = OutputKeeper([lambda: "one", lambda: "two"])
    assert kept.output is None
    for said in ("one", "two"):
        kept()
        assert kept.output == said


def test_a_sample_has_the_seconds_of_one_call_the_calls_and_the_switches() -> None:
    watch = Told(switches=7)
    sampler = Sampler(watch, nothing)
    assert sampler.take(4) == Sample(0.25, 4, 7, False, waited=0.0)
    assert sampler.take(1) == Sample(0.25, 1, 7, False, waited=0.0)
    assert watch.asked == [4, 1]


def test_another_call_may_be_sampled_once() -> None:
    said: list[str] = []
    sampler = Sampler(Told(), lambda: said.append("its own"))
    sampler.take(2, lambda: said.append("another"))
    sampler.take(1)
    assert said == ["another", "another", "its own"]


def test_so_many_samples_in_a_row_may_be_lost_and_one_more_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = [True] * PATIENCE
    monkeypatch.setattr(timing, "Standstill", Stops(*lost, False, *lost, True))
    sampler = Sampler(Told(), nothing)
    assert [sampler.take(1).stopped for _ in range(2 * PATIENCE + 1)] == [*lost, False, *lost]
    with pytest.raises(ClockError, match=rf"^the process was stopped in each of {PATIENCE + 1} samples; let it run$"):
        sampler.take(1)


@pytest.mark.parametrize(
    ("seconds", "rules", "warm_up", "calls"),
    [
        (0.25, TimingRules(warmup_time=0.25, warmup_calls=1), [], 1),  # the first call is part of it
        (0.25, TimingRules(warmup_time=0.5, warmup_calls=1), [1], 1),
        (0.25, TimingRules(warmup_time=0.25, warmup_calls=3), [1, 1], 1),
        (0.25, TimingRules(warmup_time=0.0625, warmup_calls=3), [1], 1),  # at most five times as long
        (0.25, TimingRules(warmup_time=0.05, warmup_calls=3), [], 1),
        (0.25, TimingRules(warmup_time=1.0, warmup_calls=1, rounds=4), [], 1),
        (1e-3, TimingRules(warmup_time=4.5e-3, warmup_calls=0), [1, 1, 1, 1], 1),  # long enough for a sample
        (1e-4, TimingRules(warmup_time=2e-4, warmup_calls=10), [1, 2, 4, 8], 10),
        (1e-4, TimingRules(warmup_time=2e-4, warmup_calls=8), [1, 2, 4], 10),
        (1e-4, TimingRules(warmup_time=0, warmup_calls=9), [], 10),
        (1e-4, TimingRules(warmup_time=0, shortest_sample=1.5e-4), [], 2),
        (0.25, TimingRules(warmup_time=9, quick=True), [], 1),
    ],
)
def test_warm_up_ends_by_its_time_or_its_calls_and_doubles_short_batches(
    seconds: float, rules: TimingRules, warm_up: list[int], calls: int
) -> None:
    watch = Told(seconds)
    samples = measure_time(nothing, replace(rules, max_samples=3 * rules.rounds), stopwatch=watch).samples
    assert watch.asked == [1, *warm_up, *[calls] * len(samples)]


def test_a_batch_is_sized_by_the_quickest_call_and_by_what_the_clock_costs() -> None:
    rules = TimingRules(warmup_time=1.5e-3, warmup_calls=0, max_samples=2)
    watch = Told(5e-4, first=[1e-3, 2.5e-4])
    measure_time(nothing, rules, stopwatch=watch)
    assert watch.asked == [1, 1, 2, 4, 4]
    dear = Told(1e-3, price=7.5e-7)  # half a thousandth of 1.5 ms
    measure_time(nothing, replace(rules, warmup_time=0), stopwatch=dear)
    assert dear.asked == [1, 2, 2]


@pytest.mark.parametrize(
    ("stops", "first", "warm_up"),
    [((False, True), 0.25, 3), ((True,), None, 3), ((False, False, True, True), 0.25, 4), ((), 0.25, 2)],
)
def test_calls_of_a_stopped_process_warm_nothing_up_and_are_made_again(
    stops: tuple[bool, ...], first: float | None, warm_up: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "Standstill", Stops(*stops))
    watch = Told()
    found = measure_time(nothing, TimingRules(warmup_time=0.75, warmup_calls=0, max_samples=1), stopwatch=watch)
    assert (found.first_call_s, watch.asked) == (first, [1, *[1] * warm_up, 1])


ENDLESS = TimingRules(min_time=0, max_time=1000, min_samples=6, warmup_time=0)


@pytest.mark.parametrize(
    ("rules", "samples", "stopped"),
    [
        (replace(ENDLESS, min_time=900, max_time=2.0), 8, "budget"),
        (replace(ENDLESS, min_time=900, max_time=4.0, rounds=2), 8, "budget"),
        (replace(ENDLESS, min_time=900, max_time=0.25), 6, "budget"),  # for an interval
        (replace(ENDLESS, min_time=900, max_time=0.25, rounds=3), 2, "budget"),
        (replace(ENDLESS, min_time=900, max_samples=9), 9, "budget"),
        (replace(ENDLESS, min_time=900, max_samples=8, rounds=4), 2, "budget"),
        (replace(ENDLESS, min_time=5.0), 20, "width"),
        (replace(ENDLESS, min_time=10.0, rounds=2), 20, "width"),
        (replace(ENDLESS, min_samples=12), 12, "width"),
        (replace(ENDLESS, min_samples=24, rounds=2), 12, "width"),
        (replace(ENDLESS, width=0.0), 6, "width"),  # no sample differs
        (replace(ENDLESS, quick=True), 1, "quick"),
    ],
)
def test_it_stops_at_the_very_sample_at_which_a_rule_is_met(rules: TimingRules, samples: int, stopped: str) -> None:
    found = measure_time(nothing, rules, stopwatch=Told())
    assert (len(found.samples), found.stopped) == (samples, stopped)


@pytest.mark.parametrize(("other", "samples", "stopped"), [(0.26, 20, "width"), (0.262, 40, "budget")])
def test_narrow_is_half_of_the_interval_over_the_median(other: float, samples: int, stopped: str) -> None:
    """Half of the samples take 0.25 s and half 0.26 s: the interval reaches from one to the other."""
    rules = replace(ENDLESS, min_samples=20, max_samples=40, width=0.02)
    found = measure_time(nothing, rules, stopwatch=Told(first=[0.25, *[0.25, other] * 20]))
    assert (len(found.samples), found.stopped) == (samples, stopped)


@pytest.mark.parametrize(("rounds", "stopped"), [(1, "budget"), (4, "width")])
def test_of_several_rounds_each_may_be_wider_by_their_root(rounds: int, stopped: str) -> None:
    rules = replace(ENDLESS, min_samples=20 * rounds, max_samples=40 * rounds, width=0.02, rounds=rounds)
    found = measure_time(nothing, rules, stopwatch=Told(first=[0.25, *[0.25, 0.265] * 20]))
    assert found.stopped == stopped


def test_samples_of_which_neighbours_are_alike_count_for_fewer() -> None:
    rules, rng = replace(ENDLESS, min_samples=40, max_samples=41, width=0.015), random.Random(1)
    for likeness, stopped in ((0.0, "width"), (0.9, "budget")):
        off, times = 0.0, [0.25]
        for _ in range(41):
            off = likeness * off + math.sqrt(1 - likeness**2) * rng.gauss(0, 0.02)
            times.append(0.25 * (1 + off))
        assert measure_time(nothing, rules, stopwatch=Told(first=times)).stopped == stopped


def test_the_first_output_is_handed_on() -> None:
    numbers, seen = itertools.count(), list[int]()
    rules = TimingRules(warmup_time=0.5, warmup_calls=0, max_samples=3)
    measure_time(lambda: next(numbers), rules, stopwatch=Told(), on_first=seen.append)
    assert seen == [0]
    assert next(numbers) == 1 + 1 + 3


def test_garbage_is_collected_once_before_and_not_while_samples_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    collected, seen = list[bool](), list[bool]()
    monkeypatch.setattr(gc, "collect", lambda: collected.append(gc.isenabled()))
    assert gc.isenabled()
    measure_time(lambda: seen.append(gc.isenabled()), TimingRules(max_samples=3, warmup_time=0), stopwatch=Told())
    assert (set(seen), collected, gc.isenabled()) == ({False}, [True], True)
    with pytest.raises(KeyError), garbage_collection_off():
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    try:
        with garbage_collection_off():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each rest, which takes no time."""
    rests: list[float] = []
    monkeypatch.setattr(timing, "sleep", rests.append)
    return rests


def test_another_sample_is_taken_after_a_rest_for_each_in_which_threads_waited(
    rests: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    first_call, long, short = [0.0], 0.0026, 0.0025  # of 0.25 s: above a hundredth, and not
    monkeypatch.setattr(timing, "Standstill", Stops(waits=[*first_call, long, short, long, long, *[short] * 5]))
    found = measure_time(nothing, ENDLESS, stopwatch=Told())
    assert [sample.waited for sample in found.samples] == [long, short, long, long, *[short] * 5]
    assert (sum(sample.clean for sample in found.samples), found.stopped) == (6, "width")
    assert rests == [REST] * 3


def test_a_first_call_that_waited_for_a_tenth_of_its_time_has_none(
    rests: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    for waited, known in ((0.025, 0.25), (0.026, None)):  # a tenth of 0.25 s, and more
        monkeypatch.setattr(timing, "Standstill", Stops(waits=[waited]))
        assert measure_time(nothing, ENDLESS, stopwatch=Told()).first_call_s == known


@pytest.mark.parametrize(("waited", "told"), [(2, False), (3, True)])
def test_a_few_samples_that_are_left_out_are_no_warning(waited: int, told: bool) -> None:
    found = summarise([[*[Sample(2.0, 1, waited=0.0)] * (20 - waited), *[Sample(9.0, 1, waited=5.0)] * waited]])
    assert (found.used, bool(found.warnings)) == (20 - waited, told)


@pytest.mark.parametrize(
    ("seconds", "samples"),
    [(0.125, math.ceil(LONGEST_WAIT / (0.125 + REST))), (10.0, 6), (0.01, math.ceil(LONGEST_WAIT / (0.01 + REST)) + 1)],
)
def test_a_visit_that_waits_for_a_core_gives_up_and_keeps_what_it_saw(
    seconds: float, samples: int, rests: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "Standstill", Stops(waits=[seconds] * 10**4))
    found = measure_time(nothing, ENDLESS, stopwatch=Told(seconds))
    assert found.stopped == "busy"
    assert abs(len(found.samples) - samples) <= 1  # sums of hundredths
    assert len(rests) == len(found.samples) - 1
    with pytest.raises(Disturbed, match=rf"in {len(found.samples)} of {len(found.samples)} samples, for .* s; close"):
        summarise([found.samples])


@pytest.mark.parametrize(("clean", "waited", "given"), [(3, 9, True), (2, 9, False), (2, 0, True), (1, 1, False)])
def test_a_time_needs_three_clean_samples_and_is_theirs(clean: int, waited: int, given: bool) -> None:
    samples = [*[Sample(2.0, 1, waited=0.02)] * clean, *[Sample(300.0, 1, waited=200.0)] * waited]
    if given:
        found = summarise([samples])
        assert (found.median, found.used) == (2.0, clean)
    else:
        long = f"for {0.02 * clean + 200 * waited:.2g} s in {2 * clean + 300 * waited:.2g} s"
        with pytest.raises(Disturbed, match=re.escape(f"in {waited} of {clean + waited} samples, {long}; close")):
            summarise([samples])


def test_samples_that_waited_slightly_count_if_too_few_are_clean_and_lower_the_interval() -> None:
    clean, slight, long = (Sample(2.0, 1, waited=waited) for waited in (0.02, 0.08, 0.3))
    found = summarise([[clean, clean, slight, long], [slight, long]])
    assert (found.median, found.used) == (2.0, 4)
    assert found.interval == (2.0 * (1 - 0.04), 2.0)
    assert "(too few others: the interval reaches down by 4.0%)" in found.warnings[-1]
    assert summarise([[clean] * 3 + [slight] * 9]).used == 3
    with pytest.raises(Disturbed):
        summarise([[clean, slight, *[long] * 9]])


def rounds_of(*rounds: list[float]) -> list[list[Sample]]:
    return [[Sample(seconds, 1) for seconds in one] for one in rounds]


@pytest.mark.parametrize(
    ("seconds", "warnings"),
    [
        ([1.5, 1.625, 2.0, 2.25, 2.5], ("unstable: IQR 31% of the median; close other programs",)),
        ([1.5, 1.75, 2.0, 2.25, 2.5], ("noisy: IQR 25% of the median; raise --min-time",)),
        ([9.0, 9.375, 10.0, 10.5, 11.0], ("noisy: IQR 11% of the median; raise --min-time",)),
        ([9.0, 9.5, 10.0, 10.5, 11.0], ()),
    ],
)
def test_a_spread_is_noisy_above_a_tenth_and_unstable_above_a_quarter(
    seconds: list[float], warnings: tuple[str, ...]
) -> None:
    assert summarise(rounds_of(seconds[:2], seconds[2:])).warnings == warnings
    assert summarise(rounds_of(seconds), quick=True).warnings == ()


def test_a_summary_has_the_statistics_of_all_rounds() -> None:
    found = summarise(rounds_of([0.75, 1.25], [0.875, 1.0, 1.125]))
    interval = interval_over_rounds([[0.75, 1.25], [0.875, 1.0, 1.125]])
    assert replace(found, warnings=()) == TimeSummary(1.0, interval, 0.25, 0.75, 5, ())
    found = summarise(rounds_of([9.0, 10.0, 11.0] * 10, [19.0, 20.0, 21.0] * 10))
    assert (found.interval, found.minimum, found.used) == (interval_over_rounds([[10.0], [20.0]]), 9.0, 60)


@pytest.mark.parametrize(
    ("clean", "disturbed", "used", "why"),
    [
        (6, 2, 6, "left out"),
        (5, 2, 7, "kept, too few clean ones"),
        (3, 1, 4, "kept, too few clean ones"),
    ],
)
def test_disturbed_samples_of_older_versions_are_left_out_where_six_clean_ones_remain(
    clean: int, disturbed: int, used: int, why: str
) -> None:
    found = summarise([[Sample(2.0, 1)] * clean, [Sample(2.0, 1, switches=10**6)] * disturbed])
    told = f"{disturbed} of {clean + disturbed} samples disturbed by other processes ({why}); close them"
    interval = (2.0, 2.0) if used == clean + disturbed else None  # one visit has none
    assert found == TimeSummary(2.0, interval, 0.0, 2.0, used, (told,))


def test_samples_that_were_lost_and_samples_that_were_disturbed_are_told_apart() -> None:
    rounds = [[*[Sample(2.0, 1)] * 6, Sample(9.0, 1, stopped=True)], [Sample(3.0, 1, switches=10**6)]]
    assert summarise(rounds).warnings == (
        "1 of 8 samples left out: the process was stopped meanwhile",
        "1 of 7 samples disturbed by other processes (left out); close them",
    )
    for none in ([], [[]], [[Sample(9.0, 1, stopped=True)]]):
        with pytest.raises(ValueError, match=r"^no sample of a process that was running$"):
            summarise(none)
