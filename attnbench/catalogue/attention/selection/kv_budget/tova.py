"""TOVA: keep the keys that the last query of the prompt attends to."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from attnbench.catalogue.attention.selection.kv_budget.evicted import Evicting
from attnbench.catalogue.attention.selection.kv_budget.prompt import OF_ALL, probabilities, received
from attnbench.contract.variant import register


@register(
    "tova",
    family="learned pattern",
    source="Oren et al. 2024, arXiv:2401.06104, section 3",
    formula="t ≥ P: oₜ = softmax_{j∈S, P≤j≤t}(qₜ·kⱼ/√D) vⱼ, S the keys of largest Σ_heads p_{P-1,j}",
    cost="O(n²·d)",
    memory_exponent=1.0,
    traits=replace(
        OF_ALL,
        heads_apart=False,
        own_form="evicts keys once, at the end of the prompt; the paper does so again after each further token",
    ),
    settings=("prompt=9,budget=5", "prompt=14,ratio=0.5", "budget=4"),
)
class Tova(Evicting):
    """A cache cut once, by the attention of the prompt's last query.

    Oren et al. 2024, "Transformers are Multi-State RNNs": token omission via attention. q ``(B, H, N, D)``,
    k ``(B, K, N, D)`` and v ``(B, K, N, E)`` -> ``(B, H, N, E)``. The prompt of P tokens is answered by softmax
    attention. Then a token is worth the probability that the prompt's last query gives it, the mean over all heads, so
    that all heads keep the same tokens. The last token stays in any case, and of the others the best, ``budget`` in
    all; what follows the prompt is added to them. The choice costs O(P·d).

    A whole sequence is a prompt, unless ``prompt`` says where that ends. Without causality it always is.

    Differs from the paper: tokens are omitted once, at the end of the prompt, and not again after each further token;
    the last one is never omitted.
    """

    def worth(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        weights = probabilities(q, k, real)
        return weights[..., -1, :].mean((1, 2))[:, None]

    def observed(self, prompt: int) -> int:
        return min(prompt, 1)

    def always(self, kept: int) -> int:
        return 1

    def scores(self, q: Tensor, k: Tensor, real: Tensor | None) -> Tensor:
        return received(q, k, real).mean((1, 2))[:, None]
