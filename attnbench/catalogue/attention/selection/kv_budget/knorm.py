"""Knorm: keep the keys of the smallest norm."""

from __future__ import annotations

from torch import Tensor
from torch.linalg import vector_norm

from attnbench.catalogue.attention.selection.kv_budget.evicted import Evicting
from attnbench.catalogue.attention.selection.kv_budget.prompt import OF_ALL
from attnbench.catalogue.engines.precision import accumulator
from attnbench.contract.variant import register


@register(
    "knorm",
    family="learned pattern",
    source="Devoto et al. 2024, arXiv:2406.11430, section 3",
    formula="t ≥ P: oₜ = softmax_{j∈S, P≤j≤t}(qₜ·kⱼ/√D) vⱼ, S the keys before P of smallest ‖kⱼ‖",
    cost="O(n²·d)",
    memory_exponent=1.0,
    traits=OF_ALL,
    settings=("prompt=9,budget=5", "prompt=14,ratio=0.5", "budget=4"),
)
class Knorm(Evicting):
    """A cache cut once, down to the keys of the smallest norm.

    Devoto et al. 2024, "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression". q ``(B, H, N, D)``,
    k ``(B, K, N, D)`` and v ``(B, K, N, E)`` -> ``(B, H, N, E)``. The prompt of P tokens is answered by softmax
    attention. Then the ``budget`` keys of the smallest Euclidean norm stay: in trained models these are the ones that
    get attention, sinks above all. No query is looked at, and the choice costs O(P·d). On random keys it is the worst
    choice, since a short key has logits near 0.

    A whole sequence is a prompt, unless ``prompt`` says where that ends. Without causality it always is.

    Differs from the paper: there the first layers of a model keep all; here a layer knows of no other.
    """

    def worth(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        norms: Tensor = (k**2).sum(-1) ** 0.5
        return -norms

    def scores(self, q: Tensor, k: Tensor, real: Tensor | None) -> Tensor:
        norms: Tensor = vector_norm(k, dim=-1, dtype=accumulator(k.dtype))
        return -norms
