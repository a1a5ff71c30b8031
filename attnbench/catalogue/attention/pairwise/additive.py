"""Additive attention: a network with one hidden layer scores each pair of query and key."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench.catalogue.engines.decoding.kv_cache import Cache, CachedDecoding, weighed
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.pair_scores import Chunk, PairScore, attend_by_score
from attnbench.catalogue.engines.precision import accumulator
from attnbench.contract.problem.reference import softmax_of
from attnbench.contract.problem.shape import Shape
from attnbench.contract.problem.sink import sink_of
from attnbench.contract.problem.visible import Visible
from attnbench.contract.variant import No, Traits, register


@register(
    "additive",
    family="pairwise",
    source="Bahdanau et al. 2015, arXiv:1409.0473, section 3.1 and appendix A.1.2",
    formula="oᵢ = Σ_j softmax_j(w·tanh(W·qᵢ + U·kⱼ + b)) vⱼ",
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
        bias=No("its logits come from a network that knows no positions; the paper adds nothing to them"),
    ),
    settings=("hidden=3,chunk=5", "chunk=7"),
)
class Additive(CachedDecoding, nn.Module):
    """A small network scores each pair of query and key.

    Bahdanau et al. 2015, "Neural Machine Translation by Jointly Learning to Align and Translate": the logit of query i
    and key j is w·tanh(W q_i + U k_j + b), with a hidden layer of ``hidden`` units A in each head; a softmax over the
    keys follows. q ``(B, H, N, D)``, k and v ``(B, H, M, D)`` -> ``(B, H, N, D)``. W and U are ``(H, D, A)``, w and b
    ``(H, A)``. The logits are no products, so that no score of a pair is cheaper than A values of tanh.

    W q + b and U k are computed once for each token. The hidden layers of all pairs, N × M × A numbers, would not fit
    any memory: they exist for one tile of ``chunk`` queries and keys at a time, in the backward pass as well, which
    computes them again. Memory is O(n·A). Decoding keeps U k and v of every token.

    W and U are drawn from N(0, 1/D), w from N(0, 1/A), and b is 0 at first.

    Differs from the paper: every head has its own network; b is added; the authors draw W and U near 0 and start from
    w = 0, which makes all weights equal at first.
    """

    visible: Visible

    def __init__(
        self,
        shape: Shape,
        *,
        hidden: Annotated[int | None, Field(ge=1, description="hidden units A of each head; none: D")] = None,
        chunk: Chunk = None,
    ) -> None:
        super().__init__()
        H, D, A = shape.H, shape.D, hidden or shape.D
        self.visible, self.capacity, self.chunk = Visible.of(shape), shape.M, chunk
        self.sink = sink_of(shape)
        self.W = nn.Parameter(torch.randn(H, D, A) * D**-0.5)
        self.U = nn.Parameter(torch.randn(H, D, A) * D**-0.5)
        self.b = nn.Parameter(torch.zeros(H, A))
        self.w = nn.Parameter(torch.randn(H, A) * A**-0.5)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        x, y = (torch.einsum("bhnd,hda->bhna", one, matrix) for one, matrix in ((q, self.W), (k, self.U)))
        layers = torch.tanh(x[:, :, :, None] + y[:, :, None] + self.b[:, None, None])
        logits = torch.einsum("bhnma,ha->bhnm", layers, self.w)
        return softmax_of(logits, self.visible, key_mask, self.sink) @ v

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        x, y, hidden = self._of_queries(q), self._of_keys(k), PairScore(score, (self.w,), width=self.w.shape[1])
        how: dict[str, Any] = {"causal": self.visible, "key_mask": key_mask, "sink": self.sink}
        return attend_by_score(hidden, x, y, v, chunk=self.chunk, **how)

    def _of_queries(self, q: Tensor) -> Tensor:
        dtype = accumulator(q.dtype)
        return q.to(dtype) @ self.W.to(dtype) + self.b.to(dtype)[:, None]

    def _of_keys(self, k: Tensor) -> Tensor:
        dtype = accumulator(k.dtype)
        return k.to(dtype) @ self.U.to(dtype)

    @torch.no_grad()
    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Cache:
        """q, k, v ``(B, H, n, D)``, n >= 0. The cache's keys are U k, ``(B, H, n, A)``."""
        return Cache.of(self._of_keys(k).to(k.dtype), v, self.capacity)

    @torch.no_grad()
    def step(self, state: Cache, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Cache]:
        state = state.append(self._of_keys(k).to(k.dtype), v)
        x = self._of_queries(q)
        first, sink = self.first_seen(state), None if self.sink is None else self.sink.logit[:, None, None]
        logits = torch.tanh(x + state.keys[:, :, first:].to(x.dtype)) @ self.w.to(x.dtype)[..., None]
        return weighed(logits.mT, state.values[:, :, first:], sink), state


def score(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """w·tanh(x_i + y_j) ``(G, n, m)`` of x ``(G, n, A)``, y ``(G, m, A)`` and w ``(G, A)``."""
    layers = (x[:, :, None] + y[:, None]).tanh_()
    return (layers.flatten(1, 2) @ w[..., None]).view(layers.shape[:3])
