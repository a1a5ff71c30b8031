"""What the worker answers about cells that take turns: whose times are whose, who is left out, how many turns."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.harness.inside import pairs
from attnbench.harness.inside.call import Call
from attnbench.harness.inside.fresh_inputs import look
from attnbench.harness.inside.pairs import Turns, measure_noise, measure_pairs, take_turns
from attnbench.harness.inside.turns import SEEN
from attnbench.measure.stopwatch import WallClock
from attnbench.measure.time import Sample, Sampler, TimingRules
from attnbench.suite.cell import Cell
from tests.harness.samplers import takes

QUICK = TimingRules(quick=True, warmup_time=0.0)
CHANGING = "its numbers change from call to call, so that those of timed calls could not be checked"


def cell(variant: str, **more: Any) -> Cell:
    return Cell("s", "w", parse_spec(variant), Shape(heads=1, seq_len=8, head_dim=4), **more)


def answered(blocks: list[list[float]]) -> Callable[..., Turns]:
    """In the place of :func:`take_turns`: these times, whatever is timed."""
    return lambda *_, **__: Turns(blocks, 3, 5, 7)


def told(seconds: list[float]) -> Callable[..., Any]:
    """In the place of ``hold_to_unseen``: finds nothing, and notes how long it was told that a call takes."""

    def hold(of: Cell, call: Call, watch: object, took: float, *_: object) -> tuple[int, torch.Tensor, None]:
        seconds.append(took)
        return SEEN, look(call.on(SEEN)()), None

    return hold


def test_each_cell_that_can_be_built_has_the_times_of_its_own_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: list[float] = []
    monkeypatch.setattr(pairs, "hold_to_unseen", told(seconds))
    monkeypatch.setattr(pairs, "take_turns", answered([[1.0, 2.0, 3.0], [1.5, 2.5, 9.0], [1.25, 2.25, 4.0]]))
    monkeypatch.setattr(pairs.OtherLoad, "cores", lambda self: 1.5)
    cells = [
        cell("softmax"),
        cell("no-such-variant"),
        cell("linear"),
        cell("performer"),
        cell("fnet", level="operator"),
    ]
    found = measure_pairs(cells, QUICK, fewest=2)
    assert found.ran == [0, 2, 3]
    assert found.blocks == [[1.0, 2.0, 3.0], [1.5, 2.5, 9.0], [1.25, 2.25, 4.0]]
    assert seconds == [1.25, 2.25, 4.0]
    assert [(place, status) for place, status, _ in found.left_out] == [(1, "error"), (4, "unsupported")]
    assert "no-such-variant" in found.left_out[0][2]
    assert (found.disturbed, found.taken, found.stopped, found.others, found.warnings) == (3, 5, 7, 1.5, [])


def test_the_column_of_who_did_not_always_compute_is_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def hold(of: Cell, call: Call, *_: object) -> Any:
        if of.variant.name == "linear":
            raise ArithmeticError("broken")
        return told([])(of, call, None, 1.0)

    monkeypatch.setattr(pairs, "hold_to_unseen", hold)
    monkeypatch.setattr(pairs, "take_turns", answered([[1.0, 2.0, 3.0]]))
    found = measure_pairs([cell("softmax"), cell("linear"), cell("performer")], QUICK, fewest=2)
    assert (found.ran, found.blocks) == ([0, 2], [[1.0, 3.0]])
    ((place, status, reason),) = found.left_out
    assert (place, status) == (1, "error")
    assert "broken" in reason


def test_where_nothing_can_be_built_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "take_turns", lambda *_, **__: pytest.fail("no turns without entrants"))
    found = measure_pairs([cell("no-such-variant")], QUICK, fewest=2)
    assert (found.ran, found.blocks, found.warnings) == ([], [], [])
    assert (found.disturbed, found.taken, found.stopped) == (0, 0, 0)
    assert len(found.left_out) == 1


def test_turns_get_the_rules_the_seed_and_the_number_asked_for_and_no_garbage_is_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, Any] = {}

    def turns(takes: Sequence[object], rules: TimingRules, **more: Any) -> Turns:
        asked.update(more, entrants=len(takes), rules=rules, collects=gc.isenabled())
        return Turns([[1.0, 1.0]], 0, 1, 0)

    gc.enable()
    monkeypatch.setattr(pairs, "hold_to_unseen", told([]))
    monkeypatch.setattr(pairs, "take_turns", turns)
    seeds = []
    for process in (0, 1, 0):
        measure_pairs([cell("softmax", seed=11), cell("linear", seed=12)], QUICK, fewest=9, process=process)
        seeds.append(asked.pop("seed"))
        assert asked == {"fewest": 9, "entrants": 2, "rules": QUICK, "collects": False, "pace": None}
    assert seeds[0] == seeds[2] != seeds[1]  # each process has orders of its own, and the same ones again


def test_each_process_builds_in_another_order_with_other_memory_before(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    held: list[int] = []
    honest, empty = pairs.prepare, torch.empty

    def prepare(of: Cell) -> Call:
        built.append(of.variant.name)
        return honest(of)

    def noted(*size: Any, **how: Any) -> torch.Tensor:
        made = empty(*size, **how)
        if how.get("dtype") is torch.uint8:
            held.append(made.numel())
        return made

    monkeypatch.setattr(pairs, "prepare", prepare)
    monkeypatch.setattr(pairs.torch, "empty", noted)
    monkeypatch.setattr(pairs, "hold_to_unseen", told([]))
    monkeypatch.setattr(pairs, "take_turns", answered([[1.0, 2.0]]))
    for process in (0, 1):
        found = measure_pairs([cell("softmax"), cell("linear")], QUICK, fewest=2, process=process)
        assert (found.ran, found.blocks) == ([0, 1], [[1.0, 2.0]])  # in the order of the cells, however they were built
    assert built[:2] == ["softmax", "linear"]
    assert built[4:6] == ["linear", "softmax"]  # after both of the first process were built again, to be checked
    assert len(set(held)) == 4
    assert all(size % 64 == 0 and 2**12 <= size < 2**22 for size in held)


def test_what_could_not_be_checked_is_said_once_of_the_cell_that_it_is_about(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = torch.Generator().manual_seed(0)
    dice = lambda: torch.randn(4, generator=draws)  # noqa: E731  # gives other numbers in each call
    honest = pairs.prepare

    def prepare(of: Cell) -> Call:
        made = honest(of)
        return replace(made, run=dice, on=lambda number: dice) if of.variant.name == "linear" else made

    monkeypatch.setattr(pairs, "prepare", prepare)
    monkeypatch.setattr(pairs, "stopwatch", lambda device: Ticking(1e-3))
    found = measure_pairs([cell("softmax"), cell("linear")], QUICK, fewest=2)
    assert (found.ran, found.left_out) == ([0, 1], [])
    assert found.warnings == [(1, CHANGING)]


def test_what_torch_rewrites_is_held_to_the_same_call_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[bool] = []
    honest = pairs.prepare

    def prepare(of: Cell) -> Call:
        built.append(of.compile)
        return honest(replace(of, compile=False))

    monkeypatch.setattr(pairs, "prepare", prepare)
    monkeypatch.setattr(pairs, "hold_to_unseen", told([]))
    found = measure_pairs([cell("softmax", compile=True)], QUICK, fewest=2)
    assert (found.ran, found.left_out, found.warnings) == ([0], [], [])
    assert built == [True, False]


class Ticking(WallClock):
    """A call takes ``seconds``; notes what it is asked to time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.asked = seconds, list[int]()

    def cost(self) -> float:
        return 0.0

    def time(self, call: Callable[[], object], calls: int) -> tuple[float, int]:
        self.asked.append(calls)
        call()
        return calls * self.seconds, 0


