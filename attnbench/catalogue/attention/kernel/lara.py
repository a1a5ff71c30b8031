"""LARA: softmax attention by importance sampling, with one proposal near each run of queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench.catalogue.engines.low_rank.segments import Segments
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import LOG2E, accumulator, hidden
from attnbench.catalogue.engines.recurrent.stretches import STRETCH, by_heads, in_turn, rows_in_turn
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, No, Traits, register


@register(
    "lara",
    family="kernel",
    source="Zheng et al. 2022, arXiv:2204.04667, authors' code, lara.py",
    formula="Σ_c w_nc Σ_m ξ(k_m,ω_c)v_m / Σ_c w_nc Σ_m ξ(k_m,ω_c),  w_nc = α_nc ξ(q_n,ω_c) N(ω_c;0,I)/N(ω_c;μ_c,I)",
    cost="O(n·R·d)",
    memory_exponent=1.0,
    traits=Traits(
        meets="mixtures",
        causal=No("each proposal is a mean over a run of tokens, so every output would see the future"),
        stochastic=True,
        knob=Knob("landmarks"),
        given=(("sampled=false", {"stochastic": False}),),
    ),
    settings=("landmarks=4", "landmarks=5,query_term=0.0", "landmarks=6,sampled=false"),
)
class LARA(nn.Module):
    """Softmax attention by importance sampling around means of runs.

    Zheng et al. 2022, "Linear Complexity Randomized Self-attention Mechanism". With x = q/D^¼, y = k/D^¼ and ξ(x, ω) =
    exp(ω·x - ‖x‖²/2), exp(x·y) is the mean of ξ(x, ω)ξ(y, ω) over ω ~ N(0, I). The density that would give query n no
    variance is a mixture around x_n + y_m. Instead, C = ``landmarks`` samples ω_c serve all queries. Each is drawn from
    N(μ_c, I), where μ_c = x̃_c + ỹ_c adds the means of the c-th of C runs of queries and of keys. Query n weighs it by

    α_nc = N(ω_c; μ_c, I) / Σ_c' N(ω_c; μ_c', I) + ``query_term``·(t_nc - 1/C),  t_n = softmax over c of x_n·x̃_c.

    The first term is the balance heuristic; by itself (``query_term=0``) it makes numerators and denominators unbiased
    for those of softmax attention. The second sums to 0 over c and moves weight to proposals near the query. It is cut
    where it would make α negative, which adds bias. ω_c = μ_c + ε_c with ε drawn once, for all heads and examples;
    ``sampled=false`` takes ω_c = μ_c. In all, it is attention to the ω_c with one bias for each, O(n·C·D).

    q ``(B, H, N, D)``, k and v ``(B, H, M, D)``. The real tokens are cut into runs whose lengths differ by at most one;
    where N = M the key mask holds for queries too. With fewer tokens than C, each is a run. If queries and keys then
    have different numbers of runs, those beyond the smaller number are dropped.

    Differs from the authors' code: the means are of q and k themselves, without a linear layer and a layer norm, as
    with its option no-param-pool, and scaled as q and k are (there μ is not divided by D^¼); ε is drawn in the
    constructor and stays (there it is drawn again in training, and 0 in evaluation as with ``sampled=false`` here).
    """

    def __init__(
        self,
        shape: Shape,
        *,
        landmarks: Annotated[int, Field(ge=1, description="proposals C; at most as many as tokens take effect")] = 64,
        query_term: Annotated[
            float, Field(ge=0, description="weight of the part of α that depends on the query; 0: balance heuristic")
        ] = 1.0,
        sampled: Annotated[
            bool, Field(description="draw ω around the landmarks; else the landmarks themselves")
        ] = True,
    ) -> None:
        super().__init__()
        self.landmarks, self.query_term = landmarks, query_term
        noise = torch.randn(landmarks, shape.D)
        self.noise: Tensor
        self.register_buffer("noise", noise if sampled else torch.zeros_like(noise))

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """The N × M weights Σ_c w_nc ξ(y_m, ω_c), example by example over its real tokens."""
        out = torch.zeros(*q.shape[:3], v.shape[3], dtype=v.dtype, device=v.device)
        for b in range(q.shape[0]):
            real = torch.ones(k.shape[2], dtype=torch.bool, device=k.device) if key_mask is None else key_mask[b]
            if not real.any():
                continue
            x, y = q[b] / q.shape[-1] ** 0.25, k[b, :, real] / q.shape[-1] ** 0.25
            counted = x[:, real] if q.shape[2] == k.shape[2] else x
            near_x = [part.mean(1) for part in counted.tensor_split(min(self.landmarks, counted.shape[1]), 1)]
            near_y = [part.mean(1) for part in y.tensor_split(min(self.landmarks, y.shape[1]), 1)]
            C = min(len(near_x), len(near_y))
            near = torch.stack(near_x[:C], 1)
            mu = near + torch.stack(near_y[:C], 1)
            omega = mu + self.noise[:C].to(q.dtype)
            density = (-(omega[:, :, None] - mu[:, None]).square().sum(-1) / 2).exp()  # (H, c, c')
            balance = density.diagonal(dim1=1, dim2=2) / density.sum(-1)
            t = (x @ near.mT).softmax(-1)
            alpha = (balance[:, None] + self.query_term * (t - t.mean(-1, keepdim=True))).clamp(min=0.0)
            ratio = (-omega.square().sum(-1) / 2).exp() / density.diagonal(dim1=1, dim2=2)
            weights = (alpha * ratio[:, None] * (x @ omega.mT).exp()) @ (
                omega @ y.mT - y.square().sum(-1)[:, None] / 2
            ).exp()
            out[b] = weights / weights.sum(-1, keepdim=True) @ v[b, :, real]
        return out

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        (q,) = emptied(key_mask if q.shape[2] == k.shape[2] else None, q)  # since means of queries are weighted sums
        H, dtype = q.shape[1], accumulator(q.dtype)
        near_q, near_k, used = self._runs(q.to(dtype), k.to(dtype), key_mask)
        if key_mask is None or used is None:
            return by_heads(self._attend, q, k, v, near_q, near_k, again=False)
        masks = (x[:, None].expand(-1, H, -1) for x in (key_mask, used))
        out = by_heads(self._attend, q, k, v, near_q, near_k, *masks, again=False)
        return out.masked_fill(~key_mask.any(1)[:, None, None, None], 0.0)

    def _runs(self, x: Tensor, y: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Means of runs of x and of y, ``(B, H, C, D)``, and those in use, ``(B, C)``; None: all."""
        N, M = x.shape[2], y.shape[2]
        of_queries = Segments(self.landmarks, N, key_mask if N == M else None)
        of_keys = Segments(self.landmarks, M, key_mask)
        count = min(of_queries.count, of_keys.count)
        used = None if of_keys.filled is None else of_keys.filled[:, :count]
        return of_queries.mean(x)[:, :, :count], of_keys.mean(y)[:, :, :count], used

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        near_q: Tensor,
        near_k: Tensor,
        key_mask: Tensor | None = None,
        used: Tensor | None = None,
    ) -> Tensor:
        """The outputs for q ``(G, N, D)`` and means of runs ``(G, C, D)``; masks ``(G, M)``, ``(G, C)`` are 0 or 1."""
        scale = float(q.shape[2] ** -0.25)
        mu = (near_q + near_k) * scale
        omega = mu + self.noise[: mu.shape[1]].to(mu.dtype)
        # log N(ω_c; μ_c', I) up to a term that is the same for all c', (G, c, c')
        density = _hide(torch.baddbmm(_half_square(mu).mT, omega, mu.mT), used)
        own, mixture = density.diagonal(dim1=1, dim2=2)[:, None], density.logsumexp(-1)[:, None]
        omega = omega * scale
        masks = () if key_mask is None else (key_mask,)
        add = partial(_add, omega=omega * LOG2E, factor=scale**2 * LOG2E)
        _, (context, total, top) = in_turn(add, _parts(k, v, *masks))
        context, total = context / total, (top / LOG2E + total.log()).mT
        if self.query_term:
            alpha = partial(self._log_alpha, near_q=near_q * scale**2, balance=(own - mixture).exp(), used=used)
            read = partial(_read, omega=omega, bias=total - own, context=context, used=used, log_alpha=alpha)
        else:
            read = partial(_read, omega=omega, bias=total - mixture, context=context, used=used)
        return rows_in_turn(read, _parts(q), q.shape[1])[0]

    def _log_alpha(self, q: Tensor, near_q: Tensor, balance: Tensor, used: Tensor | None) -> Tensor:
        """log(α) ``(G, N, C)``, in effect -∞ where α is cut."""
        t = _hide(torch.bmm(q, near_q.mT), used).softmax(-1)
        share = 1 / t.shape[-1] if used is None else used.to(t.dtype).sum(1).clamp(min=1).reciprocal()[:, None, None]
        alpha = torch.add(balance, t - share, alpha=self.query_term)
        # -1 or -2 where it is cut, times a large number: arithmetic, since comparisons are slower.
        cut = alpha.detach().sign().sub_(1).mul_(-hidden(q.dtype))
        return alpha.clamp(min=torch.finfo(q.dtype).tiny).log() + cut


