"""Matrix products with keys that overlap, as those of neighbouring windows do, or have gaps between them.

torch's default library reads them where they are. oneDNN's products, which are those of float32 on a CPU wherever the
precision is not "highest", are given a copy of all of them: four to nine times the keys, for windows that overlap so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnbench.attention.blocks import large_steps
from attnbench.attention.default_library import DefaultLibrary
from attnbench.attention.precision import accumulator

_in_place = False


def read_in_place(wanted: bool) -> None:
    """Whether the default library multiplies such keys in this process, whatever multiplies others.

    It depends on the machine which is faster: see :func:`attnbench.measure.limits.windows_rate`.
    """
    global _in_place
    _in_place = wanted


def copied_by_products(q: Tensor) -> bool:
    """Whether such keys of queries like q are copied."""
    if large_steps(q) or accumulator(q.dtype) != torch.float32:
        return False
    # torch.compile can trace no change of library.
    return torch.compiler.is_compiling() or (not _in_place and torch.get_float32_matmul_precision() != "highest")


def side_by_side(own: Tensor) -> Tensor:
    """Keys ``(·, width, d)``, copied once without gaps where every product would copy them."""
    return own.contiguous() if copied_by_products(own) else own


def product(x: Tensor, own: Tensor, out: Tensor | None = None) -> Tensor:
    """``(·, a, c)`` of x ``(·, a, b)`` and own ``(·, b, c)``, which is read where it is if it may be."""
    dense = own.is_contiguous() or own.mT.is_contiguous()
    if dense or not _in_place or large_steps(own) or torch.compiler.is_compiling():
        return torch.bmm(x, own, out=out)
    with DefaultLibrary():
        return torch.bmm(x, own, out=out)
