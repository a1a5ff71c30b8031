"""Traces of a cell in the process that the next cell would find.

A busy thread, another default dtype or a replaced softmax would silently change the next cell's numbers. A row states
each difference, and the next cell starts in a fresh process.
"""

from __future__ import annotations

import concurrent.futures.thread
import os
import sys
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, process_time, sleep
from types import FrameType
from typing import Any

import torch

from attnbench.harness.inside.switches import read_settings
from attnbench.measure.reuse import Recent
from attnbench.text import quantity
from attnbench.units import format_bytes

KEPT = 64 * 2**20
"""Bytes that a cell may leave resident: small tables, and what torch's libraries keep after their first calls."""
KEPT_PER_MODULE = 2**18
"""Bytes more for each module that was imported meanwhile: torch.compile brings a thousand."""
OPEN = 32
"""Files that a cell may leave open, and all cells of a process together."""
KEPT_BY_ALL = 4 * KEPT
"""Bytes that all cells of a process together may leave resident."""
GRACE = 0.05
"""Seconds that a thread may still take to end."""

_TASKS = Path("/proc/self/task")
_POOLED = concurrent.futures.thread._worker.__code__
_TORCH = str(Path(torch.__file__).parent)
_OWN_VARIABLES = ("TORCHINDUCTOR_", "KINETO_", "TEARDOWN_CUPTI", "TRITON_", "PYTORCH_", "CUDA_MODULE_LOADING")
"""Prefixes of variables that torch sets for itself when a part of it is first used."""


_WATCHED: tuple[Any, ...] = (
    torch,
    torch.Tensor,
    torch.autograd,
    torch.linalg,
    torch.nn.functional,
    torch.special,
)
_MODULES = [one for one in vars(torch.nn).values() if isinstance(one, type) and issubclass(one, torch.nn.Module)]
_CALLED = [
    (f"torch.nn.{place.__name__}.{method}", place, method)
    for place in sorted(_MODULES, key=lambda one: len(one.__mro__))  # Module first, and Linear before its subclasses
    for method in ("__call__", "_call_impl", "forward")
]
"""Methods through which modules of torch.nn are called; one may be put into a class that inherits it."""
_COMPILER = tuple(f"{_TORCH}/{name}" for name in ("_compile.py", "_dynamo", "_functorch", "_inductor"))

_OF_THE_COMPILER = "_TORCHINDUCTOR_"
"""Prefix of variables in which torch keeps addresses of its functions for the kernels that it loads."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of the process between two cells, taken in some milliseconds. Memory in bytes."""

    settings: Mapping[str, object]
    variables: Mapping[str, str]
    functions: Mapping[str, object]
    """Contents of the modules that variants are made of, by name."""
    threads: frozenset[int]
    files: int
    computed: float
    """Seconds that other threads than torch's have computed, on a CPU."""
    busy: bool
    """True if another thread computes, one without Python included."""
    modules: int
    resident: int

    @classmethod
    def take(cls, device: str, of_torch: Collection[str] = (), since: Snapshot | None = None) -> Snapshot:
        """The state now, for cells on ``device``. Threads ``of_torch`` compute for its calls alone, and spin a while
        behind each, which is not waited for. Others are not watched if they have computed nothing ``since``."""
        known = {*of_torch, str(threading.get_native_id())}
        computed = 0.0 if device.startswith("cuda") else _seconds_computed(known)
        idle = computed == 0 or (since is not None and abs(computed - since.computed) < GRACE / 50)
        return cls(
            settings=read_settings(),
            variables={name: value for name, value in os.environ.items() if not name.startswith(_OF_THE_COMPILER)},
            functions=functions(),
            threads=_threads(),
            computed=computed,
            busy=not idle and _is_busy(known),
            files=_open_files(),
            modules=len(sys.modules),
            resident=_resident(device),
        )

    def left_since(self, before: Snapshot) -> str:
        """The differences from ``before``, as words after "the cell"; empty without any."""
        changed = self.changed_since(before)
        if variables := _set(self.variables, before.variables):
            changed.append(f"{_some(variables)} in the environment")
        if functions := self.replaced_since(before):
            changed.append(_some(functions))
        threads = self.threads_since(before) or "1 thread" * (self.busy and not before.busy)
        left = [threads] if threads else []
        if self.files - before.files > OPEN:
            left.append(f"{self.files - before.files} open files")
        if kept := self.kept_since(before, KEPT):
            left.append(kept)
        said = [f"changed {_and(changed)}"] * bool(changed) + [f"left {_and(left)} behind"] * bool(left)
        return " and ".join(said)

    def changed_since(self, before: Snapshot) -> list[str]:
        """The words for settings that have changed."""
        return [words for words, value in self.settings.items() if value != before.settings[words]]

    def threads_since(self, before: Snapshot) -> str:
        """The number and the names of the threads of Python that still run; empty without any."""
        threads = _still_running(self.threads - before.threads)
        return f"{quantity(len(threads), 'thread')} ({_some(_names(threads))})" if threads else ""

    def kept_since(self, before: Snapshot, allowed: int) -> str:
        """Memory that stayed, in words; empty if ``allowed`` and :data:`KEPT_PER_MODULE` cover it."""
        kept = self.resident - before.resident
        more = allowed + KEPT_PER_MODULE * max(0, self.modules - before.modules)
        return f"{format_bytes(kept)} of memory" if kept > more else ""

    def kept_by_all_since(self, first: Snapshot) -> str:
        """Memory that stayed since the process began, in words; empty if it is little."""
        files = self.files - first.files
        return self.kept_since(first, KEPT_BY_ALL) or (f"{files} open files" if files > OPEN else "")

    def replaced_since(self, before: Snapshot) -> list[str]:
        """Names of replaced or removed functions; torch.compile replaces some by its own."""
        now = self.functions
        names = [name for name, value in before.functions.items() if now.get(name) != value]
        names = [name for name in names if not _file_of(now.get(name)).startswith(_COMPILER)]
        # A class that inherits a replaced method is not told again.
        first = {(id(before.functions[name]), id(now.get(name))): name for name in reversed(names)}
        return [name for name in names if name in first.values()]


