"""Looks at what timed calls return, after the clock has stopped and at moments that no variant can foresee."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from random import Random
from typing import Any, Generic, TypeVar

T = TypeVar("T")

DENSE = 16
"""So many samples are all looked at, and of the n-th after them one in n / 16: 80 of a thousand, the last as well."""
SHARE = 0.01
"""Of the time of samples, for looking at them."""
SURE = 4
"""Looks that are taken though they need more than that share."""
SHIFT = 8
"""Calls by which a sample of several calls may be longer: or its last one would always be the same of each few."""


class Glances(Generic[T]):
    """Keeps what ``look`` makes of the last call of some samples."""

    def __init__(self, look: Callable[[Any], T], seed: bytes | None = None) -> None:
        self._look, self._draw = look, Random(os.urandom(16) if seed is None else seed)
        self.seen: list[tuple[int, T]] = []
        """Which call it was, counted from 0, and what was seen."""
        self._samples, self._sampled, self._looking = 0, 0.0, 0.0

    def wanted(self) -> bool:
        """Whether to look at the next sample."""
        self._samples += 1
        cheap = self._looking <= SHARE * self._sampled or len(self.seen) < SURE
        return self._draw.random() * self._samples < DENSE and cheap

    def shift(self, calls: int) -> int:
        """Calls to add to a sample of so many."""
        return self._draw.randrange(SHIFT) if calls > 1 else 0

    def sampled(self, seconds: float) -> None:
        """A sample took so long."""
        self._sampled += seconds

    def look(self, call: int, output: Any) -> None:
        """At what a call returned."""
        start = time.perf_counter()
        self.seen.append((call, self._look(output)))
        self._looking += time.perf_counter() - start
