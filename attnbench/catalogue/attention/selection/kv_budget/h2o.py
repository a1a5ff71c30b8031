"""H2O: keep the last keys and those with the most attention in the prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

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


@register(
    "h2o",
    family="learned pattern",
    source="Zhang et al. 2023, arXiv:2306.14048, section 4",
    formula="t ≥ P: oₜ = softmax_{j∈S, P≤j≤t}(qₜ·kⱼ/√D) vⱼ, S the last r keys and those of largest Σ_{i<P} pᵢⱼ",
    cost="O(n²·d)",
    memory_exponent=1.0,
    traits=replace(
        OF_ALL,
        heads_apart=False,
        own_form="evicts keys once, at the end of the prompt; the paper does so again after each further token",
    ),
    settings=("prompt=9,budget=5", "prompt=14,ratio=0.6,recent=0,normalise=true", "budget=4"),
)
class H2O(Evicting):
    """A cache cut once, by the attention that each key has got so far.

    Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models".
    q ``(B, H, N, D)``, k ``(B, K, N, D)`` and v ``(B, K, N, E)`` -> ``(B, H, N, E)``. The prompt of P tokens is
    answered by softmax attention. Then a key is worth the probability that all queries of the prompt give it together,
    the mean over the heads of queries that share it. The last ``recent`` keys stay in any case, and of the others the
    best, ``budget`` in all; what follows the prompt is added to them. No fused kernel tells these sums: the choice
    forms all probabilities once more, in O(P²·d) time and O(P) memory.

    Early keys are seen by more queries, which favours them. ``normalise`` divides by the number of queries that see a
    key.

    A whole sequence is a prompt, unless ``prompt`` says where that ends. Without causality it always is.

    Differs from the paper: keys are evicted once, at the end of the prompt, and not again after each further token;
    heads that share keys choose together.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        budget: Budget = None,
        ratio: Ratio = None,
        recent: Annotated[
            int | None, Field(ge=0, description="last tokens of the prompt that stay; none: half of those kept")
        ] = None,
        normalise: Annotated[bool, Field(description="divide by the number of queries that see a key")] = False,
        prompt: Prompt = None,
    ) -> None:
        super().__init__(shape, budget=budget, ratio=ratio, prompt=prompt)
        self.recent, self.normalise = recent, normalise

    def worth(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        worth = probabilities(q, k, real).sum(-2).mean(2)
        if self.normalise:
            for j in range(k.shape[2]):
                seeing = k.shape[2] - j if real is None else real[:, j:].sum(1).clamp(min=1)[:, None]
                worth[..., j] /= seeing
        return worth

    def observed(self, prompt: int) -> int:
        return prompt

    def always(self, kept: int) -> int:
        return kept // 2 if self.recent is None else self.recent

    def scores(self, q: Tensor, k: Tensor, real: Tensor | None) -> Tensor:
        worth = received(q, k, real).mean(2)
        if not self.normalise:
            return worth
        counted = torch.ones_like(worth[:, 0]) if real is None else real.to(worth.dtype)
        return worth / counted.flip(-1).cumsum(-1).flip(-1).clamp(min=1)[:, None]
