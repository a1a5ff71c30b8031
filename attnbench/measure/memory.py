"""The memory of one call: exact tensor bytes on the CPU and CUDA, and on Linux also resident memory.

Never measured in the same pass as time, since the profiler and the allocator's counters cost time.
"""

from __future__ import annotations

import gc
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import _enable_profiler
from torch._C._profiler import RecordScope
from torch.autograd.profiler import profile  # torch.profiler's imports torch's compiler, for a second

from attnbench.errors import said
from attnbench.measure.cgroup import text_of
from attnbench.measure.machine import address_space
from attnbench.units import format_bytes

_OUT_OF_MEMORY = re.compile(
    "out of memory|(can't|cannot|unable to) allocate|not enough memory|bad_alloc|CUBLAS_STATUS_ALLOC_FAILED", re.I
)
_WANTED = re.compile(r"allocate (\d+(?:\.\d+)?) ?(bytes|[KMGT]iB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_NEAR = 2**26
"""Bytes left below the limit at which any failure counts as lack of memory."""
UNSURE = 2**26
"""Bytes of resident memory that libraries may take in their first calls."""
_VAGUE = (TypeError, SystemError, RuntimeError, OSError)
"""Errors of libraries that do not check whether they got their memory."""
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def out_of_memory(error: BaseException) -> str | None:
    """An error's words on lack of memory, or its cause's: ``needs another 512 MiB``; None for any other error."""
    found = next((text for one in _chain(error) if (text := _memory_wanted(one)) is not None), None)
    if found is None and isinstance(error, _VAGUE) and _near_the_limit():
        return f"ran out of memory ({type(error).__name__})"
    return found


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def _memory_wanted(error: BaseException) -> str | None:
    text = said(error)
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if not known and not (isinstance(error, RuntimeError | OSError | SystemError) and _OUT_OF_MEMORY.search(text)):
        return None
    wanted = _WANTED.search(text)
    return f"needs another {format_bytes(float(wanted[1]) * _UNITS[wanted[2]])}" if wanted else "ran out of memory"


def _near_the_limit() -> bool:
    if sys.platform != "linux":
        return False
    limit, used = resource.getrlimit(resource.RLIMIT_AS)[0], address_space()
    return limit != resource.RLIM_INFINITY and used is not None and limit - used < _NEAR


class _Allocations(profile):
    """torch's profiler without its events of operators, which take most of its time."""

    def _start_trace(self) -> None:
        config = self.config()  # type: ignore[no-untyped-call]  # torch types little of this class
        # Operators have another scope; allocations have none, and are told in any case.
        _enable_profiler(config, self.kineto_activities, {RecordScope.USER_SCOPE})  # type: ignore[call-arg]


def profiled(call: Callable[[], object], profiler: profile) -> list[Any]:
    """The profiler's events of one call, with its result alive at the end."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler writes to stderr that it starts and stops
    with profiler as recorded:
        result = call()
    assert recorded.kineto_results is not None
    del result
    return list(recorded.kineto_results.events())


def peak_tensor_bytes(call: Callable[[], object], device: str = "cpu") -> int | None:
    """Most bytes that tensors made by ``call`` held at once, above what existed before; its result counts."""
    found = tensor_bytes(call, device)
    return None if found is None else found[0]


def tensor_bytes(call: Callable[[], object], device: str = "cpu") -> tuple[int, int] | None:
    """Most bytes that tensors made by ``call`` held at once, and their bytes behind it, its result included.

    On the CPU exact to the byte, from the profiler's allocation events (allocations inside MKL or by other Python
    threads are not seen). On CUDA the allocator's own peak of requested bytes, or of allocated ones if it is CUDA's.
    None on devices without either.
    """
    gc.collect()
    if device.startswith("cuda"):
        return _cuda_bytes(call, device)
    if device != "cpu":
        return None
    seen = profiled(call, _Allocations(use_kineto=True, profile_memory=True))
    events = sorted((one for one in seen if one.name() == "[memory]"), key=lambda event: event.start_ns())
    held = peak = 0
    for event in events:
        held += event.nbytes()
        peak = max(peak, held)
    return peak, held


def state_bytes(state: object) -> int:
    """Bytes of all tensors in a decoding state: a tensor, a number, or a tuple of such, which may say it by itself."""
    if isinstance(state, torch.Tensor):
        return state.nbytes
    if hasattr(state, "held_bytes"):
        return int(state.held_bytes())
    return sum(state_bytes(part) for part in state) if isinstance(state, tuple | list) else 0


def _multiply(device: str) -> None:
    few = torch.ones(8, 8, device=device)
    torch.mm(few, few)


def _cuda_bytes(call: Callable[[], object], device: str) -> tuple[int, int]:
    _multiply(device)  # cuBLAS keeps memory of its own from its first product on, which is no call's
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    # With cudaMallocAsync, torch knows no requested bytes and gives 0 for them.
    kind = "requested" if torch.cuda.get_allocator_backend() == "native" else "allocated"
    before = torch.cuda.memory_stats(device)[f"{kind}_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    torch.cuda.synchronize(device)
    now = torch.cuda.memory_stats(device)
    del result
    return int(now[f"{kind}_bytes.all.peak"] - before), int(now[f"{kind}_bytes.all.current"] - before)


def peak_resident_bytes(call: Callable[[], object]) -> int | None:
    """Rise of the process's resident high-water mark during ``call``; None if the kernel does not say.

    Trust it from :data:`UNSURE` up and after a first, warming call. Where the allocator keeps freed memory (the
    ``tuned`` process), only pages returned before are seen, since a call reuses pages that are resident already.
    """
    gc.collect()  # memory freed during the call would hide memory that the call takes
    before: int | None = None
    with suppress(OSError):
        _CLEAR_REFS.write_text("5")  # 5 resets VmHWM; ru_maxrss would start at the parent's peak
        before = _status_kib("VmRSS")
    result = call()
    del result
    peak = _status_kib("VmHWM")
    return None if before is None or peak is None else (peak - before) * 1024


def _status_kib(field: str) -> int | None:
    for line in text_of(_STATUS).splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    return None
