"""Compiled code within a count of FLOPs: the dispatcher does not see what it does, so that it says so itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

_booked: list[list[tuple[str, int]]] = []
"""Of each count or prediction in progress: kernels and FLOPs of what ran out of the dispatcher's sight."""


def out_of_sight(
    call: Callable[[], Tensor], *, like: Tensor, kernel: str, matmul_flops: int, backward_flops: int = 0
) -> Tensor:
    """Run compiled code, which under a dispatch mode would not be compiled, and book what it does.

    Args:
        call: runs it.
        like: a tensor with the shape and type of what it returns; where this is a fake one, nothing runs.
        kernel: its name in the results.
        matmul_flops: what it multiplies and adds in matrix products, all of which it does out of sight.
        backward_flops: the same of its backward pass, booked each time that one runs.
    """
    _book(kernel, matmul_flops)
    if isinstance(like, FakeTensor):
        return torch.empty_like(like)
    if not _booked:
        output = call()
    else:
        with _disable_current_modes():
            output = call()
    if backward_flops and output.requires_grad:
        output.register_hook(lambda _: _book(kernel, backward_flops))  # type: ignore[no-untyped-call]  # torch leaves it so
    return output


def _book(kernel: str, matmul_flops: int) -> None:
    for entries in _booked:
        entries.append((kernel, matmul_flops))


@contextmanager
def books() -> Iterator[list[tuple[str, int]]]:
    """Collect kernels and FLOPs that :func:`out_of_sight` books in the meantime."""
    entries: list[tuple[str, int]] = []
    _booked.append(entries)
    try:
        yield entries
    finally:
        _booked.pop()
