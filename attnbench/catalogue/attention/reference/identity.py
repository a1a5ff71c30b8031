"""The operator that does nothing: no attention can be faster."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attnbench.catalogue.engines.masks import emptied
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import No, Traits, register


@register(
    "identity",
    family="reference",
    source="this project's reference line",
    formula="O = V",
    cost="O(1)",
    memory_exponent=0.0,
    traits=Traits(
        target="other",
        meets="nothing",
        cross=No("returns the values, one per query, so that M must equal N"),
        decode=True,
        permutable=True,
    ),
)
class Identity(nn.Module):
    """Returns V: the upper bound on speed.

    Each token attends only to itself. v ``(B, H, N, D)`` is returned without a copy; q and k are not read. With a key
    mask, the rows of padded tokens, which see no key, are 0, and the result is a new tensor.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        matrix = torch.eye(v.shape[2], dtype=v.dtype, device=v.device).expand(v.shape[0], 1, -1, -1)
        if key_mask is not None:
            matrix = matrix * key_mask[:, None, :, None]
        return torch.matmul(matrix, v)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return emptied(key_mask, v)[0]

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[()]:
        return ()

    def step(self, state: tuple[()], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, tuple[()]]:
        return v, state
