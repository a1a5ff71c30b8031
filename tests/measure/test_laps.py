"""The first part's share of a call, on clocks and events that are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from attnbench.measure import laps as module
from attnbench.measure.laps import Laps, first_share
from attnbench.measure.time import Sample

SECOND = 10**9
"""In the nanoseconds of the host's clock."""


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is waited for and looked at, on a clock that tells a number one higher each time."""
    log: list[str] = []

    def clock() -> int:
        log.append("clock")
        return log.count("clock")

    monkeypatch.setattr(module, "WallClock", lambda: SimpleNamespace(clock=clock))
    monkeypatch.setattr(torch.mps, "synchronize", lambda: log.append("wait"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: log.append("wait for CUDA"))
    return log


class Event:
    """An event of a GPU that gets there 250 ms after the one before."""

    made: ClassVar[list[Event]] = []

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.made.append(self)
        self.at: float | None = None
        self.reached = False

    def record(self) -> None:
        self.at = 250.0 * len(self.made)

    def synchronize(self) -> None:
        self.reached = True

    def elapsed_time(self, end: Event) -> float:
        assert end.reached  # or CUDA raises an error
        assert self.at is not None
        assert end.at is not None
        return end.at - self.at


@pytest.fixture
def event(monkeypatch: pytest.MonkeyPatch) -> type[Event]:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Event.made = []
    return Event


@pytest.mark.parametrize(("device", "each"), [("cpu", ["clock"]), ("mps", ["wait", "clock"])])
def test_a_moment_is_read_off_the_clock_of_the_host_after_what_the_device_has_to_do(
    device: str, each: list[str], log: list[str]
) -> None:
    laps = Laps(device)
    assert [laps.moment(), laps.moment()] == [1, 2]
    assert log == each * 2


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_on_a_gpu_moments_are_events_and_nothing_waits_until_somebody_asks(
    device: str, log: list[str], event: type[Event]
) -> None:
    laps = Laps(device)
    laps.add(laps.moment(), laps.moment(), laps.moment())
    assert len(event.made) == 3
    assert not any(one.reached for one in event.made)
    assert log == []
    assert laps.of_calls(0, 1) == [0.5]


def noted(*calls: tuple[float, float], device: str = "cpu") -> Laps:
    """Calls of which the parts took so many seconds."""
    laps = Laps(device)
    for number, (first, rest) in enumerate(calls):
        start = number * 1000 * SECOND
        laps.add(start, start + round(first * SECOND), start + round((first + rest) * SECOND))
    return laps


def test_the_first_part_is_the_share_of_a_call_up_to_its_middle() -> None:
    laps = noted((1.5, 0.5), (2.0, 6.0))
    assert laps.made == 2
    assert laps.of_calls(0, 2) == [0.75, 0.25]


@pytest.mark.parametrize(
    ("first", "stop", "found"),
    [(0, 5, [2, 3, 4]), (2, 3, [2]), (3, 5, [3, 4]), (1, 4, [2, 3]), (0, 2, []), (0, 1, []), (1, 2, []), (5, 9, [])],
)
def test_calls_are_found_by_their_number_as_long_as_they_are_kept(
    first: int, stop: int, found: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_KEPT", 3)
    laps = noted(*[(float(number), 8.0 - number) for number in range(5)])
    assert [8 * share for share in laps.of_calls(first, stop)] == found
    assert laps.made == 5


def sample(calls: int, **how: Any) -> Sample:
    return Sample(1.0, calls, **how)


DISTURBED = 10**6
"""Switches."""


@pytest.mark.parametrize(
    ("samples", "share"),
    [
        ([sample(1)], 16.0),
        ([sample(3)], 8.0),
        ([sample(1), sample(2)], 8.0),
        ([sample(1, switches=DISTURBED), sample(2)], 12.0),
        ([sample(2), sample(1, switches=DISTURBED)], 6.0),
        ([sample(1, switches=DISTURBED), sample(1, stopped=True)], None),
        ([sample(1, waited=0.02), sample(2, waited=0.01)], 12.0),
        ([sample(1), sample(1, stopped=True), sample(1)], 10.0),
        ([sample(2, switches=DISTURBED)], None),
        ([sample(2, stopped=True)], None),
        ([], None),
    ],
)
def test_the_share_of_samples_is_the_median_over_the_calls_of_clean_ones(
    samples: list[Sample], share: float | None
) -> None:
    laps = noted(*[(first, 32 - first) for first in (1.0, 2.0, 4.0, 8.0, 16.0)])
    assert first_share(laps, samples) == (share and share / 32)
