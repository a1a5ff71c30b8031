"""The stopwatch of a GPU, on a device that is made up: the flush takes 5 s there, and a call 1 s."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from attnbench.measure import cuda_events
from attnbench.measure.cuda_events import CudaEvents


class Event:
    """Tells the seconds of what was done until then."""

    log: ClassVar[list[Any]] = []

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = math.nan

    def record(self) -> None:
        self.at = sum({"flush": 5.0, "call": 1.0}.get(entry, 0.0) for entry in self.log)
        self.log.append("event")

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What happens on the device whose cache holds ``1 << 22`` bytes, or 100 if it is the second."""
    log = Event.log = []

    def properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(L2_cache_size=100 if device.index == 1 else 1 << 22)

    def empty(size: int, **how: Any) -> SimpleNamespace:
        log.append(("empty", size, how))
        return SimpleNamespace(zero_=lambda: log.append("flush"))

    monkeypatch.setattr(cuda_events, "get_device_properties", properties)
    monkeypatch.setattr(cuda_events, "Event", Event)
    monkeypatch.setattr(cuda_events, "synchronize", lambda device: log.append(("wait", device)))
    monkeypatch.setattr(torch, "empty", empty)
    return log


@pytest.fixture
def call(log: list[Any]) -> Callable[[], int]:
    """Returns how many calls were made."""

    def call() -> int:
        log.append("call")
        return log.count("call")

    return call


@pytest.mark.parametrize(("device", "size"), [("cuda:0", 2 << 22), ("cuda:1", 2 << 20)])
def test_what_flushes_the_cache_is_twice_as_large_and_two_mebibytes_at_least(
    device: str, size: int, log: list[Any]
) -> None:
    CudaEvents(device)
    assert log == [("empty", size, {"dtype": torch.uint8, "device": torch.device(device)})]


@pytest.mark.parametrize("calls", [1, 2, 5])
def test_every_call_finds_the_cache_flushed_only_calls_are_timed_and_nothing_waits_between_them(
    calls: int, log: list[Any], call: Callable[[], int]
) -> None:
    watch = CudaEvents("cuda:1")
    log.clear()
    assert watch.time(call, calls) == (calls, 0)
    wait = ("wait", torch.device("cuda:1"))
    assert log == [wait, *calls * ["flush", "event", "call", "event"], wait]


def test_a_look_costs_half_a_microsecond(log: list[Any]) -> None:
    assert CudaEvents("cuda").cost() == 0.5e-6
