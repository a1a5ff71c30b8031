"""The stopwatch of a CUDA device, bound before anything foreign is imported, as in :mod:`stopwatch`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.cuda import Event, get_device_properties, synchronize


class CudaEvents:
    """Device time between two events around each call, with the L2 cache flushed before each.

    Nothing waits between the calls: the host queues the next one while the device still works, as it does in a model.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        size = get_device_properties(self._device).L2_cache_size
        self._flush = torch.empty(2 * max(size, 1 << 20), dtype=torch.uint8, device=self._device)

    def flush(self) -> None:
        """Empty the L2 cache, by one kernel."""
        self._flush.zero_()

    def cost(self) -> float:
        return 5e-7  # the resolution of an event, by CUDA's documentation of cudaEventElapsedTime

    def time(self, call: Callable[[], object], calls: int) -> tuple[float, int]:
        events = [(Event(enable_timing=True), Event(enable_timing=True)) for _ in range(calls)]  # type: ignore[no-untyped-call]  # torch leaves it so
        synchronize(self._device)
        for start, end in events:
            self._flush.zero_()
            start.record()
            call()
            end.record()
        synchronize(self._device)
        return sum(start.elapsed_time(end) for start, end in events) / 1e3, 0
