"""The state of the process that measures: threads, allocator, matmul library, memory limit.

Fresh pages and the choice of matmul library move CPU times by a factor of two to four and change winners, so a row says
which of two settings it was measured in: ``tuned`` or ``as-shipped``.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal, NamedTuple

Process = Literal["tuned", "as-shipped"]
Library = Literal["default", "oneDNN"]
_PRECISION: dict[Library, str] = {"default": "highest", "oneDNN": "medium"}
"""torch's switch for each library of float32 products."""

_TURNS = 4
"""Of each library with windows: a turn is so short that all of it may be disturbed."""


class Products(NamedTuple):
    """The libraries that multiply float32 matrices."""

    float32_products: Library = "default"
    window_products: Library = "default"
    """Where the right matrices overlap, which oneDNN copies first: see :mod:`attnbench.attention.default_library`."""


_products = Products()
"""What this process uses but for a cell that is better off with the default."""

END_OF_REQUEST = "\0end of request\n"
"""What the worker writes to stderr when it has answered, for the parent to know that it has read everything."""

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # mallopt(3)
_DEFAULT_TRIM_THRESHOLD, _DEFAULT_MMAP_MAX = 128 * 1024, 65536


def environment_for(threads: int) -> dict[str, str]:
    """Variables that must be set before torch is imported."""
    count = str(threads)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    # The worker finds what this process finds, and nothing because it happens to lie in the current folder (-P).
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**os.environ, **dict.fromkeys(names, count), "PYTHONPATH": path}


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory, so that a call does not pay for page faults again; False without glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))


@contextmanager
def freed_memory_returned(wanted: bool) -> Iterator[None]:
    """As shipped for a while, inside the tuned process: every large tensor is given back when it is freed.

    An allocator that keeps memory may hold a large tensor's place twice, which near the limit is once too often.
    """
    if not wanted:
        yield
        return
    return_freed_memory()
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_MAX, _DEFAULT_MMAP_MAX)
    mallopt(_M_TRIM_THRESHOLD, _DEFAULT_TRIM_THRESHOLD)
    try:
        yield
    finally:
        keep_freed_memory()


def return_freed_memory() -> None:
    """Give memory that the allocator kept back to the system, between cells."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def apply(
    process: Process, *, threads: int, device: str, products: Products | None = None
) -> tuple[Process, Products, list[str]]:
    """Set the process up; returns what could be had, the libraries of float32 products, and what could not be had.

    ``tuned`` on the CPU: freed memory stays with the allocator, and float32 products use the faster library (but see
    :func:`choose_products`), which for windows may be another one.

    Args:
        products: what another process of the same run found to be faster; measured where None.
    """
    global _products
    import torch

    torch.set_num_threads(threads)
    if process == "as-shipped" or device != "cpu":
        return "as-shipped", Products(), []
    notes = []
    if not keep_freed_memory():
        notes.append(
            "the allocator cannot keep memory on this system: times hold page faults; use --process as-shipped"
        )
    if products is None:
        products, lost = faster_products()
        if lost:
            notes.append("float32 matmul stays with the default library: the faster one loses precision here")
    from attnbench.attention.default_library import read_in_place

    _products = products
    read_in_place(products.window_products == "default")
    # Also where it is the default: looking for the faster library has left the other one's precision behind.
    torch.set_float32_matmul_precision(_PRECISION[products.float32_products])
    return "tuned", products, notes


def faster_products() -> tuple[Products, bool]:
    """The libraries that multiply float32 matrices faster, and whether oneDNN's were refused for their precision.

    torch calls its switch "medium" since it allows bfloat16 inside a product, which is what oneDNN uses on processors
    with AMX; on others its products are true float32. A product against float64 tells.
    """
    import torch

    from attnbench.measure.limits import is_true_float32, matmul_rate, windows_rate

    whole: dict[Library, float] = {}
    for library, precision in _PRECISION.items():
        torch.set_float32_matmul_precision(precision)
        if library != "default" and not is_true_float32():
            return Products(), True
        whole[library] = matmul_rate("cpu", torch.float32, size=768, rounds=5)
    # Where they are about as fast, always the same one, lest chance decide between two runs.
    if whole["default"] > 1.1 * whole["oneDNN"]:
        return Products(), False
    windows = dict.fromkeys(_PRECISION, 0.0)
    for _ in range(_TURNS):
        for library, precision in _PRECISION.items():
            torch.set_float32_matmul_precision(precision)
            windows[library] = max(windows[library], windows_rate(rounds=4))
    return Products("oneDNN", "oneDNN" if windows["oneDNN"] > 1.2 * windows["default"] else "default"), False


def choose_products(*, of_one_row: bool) -> None:
    """The library for the products of the next cell; does nothing unless the process is tuned.

    For one row, a decoding step, oneDNN first copies the whole matrix: twelve times as slow as the default library.
    """
    import torch

    if _products.float32_products == "oneDNN":
        torch.set_float32_matmul_precision(_PRECISION["default" if of_one_row else "oneDNN"])


def limit_memory(extra_bytes: int | None) -> bool:
    """Refuse allocations beyond what the process has now plus ``extra_bytes``; False where that is impossible.

    Not for CUDA processes: the driver maps far more address space than it uses.
    """
    if extra_bytes is None or sys.platform != "linux":
        return False
    import resource

    with open("/proc/self/statm") as file:  # noqa: PTH123  # a kernel interface, not a file of ours
        pages = int(file.read().split()[0])
    size = pages * resource.getpagesize() + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    return True
