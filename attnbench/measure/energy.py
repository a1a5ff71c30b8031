"""Energy that a device took, by counters of the machine. Nothing is estimated: without counters there is no number.

On a CPU these are the counters of its packages, which Linux shows as ``intel-rapl:N`` (for AMD too). They cover cores,
caches and memory controllers, whatever these work for, but not memory itself or the rest of the machine. Many systems
let only root read them. On an NVIDIA GPU it is the total of NVML (Volta and later): it covers the whole board, and is
updated some ten times a second; it needs the module ``pynvml`` (package nvidia-ml-py).

Sources: Linux kernel documentation, "Power Capping Framework"; NVIDIA, "NVML API Reference Guide",
nvmlDeviceGetTotalEnergyConsumption.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from attnbench.measure.card import Board

POWERCAP = Path("/sys/class/powercap")
_TOP_ZONE = re.compile(r"intel-rapl:\d+")
"""Name of a whole package. Its parts (``intel-rapl:0:0``) and ``intel-rapl-mmio:0`` would count the same twice."""
_MOST_WATTS = 1000.0
"""Most watts of one package. A counter that these fill between two looks may have wrapped several times."""


@dataclass(frozen=True, slots=True)
class Counter:
    """A counter that rises from any number and begins again at 0 when it is full."""

    read: Callable[[], float]
    """Joules; raises OSError or ValueError if it can no longer be read."""
    full: float = math.inf
    """Joules at which it is full."""


def energy_counters(device: str) -> tuple[Counter, ...]:
    """Counters of all that the device takes; none if one of them cannot be read."""
    if device == "cpu":
        return _packages()
    return _board(device) if device.startswith("cuda") else ()


class Meter:
    """Counts joules from its creation on, on top of those from before; None once the sum is unknown."""

    _joules: float | None
    _at: float
    _values: list[float]

    def __init__(self, counters: Sequence[Counter] = (), before: float | None = 0.0) -> None:
        self._counters = counters
        self.go_on(before)

    def go_on(self, before: float | None) -> None:
        """Count from now, on top of ``before``."""
        self._joules = before if self._counters else None
        self.skip()

    def skip(self) -> None:
        """Leave out the energy since the last look."""
        if self._joules is not None:
            self._at, self._values = time.monotonic(), [_read(counter) for counter in self._counters]

    def joules(self) -> float | None:
        """Joules so far. Ask every few seconds, since the counter of a busy package is full within minutes."""
        if self._joules is None:
            return None
        at, values = self._at, self._values
        self.skip()
        for counter, before, now in zip(self._counters, values, self._values, strict=True):
            self._joules += _taken(counter, before, now, self._at - at)
        if not math.isfinite(self._joules):
            self._joules = None
        return self._joules


def _read(counter: Counter) -> float:
    try:
        return counter.read()
    except (OSError, ValueError):
        return math.nan


def _taken(counter: Counter, before: float, now: float, seconds: float) -> float:
    if counter.full < _MOST_WATTS * seconds:
        return math.nan
    return now - before + (counter.full if now < before else 0.0)


def _packages() -> tuple[Counter, ...]:
    """Counters of all packages, since a training may move from one to another."""
    try:
        zones = sorted(zone for zone in POWERCAP.iterdir() if _TOP_ZONE.fullmatch(zone.name))
        packages = [zone for zone in zones if (zone / "name").read_text().startswith("package")]
        counters = tuple(
            Counter(partial(_joules_in, zone / "energy_uj"), _joules_in(zone / "max_energy_range_uj"))
            for zone in packages
        )
        for counter in counters:
            counter.read()
    except (OSError, ValueError):
        return ()
    return counters


def _joules_in(file: Path) -> float:
    return int(file.read_text()) / 1e6


def _board(device: str) -> tuple[Counter, ...]:
    board = Board.of(device)

    def read() -> float:
        if board is None or (told := board.millijoules()) is None:
            raise OSError("the card does not tell its energy")
        return told / 1e3

    counter = Counter(read)
    return () if math.isnan(_read(counter)) else (counter,)
