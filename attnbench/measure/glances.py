"""Looks at what timed calls return, after the clock has stopped and at moments that no variant can foresee."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random
from typing import Any, Generic, TypeVar

T = TypeVar("T")

DENSE = 16
"""The first 16 samples are all looked at. After them, the n-th is looked at with a chance of 16 / n, so that even the
last one may be: about 80 of a thousand."""
SHARE = 0.01
"""Largest share of the samples' time that looking at them may take."""
SURE = 4
"""Number of looks that are taken even if they need more than that share."""
SHIFT = 8
"""A sample of several calls is longer by a random number below this. Otherwise its last call would always be the same
one of every few."""


class Glances(Generic[T]):
    """Keeps what ``look`` makes of the last call of some samples."""

    def __init__(self, look: Callable[[Any], T], seed: bytes | None = None) -> None:
        self._look, self._draw = look, Random(seed)
        self.seen: list[tuple[int, T]] = []
        """For each look the number of the call, counted from 0, and what was seen."""
        self._samples, self._sampled, self._looking = 0, 0.0, 0.0

    def wanted(self) -> bool:
        """Whether to look at the next sample."""
        self._samples += 1
        cheap = self._looking <= SHARE * self._sampled or len(self.seen) < SURE
        return self._draw.random() * self._samples < DENSE and cheap

    def shift(self, calls: int) -> int:
        """How many calls to add to a sample of ``calls``."""
        return self._draw.randrange(SHIFT) if calls > 1 else 0

    def sampled(self, seconds: float) -> None:
        """Note that a sample took ``seconds``."""
        self._sampled += seconds

    def look(self, call: int, output: Any) -> None:
        """Look at what a call returned."""
        start = time.perf_counter()
        self.seen.append((call, self._look(output)))
        self._looking += time.perf_counter() - start
