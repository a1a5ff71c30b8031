"""Attention through a Gaussian window around a centre: one that each query predicts, or its own position."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench.catalogue.engines.decoding.kv_cache import Cache
from attnbench.catalogue.engines.masks import emptied, visible_pairs
from attnbench.catalogue.engines.pair_scores import Chunk, PairScore, attend_by_score
from attnbench.catalogue.engines.precision import accumulator
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import No, Traits, register


@register(
    "monotonic",
    family="learned pattern",
    source="Luong et al. 2015, arXiv:1508.04025, section 3.2, equations 9 and 10",
    formula="oᵢ = Σ_j softmax_j(-(j - pᵢ)²/2σ²) vⱼ,  pᵢ = s·sigmoid(u·tanh(W·qᵢ)), or i",
    cost="O(n²·d)",
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        meets="all keys",
        stochastic=True,
        decode=True,
        bias=No("the distance from the window's centre is a bias already"),
        own_form="reads no key: a softmax of the window alone; the paper multiplies weights of q·k by the window",
        given=(
            ("centre=diagonal", {"stochastic": False}),
            (
                "content=true",
                {"own_form": "adds the window to the logits; the paper multiplies the weights of q·k by it"},
            ),
        ),
    ),
    settings=("sigma=2.0,chunk=5", "sigma=3.0,content=true,chunk=5", "centre=diagonal,sigma=2.0,content=true,chunk=7"),
)
class Monotonic(nn.Module):
    """A Gaussian window around a centre that each query predicts.

    Luong et al. 2015, "Effective Approaches to Attention-based Neural Machine Translation", local attention: the logit
    of query i and position j is -(j - p_i)²/2σ², σ = ``sigma``, and a softmax over the positions follows.

    - ``centre=predicted`` (the paper's local-p): p_i = s·sigmoid(u·tanh(W q_i)) with a D × D matrix W and a vector u
      for each head. s is one more than the position of the last real key, and i + 1 if causal.
    - ``centre=diagonal`` (the paper's local-m, monotonic alignment): p_i = i, and nothing is learned.

    ``content`` adds q_i·k_j/√D to the logits; without it no key is read. q ``(B, H, N, D)``, k and v ``(B, H, M, D)``
    -> ``(B, H, N, D)``. Positions count from 0, padded keys included. All keys are weighed, in tiles, O(n²) time and
    O(n·d) memory.

    W is drawn from N(0, 1/D), u from N(0, 1/D).

    Differs from the paper: the window is part of one softmax, so that rows sum to 1, where the paper multiplies the
    weights of 2σ keys on either side by the Gaussian and leaves the product as it is; every key is weighed; ``content``
    is off unless asked for; every head has its own W and u.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        centre: Annotated[
            Literal["predicted", "diagonal"], Field(description="where the window of query i is: predicted, or at i")
        ] = "predicted",
        sigma: Annotated[float, Field(gt=0, description="standard deviation σ of the window, in tokens")] = 5.0,
        content: Annotated[bool, Field(description="add q·k/√D to the logits")] = False,
        chunk: Chunk = None,
    ) -> None:
        super().__init__()
        H, D = shape.H, shape.D
        self.causal, self.capacity, self.chunk = shape.causal, shape.M, chunk
        self.predicted, self.content, self.narrowness = centre == "predicted", content, 0.5 / sigma**2
        if self.predicted:
            self.W = nn.Parameter(torch.randn(H, D, D) * D**-0.5)
            self.u = nn.Parameter(torch.randn(H, D) * D**-0.5)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        N, M = q.shape[2], v.shape[2]
        i, j = (torch.arange(n, dtype=q.dtype, device=q.device) for n in (N, M))
        centres = i.expand(*q.shape[:3])
        if self.predicted:
            units = torch.tanh(torch.einsum("bhnd,hde->bhne", q, self.W))
            share = torch.sigmoid(torch.einsum("bhne,he->bhn", units, self.u))
            real = torch.ones(len(q), M, dtype=torch.bool, device=q.device) if key_mask is None else key_mask
            ends = (i + 1).expand(len(q), 1, N) if self.causal else ((j + 1) * real).amax(1)[:, None, None]
            centres = ends * share
        logits = (j - centres[..., None]).square() * -self.narrowness
        if self.content:
            logits = logits + q @ k.mT / q.shape[-1] ** 0.5
        visible = visible_pairs(q, v, self.causal, key_mask)
        weights = logits.masked_fill(~visible, float("-inf")).softmax(-1).masked_fill(~visible, 0.0)
        return weights @ v

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        N, M = q.shape[2], v.shape[2]
        steps = torch.arange(1, max(N, M) + 1, device=q.device)
        if self.causal:
            ends = steps[:N, None]
        else:
            ends = steps[M - 1] if key_mask is None else (key_mask * steps[:M]).amax(1)[:, None, None, None]
        centres = self._centres(q, steps[:N, None] - 1, ends)
        positions = (steps[:M, None] - 1).to(centres.dtype).expand(*v.shape[:2], -1, -1)
        x, y = self._beside(q, centres, q.shape[-1] ** -0.5), self._beside(k, positions, 1.0)
        window = PairScore(partial(score, narrowness=self.narrowness), width=2)
        return attend_by_score(window, x, y, v, causal=self.causal, key_mask=key_mask, chunk=self.chunk)

    def _centres(self, q: Tensor, own: Tensor, ends: Tensor) -> Tensor:
        """p ``(B, H, N, 1)``, float32 at least, of queries at ``own``, with ``ends`` for s; both broadcast to it."""
        dtype = accumulator(q.dtype)
        if not self.predicted:
            return own.to(dtype).expand(*q.shape[:2], -1, -1)
        units = torch.tanh(q.to(dtype) @ self.W.to(dtype)) @ self.u.to(dtype)[..., None]
        return torch.sigmoid(units) * ends

    def _beside(self, x: Tensor, positions: Tensor, scale: float) -> Tensor:
        return torch.cat([x.to(positions.dtype) * scale, positions], -1) if self.content else positions

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Cache:
        """The state after q, k, v ``(B, H, n, D)``, n >= 0. Keys are kept only if they count."""
        return Cache.of(self._kept(k), v, self.capacity)

    def _kept(self, k: Tensor) -> Tensor:
        return k if self.content else k[..., :0]

    @torch.no_grad()
    def step(self, state: Cache, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Cache]:
        state = state.append(self._kept(k), v)
        steps = torch.arange(1, state.length + 1, device=q.device)[:, None]
        centre = self._centres(q, steps[-1:] - 1, steps[-1:])
        logits = (steps.mT - 1 - centre).square() * -self.narrowness
        if self.content:
            logits = logits + q.to(logits.dtype) @ state.keys.to(logits.dtype).mT * q.shape[-1] ** -0.5
        return torch.matmul(logits.softmax(-1).to(v.dtype), state.values), state


def score(x: Tensor, y: Tensor, narrowness: float) -> Tensor:
    """x_i·y_j of all columns but the last, less the squared distance of these; ``(G, n, m)``."""
    window = (x[..., -1:] - y[..., -1:].mT).square() * -narrowness
    return window if x.shape[2] == 1 else torch.baddbmm(window, x[..., :-1], y[..., :-1].mT)
