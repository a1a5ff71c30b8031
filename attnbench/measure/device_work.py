"""The time and number of a call's kernels on a GPU, by torch's profiler."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from torch._C._autograd import DeviceType
from torch.autograd.profiler import profile

from attnbench.measure.memory import profiled

_CALLS, _SECONDS = 5, 0.5
"""Most calls that are looked at, and most seconds."""


class DeviceKernel(NamedTuple):
    """A kernel, copy or fill that the device ran. Times in nanoseconds."""

    start: int
    name: str
    duration: int


class Work(NamedTuple):
    """The work of one call on the device."""

    seconds: float
    kernels: float


def kernels_of(call: Callable[[], object]) -> list[DeviceKernel]:
    """All that the device does in one call, in any order."""
    # torch's own way where graphs are replayed: CUPTI does not survive to be torn down between two profiles.
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    seen: list[Any] = profiled(call, profile(use_device="cuda", use_kineto=True, use_cpu=False))
    return [
        DeviceKernel(one.start_ns(), one.name(), one.duration_ns())
        for one in seen
        if one.device_type() == DeviceType.CUDA and not one.is_user_annotation()
    ]


def device_work(
    call: Callable[[], object],
    flush: Callable[[], object],
    seconds: float,
    *,
    look: Callable[[Callable[[], object]], list[DeviceKernel]] = kernels_of,
) -> Work | None:
    """The device's work in a call, with the cache flushed before it as in the timing; None if unknown.

    ``flush`` empties the cache by one kernel, longer than others of its name; ``seconds`` is a call's time.
    """
    calls = max(1, min(_CALLS, int(_SECONDS / seconds)))

    def several() -> None:
        for _ in range(calls):
            flush()
            call()

    seen: list[DeviceKernel] = []
    with suppress(RuntimeError):  # a driver that lets nobody count
        seen = look(several)
    if not seen:
        return None
    first = min(seen).name
    flushes = sorted((one.duration for one in seen if one.name == first), reverse=True)[:calls]
    spent = sum(one.duration for one in seen) - sum(flushes)
    return Work(spent / calls / 1e9, (len(seen) - len(flushes)) / calls)
