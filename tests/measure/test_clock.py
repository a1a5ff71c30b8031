"""Calls, batches and stop points to the unit, on a clock that only goes on when it is read or called for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.harness.inside import execute
from attnbench.harness.inside.execute import run_cell
from attnbench.harness.inside.pairs import measure_pairs, take_turns
from attnbench.harness.wire.protocol import VisitCell
from attnbench.measure import stopwatch
from attnbench.measure.status import Status
from attnbench.measure.stopwatch import READS, ClockError, WallClock
from attnbench.measure.time import TimingRules, measure_time
from attnbench.suite.cell import Cell
from tests.harness.samplers import takes

MICROSECOND = 1000
"""In the nanoseconds of the clock."""


@pytest.fixture(autouse=True)
def _never_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where a busy machine lets the tests wait: a sample that was lost would be taken again."""
    monkeypatch.setattr(
        "attnbench.measure.time.Standstill", lambda: SimpleNamespace(between=lambda *_: False, waited=0.0)
    )


@dataclass
class SlowClock:
    """Looking at it takes ``cost`` nanoseconds, a call ``call`` nanoseconds, nothing else any time."""

    cost: int
    call: int
    now: int = 0
    reads: int = 0
    calls: int = 0

    def __call__(self) -> int:
        self.now += self.cost
        self.reads += 1
        assert self.reads < 9000, "it goes on without end"
        return self.now

    def work(self) -> None:
        self.now += self.call
        self.calls += 1


@pytest.mark.parametrize("cost", [25, 100, 1000, 5000])
@pytest.mark.parametrize("call", [1000, 70_000, 10_000_000])
def test_looking_at_the_clock_adds_at_most_a_thousandth_to_a_sample(cost: int, call: int) -> None:
    clock = SlowClock(cost, call)
    rules = TimingRules(min_time=0, min_samples=6, warmup_time=1e-3)
    timing = measure_time(clock.work, rules, stopwatch=WallClock(clock))
    for sample in timing.samples:
        assert call <= sample.seconds * 1e9 <= 1.001 * call


def test_calls_batches_and_reads_are_exactly_as_many_as_the_rules_say() -> None:
    clock = SlowClock(cost=0, call=100 * MICROSECOND)
    rules = TimingRules(min_time=0.4999, min_samples=20, warmup_time=0.1995)
    timing = measure_time(clock.work, rules, stopwatch=WallClock(clock))
    # The first call; warm-up in batches of 1, 2, 4, 8 calls, then of 16 until 1995 calls are over; samples of 10 calls,
    # which take 1 ms, until 0.4999 s are over.
    batches = 4 + math.ceil((1995 - 16) / 16)
    assert {sample.calls for sample in timing.samples} == {10}
    assert len(timing.samples) == 500
    assert clock.calls == 16 + 16 * (batches - 4) + 10 * 500
    assert clock.reads == READS + 1 + 2 * (1 + batches + 500)
    assert timing.stopped == "width"


@pytest.mark.parametrize(
    ("rules", "blocks"),
    [
        (TimingRules(min_time=0.1, min_samples=20), 20),
        (TimingRules(min_time=1.0, min_samples=20), 50),
        (TimingRules(min_time=9, max_time=1.0), 50),
        (TimingRules(min_time=9, max_samples=11), 11),
        (TimingRules(quick=True), 1),
    ],
)
def test_pairs_stop_at_the_block_where_the_rule_is_met(rules: TimingRules, blocks: int) -> None:
    clock = SlowClock(cost=0, call=10_000 * MICROSECOND)
    both = takes(WallClock(clock), [clock.work] * 2)
    turns = take_turns(both, rules, seed=0, clock=lambda: round(clock.now / 1e9, 9))
    assert (len(turns.blocks), turns.disturbed, clock.calls) == (blocks, 0, 2 * blocks)


def test_every_position_comes_first_as_often_as_last() -> None:
    said: list[int] = []
    clock = SlowClock(cost=0, call=MICROSECOND)
    calls = [lambda i=i: said.append(i) or clock.work() for i in range(3)]  # type: ignore[misc, func-returns-value]
    take_turns(takes(WallClock(clock), calls), TimingRules(max_samples=20), seed=0)
    blocks = [said[i : i + 3] for i in range(0, len(said), 3)]
    assert all(second == first[::-1] for first, second in zip(blocks[::2], blocks[1::2], strict=True))
    assert {tuple(block) for block in blocks} == {(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)}


@pytest.mark.parametrize("step", [0, -1000])
def test_a_clock_that_is_stuck_or_runs_backwards_is_found_out_within_64_reads(step: int) -> None:
    clock = SlowClock(step, 0)
    with pytest.raises(ClockError, match="the clock gave"):
        measure_time(clock.work, TimingRules(), stopwatch=WallClock(clock))
    assert clock.reads <= 64


def test_a_clock_that_stops_while_it_is_used_is_found_out_as_well() -> None:
    clock = SlowClock(cost=0, call=10_000 * MICROSECOND)

    def work() -> None:
        if clock.calls < 30:
            clock.work()

    with pytest.raises(ClockError):
        measure_time(work, TimingRules(), stopwatch=WallClock(clock))
    with pytest.raises(ClockError):
        take_turns(takes(WallClock(clock), [work]), TimingRules(), seed=0)


@pytest.mark.parametrize("step", [0, -1000])
def test_a_bad_clock_is_the_status_of_the_cell_and_never_a_number(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    monkeypatch.setattr(execute, "stopwatch", lambda device: WallClock(SlowClock(step, 0)))
    cell = Cell("s", "w", Spec("softmax"), Shape(heads=1, seq_len=8, head_dim=4))
    record, samples = run_cell(VisitCell(cell, TimingRules()))
    assert record.status is Status.ERROR
    assert "the clock gave" in record.reason
    assert record.time_median_s is None
    assert samples is None


def test_a_bad_clock_gives_no_pair_and_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnbench.harness.inside.pairs.stopwatch", lambda device: WallClock(SlowClock(0, 0)))
    cell = Cell("s", "w", Spec("softmax"), Shape(heads=1, seq_len=8, head_dim=4), measure=("time",))
    found = measure_pairs([cell, cell], TimingRules(), fewest=6)
    assert (found.ran, found.blocks) == ([], [])
    assert [(place, status) for place, status, _ in found.left_out] == [(0, "error"), (1, "error")]
    assert all("the clock gave" in reason for *_, reason in found.left_out)


@pytest.mark.parametrize("cost", [0, 25, 1000])
def test_the_cost_of_the_clock_is_that_of_one_look(cost: int) -> None:
    clock = SlowClock(cost, 0)
    assert WallClock(clock).cost() == cost / 1e9
    assert clock.reads == READS + 1


def test_seconds_and_switches_are_those_between_the_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    switches = iter([3, 10])
    monkeypatch.setattr(stopwatch, "_involuntary_switches", lambda: next(switches))
    clock = SlowClock(cost=500, call=1000)
    assert WallClock(clock).time(clock.work, 4) == (4500 / 1e9, 7)
    assert clock.calls == 4
