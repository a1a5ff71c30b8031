"""NVML's facts of an NVIDIA card: its model, its speed now, and its other users.

NVML is reached by the module ``pynvml`` (package nvidia-ml-py). Facts it does not tell are absent: no driver, a GPU of
another maker, a part of a card (MIG), a field that this card or driver does not have.

Source: NVIDIA, "NVML API Reference Guide", device queries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from time import perf_counter  # bound before anything foreign is imported
from typing import Any, NamedTuple, Self

from attnbench.measure.time import EVERY, THROTTLES, why_throttled
from attnbench.units import format_bytes

NOT_TOLD = (
    "driver, clocks, temperature and energy of the card are not told, nor whether it throttles: "
    "pip install nvidia-ml-py, which 'attnbench[gpu]' brings"
)
"""The one line about a card of NVIDIA's on a machine without the package."""
PATIENT = 10
"""Samples between two readings take this many times as long as a reading, so that the card hardly idles."""
ALONE = 1 << 30, 10
"""Bytes and percent of the time that a card may seem used at the start: a screen, or the driver itself."""
TICK = 0.1
"""Most seconds between changes of the counter of energy."""
COUNTED = 0.2
"""Least seconds of counted calls, between two changes of that counter."""
_SM, _MEMORY = 1, 2
"""NVML's numbers of clocks."""


