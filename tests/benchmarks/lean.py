"""A plug-in: linear attention by as few calls of torch as will do, for one kind of input and without gradients.

`attnbench compare linear lean --plugin tests/benchmarks/lean.py --n 4096` says what generality costs the variant, and
beside a package how far these calls can go at all.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attnbench import register
from attnbench.shape import Shape
from attnbench.variant import No, Traits

_ROWS = 1024


@register(
    "lean",
    family="kernel",
    source="this project",
    formula="φ(q)ᵀ Σ φ(k)vᵀ / φ(q)ᵀ Σ φ(k),  φ(x) = elu(x) + 1",
    cost="O(n·d²)",
    traits=Traits(target="other", key_padding=No("it takes no mask")),
)
class Lean(nn.Module):
    """The operator ``linear``: one example in float32, without gradients."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        out = torch.empty_like(v[0], memory_format=torch.contiguous_format)
        H, n, D = out.shape
        phi, room = (out.new_empty(H, min(n, _ROWS), D) for _ in range(2))
        sums, ones = out.new_zeros(H, D, D), out.new_zeros(H, 1, D)
        for first in range(0, n, _ROWS):
            values = v[0, :, first : first + _ROWS]
            features = _features(k[0, :, first : first + _ROWS], phi)
            sums.baddbmm_(features.mT, room[:, : values.shape[1]].copy_(values))
            ones += features.sum(1, keepdim=True)
        for first in range(0, n, _ROWS):
            features = _features(q[0, :, first : first + _ROWS], phi)
            answer = torch.bmm(features, sums, out=out[:, first : first + _ROWS])
            answer.div_(features.mul_(ones).sum(-1, keepdim=True))
        return out[None]


def _features(x: Tensor, phi: Tensor) -> Tensor:
    out = phi[:, : x.shape[1]]
    torch.clamp(x, min=0.0, out=out).add_(1.0)
    torch.ops.aten.elu_backward.grad_input(out, 1.0, 1.0, 1.0, False, x, grad_input=out)
    return out
