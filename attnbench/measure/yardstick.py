"""A fixed piece of work, timed beside the samples: the machine's speed at this moment.

The cores of a laptop or of a shared host change their speed from second to second, by half and more. A slow machine
slows the yardstick by about as much, so that samples of two runs can be compared at one speed.

All of it is bound at import, before anything foreign.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import exp, mm, no_grad

from attnbench.measure.standstill import Moment
from attnbench.measure.time import EVERY, WAITED

SHARE = 0.06
"""Share of the time since the last reading for the next: one go is too short, since speed changes between
milliseconds."""
MOST = 8
"""Most goes of one reading."""
_SIDE = 192
_NUMBERS = 1 << 15
_SMALL = 16


class Reading(NamedTuple):
    """Seconds of the two pieces of work: one fills the arithmetic units, one is mostly calls of small kernels.

    Cores slow down unevenly: a neighbour on the same core takes more from many small calls than from one product.
    """

    products: float
    calls: float

    def until(self, later: Reading) -> dict[str, Any]:
        """Fields of the samples between two readings: the mean of both."""
        return {"yardstick": ((self.products + later.products) / 2, (self.calls + later.calls) / 2)}


class Mark(Protocol):
    """The machine's speed at one moment."""

    def until(self, later: Any) -> dict[str, Any]:
        """Fields of the samples that were taken between this moment and a later one."""


class Pace(Protocol):
    """A source of the machine's speed."""

    apart: float
    """Least seconds of samples between readings."""

    def begin(self, call: Callable[[], object], calls: int) -> None:
        """Look at a call before its samples, of which each makes it ``calls`` times."""

    def read(self, since: float) -> Mark:
        """The speed now; ``since`` is the seconds of samples since the last reading."""


class Yardstick:
    """A product and exponentials, and a number of small products: what attention consists of.

    It holds half a mebibyte for each thread and draws no random number.
    """

    apart = EVERY

    def __init__(self) -> None:
        threads = torch.get_num_threads()
        self._a = _numbers(threads * _SIDE * _SIDE).reshape(-1, _SIDE)
        self._b = _numbers(_SIDE * _SIDE).reshape(_SIDE, _SIDE)
        self._product = torch.empty_like(self._a)
        self._x = _numbers(threads * _NUMBERS)
        self._exponentials = torch.empty_like(self._x)
        self._small = _numbers(32 * 32).reshape(32, 32)
        self._smaller = torch.empty_like(self._small)
        self._quickest = math.inf
        self._last = Reading(math.inf, math.inf)
        self.read(0.0)

    def begin(self, call: Callable[[], object], calls: int) -> None:
        """Make none of the calls."""

    def read(self, since: float) -> Reading:
        """The mean of goes without a waiting thread; the reading before if there are none.

        A slowed reading would be of another machine than the samples, which do not count if they waited. If threads
        waited in all goes since the beginning, the quickest go stands.
        """
        wanted = max(1, min(MOST, round(SHARE * since / self._quickest)))  # one if nothing was read before
        clean = list[tuple[float, float]]()
        for _ in range(wanted + MOST):
            start = Moment.now()
            with no_grad():
                go = self._go()
            if start.delay_until(Moment.now()) <= WAITED * sum(go):
                clean.append(go)
                self._quickest = min(self._quickest, sum(go))
            elif math.isinf(self._quickest):
                self._last = min(self._last, Reading(*go), key=sum)
            if len(clean) == wanted:
                break
        if clean:
            self._last = Reading(*(sum(column) / len(clean) for column in zip(*clean, strict=True)))
        return self._last

    def _go(self) -> tuple[float, float]:
        start = perf_counter()
        mm(self._a, self._b, out=self._product)
        exp(self._x, out=self._exponentials)
        middle = perf_counter()
        for _ in range(_SMALL):
            mm(self._small, self._small, out=self._smaller)
        return middle - start, perf_counter() - middle


def _numbers(count: int) -> torch.Tensor:
    return torch.linspace(-1, 1, count, dtype=torch.float32, device="cpu")
