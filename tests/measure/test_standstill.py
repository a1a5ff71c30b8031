"""A while in which the process stood still is never part of a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnbench.measure import standstill
from attnbench.measure.standstill import Moment, Standstill
from attnbench.measure.stopwatch import ClockError, WallClock
from attnbench.measure.time import Sample, Sampler, TimingRules, measure_time, summarise

PROGRAM = """
import sys, time
from attnbench.measure.standstill import notice_stops
from attnbench.measure.time import TimingRules, measure_time, summarise

def work():
    print("working", flush=True)
    end = time.thread_time() + float(sys.argv[1])
    while time.thread_time() < end:
        pass

if sys.argv[2] == "noticed":
    notice_stops()
timing = measure_time(work, TimingRules(min_time=0.4, max_time=0.8, warmup_time=0.02))
summary = summarise([timing.samples])
longest = max(sample.seconds - sample.waited for sample in timing.samples if not sample.stopped)
print("result", timing.first_call_s, sum(s.stopped for s in timing.samples), longest, summary.warnings)
"""


STOP = 4
"""Seconds: far more than any call takes, also if other tests have the cores (1.6 s was seen)."""


def stopped_once(work: float, at_call: int, noticed: str = "noticed") -> list[str]:
    """The last line of a process that is stopped for a while in its ``at_call``-th call."""
    command = [sys.executable, "-c", PROGRAM, str(work), noticed]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(at_call):
            assert process.stdout.readline() == "working\n"
        time.sleep(work / 2)
        process.send_signal(signal.SIGSTOP)
        time.sleep(STOP)
        process.send_signal(signal.SIGCONT)
        return process.stdout.read().splitlines()[-1].split(maxsplit=4)


@pytest.mark.usefixtures("forks")
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="there is no such signal on Windows")
@pytest.mark.parametrize("noticed", ["noticed", "by its idleness"])
def test_a_call_during_which_the_process_was_stopped_is_no_sample(noticed: str) -> None:
    _, first, stopped, longest, warnings = stopped_once(0.15, at_call=3, noticed=noticed)
    assert float(first) < STOP
    assert int(stopped) == 1
    assert float(longest) < STOP
    assert "1 of 7 samples left out: the process was stopped meanwhile" in warnings


@pytest.mark.usefixtures("forks")
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="there is no such signal on Windows")
@pytest.mark.parametrize("at_call", [1, 40, 300], ids=["the first calls", "warm-up", "batched samples"])
def test_a_stop_in_short_calls_reaches_no_time(at_call: int) -> None:
    _, first, _, longest, _ = stopped_once(2e-4, at_call)
    assert first == "None" or float(first) < STOP
    assert float(longest) < 0.03  # the stop in a batch of five calls is more


def moment(passed: float, busy: float, *, asleep: float = 0.0) -> Moment:
    return Moment(passed, busy, asleep, 0)


def test_what_sleeps_or_waits_for_a_device_in_every_call_never_stands_still() -> None:
    seen = Standstill()
    calls = [(moment(3.0 * i, 0.1 * i), moment(3.0 * (i + 1), 0.1 * (i + 1))) for i in range(9)]
    assert not any(seen.between(start, end) for start, end in calls)
    assert seen.between(moment(27, 0.9), moment(36.5, 1.0))


def test_a_call_that_begins_to_wait_later_is_believed_after_a_few_calls() -> None:
    seen = Standstill()
    assert not seen.between(moment(0, 0), moment(1, 1))
    assert [seen.between(moment(0, 0), moment(1, 0.1)) for _ in range(6)] == [True] * 3 + [False] * 3


def test_a_laptop_that_slept_during_a_call_is_seen_though_the_clock_of_the_sample_slept_as_well() -> None:
    assert Standstill().between(moment(0, 0), moment(1, 1, asleep=60))


def test_short_idleness_and_time_in_which_others_had_the_core_are_no_standstill() -> None:
    seen = Standstill()
    seen.between(moment(0, 0), moment(0.01, 0.01))
    assert not seen.between(moment(0, 0), moment(0.15, 0.01))
    assert not seen.between(moment(0, 0), moment(10, 9))


@pytest.mark.usefixtures("may_wait")
def test_on_a_core_that_is_shared_waiting_for_it_is_not_idleness() -> None:
    if not Path("/proc/thread-self/schedstat").exists():
        pytest.skip("the kernel does not tell")
    core = {min(os.sched_getaffinity(0))}
    hog = f"import os\nos.sched_setaffinity(0, {core})\nprint(flush=True)\nwhile True: pass"
    mine = os.sched_getaffinity(0)
    with subprocess.Popen([sys.executable, "-c", hog], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        os.sched_setaffinity(0, core)
        try:
            start = Moment.now()
            end = time.perf_counter() + 0.5
            while time.perf_counter() < end:
                pass
            passed = Moment.now()
        finally:
            os.sched_setaffinity(0, mine)
            other.kill()
    assert passed.busy - start.busy > 0.8 * (passed.passed - start.passed)
    assert start.delay_until(passed) > 0.25 * (passed.passed - start.passed)


def test_samples_of_a_stopped_process_are_never_used_and_never_widen_the_interval() -> None:
    good, bad = Sample(1.0, 1), Sample(4.54, 1, stopped=True)
    assert not bad.clean
    summary = summarise([[good] * 5 + [bad]])
    assert (summary.median, summary.used) == (1.0, 5)
    assert summary.warnings == ("1 of 6 samples left out: the process was stopped meanwhile",)
    assert Sample(**bad.to_json()) == bad  # type: ignore[arg-type]  # as JSON has it
    assert "stopped" not in good.to_json()


class StoppedWatch:
    """Every call takes a second, and the process is stopped in those that ``stops`` names by their number from 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *stops: int) -> None:
        self.stops, self.made, self.continued = stops, 0, 0
        monkeypatch.setattr(Moment, "now", lambda: Moment(self.made, self.made, 0.0, self.continued))

    def cost(self) -> float:
        return 0.0

    def time(self, call: object, calls: int) -> tuple[float, int]:
        self.continued += self.made in self.stops
        self.made += 1
        assert self.made < 3000, "it goes on without end"
        return 1.0 * calls, 0


