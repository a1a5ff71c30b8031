from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from attnbench.measure import yardstick as yardstick_module
from attnbench.measure.cuda_events import CudaEvents
from attnbench.measure.stopwatch import ClockError, WallClock
from attnbench.measure.time import EVERY, TimingRules, measure_time
from attnbench.measure.yardstick import Reading, Yardstick


@dataclass
class FakeClock:
    """A stopwatch with calls of a given length; keeps the number of calls of each sample."""

    seconds: float = 0.01
    asked: list[int] = field(default_factory=list)

    def cost(self) -> float:
        return 0.0

    def time(self, call: object, calls: int) -> tuple[float, int]:
        self.asked.append(calls)
        assert len(self.asked) < 3000, "it goes on without end"
        return self.seconds * calls, 0


def nothing() -> None:
    pass


@pytest.fixture(autouse=True)
def _never_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where a busy machine lets the tests wait: a sample that was lost would be taken again."""
    monkeypatch.setattr(
        "attnbench.measure.time.Standstill", lambda: SimpleNamespace(between=lambda *_: False, waited=0.0)
    )


@dataclass
class FakePace:
    """A yardstick whose readings are told: of its calls ten times as long as of its products."""

    readings: list[float]
    asked: list[float] = field(default_factory=list)
    apart: float = EVERY

    def begin(self, call: object, calls: int) -> None:
        pass

    def read(self, since: float) -> Reading:
        self.asked.append(since)
        return Reading(self.readings[0], 10 * self.readings.pop(0))


def test_each_sample_gets_the_mean_of_the_readings_before_and_after_it() -> None:
    pace = FakePace([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    rules = TimingRules(min_time=0.02, min_samples=5, max_samples=5)
    timing = measure_time(nothing, rules, stopwatch=FakeClock(seconds=0.02), pace=pace)
    beside = [1.5, 3.0, 6.0, 12.0, 24.0]
    assert [sample.yardstick for sample in timing.samples] == [(one, 10 * one) for one in beside]
    assert pace.readings == []
    assert pace.asked == [0.0, *[0.02] * 5]


def test_short_samples_share_readings_that_are_some_milliseconds_apart() -> None:
    pace = FakePace([1.0, 3.0, 5.0, 7.0])
    rules = TimingRules(min_time=0.0125, min_samples=5, max_samples=5)
    timing = measure_time(nothing, rules, stopwatch=FakeClock(seconds=0.0025), pace=pace)
    assert [sample.yardstick[0] for sample in timing.samples if sample.yardstick] == [2.0, 2.0, 4.0, 4.0, 6.0]
    assert pace.asked == [0.0, 0.005, 0.005, 0.0025]


def test_readings_are_apart_by_the_time_of_samples_and_not_of_single_calls() -> None:
    pace = FakePace([1.0, 3.0, 5.0])
    call = 2**-16  # 66 of them take a millisecond, and so does a sample
    rules = TimingRules(min_samples=10, max_samples=10)
    timing = measure_time(nothing, rules, stopwatch=FakeClock(seconds=call), pace=pace)
    assert {sample.calls for sample in timing.samples} == {66}
    assert pace.asked == [0.0, 5 * 66 * call, 5 * 66 * call]


def test_samples_have_no_yardstick_where_none_is_read() -> None:
    timing = measure_time(nothing, TimingRules(), stopwatch=FakeClock())
    assert {sample.yardstick for sample in timing.samples} == {None}
    assert "yardstick" not in timing.samples[0].to_json()


def test_a_reading_takes_about_as_long_each_time_and_changes_no_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yardstick_module, "perf_counter", time.process_time)  # others may have the core meanwhile
    before = torch.get_rng_state()
    yardstick = Yardstick()
    readings = sorted(sum(yardstick.read(0.0)) for _ in range(50))
    assert torch.equal(torch.get_rng_state(), before)
    assert 0 < readings[5] <= readings[25] < 0.05
    assert readings[25] < 3 * readings[5]


@pytest.mark.parametrize("bad", [0.0, -1e-3, math.nan, math.inf])
def test_a_clock_that_stands_still_or_runs_backwards_ends_in_an_error(bad: float) -> None:
    clock = FakeClock(seconds=bad)
    with pytest.raises(ClockError):
        measure_time(nothing, TimingRules(), stopwatch=clock)
    assert len(clock.asked) <= 64


@pytest.mark.parametrize("sleep", [0.02, 0.05, 0.1])
def test_the_wall_clock_never_reports_less_than_a_sleep_took(sleep: float) -> None:
    took = list[float]()

    def call() -> None:
        start = time.perf_counter()
        time.sleep(sleep)
        took.append(time.perf_counter() - start)  # on a busy machine it wakes up late

    timing = measure_time(call, TimingRules(min_time=0.5, min_samples=6, warmup_time=0))
    seconds = [sample.seconds for sample in timing.samples]
    beyond = [one - slept for one, slept in zip(seconds, took[-len(seconds) :], strict=True)]
    assert sleep <= min(seconds)
    assert 0 <= min(beyond) < sleep / 100


def test_the_wall_clock_reads_the_clock_twice_and_waits_for_the_device_on_both_sides() -> None:
    log: list[str] = []
    ticks = iter([100, 350])

    def clock() -> int:
        log.append("clock")
        return next(ticks)

    watch = WallClock(clock=clock, sync=lambda: log.append("sync"))
    seconds, _ = watch.time(lambda: log.append("call"), 2)
    assert seconds == pytest.approx(250e-9)
    assert log == ["sync", "clock", "call", "call", "sync", "clock"]


@pytest.mark.cuda
def test_on_a_gpu_a_product_takes_its_time_and_not_that_of_the_flush() -> None:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    watch = CudaEvents("cuda")
    watch.time(lambda: a @ a, 3)
    once, thrice = watch.time(lambda: a @ a, 10)[0] / 10, watch.time(lambda: [a @ a for _ in range(3)], 10)[0] / 10
    assert 2.5 < thrice / once < 3.5
    assert watch.time(lambda: None, 10)[0] / 10 < once / 10
