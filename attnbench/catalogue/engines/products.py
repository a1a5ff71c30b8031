"""Matrix products, each by the faster library of the process.

On a CPU, torch's default library multiplies float32 matrices, or oneDNN if torch may round them. oneDNN is faster for
large dense matrices only: it takes a while to start, and copies right matrices that overlap or have gaps between
them: for windows, four to nine times the keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch
from torch import Tensor

from attnbench.contract.compiled import on_cpu

_SMALL = 1 << 21
"""Multiplications in a product up to which oneDNN's start, 10 to 20 µs, outweighs all else."""

_AS_IT_IS = nullcontext()

_LIBRARY = "mkldnn", "matmul"
"""The switch. Other names for it raise if two of them were set."""

_in_place: ContextVar[bool] = ContextVar("windows_in_place", default=False)


@contextmanager
def windows_in_place(wanted: bool) -> Iterator[None]:
    """Inside, the default library multiplies what oneDNN would copy first, whatever multiplies the rest.

    The faster of the two depends on the machine: the measuring process probes once and stays inside all its life.
    """
    before = _in_place.set(wanted)
    try:
        yield
    finally:
        _in_place.reset(before)


def bmm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``(·, n, m)`` from a ``(·, n, c)`` and b ``(·, c, m)``."""
    with best_for(a, b):
        return torch.bmm(a, b, out=out)


def best_for(a: Tensor, b: Tensor) -> AbstractContextManager[None]:
    """The context for products as large as a·b with right matrices in memory like b, if :func:`bmm` does not do."""
    if torch.compiler.is_compiling():
        return nullcontext()
    if not _has_a_choice(b):
        return _AS_IT_IS
    gaps = _in_place.get() and not (b.is_contiguous() or b.mT.is_contiguous())
    return _DefaultLibrary() if gaps or a.numel() * b.shape[2] <= _SMALL else _AS_IT_IS


def copies(x: Tensor) -> bool:
    """Return True if a product copies right matrices like x, which overlap or have gaps between them."""
    if torch.compiler.is_compiling():  # it cannot trace a change of library
        return _may_choose(x)
    return not _in_place.get() and _has_a_choice(x)


def laid_out(x: Tensor, room: Tensor | None = None) -> Tensor:
    """x for several products: copied once, without gaps, into ``room`` if given, if each of them would copy it."""
    if x.is_contiguous() or not copies(x):
        return x
    return x.contiguous() if room is None else room.view(-1)[: x.numel()].view(x.shape).copy_(x)


def writes_gaps() -> bool:
    """Return True if a product can be written into matrices with gaps between them at no cost, as by oneDNN.

    Torch's default library then multiplies one at a time and takes half as long again; torch.compile refuses.
    """
    return not torch.compiler.is_compiling() and is_onednn()


class _DefaultLibrary:
    """Inside, products go to torch's default library. A class, since a generator would add 1 µs to each product."""

    __slots__ = ("_precision",)

    def __enter__(self) -> None:
        self._precision = torch._C._get_fp32_precision_getter(*_LIBRARY)
        torch._C._set_fp32_precision_setter(*_LIBRARY, "ieee")

    def __exit__(self, *_: object) -> None:
        torch._C._set_fp32_precision_setter(*_LIBRARY, self._precision)


def is_onednn() -> bool:
    """Return True if torch's switches have oneDNN multiply float32 matrices on a CPU."""
    return torch._C._get_fp32_precision_getter(*_LIBRARY) not in ("ieee", "none")


def _has_a_choice(x: Tensor) -> bool:
    return is_onednn() and _may_choose(x)


def _may_choose(x: Tensor) -> bool:
    """Return True if oneDNN may multiply x. On a GPU the switch, a precision, means something else."""
    return x.dtype != torch.float64 and on_cpu(x.device)
