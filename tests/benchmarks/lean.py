"""A plug-in: linear attention by as few calls of torch as will do, for one kind of input.

`attnbench compare linear lean --plugin tests/benchmarks/lean.py --n 4096` says what generality costs the variant, and
beside a package how far these calls can go at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from attnbench import register
from attnbench.catalogue.attention.kernel.linear import EluPlusOne
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import No, Traits

_ROWS = 1024
_PHI = EluPlusOne(0)  # what it is told is the width of tiles, which it does not make here


@register(
    "lean",
    family="kernel",
    source="this project",
    formula="φ(q)ᵀ Σ φ(k)vᵀ / φ(q)ᵀ Σ φ(k),  φ(x) = elu(x) + 1",
    cost="O(n·d²)",
    traits=Traits(target="other", key_padding=No("it takes no mask")),
)
class Lean(nn.Module):
    """The operator ``linear``: one example in float32, forward or forward and backward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return _Lean.apply(q, k, v)  # type: ignore[no-any-return, no-untyped-call]  # untyped in torch


class _Lean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        H, n, D = out.shape[1:]
        room = out.new_empty(2, H, min(n, _ROWS), D)
        sums, ones, divisors = out.new_zeros(H, D, D), out.new_zeros(H, 1, D), out.new_empty(H, n, 1)
        for (x, values), phi in _tiles(room[0], k, v):
            _PHI.queries(x, phi)
            sums.baddbmm_(phi.mT, room[1, :, : x.shape[1]].copy_(values))
            ones += phi.sum(1, keepdim=True)
        for (x, answer, divisor), phi in _tiles(room[0], q, out, divisors[None]):
            _PHI.queries(x, phi)
            torch.bmm(phi, sums, out=answer)
            answer.div_(torch.sum(phi.mul_(ones), -1, keepdim=True, out=divisor))
        ctx.save_for_backward(q, k, v, out, sums, ones, divisors)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, sums, ones, divisors = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        d_sums, d_ones = torch.zeros_like(sums), torch.zeros_like(ones)
        room = out.new_empty(3, *out.shape[1:2], min(out.shape[2], _ROWS), out.shape[3])
        columns = sums.mT.contiguous()
        for (x, upper, answer, divisor, dx), phi in _tiles(room[0], q, grad, out, divisors[None], dq):
            d_phi, above = room[1:, :, : x.shape[1]]
            _PHI.queries(x, phi)
            torch.div(upper, divisor, out=above)
            below = torch.linalg.vecdot(above, answer)[..., None].neg_()
            torch.bmm(above, columns, out=d_phi).addcmul_(below, ones)
            d_sums.baddbmm_(phi.mT, above)
            d_ones.baddbmm_(below.mT, phi)
            torch.mul(phi.clamp_(max=1.0), d_phi, out=dx)
        columns = d_sums.mT.contiguous()
        for (x, values, dx, d_values), phi in _tiles(room[0], k, v, dk, dv):
            d_phi, own = room[1:, :, : x.shape[1]]
            _PHI.queries(x, phi)
            torch.bmm(own.copy_(values), columns, out=d_phi).add_(d_ones)
            torch.bmm(phi, d_sums, out=d_values)
            torch.mul(phi.clamp_(max=1.0), d_phi, out=dx)
        return dq, dk, dv


def _tiles(room: Tensor, *tensors: Tensor) -> Iterator[tuple[list[Tensor], Tensor]]:
    """The same tokens of ``(1, H, n, ·)`` tensors, and memory for their features."""
    for first in range(0, tensors[0].shape[2], _ROWS):
        parts = [x[0, :, first : first + _ROWS] for x in tensors]
        yield parts, room[:, : parts[0].shape[1]]
