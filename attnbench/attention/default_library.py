"""Float32 products on a CPU for which torch's default library is the better one, where the process has another.

oneDNN, which multiplies wherever the precision is not "highest", is the faster one for large dense matrices alone.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from attnbench.attention.precision import accumulator

_SMALL = 1 << 21
"""Multiplications of a product up to which the 10 to 20 µs that oneDNN takes before the first of them decide."""


class DefaultLibrary:
    """Products inside are those of torch's default library. A class, since a generator would add 1 µs to a product."""

    __slots__ = ("_precision",)

    def __enter__(self) -> None:
        self._precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")

    def __exit__(self, *_: object) -> None:
        torch.set_float32_matmul_precision(self._precision)


def for_small_products(x: Tensor, multiplications: int) -> AbstractContextManager[None]:
    """The default library where x is multiplied with so few multiplications, else what the process has.

    torch.compile can trace no change of library, and on a GPU the precision is another matter.
    """
    if torch.compiler.is_compiling() or x.device.type != "cpu" or accumulator(x.dtype) != torch.float32:
        return nullcontext()
    return DefaultLibrary() if multiplications <= _SMALL else nullcontext()


def small_bmm(x: Tensor, y: Tensor) -> Tensor:
    """``(·, a, c)`` of x ``(·, a, b)`` and y ``(·, b, c)``, which may be few and small."""
    with for_small_products(x, x.numel() * y.shape[2]):
        return torch.bmm(x, y)