def _parts(*inputs: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*(torch.split(x, STRETCH, 1) for x in inputs), strict=True))


Sums = tuple[Tensor, Tensor, Tensor]
"""Σ ξ v ``(G, C, E)`` and Σ ξ ``(G, C, 1)`` over the keys so far, both divided by 2^top, and top ``(G, C, 1)``."""


def _add(
    sums: Sums | None, k: Tensor, v: Tensor, key_mask: Tensor | None = None, *, omega: Tensor, factor: float
) -> tuple[None, Sums]:
    exponents = torch.bmm(omega, k.mT) + _half_square(k).mT * factor
    exponents = _hide(exponents, key_mask)
    top = exponents.detach().amax(-1, keepdim=True)
    if sums is None:
        xi = (exponents - top).exp2()
        return None, (torch.bmm(xi, v), xi.sum(-1, keepdim=True), top)
    of_values, of_ones, before = sums
    top = torch.maximum(top, before)
    xi, kept = (exponents - top).exp2(), (before - top).exp2()
    return None, (torch.baddbmm(of_values * kept, xi, v), of_ones * kept + xi.sum(-1, keepdim=True), top)


def _read(
    _: None,
    q: Tensor,
    *,
    omega: Tensor,
    bias: Tensor,
    context: Tensor,
    used: Tensor | None,
    log_alpha: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, None]:
    logits = torch.bmm(q, omega.mT) + bias
    if log_alpha is not None:
        logits = logits + log_alpha(q)
    return torch.bmm(_hide(logits, used).softmax(-1), context), None


def _hide(logits: Tensor, there: Tensor | None) -> Tensor:
    """The logits, with :func:`hidden` in the missing columns of ``(G, columns)``."""
    return logits if there is None else logits.masked_fill(there[:, None] == 0, hidden(logits.dtype))


def _half_square(x: Tensor) -> Tensor:
    square: Tensor = torch.linalg.vecdot(x, x)[..., None]
    return square * -0.5
