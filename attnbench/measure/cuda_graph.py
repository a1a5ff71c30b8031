"""A call as a CUDA graph: the device repeats all of its kernels without waiting for the host to start each.

Functions of torch are bound before anything foreign is imported, as in :mod:`stopwatch`.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.cuda import CUDAGraph, Stream, current_stream, graph, set_stream, stream, synchronize

_TORCH = str(Path(torch.__file__).parent)
Call = Callable[[], Any]


class NotCaptured(Exception):
    """A call cannot be captured; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A call that was captured."""

    again: Callable[[], object]
    output: Any

    def __call__(self) -> Any:
        self.again()
        return self.output


@cache
def _side_stream(device: torch.device) -> Stream:
    """One stream for all cells: torch keeps memory for each stream that multiplied something."""
    return Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it so


class CudaRecorder:
    """Captures on a side stream of one device, with one pool of memory for all of its graphs."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._outer, self._side = current_stream(self._device), _side_stream(self._device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm(self, call: Call) -> None:
        """Make the call where it will be captured, to prepare everything that is done once."""
        self._side.wait_stream(self._outer)
        with stream(self._side):
            call()
        self._outer.wait_stream(self._side)
        synchronize(self._device)

    def capture(self, call: Call) -> Replay:
        """Record the work that the call gives the device."""
        made = CUDAGraph()
        with torch.cuda.device(self._device), graph(made, pool=self._pool, stream=self._side):
            output = call()
        return Replay(made.replay, output)

    def recover(self) -> None:
        """Restore the device after a failed capture; raise RuntimeError if it is lost."""
        set_stream(self._outer)  # torch leaves the side stream current where a capture cannot be ended
        index = self._outer.device_index
        with suppress(Exception):  # newer versions of torch have done it
            torch._C._cuda_endAllocateToPool(index, self._pool)
        numbers = torch.cuda.default_generators[index]
        numbers.graphsafe_set_state(numbers.clone_state())  # a capture that cannot be ended would keep the old state
        synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        if self._keeps_memory():  # older versions of torch never release the pool of such a capture
            torch._C._cuda_releasePool(index, self._pool)
            torch.cuda.empty_cache()

    def _keeps_memory(self) -> bool:
        """True if the pool holds memory of no tensor, unlike one that can be freed."""
        parts = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]  # torch leaves it so
        return any(one.get("segment_pool_id") == self._pool and not one["active_size"] for one in parts)


def captured(calls: Sequence[Call], recorder: CudaRecorder) -> list[Replay]:
    """The calls as graphs, each of which writes into the same tensors whenever it is replayed.

    Raises NotCaptured if a call cannot be captured, with the device as before; RuntimeError if it is lost.
    """
    replays, why = list[Replay](), ""
    try:
        for call in calls:
            recorder.warm(call)
        for call in calls:
            replays.append(recorder.capture(call))
    except Exception as error:
        why = _reason(error)
    if why:
        replays.clear()
        recorder.recover()
        raise NotCaptured(why)
    return replays


def _reason(error: BaseException) -> str:
    while error.__context__ is not None:  # ending a capture that is broken raises once more
        error = error.__context__
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(_TORCH)]
    own = [one for one in frames if one.filename != __file__]
    return text + (f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else "")