def test_another_sample_is_taken_for_each_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = TimingRules(max_time=3.0, warmup_time=0)
    timing = measure_time(lambda: None, rules, stopwatch=StoppedWatch(monkeypatch, 2, 4))
    assert [sample.stopped for sample in timing.samples] == [i in (1, 3) for i in range(8)]
    quick = replace(rules, quick=True)
    timing = measure_time(lambda: None, quick, stopwatch=StoppedWatch(monkeypatch, 0, 1))
    assert timing.first_call_s is None
    assert [sample.stopped for sample in timing.samples] == [True, False]


def test_a_process_that_is_stopped_all_the_time_is_an_error_and_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ClockError, match="stopped in each of 21 samples; let it run"):
        measure_time(lambda: None, TimingRules(), stopwatch=StoppedWatch(monkeypatch, *range(100)))


def test_a_sample_reads_the_clock_of_its_stopwatch_only() -> None:
    ticks = iter([0, 5_000_000_000])
    sample = Sampler(WallClock(clock=lambda: next(ticks)), lambda: None).take(1)
    assert replace(sample, switches=0) == Sample(5.0, 1, waited=0.0)  # others may take the core meanwhile


def test_stops_are_counted_in_the_main_thread_and_where_there_are_such_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    theirs = SimpleNamespace(
        SIGCONT=18,
        signal=lambda *given: asked.append(("signal", *given)),
        siginterrupt=lambda *given: asked.append(("siginterrupt", *given)),
    )
    monkeypatch.setattr(standstill, "signal", theirs)
    other = threading.Thread(target=standstill.notice_stops)
    other.start()
    other.join()
    assert asked == []
    standstill.notice_stops()
    assert asked == [("signal", 18, standstill._count), ("siginterrupt", 18, False)]
    monkeypatch.setattr(standstill, "signal", SimpleNamespace())
    standstill.notice_stops()
    assert len(asked) == 2


def test_each_stop_counts_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standstill, "_continued", 5)
    standstill._count(18, None)
    standstill._count()
    assert standstill._continued == 7


def test_a_moment_is_read_off_four_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    delays = {str(threading.get_native_id()): 0.5, "7": 2.0}
    clocks = {"_clock": 100.0, "_thread_time": 3.0, "run_delays": delays}
    for name, value in clocks.items():
        monkeypatch.setattr(standstill, name, lambda value=value: value)
    monkeypatch.setattr(standstill, "_continued", 4)
    monkeypatch.setattr(standstill, "_BOOT_CLOCK", 7)
    monkeypatch.setattr(standstill, "_AWAKE_CLOCK", 1)
    monkeypatch.setattr(standstill, "_read_clock", {7: 90.0, 1: 30.0}.__getitem__)
    assert Moment.now() == Moment(passed=100.0, busy=3.5, asleep=60.0, continued=4, delays=delays)
    for name in ("_BOOT_CLOCK", "_AWAKE_CLOCK", "_read_clock"):
        with monkeypatch.context() as without:
            without.setattr(standstill, name, None)
            assert Moment.now() == Moment(100.0, 3.5, 0.0, 4, delays)


