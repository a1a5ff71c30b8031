"""The bound of sparse attention: a choice by the exact probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench.catalogue.engines.decoding.kv_cache import Cache, CachedDecoding, last_row
from attnbench.catalogue.engines.gathered.choice import Choice
from attnbench.catalogue.engines.masks import added_to_logits, emptied, seeing, visible_pairs
from attnbench.catalogue.engines.precision import accumulator, hidden
from attnbench.contract.problem.position_bias import position_bias
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, Traits, register

_BLOCK = 256
"""Query rows whose probabilities are in memory at once."""


@register(
    "oracle-topk",
    family="reference",
    source="this project's reference line",
    formula="oᵢ = Σ_{j∈Tᵢ} pᵢⱼ·vⱼ / Σ_{j∈Tᵢ} pᵢⱼ, P = softmax(Q·Kᵀ/√D), Tᵢ the t keys of largest pᵢⱼ",
    cost="O(n²·d)",
    memory_exponent=2.0,
    traits=Traits(
        decode=True,
        bias=True,
        shares="query by query",
        permutable=True,
        exact_with=("keys={n}",),
        knob=Knob("keys"),
        given=(("renormalise=false", {"rows_sum_to_one": False}),),
    ),
    settings=("keys=3", "keys=3,renormalise=false"),
)
class OracleTopK(CachedDecoding, nn.Module):
    """Each query's most probable keys: reference line of sparse methods.

    q ``(B, H, N, D)``, k and v ``(B, H, M, D)`` -> ``(B, H, N, D)``. It knows the exact probabilities, in float32
    (float64 for float64), keeps the t = ``keys`` largest of each row and gives weight 0 to the others. Memory is O(n)
    forward, 256 rows at a time, and O(n²) where gradients are wanted.

    With ``renormalise`` the kept weights sum to 1, as in every method that takes a softmax over the keys it selected:
    it shows such a method that selects by probability and never errs. It is no lower bound: where attention is flat, a
    few renormalised keys are noise, worse than ``mean-value``. Without ``renormalise`` the matrix is the best one with
    t entries per row in the Frobenius norm, and so in the mean over white values.

    With ``renormalise`` it is the operator of ``topk``, which is Gupta et al.'s method at its real cost. Here the code
    is as plain as the definition, and its time says nothing about that method.

    t >= M gives exact attention. Ties are broken as ``torch.topk`` breaks them.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        keys: Annotated[int, Field(ge=1, description="keys kept for each query")] = 64,
        renormalise: Annotated[bool, Field(description="the kept probabilities are scaled to sum to 1")] = True,
    ) -> None:
        super().__init__()
        self.causal, self.capacity = shape.causal, shape.M
        self.position_bias = position_bias(shape)
        self.keys = keys
        self.renormalise = renormalise

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        logits = (q.double() @ k.double().mT) / math.sqrt(q.shape[-1])
        if self.position_bias is not None:
            logits = logits + self.position_bias(slice(0, q.shape[2]), slice(0, k.shape[2]), torch.float64)
        weights = logits.exp() * visible_pairs(q, k, self.causal, key_mask)
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        rows = []
        for row in weights.flatten(0, 2):
            kept = row * torch.zeros_like(row).index_fill(0, row.argsort(descending=True)[: self.keys], 1)
            rows.append(kept / kept.sum() if self.renormalise and row.any() else kept)
        return (torch.stack(rows).view_as(weights) @ v.double()).to(v.dtype)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        values = v.to(accumulator(q.dtype))
        blocks = [self._of_the_largest(logits, values) for logits in self._logits(q, k, key_mask)]
        output = torch.cat(blocks, 2).to(v.dtype)
        return output if key_mask is None else output.masked_fill(~seeing(key_mask, self.causal), 0)

    @property
    def selects(self) -> bool:
        return self.renormalise and self.position_bias is None

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, *, key_mask: Tensor | None = None) -> Choice:
        (k,) = emptied(key_mask, k)
        chosen = [self._largest(logits)[1].int() for logits in self._logits(q, k, key_mask)]
        return Choice(torch.cat(chosen, 2), q.shape[1], k.shape[2], causal=self.causal, real=key_mask)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: Choice) -> Tensor:
        return selection.attend(q, k, v)

    def _logits(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> Iterator[Tensor]:
        """Logits of some queries at a time, ``(B, H, n, M)``, hidden for unseen keys."""
        dtype = accumulator(q.dtype)
        N, M = q.shape[2], k.shape[2]
        k = k.to(dtype)
        padding = None if key_mask is None else added_to_logits(key_mask, dtype)[:, None, None]
        for start in range(0, N, _BLOCK):
            rows = q[:, :, start : start + _BLOCK].to(dtype) * q.shape[-1] ** -0.5
            logits = rows @ k.mT
            if self.position_bias is not None:
                logits = logits + self.position_bias(slice(start, start + rows.shape[2]), slice(0, M), dtype)
            if self.causal:
                future = torch.full((rows.shape[2], M), hidden(dtype), dtype=dtype, device=q.device).triu(start + 1)
                logits = logits + future
            if padding is not None:
                logits = logits + padding
            yield logits

    def _largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        kept, chosen = logits.softmax(-1).topk(min(self.keys, logits.shape[-1]), sorted=False)
        return kept, chosen

    def _of_the_largest(self, logits: Tensor, values: Tensor) -> Tensor:
        kept, chosen = self._largest(logits)
        if self.renormalise:
            kept = kept / kept.sum(-1, keepdim=True)
        return torch.matmul(torch.zeros_like(logits).scatter(-1, chosen, kept), values)

    def step(self, state: Cache, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Cache]:
        state = state.append(k, v)
        dtype = accumulator(q.dtype)
        logits = (q.to(dtype) * q.shape[-1] ** -0.5) @ state.keys.to(dtype).mT
        if self.position_bias is not None:
            logits = logits + last_row(self.position_bias, state.length, dtype)
        return self._of_the_largest(logits, state.values.to(dtype)).to(v.dtype), state
