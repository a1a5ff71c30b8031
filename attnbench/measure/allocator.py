"""Control what glibc's allocator does with freed memory.

Memory that it gives back costs a page fault for each 4 KiB when it is taken again: a call on tensors of a few MiB may
take three times as long. Their return depends on the earlier allocations of the process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # mallopt(3)
_DEFAULT_TRIM_THRESHOLD, _DEFAULT_MMAP_MAX = 128 * 1024, 65536
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
"""Bytes: the end of glibc's threshold, which rises to the size of each tensor that is freed."""


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory, so that a call does not pay for page faults again; False without glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep freed memory in this block, with glibc; afterwards it works as it does once large tensors were freed."""
    kept = keep_freed_memory()
    try:
        yield
    finally:
        if kept:
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_M_MMAP_MAX, _DEFAULT_MMAP_MAX)
            mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
            mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST_MMAP_THRESHOLD)
            return_freed_memory()


@contextmanager
def freed_memory_returned(wanted: bool) -> Iterator[None]:
    """Use the default allocator in this block of the tuned process: it gives large tensors back when freed.

    One that keeps memory may hold a large tensor's place twice, too much near the limit.
    """
    if not wanted or not keep_freed_memory():
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
    """Return to the system the memory that the allocator kept, between cells."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