@dataclass(frozen=True, slots=True)
class Board:
    """One card."""

    nvml: Any
    handle: Any

    @classmethod
    def of(cls, device: str) -> Self | None:
        """The card of a CUDA device; None if NVML does not know it."""
        if not device.startswith("cuda"):
            return None
        import torch

        try:
            nvml = import_module("pynvml")
            nvml.nvmlInit()
            # Not by its number: CUDA counts only the boards that it may see, and in an order of its own.
            uuid = torch.cuda.get_device_properties(torch.device(device)).uuid
            return cls(nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        except Exception:  # no package, library, driver or such card: each has an error of its own
            return None

    def ask(self, name: str, *given: Any) -> Any:
        """The result of an NVML function for this card, or for the machine; None if it fails."""
        try:
            return getattr(self.nvml, name)(*([] if "System" in name else [self.handle]), *given)
        except Exception:  # NVMLError, or an older package without the function
            return None

    def millijoules(self) -> int | None:
        """The counter of the energy that it took; None without one."""
        told = self.ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if told is None else int(told)

    def throttles(self) -> int:
        """NVML's bits of why the card throttles now, without those that are no throttling."""
        told = self.ask("nvmlDeviceGetCurrentClocksEventReasons")
        told = self.ask("nvmlDeviceGetCurrentClocksThrottleReasons") if told is None else told
        return int(told or 0) & sum(THROTTLES)


def facts(device: str) -> dict[str, Any]:
    """The card, and its speed before anything is measured; empty if unknown."""
    board = Board.of(device)
    if board is None:
        return {}
    limit = board.ask("nvmlDeviceGetEnforcedPowerLimit")
    told = {
        "driver": board.ask("nvmlSystemGetDriverVersion"),
        "power_limit_w": None if limit is None else round(limit / 1e3, 1),
        "highest_sm_clock_mhz": board.ask("nvmlDeviceGetMaxClockInfo", _SM),
        "highest_memory_clock_mhz": board.ask("nvmlDeviceGetMaxClockInfo", _MEMORY),
    }
    return {**{name: one for name, one in told.items() if one is not None}, "before": look(board)}


def look(board: Board) -> dict[str, Any]:
    """The present state of the card."""
    power = board.ask("nvmlDeviceGetPowerUsage")
    told = {
        "sm_clock_mhz": board.ask("nvmlDeviceGetClockInfo", _SM),
        "memory_clock_mhz": board.ask("nvmlDeviceGetClockInfo", _MEMORY),
        "temperature_c": board.ask("nvmlDeviceGetTemperature", 0),
        "power_w": None if power is None else round(power / 1e3, 1),
        "throttled": why_throttled(board.throttles()),
    }
    return {name: one for name, one in told.items() if one is not None}


def after(card: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The facts with one more look: ``after`` is the last one, ``during`` the lowest and highest of all."""
    during = dict(card.get("during", {}))
    for name, one in now.items():
        if name == "throttled":
            words = filter(None, [*str(during.get(name, "")).split(", "), *str(one).split(", ")])
            during[name] = ", ".join(dict.fromkeys(words))
        else:
            low, high = during.get(name, (one, one))
            during[name] = [min(low, one), max(high, one)]
    return {**card, "during": during, "after": dict(now)}


_UNITS = {"_mhz": "MHz", "_w": "W", "_c": "°C"}


def in_words(name: str, told: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Facts as names with text: a line for the card, and one for its speed before, during and after."""
    said, more = list[str](), list[tuple[str, str]]()
    for key, one in told.items():
        if isinstance(one, Mapping):
            more += in_words(f"{name} {key}", one)
        elif one not in (None, ""):
            end = next((end for end in _UNITS if key.endswith(end)), "")
            ends = dict.fromkeys(map(str, one if isinstance(one, list) else [one]))
            words = key.removesuffix(end).replace("_", " "), " to ".join(ends), _UNITS.get(end, "")
            said.append(" ".join(filter(None, words)))
    return [(name, ", ".join(said)), *more]


def warning(device: str) -> str | None:
    """A warning before the first use of the card: others use it, or NVML does not know it; None without one."""
    board = Board.of(device)
    if board is None:
        import torch

        try:
            import_module("pynvml")
        except ImportError:
            return NOT_TOLD if device.startswith("cuda") and torch.version.cuda else None
        return None
    told = board.ask("nvmlDeviceGetMemoryInfo", getattr(board.nvml, "nvmlMemory_v2", None))
    told = board.ask("nvmlDeviceGetMemoryInfo") if told is None else told
    rates = board.ask("nvmlDeviceGetUtilizationRates")
    held, busy = getattr(told, "used", 0), getattr(rates, "gpu", 0)
    if held < ALONE[0] and busy < ALONE[1]:
        return None
    return (
        f"the card is shared: others hold {format_bytes(held)} of its memory and keep it busy {busy} % of the time; "
        "close them or expect wide intervals"
    )


class Clocked(NamedTuple):
    """The card's clock at one moment, and NVML's bits of throttling."""

    sm_mhz: int | None
    throttled: int

    def until(self, later: Self) -> dict[str, Any]:
        """The worse of two moments, for the samples between them."""
        clocks = [one for one in (self.sm_mhz, later.sm_mhz) if one is not None]
        return {"sm_mhz": min(clocks, default=None), "throttled": self.throttled | later.throttled}


class Card:
    """Reads a card's clock and throttling between samples, rarely enough to keep it busy; and the energy of a call."""

    def __init__(self, board: Board, wait: Callable[[], None], *, energy: bool = False) -> None:
        self._board, self._wait, self._energy = board, wait, energy
        self.joules: float | None = None
        """Energy of a call; None if it was not counted, or the card has no counter that moves."""
        self.read(0.0)
        start = perf_counter()
        self.read(0.0)
        self.apart = max(EVERY, PATIENT * (perf_counter() - start))
        """Seconds of samples between two readings, at least."""

    @classmethod
    def of(cls, device: str, *, energy: bool = False) -> Self | None:
        """The one of a device; None if NVML does not know it."""
        board = Board.of(device)
        if board is None:
            return None
        import torch

        return cls(board, partial(torch.cuda.synchronize, torch.device(device)), energy=energy)

    def read(self, since: float) -> Clocked:
        """The clock and throttling now."""
        return Clocked(self._board.ask("nvmlDeviceGetClockInfo", _SM), self._board.throttles())

    def begin(self, call: Callable[[], object], calls: int) -> None:
        """Count the energy of consecutive calls, of which ``calls`` take a millisecond or more, between two counter
        changes."""
        changes, made, begun = [(self._board.millijoules(), 0, perf_counter())], 0, perf_counter()
        while self._energy and changes[0][0] is not None:
            start = perf_counter()
            for _ in range(calls):
                call()
            self._wait()
            now, made = perf_counter(), made + calls
            if (millijoules := self._board.millijoules()) != changes[-1][0]:
                changes.append((millijoules, made, now))
            (first, before, since), (last, after, until) = changes[min(1, len(changes) - 1)], changes[-1]
            if until - since >= max(COUNTED, 10 * min(TICK, now - start)):
                grown = (last or 0) - (first or 0)
                self.joules = grown / 1e3 / (after - before) if grown > 0 else None
                break
            if now - begun > max(10 * COUNTED, 4 * (now - start)):
                break
            calls *= 1 + (now - start < EVERY)
