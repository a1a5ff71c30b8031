"""How much memory one call takes: exact tensor bytes on every device, resident memory beside it on Linux.

Never in the same pass as timing: both the profiler and the allocator's counters cost time.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch.autograd.profiler import profile  # torch.profiler's imports torch's compiler, for a second

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def peak_tensor_bytes(call: Callable[[], object], device: str = "cpu") -> int | None:
    """Most bytes that tensors made by ``call`` held at once, above what existed before; its result counts.

    On the CPU exact to the byte, from the profiler's allocation events (allocations inside MKL or by other Python
    threads are not seen). On CUDA the allocator's own peak of requested bytes. None on devices without either.
    """
    gc.collect()
    if device.startswith("cuda"):
        return _cuda_peak(call, device)
    if device != "cpu":
        return None
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler writes to stderr that it starts and stops
    with profile(use_kineto=True, profile_memory=True) as recorded:
        result = call()  # held, so that the output is alive at the end
    assert recorded.kineto_results is not None
    del result
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    held = peak = 0
    for event in events:
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def state_bytes(state: object) -> int:
    """Bytes of all tensors in a decoding state: a tensor, a number, or a tuple of such."""
    if isinstance(state, torch.Tensor):
        return state.nbytes
    return sum(state_bytes(part) for part in state) if isinstance(state, tuple | list) else 0


def _cuda_peak(call: Callable[[], object], device: str) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.memory_stats(device)["requested_bytes.all.peak"]
    del result
    return int(peak - before)


def peak_resident_bytes(call: Callable[[], object]) -> int | None:
    """Rise of the process's resident high-water mark during ``call``; None where the kernel does not tell.

    Trust it from 64 MiB up and after a first, warming call. Meaningless when the allocator keeps freed memory
    (the ``tuned`` process), where a call reuses pages that are resident already.
    """
    gc.collect()  # what would be freed during the call would hide what the call takes
    try:
        _CLEAR_REFS.write_text("5")  # 5 resets VmHWM; ru_maxrss would start at the parent's peak
        before = _status_kib("VmRSS")
        result = call()
        del result
        return (_status_kib("VmHWM") - before) * 1024
    except (OSError, LookupError):
        return None


def _status_kib(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise LookupError(field)
