"""The moment of a call at which its first part ends: a prompt, before the tokens that are generated after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from attnbench.measure.statistics import median
from attnbench.measure.stopwatch import WallClock
from attnbench.measure.time import Sample, counting

_KEPT = 1 << 16
"""Calls with laps kept, the last ones: more than a round has samples of."""


class Laps:
    """Notes the start of a call, the end of its first part, and its own end.

    By the host's clock on a CPU, by events on CUDA, so that nothing waits within a call. Other devices are waited for.
    """

    def __init__(self, device: str) -> None:
        self._cuda = device.startswith("cuda")
        self._clock = WallClock().clock
        self._wait: Callable[[], None] | None = torch.mps.synchronize if device == "mps" else None
        self._moments: deque[tuple[int | torch.cuda.Event, ...]] = deque(maxlen=_KEPT)
        self.made = 0
        """Calls noted until now."""

    def moment(self) -> int | torch.cuda.Event:
        """Now, in nanoseconds; on CUDA when the device gets here."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it so
            event.record()
            return event
        if self._wait is not None:
            self._wait()
        return self._clock()

    def add(self, *moments: int | torch.cuda.Event) -> None:
        """Keep the start, the end of the first part and the end of one call."""
        self._moments.append(moments)
        self.made += 1

    def of_calls(self, first: int, stop: int) -> list[float]:
        """The first part's share of each call, by the number of calls before; those no longer kept are left out."""
        oldest = self.made - len(self._moments)
        found = list(self._moments)[max(0, first - oldest) : max(0, stop - oldest)]
        return [_seconds(start, middle) / _seconds(start, end) for start, middle, end in found]


def _seconds(start: int | torch.cuda.Event, end: int | torch.cuda.Event) -> float:
    if isinstance(start, int) and isinstance(end, int):
        return (end - start) / 1e9
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def first_share(laps: Laps, samples: Sequence[Sample]) -> float | None:
    """The first part's share of a call: the median over calls of the samples that count, the last ones that were taken.

    None without any. A share, since seconds of other calls than those of a row's time may contradict it.
    """
    calls, count = sum(sample.calls for sample in samples), set(map(id, counting(samples, 1)))
    at, used = laps.made - calls, list[float]()
    for sample in samples:
        found = laps.of_calls(at, at + sample.calls)
        at += sample.calls
        if id(sample) in count:
            used.extend(found)
    return median(used) if used else None