def functions() -> dict[str, object]:
    """The functions of :data:`_WATCHED`, and :data:`_CALLED`, by name: libraries patch them there."""
    found = dict[str, object]()
    for place in _WATCHED:
        # One that is put into a class may hide one that it inherits.
        inside = {name: getattr(place, name, None) for name in dir(place)} if isinstance(place, type) else vars(place)
        found |= {f"{place.__name__}.{name}": one for name, one in inside.items() if callable(one)}
    return found | {name: getattr(place, method, None) for name, place, method in _CALLED}


def _file_of(function: object) -> str:
    code = getattr(function, "__code__", None)
    return str(code.co_filename) if code else ""


def _resident(device: str) -> int:
    """Resident bytes of this process, or bytes of the GPU if ``device`` is one, without caches and pages of
    libraries."""
    if device.startswith("cuda"):
        torch._C._cuda_clearCublasWorkspaces()  # those of a stream on which a graph was captured, say
        return int(torch.cuda.memory_allocated(torch.device(device))) - Recent.held("cuda")
    with suppress(OSError), open("/proc/self/statm") as file:  # noqa: PTH123  # a kernel interface, not a file of ours
        _, resident, shared, *_ = map(int, file.read().split())
        return (resident - shared) * os.sysconf("SC_PAGE_SIZE") - Recent.held("cpu")
    return 0


def _open_files() -> int:
    with suppress(OSError):
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # a kernel interface, and only their number counts
    return 0


def threads_of_torch() -> frozenset[str]:
    """Numbers of all threads of the process, once torch has started its own; none if the system does not tell them."""
    torch.zeros(2**15 * torch.get_num_threads(), dtype=torch.uint8).add_(1)  # large enough for all of them
    with suppress(OSError):
        return frozenset(one.name for one in _TASKS.iterdir())
    return frozenset()


def _is_busy(known: Collection[str]) -> bool:
    """True if a thread that is not ``known`` computes, for longer than torch's threads spin before they sleep."""
    before, deadline = _seconds_computed(known), monotonic() + GRACE
    while before:
        sleep(GRACE / 5)  # torch's threads may hold both cores for as long
        now = _seconds_computed(known)
        if now - before < GRACE / 50:
            return False
        if monotonic() > deadline:
            return True
        before = now
    return False


def _seconds_computed(known: Collection[str]) -> float:
    """Processor time of the threads that are not ``known``; of all if the system does not tell, or one ends now."""
    try:
        others = [one for one in _TASKS.iterdir() if one.name not in known]
        computed = sum(int((one / "schedstat").read_bytes().split()[0]) for one in others) / 1e9
    except (OSError, IndexError):
        return process_time()
    return computed or process_time() * bool(others)  # a kernel that does not tell says 0


def _threads() -> frozenset[int]:
    return frozenset(thread for thread, frame in sys._current_frames().items() if not _is_at_rest(frame))


def _is_at_rest(frame: FrameType) -> bool:
    if frame.f_code is _POOLED:
        return True
    while frame.f_back is not None and frame.f_back.f_code.co_filename != threading.__file__:
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(_TORCH)


def _still_running(threads: frozenset[int]) -> frozenset[int]:
    deadline = monotonic() + GRACE
    while (left := threads & _threads()) and monotonic() < deadline:
        sleep(GRACE / 10)
    return left


def _names(threads: frozenset[int]) -> list[str]:
    known = {thread.ident: thread.name for thread in threading.enumerate()}
    return sorted(known.get(thread, "unnamed") for thread in threads)


def _set(now: Mapping[str, str], before: Mapping[str, str]) -> list[str]:
    own = {name for name in now.keys() - before.keys() if name.startswith(_OWN_VARIABLES)}
    return sorted(name for name in {*now, *before} - own if now.get(name) != before.get(name))


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _and(parts: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))
