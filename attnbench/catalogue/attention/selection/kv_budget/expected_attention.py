"""Expected attention: keep the keys that queries like those of the prompt would attend to."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnbench.catalogue.attention.selection.kv_budget.evicted import Evicting
from attnbench.catalogue.attention.selection.kv_budget.prompt import OF_ALL
from attnbench.catalogue.engines.precision import accumulator, hidden
from attnbench.contract.variant import No, register


@register(
    "expected-attention",
    family="learned pattern",
    source="Devoto et al. 2025, arXiv:2510.00636; authors' code, expected_attention_press.py",
    formula="t ≥ P: oₜ = softmax_{j∈S, P≤j≤t}(qₜ·kⱼ/√D) vⱼ, S the keys of largest exp(kⱼ·μ/√D + kⱼᵀΣkⱼ/2D)·‖vⱼ‖",
    cost="O(n²·d)",
    memory_exponent=1.0,
    traits=replace(
        OF_ALL,
        heads_apart=False,
        v_dim=No("keys stay by the length of their whole values: no column of these is treated alone"),
    ),
    settings=("prompt=9,budget=5", "prompt=14,ratio=0.5", "budget=4"),
)
class ExpectedAttention(Evicting):
    """A cache cut once, by the attention of a normal query.

    Devoto et al. 2025, "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
    Distribution". q ``(B, H, N, D)``, k ``(B, K, N, D)`` and v ``(B, K, N, E)`` -> ``(B, H, N, E)``. The prompt of P
    tokens is answered by softmax attention. Queries to come are taken for normal, with the mean μ and the covariance Σ
    of those of the prompt, so that the expected exponential of a logit is exp(k·μ/√D + kᵀΣk/2D). A key is worth its
    share of these, times the length of its value; heads of queries that share keys choose together, by the mean of
    their shares. The ``budget`` keys of largest worth stay. The choice costs O(P·D²), and no probability is formed.

    A whole sequence is a prompt, unless ``prompt`` says where that ends. Without causality it always is.

    Differs from the authors' code: that turns mean and covariance by the mean rotation of the 512 places to come, and
    queries have no rotary positions here; there the first four tokens always stay, and count neither in mean and
    covariance nor in the shares.
    """

    def worth(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        (B, K, P, D), H = k.shape, q.shape[1]
        G, worth = H // K, k.new_zeros(B, K, P)
        for b in range(B):
            some = torch.arange(P, device=k.device) if real is None else real[b].nonzero()[:, 0]
            for h in range(K if len(some) else 0):
                keys, sizes = k[b, h, some], (v[b, h, some] ** 2).sum(-1) ** 0.5
                for g in range(G):
                    asked = q[b, h * G + g, some]
                    covariance = torch.cov(asked.mT, correction=0).view(D, D)
                    spread = torch.einsum("jd,de,je->j", keys, covariance, keys)
                    logits = keys @ asked.mean(0) / D**0.5 + spread / (2 * D)
                    worth[b, h, some] += logits.softmax(0) * sizes / G
        return worth

    def observed(self, prompt: int) -> int:
        return prompt

    def scores(self, q: Tensor, k: Tensor, real: Tensor | None) -> Tensor:
        dtype, D = accumulator(k.dtype), k.shape[3]
        asked, keys = torch.unflatten(q.to(dtype), 1, (k.shape[1], -1)), k.to(dtype)[:, :, None]
        there = asked.new_ones(1, asked.shape[3]) if real is None else real.to(dtype)
        weights = (there / there.sum(1, keepdim=True).clamp(min=1))[:, None, None, :, None]
        mean = (asked * weights).sum(3, keepdim=True)
        apart = asked - mean
        covariance = (apart * weights).mT @ apart
        logits = keys @ mean.mT * D**-0.5 + ((keys @ covariance) * keys).sum(-1, keepdim=True) / (2 * D)
        logits = logits[..., 0]
        if real is not None:
            logits = logits.masked_fill(~real[:, None, None], hidden(dtype))
        shares: Tensor = logits.softmax(-1).mean(2)
        return shares

    def weighed(self, scores: Tensor, v: Tensor) -> Tensor:
        size: Tensor = torch.linalg.vector_norm(v.to(scores.dtype), dim=-1)
        return scores * size
