"""Bilinear attention: a learned matrix between query and key."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnbench.catalogue.engines.decoding.kv_cache import CachedDecoding
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.pair_scores import PRODUCT, Chunk, attend_by_score
from attnbench.catalogue.engines.precision import accumulator
from attnbench.contract.problem.reference import softmax_of
from attnbench.contract.problem.shape import Shape
from attnbench.contract.problem.sink import sink_of
from attnbench.contract.problem.visible import Visible
from attnbench.contract.variant import No, Traits, register


@register(
    "bilinear",
    family="pairwise",
    source="Luong et al. 2015, arXiv:1508.04025, section 3.1, the score called general",
    formula="oᵢ = Σ_j softmax_j(qᵢᵀ·W·kⱼ) vⱼ",
    cost="O(n²·d)",
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        stochastic=True,
        decode=True,
        mask=True,
        q_start=True,
        sink=True,
        permutable=True,
        bias=No("the learned matrix is the whole score; the paper adds nothing to its logits"),
    ),
    settings=("chunk=5",),
)
class Bilinear(CachedDecoding, nn.Module):
    """A learned matrix between query and key.

    Luong et al. 2015, "Effective Approaches to Attention-based Neural Machine Translation", the score called general:
    the logit of query i and key j is q_iᵀ W k_j with one D × D matrix W for each head, and a softmax over the keys
    follows. q ``(B, H, N, D)``, k and v ``(B, H, M, D)`` -> ``(B, H, N, D)``. There is no further scale: with
    W = I/√D it is softmax attention, and any projections of q and k that a layer has make it one with another W.

    W is drawn from N(0, 1/D²), so that the logits of standard normal q and k have variance 1. Logits exist for one tile
    at a time, forward and backward; memory is O(n·d).

    Differs from the paper: every head has its own W.
    """

    unequal = True
    visible: Visible

    def __init__(self, shape: Shape, *, chunk: Chunk = None) -> None:
        super().__init__()
        self.visible, self.capacity, self.chunk = Visible.of(shape), shape.M, chunk
        self.sink = sink_of(shape)
        self.W = nn.Parameter(torch.randn(shape.H, shape.D, shape.D) / shape.D)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        logits = torch.einsum("bhnd,hde,bhme->bhnm", q, self.W, k)
        return softmax_of(logits, self.visible, key_mask, self.sink) @ v

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        how: dict[str, Any] = {"causal": self.visible, "key_mask": key_mask, "sink": self.sink}
        return attend_by_score(PRODUCT, self._turned(q), k, v, chunk=self.chunk, **how)

    def _turned(self, q: Tensor) -> Tensor:
        dtype = accumulator(q.dtype)
        return q.to(dtype) @ self.W.to(dtype)

    @torch.no_grad()
    def step(self, state: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Any]:
        undivided = self._turned(q) * q.shape[-1] ** 0.5  # softmax attention divides by it
        return super().step(state, undivided.to(q.dtype), k, v)
