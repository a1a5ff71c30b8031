"""KeyDiff: keep the keys that are least like the others."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from attnbench.catalogue.attention.selection.kv_budget.evicted import Evicting
from attnbench.catalogue.attention.selection.kv_budget.prompt import OF_ALL
from attnbench.catalogue.engines.precision import accumulator
from attnbench.contract.variant import register


@register(
    "keydiff",
    family="learned pattern",
    source="Park et al. 2025, arXiv:2504.15364, section 3",
    formula="t ≥ P: oₜ = softmax_{j∈S, P≤j≤t}(qₜ·kⱼ/√D) vⱼ, S the keys before P of smallest cos(kⱼ, Σᵢ kᵢ/‖kᵢ‖)",
    cost="O(n²·d)",
    memory_exponent=1.0,
    traits=OF_ALL,
    settings=("prompt=9,budget=5", "prompt=14,ratio=0.5", "budget=4"),
)
class KeyDiff(Evicting):
    """A cache cut once, down to the keys least like their mean.

    Park et al. 2025, "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
    Resource-Constrained Environments". q ``(B, H, N, D)``, k ``(B, K, N, D)`` and v ``(B, K, N, E)`` ->
    ``(B, H, N, E)``. The prompt of P tokens is answered by softmax attention. Then the ``budget`` keys stay whose
    cosine with the mean of all normalised keys is smallest. No query is looked at, and the choice costs O(P·d).

    A whole sequence is a prompt, unless ``prompt`` says where that ends. Without causality it always is.

    Differs from the paper: a prompt is read as a whole and cut once, where the paper also cuts between its blocks; no
    window of last tokens stays whatever its keys are.
    """

    def worth(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        units = [one / (one**2).sum(-1, keepdim=True) ** 0.5 for one in k.unbind(2)]
        counts = [k.new_ones(())] * k.shape[2] if real is None else real[..., None, None].unbind(1)
        mean = sum((one * count for one, count in zip(units, counts, strict=True)), torch.zeros_like(units[0]))
        cosines = [(one * mean).sum(-1) / (mean**2).sum(-1).clamp(min=1e-300) ** 0.5 for one in units]
        return -torch.stack(cosines, -1)

    def scores(self, q: Tensor, k: Tensor, real: Tensor | None) -> Tensor:
        # Padded keys are 0 here, and so add nothing to the sum; its length changes no cosine.
        units = normalize(k.to(accumulator(k.dtype)), dim=-1)
        anchor = normalize(units.sum(2, keepdim=True), dim=-1)
        return -(units * anchor).sum(-1)
