"""A plug-in of variants that do a known number of equal steps."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench import register
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import No, Traits


@register(
    "known-work",
    family="reference",
    source="this project",
    formula="v",
    cost="O(steps)",
    traits=Traits(
        target="other",
        causal=No("it sees nothing"),
        key_padding=No("it takes no mask"),
        cross=No("it returns the values, one per query"),
        permutable=True,
    ),
)
class KnownWork(nn.Module):
    """The same small product ``steps`` times; the output is the values."""

    def __init__(
        self, shape: Shape, *, steps: Annotated[int, Field(ge=1, description="products of 128 × 128 matrices")] = 100
    ) -> None:
        super().__init__()
        self.steps = steps
        self.register_buffer("a", torch.randn(128, 128))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        out = torch.empty_like(self.a)  # of this call: what another made may belong to another mode
        for _ in range(self.steps):
            torch.mm(self.a, self.a, out=out)
        return v.clone()
