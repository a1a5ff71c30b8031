"""Monte-Carlo attention: each output is the mean over keys that uniform noise has picked."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, one_hot

from attnbench.catalogue.engines.decoding.kv_cache import Cache, CachedDecoding
from attnbench.catalogue.engines.low_rank.segments import nth_real, take
from attnbench.catalogue.engines.low_rank.thin import attend_to_few_keys
from attnbench.catalogue.engines.masks import emptied, seeing, visible_pairs
from attnbench.catalogue.engines.precision import accumulator
from attnbench.catalogue.engines.tiling import budget
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, No, Traits, register
from attnbench.errors import Unsupported

_LEVELS = 4**11
"""Different values of the noise: few enough that float32 holds each of them, and none is rounded to 1."""

_ONE_DRAW = "one draw of keys serves all queries, and the first of them would see none"


@register(
    "noise",
    family="reference",
    source="Xu et al. 2015, arXiv:1502.03044, section 4.1, stochastic hard attention, with more than one sample",
    formula="oᵢ = (1/R)·Σᵣ v_J(i,r), J(i,r) the first j with p_i1 + … + p_ij > uᵣ, uᵣ ~ U(0, 1), P = softmax(Q·Kᵀ/√D)",
    cost="O(n²·d)",
    memory_exponent=1.0,
    traits=Traits(
        stochastic=True,
        decode=True,
        bias=No("the rows that keys are drawn from are those of q and k alone"),
        converges_with="samples",
        knob=Knob("samples"),
        given=(("draw=keys", {"causal": No(_ONE_DRAW), "decode": No(_ONE_DRAW), "cost": "O(n·R·d)"}),),
    ),
    settings=("samples=16", "samples=16,draw=keys"),
)
class Noise(CachedDecoding, nn.Module):
    """Mean over sampled keys: what chance alone costs.

    Attention as an expectation, estimated from R = ``samples`` keys by reparameterisation: uniform noise u_1 .. u_R,
    drawn once from the seed and the same for all queries, heads and examples, says which keys are taken.

    - ``draw=rows``: every query takes keys from its own softmax row, by the inverse of its cumulated probabilities, and
      averages their values. This is the stochastic hard attention of Xu et al. 2015, "Show, Attend and Tell", with R
      samples instead of one. It is unbiased for softmax attention, with variance p(1 - p)/R in each weight, and it
      saves nothing, since all probabilities are computed first. O(n²·d) time, O(n·R) memory.
    - ``draw=keys``: the noise picks R of the keys, all with the same chance, for all queries, and a softmax over them
      follows. Numerator and denominator are unbiased, the quotient is not. O(n·R·d).

    q ``(B, H, N, D)``, k and v ``(B, H, M, D)`` -> ``(B, H, N, D)``. Keys are drawn with replacement, among the real
    ones. With ``draw=rows`` no gradient reaches q and k: a choice has none; the rows are computed in float64, so that
    the same keys are drawn in every dtype. Differs from the paper in that no other signal trains the choice.

    Raises:
        Unsupported: ``draw=keys`` where causal: one draw of keys serves all queries.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        samples: Annotated[int, Field(ge=1, description="keys R that are drawn")] = 64,
        draw: Annotated[
            Literal["rows", "keys"],
            Field(description="from each query's softmax row, or the same keys for all queries"),
        ] = "rows",
    ) -> None:
        super().__init__()
        if draw == "keys" and shape.causal:
            raise Unsupported(f"causal: {_ONE_DRAW}; write draw=rows")
        self.causal, self.capacity, self.rows = shape.causal, shape.M, draw == "rows"
        self.levels: Tensor
        # Integers keep their values when a module is moved to bfloat16.
        self.register_buffer("levels", (torch.rand(samples, dtype=torch.float64) * _LEVELS).long())

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        visible = visible_pairs(q, k, self.causal, key_mask)
        logits: Tensor = q.double() @ k.double().mT / q.shape[-1] ** 0.5
        if self.rows:
            weights = logits.exp() * visible
            cumulated = (weights / weights.sum(-1, keepdim=True)).cumsum(-1)
            drawn = (cumulated[..., None] <= self._noise() * cumulated[..., -1:, None]).sum(-2)
            counts = one_hot(drawn.clamp(max=k.shape[2] - 1), k.shape[2]).sum(-2) * visible
            return (counts.to(v.dtype) / len(self.levels)) @ v
        counts = torch.zeros(len(q), k.shape[2], dtype=torch.float64, device=q.device)
        for b in range(len(q)):
            real = torch.arange(k.shape[2], device=q.device) if key_mask is None else key_mask[b].nonzero()[:, 0]
            for u in self._noise().tolist() if len(real) else ():
                counts[b, real[int(u * len(real))]] += 1
        weights = logits.exp() * counts[:, None, None]
        total = weights.sum(-1, keepdim=True)
        return (weights / total.masked_fill(total == 0, 1.0)).to(v.dtype) @ v

    def _noise(self) -> Tensor:
        """u ``(R,)`` in float64, between 0 and 1."""
        return (self.levels.double() + 0.5) / _LEVELS

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        if self.rows:
            out = _mean(v, self._drawn(q, k, key_mask, causal=self.causal))
        else:
            out = attend_to_few_keys(q, *(take(x, self._keys(k, key_mask)) for x in (k, v)))
        return out if key_mask is None else out.masked_fill(~seeing(key_mask, self.causal), 0)

    @torch.no_grad()
    def _drawn(self, q: Tensor, k: Tensor, key_mask: Tensor | None, *, causal: bool) -> Tensor:
        """The keys that each query draws from its row, ``(B, H, N, R)``."""
        B, H, N, D = q.shape
        M, u = k.shape[2], self._noise()
        keys, rows = k.double().mT, max(1, budget("noise.rows", q.device) // (B * H * M))
        parts = []
        for start in range(0, N, rows):
            logits = (q[:, :, start : start + rows].double() * D**-0.5) @ keys
            if causal:
                logits = logits.masked_fill_(
                    torch.ones_like(logits[0, 0], dtype=torch.bool).triu(start + 1), -torch.inf
                )
            if key_mask is not None:
                logits = logits.masked_fill_(~key_mask[:, None, None], -torch.inf)
            cumulated = logits.softmax(-1).nan_to_num(0.0).cumsum(-1)
            # The first key beyond the noise: one without any weight is never it.
            drawn = torch.searchsorted(cumulated, u * cumulated[..., -1:], right=True)
            parts.append(drawn.clamp_(max=M - 1))
        return torch.cat(parts, 2)

    def _keys(self, k: Tensor, key_mask: Tensor | None) -> Tensor:
        if key_mask is None:
            return (self._noise() * k.shape[2]).long().expand(k.shape[0], -1)
        return nth_real(key_mask, (self._noise() * key_mask.sum(1, keepdim=True)).long())

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        """The share of each key among those drawn; with ``draw=keys``, times M·exp(q·k/√D)."""
        if self.rows:
            drawn = self._drawn(q, k, None, causal=False)
            return one_hot(drawn, k.shape[2]).to(q.dtype).mean(-2)
        counts = one_hot(self._keys(k, None), k.shape[2]).to(q.dtype).mean(1)[:, None, None]
        pairs: Tensor = (q @ k.mT * q.shape[-1] ** -0.5).exp()
        return counts * k.shape[2] * pairs

    def kernel_mean(self, q: Tensor, k: Tensor) -> Tensor:
        """The softmax row, or exp(q·k/√D)."""
        logits: Tensor = q @ k.mT * q.shape[-1] ** -0.5
        return logits.softmax(-1) if self.rows else logits.exp()

    def kernel_variance(self, q: Tensor, k: Tensor) -> Tensor:
        """p(1 - p)/R, or exp(q·k/√D)²·(M - 1)/R."""
        mean, R = self.kernel_mean(q, k), len(self.levels)
        return mean * (1 - mean) / R if self.rows else mean.square() * (k.shape[2] - 1) / R

    def step(self, state: Cache, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Cache]:
        state = state.append(k, v)
        return _mean(state.values, self._drawn(q, state.keys, None, causal=False)), state


def _mean(v: Tensor, drawn: Tensor) -> Tensor:
    B, H, M, D = v.shape
    table = v.to(accumulator(v.dtype)).reshape(B * H * M, D)
    first = torch.arange(B * H, device=v.device).view(B, H, 1, 1) * M
    return embedding_bag((drawn + first).flatten(0, 2), table, mode="mean").view(B, H, -1, D).to(v.dtype)