@pytest.mark.usefixtures("may_wait")
def test_threads_wait_all_together_also_those_that_began_or_ended_meanwhile() -> None:
    start = Moment(0, 0, 0, 0, {"1": 1.0, "2": 2.0, "3": 3.0})
    assert start.delay_until(Moment(1, 0, 0, 0, {"1": 1.25, "2": 2.5, "4": 0.125})) == 0.875


@pytest.mark.usefixtures("may_wait")
def test_without_a_kernel_that_tells_unusual_idleness_is_waiting() -> None:
    seen = Standstill()
    for passed, busy, waited in ((1.0, 1.0, 0.0), (1.0, 0.75, 0.25), (1.0, 1.0, 0.0)):
        seen.between(moment(0, 0), moment(passed, busy))
        assert seen.waited == waited
    asleep = Standstill()
    for _ in range(3):  # a call that sleeps, or waits for a device, does so every time
        asleep.between(moment(0, 0), moment(1.0, 0.25))
        assert asleep.waited == 0.0


@pytest.mark.usefixtures("may_wait")
def test_the_waiting_before_a_stop_is_not_that_of_the_stopped_call() -> None:
    seen, last = Standstill(), Moment(2.0, 1.5, 0.0, 0, {"1": 0.5})
    seen.between(Moment(0, 0, 0, 0, {"1": 0.0}), last)
    assert seen.waited == 0.5
    assert seen.between(last, Moment(9.0, 2.0, 0.0, 1, {"1": 0.75}))
    assert seen.waited == 0.25


@pytest.mark.parametrize(
    ("end", "stood"),
    [
        (Moment(12.0, 7.0, 60.0, 3), False),
        (Moment(12.0, 7.0, 60.0, 4), True),  # a signal came
        (Moment(12.0, 7.0, 60.09375, 3), False),
        (Moment(12.0, 7.0, 60.125, 3), True),  # asleep for more than a tenth of a second
    ],
)
def test_what_counts_is_the_difference_of_two_moments(end: Moment, stood: bool) -> None:
    assert Standstill().between(Moment(10.0, 5.0, 60.0, 3), end) is stood


def test_work_that_was_done_before_a_call_is_no_work_of_the_call() -> None:
    seen = Standstill()
    assert not seen.between(moment(9, 8), moment(10, 9))
    assert seen.between(moment(10, 9), moment(12, 9.5))


def test_idleness_is_unusual_above_half_of_the_time_and_a_fifth_of_a_second() -> None:
    for passed, idle, stood in ((8.0, 4.0, False), (8.0, 4.125, True), (0.25, 0.1875, False), (0.25, 0.21875, True)):
        seen = Standstill()
        seen.between(moment(0, 0), moment(1, 1))
        assert seen.between(moment(0, 0), moment(passed, passed - idle)) is stood


def test_usual_idleness_is_that_of_one_call_times_the_calls() -> None:
    seen = Standstill()
    assert not seen.between(moment(0, 0), moment(4.5, 0.5), 8)  # idle for half a second in each of eight
    assert not seen.between(moment(0, 0), moment(2.5, 0.5), 4)
    assert seen.between(moment(0, 0), moment(1.25, 0.0))  # one, unless somebody says how many
    assert not seen.between(moment(0, 0), moment(8.5, 0.5), 16)


def test_more_work_than_time_is_no_idleness() -> None:
    seen = Standstill()
    for _ in range(2):
        assert not seen.between(moment(0, 0), moment(1, 3))  # of several clocks
    assert seen.between(moment(0, 0), moment(1, 0.25))
    seen = Standstill()
    seen.between(moment(0, 0), moment(1, 3))
    assert not seen.between(moment(0, 0), moment(4, 2.5))


def test_idleness_of_calls_that_were_stopped_is_not_remembered() -> None:
    seen = Standstill()
    seen.between(moment(0, 0), moment(1, 1))
    for _ in range(5):
        assert seen.between(moment(0, 0), Moment(9.0, 0.0, 0.0, 1))
    assert seen.between(moment(0, 0), moment(9, 0))
