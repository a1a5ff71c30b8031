"""Row-wise weight normalisation: each row of weights divided by its Euclidean length."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench.catalogue.engines.decoding.kv_cache import Cache, CachedDecoding
from attnbench.catalogue.engines.masks import added_to_logits, emptied, seeing, visible_pairs
from attnbench.catalogue.engines.precision import accumulator, hidden
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import No, Traits, register


@register(
    "rwwn",
    family="reference",
    source="an article about the Performer; no such step is in its paper, Choromanski et al. 2021, arXiv:2009.14794",
    formula="O = (W / ‖W‖ row by row)·V,  W = exp(Q·Kᵀ/√D)",
    cost="O(n²·d)",
    memory_exponent=2.0,
    traits=Traits(
        target="other",
        meets="all keys",
        decode=True,
        permutable=True,
        rows_sum_to_one=False,
        bias=No("what it normalises are the weights of q and k alone"),
        given=(("norm=sum", {"target": "softmax", "exact": True, "rows_sum_to_one": True}),),
    ),
    settings=("", "norm=sum"),
)
class RowWiseWeightNormalisation(CachedDecoding, nn.Module):
    """Rows of length one in place of rows of sum one.

    An article ascribes "row-wise weight normalisation" (RWWN) to the Performer. The Performer's paper has no such step:
    it divides each row of weights by its sum, as all attention does. Here the words are taken at their
    word: the exponentials of a row are divided by its Euclidean length. q ``(B, H, N, D)``, k and v
    ``(B, H, M, D)`` -> ``(B, H, N, D)``. A row that is flat over m keys then sums to √m, so that outputs grow with the
    number of keys that count. ``norm=sum`` divides by the sum, and is softmax attention.

    The N × M matrix is in memory.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        norm: Annotated[
            Literal["length", "sum"], Field(description="what a row is divided by; sum gives softmax attention")
        ] = "length",
    ) -> None:
        super().__init__()
        self.causal, self.capacity, self.by_length = shape.causal, shape.M, norm == "length"

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        weights: Tensor = (q @ k.mT / q.shape[-1] ** 0.5).exp() * visible_pairs(q, k, self.causal, key_mask)
        size = weights.norm(dim=-1, keepdim=True) if self.by_length else weights.sum(-1, keepdim=True)
        return weights / size.masked_fill(size == 0, 1.0) @ v

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        dtype = accumulator(q.dtype)
        logits = (q.to(dtype) * q.shape[-1] ** -0.5) @ k.to(dtype).mT
        if self.causal:
            logits = logits + torch.full_like(logits[0, 0], hidden(dtype)).triu(1)
        if key_mask is None:
            return self._weighed(logits, v)
        logits = logits + added_to_logits(key_mask, dtype)[:, None, None]
        return self._weighed(logits, v).masked_fill(~seeing(key_mask, self.causal), 0)

    def _weighed(self, logits: Tensor, v: Tensor) -> Tensor:
        weights = logits.softmax(-1)
        if self.by_length:
            weights = weights / torch.linalg.vector_norm(weights, dim=-1, keepdim=True)
        return (weights @ v.to(logits.dtype)).to(v.dtype)

    def step(self, state: Cache, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Cache]:
        state = state.append(k, v)
        dtype = accumulator(q.dtype)
        logits = (q.to(dtype) * q.shape[-1] ** -0.5) @ state.keys.to(dtype).mT
        return self._weighed(logits, state.values), state
