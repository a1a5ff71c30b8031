"""The state of the process that measures: threads, allocator, matmul library, memory limit.

Fresh pages and the matmul library change CPU times by a factor of two to four, and winners, so a row states its
setting: ``tuned`` or ``as-shipped``.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Self

from attnbench.errors import UsageError
from attnbench.measure.allocator import keep_freed_memory
from attnbench.measure.machine import THREADS, address_space, available_memory_bytes
from attnbench.units import format_bytes

Process = Literal["tuned", "as-shipped"]
Library = Literal["default", "oneDNN"]
_PRECISION: dict[Library, str] = {"default": "highest", "oneDNN": "medium"}

_TURNS = 4
"""Turns of each library on windows: all of a single, short one may be disturbed."""


class Products(NamedTuple):
    """The libraries that multiply float32 matrices."""

    float32_products: Library = "default"
    window_products: Library = "default"
    """For products whose right matrices overlap. oneDNN copies these first; see
    :mod:`attnbench.catalogue.engines.products`."""

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Self:
        """The libraries in the facts of a process."""
        return cls(*(facts[name] for name in cls._fields))


_products = Products()
"""The libraries of this process, except for a cell that is better off with the default."""

END_OF_REQUEST = "\0end of request\n"
"""The worker's mark on stderr after an answer, by which the parent knows that it has read everything."""

LEAST_MEMORY = 256 * 2**20
"""Bytes of address space for torch's first calls: stacks, arenas, oneDNN's code, late imports. With half of it,
products and compilers fail whatever the variant is."""

_MEMORY_SHARE = 0.85
"""Share of the memory available at the start for a cell; the rest keeps the machine alive."""

_TOO_LITTLE = f"torch itself needs {format_bytes(LEAST_MEMORY)}"


def environment_for(threads: int) -> dict[str, str]:
    """Variables to set before torch is imported; those that change arithmetic stay as the user set them.

    Unless the user says otherwise, Triton caches its choice of kernels, so that a later process does not try all again.
    """
    # With these, fewer threads would work than torch and the row say.
    fewer = ("OMP_THREAD_LIMIT", "OMP_DYNAMIC", "OMP_MAX_ACTIVE_LEVELS")
    inherited = {name: text for name, text in os.environ.items() if name not in fewer}
    # The worker finds what this process finds, and nothing that just happens to lie in the current folder (-P).
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {"TRITON_CACHE_AUTOTUNING": "1", **inherited, **dict.fromkeys(THREADS, str(threads)), "PYTHONPATH": path}


def apply(
    process: Process, *, threads: int, device: str, products: Products | None = None
) -> tuple[Process, Products, list[str]]:
    """Set the process up; return its state, the libraries of float32 products, and notes on failures.

    ``tuned`` on the CPU: freed memory stays with the allocator, and float32 products use the faster library (but see
    :func:`choose_products`), for windows perhaps another one (:func:`window_library`). On CUDA convolutions and
    recurrent cells compute in true float32, as matrix products do anyway.

    ``products`` of another process or run are tried for their precision; None measures them. Raises UsageError if torch
    does not take so many threads.
    """
    global _products
    import torch

    from attnbench.catalogue.engines.products import is_onednn
    from attnbench.harness.inside import switches

    torch.set_num_threads(threads)
    if torch.get_num_threads() != threads:  # numbers of other threads would pass for those of these
        raise UsageError(f"torch computes with {torch.get_num_threads()} threads instead of {threads}; use --threads")
    if second := torch.device(device).index:  # events and Triton's kernels use the current GPU, whatever the tensors'
        torch.cuda.set_device(second)
    if process == "tuned" and device.startswith("cuda"):
        # As torch ships it, they round float32 to the 11 bits of TF32, alone among all that computes in float32.
        torch.backends.cudnn.allow_tf32 = False
        return "tuned", Products(), []
    if process == "as-shipped" or device != "cpu":
        # A plug-in may have chosen.
        return "as-shipped", Products("oneDNN", "oneDNN") if device == "cpu" and is_onednn() else Products(), []
    notes = []
    if not keep_freed_memory():
        notes.append(
            "the allocator cannot keep memory on this system: times hold page faults; use --process as-shipped"
        )
    if products is None:
        products, lost = faster_products()
    elif lost := "oneDNN" in products and not _is_true_float32("oneDNN"):
        products = Products()
    if lost:
        notes.append("float32 matmul stays with the default library: the faster one loses precision here")
    _products = products
    switches.chosen.clear()
    # Also where it is the default: the search for the faster library has left the other one's precision behind.
    for library in ("default", "oneDNN") if products.float32_products == "oneDNN" else ("default",):
        torch.set_float32_matmul_precision(_PRECISION[library])
        switches.chosen.add(switches.state_of(switches.PRODUCTS))
    return "tuned", products, notes


