"""What sparse attention would give if it knew the exact probabilities."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench.shape import Shape
from attnbench.variant import Traits, register

_BLOCK = 256
"""Query rows whose probabilities are in memory at once."""


@register(
    "oracle-topk",
    family="reference",
    source="this project's reference line",
    formula="oᵢ = Σ_{j∈Tᵢ} pᵢⱼ·vⱼ / Σ_{j∈Tᵢ} pᵢⱼ, P = softmax(Q·Kᵀ/√D), Tᵢ the keys largest pᵢⱼ",
    cost="O(n²·d)",
    time_exponent=2.0,
    memory_exponent=2.0,
    traits=Traits(target="softmax", causal=True, cross=True, key_padding=True),
    settings=("keys=3", "keys=3,renormalise=false"),
)
class OracleTopK(nn.Module):
    """Keeps each query's most probable keys: the line for sparse methods.

    q ``(B, H, N, D)``, k and v ``(B, H, M, D)`` -> ``(B, H, N, D)``. Knows the exact probabilities, in float32 (float64
    for float64), keeps the ``keys`` largest of each row and gives weight 0 to the others. Memory is O(n) forward,
    ``_BLOCK`` rows at a time, and O(n²) where gradients are wanted.

    With ``renormalise`` the kept weights sum to 1, as in every method that takes a softmax over the keys it selected:
    this is what such a method gives that selects by probability and never errs. It is no lower bound: where attention
    is flat, a few renormalised keys are noise, worse than ``mean-value``. Without it the matrix is the best one with
    ``keys`` entries per row in the Frobenius norm, and so in the mean over white values.

    ``keys`` >= M gives exact attention. Keys of equal probability are chosen as ``torch.topk`` does.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        keys: Annotated[int, Field(ge=1, description="keys kept for each query")] = 64,
        renormalise: Annotated[bool, Field(description="the kept probabilities are scaled to sum to 1")] = True,
    ) -> None:
        super().__init__()
        self.causal = shape.causal
        self.keys = keys
        self.renormalise = renormalise

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        N, M = q.shape[2], k.shape[2]
        k, values = k.to(dtype), v.to(dtype)
        hidden = torch.finfo(dtype).min / 4
        bias = None
        if key_mask is not None:
            bias = torch.zeros_like(key_mask, dtype=dtype).masked_fill_(~key_mask, hidden)[:, None, None]
        blocks = []
        for start in range(0, N, _BLOCK):
            rows = q[:, :, start : start + _BLOCK].to(dtype) * q.shape[-1] ** -0.5
            logits = rows @ k.mT
            if self.causal:
                future = torch.full((rows.shape[2], M), hidden, dtype=dtype, device=q.device).triu(start + 1)
                logits = logits + future
            if bias is not None:
                logits = logits + bias
            kept, chosen = logits.softmax(-1).topk(min(self.keys, M), sorted=False)
            if self.renormalise:
                kept = kept / kept.sum(-1, keepdim=True)
            blocks.append(torch.zeros_like(logits).scatter(-1, chosen, kept) @ values)
        output = torch.cat(blocks, 2).to(v.dtype)
        if key_mask is None:
            return output
        seen = key_mask.cumsum(1) > 0 if self.causal else key_mask.any(1, keepdim=True)
        return output.masked_fill(~seen[:, None, :, None], 0)