@pytest.mark.parametrize(("seconds", "batch"), [(1e-5, 100), (4e-4, 3), (2e-3, 1)])
def test_a_turn_holds_as_many_calls_as_a_sample_of_a_single_measurement(
    monkeypatch: pytest.MonkeyPatch, seconds: float, batch: int
) -> None:
    watch = Ticking(seconds)
    monkeypatch.setattr(pairs, "stopwatch", lambda device: watch)
    sizes: list[int] = []

    def turns(takes: Sequence[partial[Sample]], *_: Any, **__: Any) -> Turns:
        sizes.extend(one.args[0] for one in takes)
        return Turns([[seconds] * len(takes)], 0, 1, 0)

    monkeypatch.setattr(pairs, "take_turns", turns)
    rules = TimingRules(warmup_time=0.05)
    measure_pairs([cell("softmax")], rules, fewest=2)
    assert sizes == [batch]
    warm = seconds * (sum(watch.asked[: watch.asked.index(batch, 1) + 1]) if batch > 1 else 0.05 / seconds)
    assert 0.05 <= warm < 0.2


def test_calls_are_warmed_up_as_long_and_as_often_as_for_a_single_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "take_turns", answered([[1.0]]))
    monkeypatch.setattr(pairs, "hold_to_unseen", told([]))
    for rules, calls in (
        (TimingRules(warmup_time=0.1, warmup_calls=0), 100),
        (TimingRules(warmup_time=0.001, warmup_calls=4), 4),
        (TimingRules(warmup_time=0.0, warmup_calls=0), 1),
    ):
        watch = Ticking(1e-3)
        monkeypatch.setattr(pairs, "stopwatch", lambda device, watch=watch: watch)
        measure_pairs([cell("softmax")], rules, fewest=2)
        assert sum(watch.asked) == calls + 1  # and one sample