def window_library(process: Process, products: Products) -> AbstractContextManager[None]:
    """A context in which windows are multiplied by the library for them."""
    from attnbench.catalogue.engines.products import windows_in_place

    return windows_in_place(process == "tuned" and products.window_products == "default")


def faster_products() -> tuple[Products, bool]:
    """The faster libraries of float32 products, and whether oneDNN's were refused for their precision.

    torch's "medium" allows bfloat16 inside a product, which oneDNN uses on processors with AMX; on others its products
    are true float32. A comparison with a product in float64 decides.
    """
    import torch

    from attnbench.measure.limits import matmul_rate, windows_rate

    whole: dict[Library, float] = {}
    for library, precision in _PRECISION.items():
        torch.set_float32_matmul_precision(precision)
        if library != "default" and not _is_true_float32(library):
            return Products(), True
        whole[library] = matmul_rate("cpu", torch.float32, size=768, rounds=5)
    # Where both are about as fast, always take the same one, lest chance decide between two runs.
    if whole["default"] > 1.1 * whole["oneDNN"]:
        return Products(), False
    windows = dict.fromkeys(_PRECISION, 0.0)
    for _ in range(_TURNS):
        for library, precision in _PRECISION.items():
            torch.set_float32_matmul_precision(precision)
            windows[library] = max(windows[library], windows_rate(rounds=4))
    return Products("oneDNN", "oneDNN" if windows["oneDNN"] > 1.2 * windows["default"] else "default"), False


def _is_true_float32(library: Library) -> bool:
    """True if products of a library carry float32's precision; it stays in use."""
    import torch

    from attnbench.measure.limits import is_true_float32

    torch.set_float32_matmul_precision(_PRECISION[library])
    return is_true_float32()


def choose_products(*, of_one_row: bool) -> None:
    """Choose the library for the products of the next cell, if the process is tuned.

    For one row, a decoding step, oneDNN copies the whole matrix first: twelve times as slow as the default.
    """
    import torch

    if _products.float32_products == "oneDNN":
        torch.set_float32_matmul_precision(_PRECISION["default" if of_one_row else "oneDNN"])


def memory_limit(device: str, wanted: int | None = None) -> int | None:
    """Bytes that a cell may take: ``wanted``, else most of the free memory, and no more than ``ulimit -v`` leaves.

    On other devices than the CPU None unless wanted: their allocator refuses in time. Raises UsageError for less than
    torch itself needs.
    """
    if device != "cpu":
        return wanted
    available = available_memory_bytes()
    limit = wanted or (int(available * _MEMORY_SHARE) if available else None)
    if limit is not None and limit < LEAST_MEMORY:
        raise UsageError(f"memory limit {format_bytes(limit)}: {_TOO_LITTLE}; allow more")
    left = _address_space_left()
    return left if limit is None else limit if left is None else min(limit, left)


def limit_memory(extra_bytes: int | None) -> int | None:
    """Refuse allocations beyond the present ones plus ``extra_bytes``; return the bytes left.

    Those are fewer if ``ulimit -v`` leaves fewer, and None if nothing is limited. Not for CUDA processes: the driver
    maps far more than it uses. Raises UsageError if ``ulimit -v`` leaves less than torch itself needs.
    """
    if extra_bytes is None or sys.platform != "linux":
        return None
    left, used = _address_space_left(), address_space()
    if used is None:
        return None
    extra = extra_bytes if left is None else min(extra_bytes, left)
    size = used + extra
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    return extra


def allowed_address_space() -> int | None:
    """Bytes of ``ulimit -v``; None without a limit."""
    if sys.platform != "linux":
        return None
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if allowed == resource.RLIM_INFINITY else allowed


def _address_space_left() -> int | None:
    """Bytes below ``ulimit -v``, None without a limit; raise UsageError for less than torch itself needs."""
    allowed = allowed_address_space()
    if allowed is None:
        return None
    left = max(0, allowed - (address_space() or 0))
    if left < LEAST_MEMORY:
        raise UsageError(f"ulimit -v leaves {format_bytes(left)} for a cell: {_TOO_LITTLE}; raise it")
    return left
