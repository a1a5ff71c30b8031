"""Float32 products on a CPU that torch's default library computes better than the other library of the process.

That other library is oneDNN, which multiplies wherever the precision is not "highest". It is faster for large dense
matrices only. Matrices that overlap or have gaps between them are copied for it: for windows, four to nine times the
keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch
from torch import Tensor

from attnbench.engines.precision import accumulator

_SMALL = 1 << 21
"""Multiplications in a product up to which the 10 to 20 µs that oneDNN takes to start outweigh all else."""

_in_place: ContextVar[bool] = ContextVar("windows_in_place", default=False)


@contextmanager
def windows_in_place(wanted: bool) -> Iterator[None]:
    """Inside, the default library multiplies what oneDNN would copy first, whatever multiplies the rest.

    Which is faster depends on the machine. The process that measures finds out and stays inside all its life.
    """
    before = _in_place.set(wanted)
    try:
        yield
    finally:
        _in_place.reset(before)


class DefaultLibrary:
    """Products inside go to torch's default library. A class, since a generator would add 1 µs to each product."""

    __slots__ = ("_precision",)

    def __enter__(self) -> None:
        self._precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")

    def __exit__(self, *_: object) -> None:
        torch.set_float32_matmul_precision(self._precision)


def copied_by_products(x: Tensor) -> bool:
    """Whether a product copies x if x has gaps or overlaps."""
    if torch.compiler.is_compiling():  # it cannot trace a change of library
        return _two_libraries(x)
    return not _in_place.get() and torch.get_float32_matmul_precision() != "highest" and _two_libraries(x)


def without_copies(x: Tensor) -> AbstractContextManager[None]:
    """The context for products with x: the default library, which reads it in place, if it has gaps or overlaps."""
    dense = x.is_contiguous() or x.mT.is_contiguous()
    return DefaultLibrary() if not dense and _has_a_choice(x) and _in_place.get() else nullcontext()


def side_by_side(own: Tensor) -> Tensor:
    """Keys ``(·, width, d)``, copied once without gaps where every product would copy them."""
    return own.contiguous() if copied_by_products(own) else own


def product(x: Tensor, own: Tensor, out: Tensor | None = None) -> Tensor:
    """``(·, a, c)`` from x ``(·, a, b)`` and own ``(·, b, c)``, which is read in place where that is wanted."""
    with without_copies(own):
        return torch.bmm(x, own, out=out)


def for_small_products(x: Tensor, multiplications: int) -> AbstractContextManager[None]:
    """The context for products with x: the default library for few multiplications, else the one in use."""
    return DefaultLibrary() if multiplications <= _SMALL and _has_a_choice(x) else nullcontext()


def small_bmm(x: Tensor, y: Tensor) -> Tensor:
    """``(·, a, c)`` from x ``(·, a, b)`` and y ``(·, b, c)``, which may be few and small."""
    with for_small_products(x, x.numel() * y.shape[2]):
        return torch.bmm(x, y)


def _has_a_choice(x: Tensor) -> bool:
    return not torch.compiler.is_compiling() and _two_libraries(x)


def _two_libraries(x: Tensor) -> bool:
    """Whether oneDNN may multiply x. On a GPU the precision, which chooses the library here, means something else."""
    return x.device.type == "cpu" and accumulator(x.dtype) == torch.float32


def writes_gaps() -> bool:
    """Whether a product can be written into matrices with gaps between them at no cost.

    oneDNN can. Torch's default library then multiplies one at a time and takes half as long again; torch.compile
    refuses.
    """
    return not torch.compiler.is_compiling() and torch.get_float32_matmul_precision() != "highest"
