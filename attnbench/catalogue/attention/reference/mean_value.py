"""The trivial approximation: every query gets the mean."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnbench.catalogue.engines.masks import emptied, visible_pairs
from attnbench.catalogue.engines.precision import accumulator
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Traits, register


class Mean(NamedTuple):
    """The state of decoding."""

    total: Tensor
    """Sum of their values ``(B, H, 1, D)``."""
    tokens: int


@register(
    "mean-value",
    family="reference",
    source="this project's reference line",
    formula="oᵢ = (1/|Sᵢ|)·Σ_{j∈Sᵢ} vⱼ, Sᵢ the keys that query i may see",
    cost="O(n·d)",
    memory_exponent=1.0,
    traits=Traits(meets="state", decode=True, shares="query by query", permutable=True),
)
class MeanValue(nn.Module):
    """Every row is the mean of the visible values: the trivial answer.

    v ``(B, H, M, D)`` -> ``(B, H, N, D)``; only the shape of q is read, and k not at all. An approximation with a
    larger error than this one gets nothing out of q and k. For independent Gaussian logits of standard deviation σ,
    this error is about √(1 - exp(-σ²)). Sums are float32 (float64 for float64).

    Causal: row i is the mean of the first i + 1 values. Otherwise all rows are a single row in memory, expanded. A
    query that sees no key gives 0.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.causal = shape.causal

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Equal weights for the keys that each query may see, as a matrix ``(B, 1, N, M)``."""
        seen = visible_pairs(q, v, self.causal, key_mask).to(v.dtype)
        return torch.matmul(seen / seen.sum(-1, keepdim=True).clamp(min=1), v)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        sums = accumulator(v.dtype)
        (v,) = emptied(key_mask, v)
        if not self.causal:
            if key_mask is None:
                mean = v.mean(2, keepdim=True, dtype=sums)
            else:
                mean = v.sum(2, keepdim=True, dtype=sums) / key_mask.sum(1).clamp_(min=1)[:, None, None, None]
            return mean.to(v.dtype).expand(-1, -1, q.shape[2], -1)
        if key_mask is None:
            count = torch.arange(1, v.shape[2] + 1, device=v.device)[:, None]
        else:
            count = key_mask.cumsum(1).clamp_(min=1)[:, None, :, None]
        return v.to(sums).cumsum(2).div_(count).to(v.dtype)  # gradients are added up in float32 as well

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Mean:
        return Mean(v.sum(2, keepdim=True, dtype=accumulator(v.dtype)), v.shape[2])

    def step(self, state: Mean, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Mean]:
        state = Mean(state.total + v, state.tokens + 1)
        return (state.total / state.tokens).to(v.dtype), state