# Turns


class Listed(Sampler):
    """Notes the order in which samples are taken."""

    order: list[float]

    def take(self, calls: int, call: Callable[[], object] | None = None) -> Sample:
        (call or self._call)()
        return Sample(0.01, calls)


def orders(count: int, blocks: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    taken: list[int] = []
    monkeypatch.setattr(pairs, "Sampler", Listed)
    calls = [lambda place=place: taken.append(place) for place in range(count)]
    take_turns(takes(WallClock(), calls), TimingRules(max_samples=blocks), seed=seed, clock=lambda: 0.0)
    return [taken[start : start + count] for start in range(0, len(taken), count)]


def test_a_random_order_is_followed_by_its_reverse_and_then_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    found = orders(4, 40, 0, monkeypatch)
    assert len(found) == 40
    assert all(sorted(one) == [0, 1, 2, 3] for one in found)
    assert all(there == back[::-1] for there, back in zip(found[::2], found[1::2], strict=True))
    assert len({tuple(one) for one in found[::2]}) > 10
    assert found == orders(4, 40, 0, monkeypatch)
    assert found != orders(4, 40, 1, monkeypatch)


def test_a_block_in_which_the_process_stood_still_is_taken_again_in_the_same_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []

    class Stopping(Listed):
        def take(self, calls: int, call: Callable[[], object] | None = None) -> Sample:
            return replace(super().take(calls), stopped=len(taken) in (3, 10))

    monkeypatch.setattr(pairs, "Sampler", Stopping)
    calls = [lambda place=place: taken.append(place) for place in range(3)]
    turns = take_turns(takes(WallClock(), calls), TimingRules(max_samples=4), seed=0, clock=lambda: 0.0)
    blocks = [taken[start : start + 3] for start in range(0, len(taken), 3)]
    assert (len(blocks), turns.taken, turns.stopped) == (6, 4, 2)
    assert blocks[0] == blocks[1] == blocks[2][::-1]  # first, again, its reverse
    assert blocks[3] == blocks[4] == blocks[5][::-1]


def test_quick_rules_take_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = TimingRules(quick=True)
    turns = take_turns(takes(Ticking(0.5), [lambda: None] * 2, 4), rules, seed=0, clock=lambda: 0.0)
    assert (turns.blocks, turns.taken, turns.disturbed) == ([[0.5, 0.5]], 1, 0)


def test_before_the_budget_is_spent_there_are_as_many_blocks_as_the_rules_want_and_no_fewer_seconds() -> None:
    def taken(**rules: Any) -> int:
        watch = Ticking(0.5)
        now = lambda: 0.5 * sum(watch.asked)  # noqa: E731
        both = takes(watch, [lambda: None] * 2)
        return take_turns(both, TimingRules(max_time=100.0, **rules), seed=0, clock=now).taken

    assert taken(min_time=0.0, min_samples=20) == 20
    assert taken(min_time=30.0, min_samples=20) == 30
    assert taken(min_time=30.5, min_samples=20) == 31
    assert taken(min_time=1000.0, min_samples=20) == 100  # the budget


class Alternating(Ticking):
    """The third of three programs is as noisy as told; a block is three samples."""

    def __init__(self, spread: Sequence[float]) -> None:
        super().__init__(1.0)
        self.spread, self.count = spread, [0, 0, 0]

    def time(self, call: Callable[[], object], calls: int) -> tuple[float, int]:
        place = call()
        assert isinstance(place, int)
        self.count[place] += 1
        # Four values in turn, so that quartiles are what they are at any number of blocks that four divides.
        return calls * (1 + self.spread[place] * (self.count[place] % 4)), 0


def blocks_taken(spread: Sequence[float], width: float) -> int:
    calls = [lambda place=place: place for place in range(3)]
    rules = TimingRules(width=width, min_time=0.0, max_samples=10**6)
    return take_turns(takes(Alternating(spread), calls), rules, seed=0, clock=lambda: 0.0).taken


def test_half_the_width_takes_four_times_the_blocks_and_the_widest_of_all_ratios_decides() -> None:
    wide = blocks_taken((0.0, 0.0, 0.03), 0.01)
    assert wide > 20
    assert blocks_taken((0.0, 0.0, 0.03), 0.005) == pytest.approx(4 * wide, abs=4)
    assert blocks_taken((0.0, 0.0, 0.0), 0.01) == 20
    for spread in ((0.03, 0.0, 0.0), (0.0, 0.03, 0.0), (0.001, 0.0, 0.03)):
        assert blocks_taken(spread, 0.01) == pytest.approx(wide, rel=0.1)


def test_programs_that_slow_down_together_need_no_more_blocks() -> None:
    watch = Ticking(1.0)
    drifting = iter(range(10**6))

    def call() -> None:
        watch.seconds = 1.0 + next(drifting) // 2  # the same for both of a block

    rules = TimingRules(width=0.01, min_time=0.0, max_samples=1000)
    assert take_turns(takes(watch, [call] * 2), rules, seed=0, clock=lambda: 0.0).taken == 20


# The noise floor


def floors(found: Sequence[float | None], monkeypatch: pytest.MonkeyPatch) -> tuple[float | None, int]:
    left = list(found)
    monkeypatch.setattr(pairs, "noise_floor", lambda first, second: left.pop(0))
    monkeypatch.setattr(pairs, "take_turns", answered([[1.0, 1.0]]))
    return measure_noise("cpu", Ticking(1e-3)), len(found) - len(left)


def test_the_floor_is_the_least_of_three_tries_or_the_first_that_is_low_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert floors([0.5, 0.3, 0.4, 0.1], monkeypatch) == (0.3, 3)
    assert floors([0.5, 0.02, 0.01], monkeypatch) == (0.02, 2)
    assert floors([0.021, 0.5, 0.01], monkeypatch) == (0.01, 3)
    assert floors([0.0, 0.5], monkeypatch) == (0.0, 1)


def test_the_floor_is_unknown_where_there_are_too_few_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert floors([None, 0.01], monkeypatch) == (None, 1)


def test_the_floor_is_that_of_one_product_timed_as_two(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def turns(takes: Sequence[partial[Sample]], rules: TimingRules, *, seed: int) -> Turns:
        given.extend([*takes, rules, gc.isenabled()])
        return Turns([[1.0, 1.1]] * 6 + [[1.2, 1.0]] * 6, 0, 12, 0)

    gc.enable()
    monkeypatch.setattr(pairs, "take_turns", turns)
    floor = measure_noise("cpu", Ticking(1e-4))
    assert floor == pytest.approx(0.2)
    one, other, rules, collects = given[:4]
    calls = [take.func.__self__._call for take in (one, other)]
    assert calls[0] is calls[1]
    assert one.args == other.args == (10,)
    assert calls[0]().shape == (256, 256)
    assert not collects
    assert rules.min_time == rules.max_time == pairs.NOISE_TIME


def test_without_a_watch_the_floor_is_read_off_the_clock_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(pairs, "take_turns", answered([[1.0, 1.0]] * 6))

    def stopwatch(device: str) -> Ticking:
        asked.append(device)
        return Ticking(1e-3)

    monkeypatch.setattr(pairs, "stopwatch", stopwatch)
    assert measure_noise("cpu") == 0.0
    assert asked == ["cpu"]
