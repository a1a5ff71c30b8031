"""SnapKV: keep the keys that the end of the prompt attends to, with their neighbours."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import avg_pool1d

from attnbench.catalogue.attention.selection.kv_budget.evicted import Evicting
from attnbench.catalogue.attention.selection.kv_budget.prompt import (
    OF_ALL,
    Budget,
    Prompt,
    Ratio,
    probabilities,
    received,
)
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import register
from attnbench.errors import UsageError


@register(
    "snapkv",
    family="learned pattern",
    source="Li et al. 2024, arXiv:2404.14469, section 4",
    formula="t ≥ P: oₜ = softmax_{j∈S, P≤j≤t}(qₜ·kⱼ/√D) vⱼ, S the last w keys and the best by Σ_{P-w≤i<P} pᵢⱼ",
    cost="O(n²·d)",
    memory_exponent=1.0,
    traits=replace(OF_ALL, heads_apart=False),
    settings=("prompt=9,budget=5,window=2,pool=3", "prompt=14,ratio=0.5,window=3,pool=1", "budget=4"),
)
class SnapKV(Evicting):
    """A cache cut once, by the attention of the last queries of the prompt.

    Li et al. 2024, "SnapKV: LLM Knows What You Are Looking For Before Generation". q ``(B, H, N, D)``,
    k ``(B, K, N, D)`` and v ``(B, K, N, E)`` -> ``(B, H, N, E)``. The prompt of P tokens is answered by softmax
    attention. Then a key j is worth the probability that the last w = ``window`` queries of the prompt give it, the
    mean over these and over the heads of queries that share it, smoothed by a mean over ``pool`` neighbours. The last w
    keys stay in any case, and of the others the best, ``budget`` in all; what follows the prompt is added to them. The
    choice costs O(w·P·d) and a step O((budget + r)·d) after r others. A window of 32 and a pool of 5 are this project's
    choice.

    A whole sequence is a prompt, unless ``prompt`` says where that ends. Without causality it always is.

    Differs from the authors' code: heads that share keys choose together, by the mean of their probabilities, where
    theirs repeats the keys, and each head chooses. The mean over ``pool`` scores, in which what lies outside counts as
    0, is the default there; their published runs take the maximum of seven.

    Raises:
        UsageError: ``pool`` is even, or ``budget`` and ``ratio`` are both given.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        budget: Budget = None,
        ratio: Ratio = None,
        window: Annotated[int, Field(ge=1, description="last tokens of the prompt, which choose and stay")] = 32,
        pool: Annotated[int, Field(ge=1, description="neighbouring keys whose scores are averaged, an odd number")] = 5,
        prompt: Prompt = None,
    ) -> None:
        super().__init__(shape, budget=budget, ratio=ratio, prompt=prompt)
        if pool % 2 == 0:
            raise UsageError(f"pool must be odd, so that it has a middle, got {pool}; write pool={pool + 1}")
        self.window, self.pool = window, pool

    def worth(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        P = k.shape[2]
        weights = probabilities(q, k, real)
        worth = weights[..., max(0, P - self.window) :, :].sum(-2).mean(2)
        prefix, side = max(0, P - self.window), self.pool // 2
        pooled = torch.zeros_like(worth)
        for j in range(prefix):
            pooled[..., j] = worth[..., max(0, j - side) : min(prefix, j + side + 1)].sum(-1) / self.pool
        return pooled

    def observed(self, prompt: int) -> int:
        return min(prompt, self.window)

    def always(self, kept: int) -> int:
        return self.window

    def scores(self, q: Tensor, k: Tensor, real: Tensor | None) -> Tensor:
        worth = received(q, k, real).mean(2)
        prefix = k.shape[2] - q.shape[2]
        if not prefix:
            return worth
        pooled = avg_pool1d(worth[..., :prefix], self.pool, stride=1, padding=self.pool // 2)
        return torch.cat((pooled, torch.zeros_like(worth[..., prefix:])), -1)
