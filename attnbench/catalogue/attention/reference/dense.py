"""A layer without attention that multiplies as often as one with it."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import gelu

from attnbench.catalogue.engines.masks import emptied
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import No, Traits, register


@register(
    "dense",
    kind="mixer",
    family="reference",
    source="this project's reference line",
    formula="y_i = W₂ GELU(W₁ x_i + b₁) + b₂,  W₁ ∈ ℝ^((2C+N)×C)",
    cost="O(n²·d + n·d²)",
    memory_exponent=2.0,
    traits=Traits(
        target="other",
        meets="nothing",
        cross=No("each token is mapped by itself; there is no second sequence"),
        bias=No("there are no pairs of tokens that a bias could belong to"),
        stochastic=True,
        rows_sum_to_one=False,
        decode=True,
        permutable=True,
    ),
    settings=("hidden=5",),
)
class DenseLayer(nn.Module):
    """Each token through a layer of equal FLOPs; no token sees another.

    The worth of the multiplications of attention where they are not spent on it. A layer of softmax attention over N
    tokens takes 8NC² multiplications and additions for its four projections and 4N²C for the products with keys and
    values. A feed-forward layer of ``hidden`` units takes 4NC·hidden: with 2C + N units, N that of the shape, as many.
    x is ``(B, N, C)`` and so is the output; GELU is the erf form. Neither causality nor padding changes anything, and
    decoding keeps nothing.

    W₁ is drawn from N(0, 1/C), W₂ from N(0, 1/hidden); the biases are 0.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        hidden: Annotated[int | None, Field(ge=1, description="hidden units of a token; none: 2·C + N")] = None,
    ) -> None:
        super().__init__()
        C, F = shape.C, hidden or 2 * shape.C + shape.N
        self.W1, self.b1 = nn.Parameter(torch.randn(F, C) * C**-0.5), nn.Parameter(torch.zeros(F))
        self.W2, self.b2 = nn.Parameter(torch.randn(C, F) * F**-0.5), nn.Parameter(torch.zeros(C))

    def dense(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        units = torch.einsum("bnc,fc->bnf", x, self.W1) + self.b1
        units = units * (1 + torch.erf(units * 0.5**0.5)) / 2
        return torch.einsum("bnf,cf->bnc", units, self.W2) + self.b2

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        units = gelu(nn.functional.linear(x, self.W1, self.b1))
        return nn.functional.linear(units, self.W2, self.b2)

    def begin(self, x: Tensor) -> tuple[()]:
        return ()

    def step(self, state: tuple[()], x: Tensor) -> tuple[Tensor, tuple[()]]:
        return self.forward(x), state
