"""Parallax: softmax attention less a covariance of values with a second query's finds among the keys."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from attnbench.catalogue.engines import fla, forms
from attnbench.catalogue.engines.decoding.kv_cache import Cache, CachedDecoding
from attnbench.catalogue.engines.masks import added_to_logits, emptied, seeing, visible_pairs
from attnbench.catalogue.engines.precision import accumulator, hidden
from attnbench.catalogue.engines.recurrent.stretches import by_heads, rows_in_turn
from attnbench.catalogue.engines.tiling import row_blocks
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import No, Traits, register

_ROWS = 64
"""Queries whose pairs exist at a time."""


@register(
    "parallax",
    family="pairwise",
    source="Zuo et al. 2026, arXiv:2605.29157, algorithm 1; flash-linear-attention, parallax.py",
    formula="oᵢ = Σ_j pᵢⱼ·(1 + s̄ᵢ - sᵢⱼ) vⱼ,  p = softmax(q·k/√D),  sᵢⱼ = rᵢ·kⱼ,  s̄ᵢ = Σ_j pᵢⱼ·sᵢⱼ,  r = q·W",
    cost="O(n²·d)",
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        stochastic=True,
        decode=True,
        permutable=True,
        bias=No("the paper adds nothing to its logits, and knows no positions"),
        mask=No("it hides later tokens and padding alone"),
        sink=No("with a sink the weights sum to less than one, and the covariance is no longer one"),
        given=(("form=fla", {"key_padding": No(fla.NO_MASK), "dtypes": ("bfloat16", "float16")}),),
    ),
)
class Parallax(CachedDecoding, nn.Module):
    """Softmax attention less Cov(r·k, v) under its own weights.

    Zuo et al. 2026, the layer that its authors call parameterized local linear attention. With the softmax weights p of
    q·k/√D, a second query r asks the same keys, and its product is not scaled: the output is
    E_p[v] - Cov_p(r·k, v). So a value counts p·(1 + E_p[r·k] - r·k), which sums to 1 over the keys, and may be
    negative. With r = 0 it is softmax attention.

    q ``(B, H, N, D)``, k and v ``(B, H, M, D)`` -> ``(B, H, N, D)``. The paper makes r of the layer's input, by a
    projection next to that of q. An operator has q alone, so that here r = q W with a D × D matrix W for each head,
    drawn from N(0, 1/D²): r·k of standard normal q and k has variance 1. The pairs of 64 queries exist at a time,
    forward and backward; memory is O(n·d).

    Differs from the authors' code: r comes from q, as said; their sliding window and their norm of q, r and k are left
    out.
    """

    def __init__(self, shape: Shape, *, form: forms.Fla = "auto") -> None:
        super().__init__()
        self.fused = {"fla": partial(fla.run, "parallax")} if shape.causal and shape.E == shape.D else {}
        forms.require("parallax", form, self.fused)
        self.causal, self.capacity, self.form = shape.causal, shape.M, form
        self.W = nn.Parameter(torch.randn(shape.H, shape.D, shape.D) / shape.D)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        visible = visible_pairs(q, k, self.causal, key_mask)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, float("-inf")).softmax(-1)
        weights = weights.masked_fill(~visible, 0.0)
        found = torch.einsum("bhnd,hde,bhme->bhnm", q, self.W, k)
        mean = weights @ v
        both = (weights * found) @ v
        out: Tensor = mean - (both - (weights * found).sum(-1, keepdim=True) * mean)
        return out

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        rows = partial(self._by_rows, key_mask=key_mask)
        fast = self.fused if key_mask is None and q.shape[2] == k.shape[2] else {}
        y = forms.attend("parallax", self.form, rows, q, k, v, self._second(q), fast=fast)
        return y if key_mask is None else y.masked_fill(~seeing(key_mask, self.causal), 0)

    def _by_rows(self, q: Tensor, k: Tensor, v: Tensor, r: Tensor, *, key_mask: Tensor | None) -> Tensor:
        B, H, M = k.shape[:3]
        dtype = accumulator(q.dtype)
        added = k.new_zeros(B, M, dtype=dtype) if key_mask is None else added_to_logits(key_mask, dtype)
        added = added[:, None, :, None].expand(-1, H, -1, -1)
        return by_heads(partial(_attend, causal=self.causal), q, k, v, r, added)

    def _second(self, q: Tensor) -> Tensor:
        dtype = accumulator(q.dtype)
        return q.to(dtype) @ self.W.to(dtype)

    @torch.no_grad()
    def step(self, state: Cache, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Cache]:
        state, dtype = state.append(k, v), accumulator(q.dtype)
        keys, values = state.keys.to(dtype), state.values.to(dtype)
        logits = q.to(dtype) @ keys.mT * q.shape[-1] ** -0.5
        return _less_covariance(logits, self._second(q) @ keys.mT, values).to(q.dtype), state


def _less_covariance(logits: Tensor, found: Tensor, v: Tensor) -> Tensor:
    """Logits and r·k of all pairs ``(..., n, m)``, values ``(..., m, E)``."""
    weights = logits.softmax(-1)
    mean = (weights * found).sum(-1, keepdim=True)
    return (weights * (1 + mean - found)) @ v


def _attend(q: Tensor, k: Tensor, v: Tensor, r: Tensor, added: Tensor, *, causal: bool) -> Tensor:
    """Outputs ``(G, N, E)``; q and r ``(G, N, D)``, k ``(G, M, D)``, v ``(G, M, E)``, added to logits ``(G, M, 1)``."""
    N, M, scale = q.shape[1], k.shape[1], q.shape[2] ** -0.5

    def one(_: None, rows: slice) -> tuple[Tensor, None]:
        last = rows.stop if causal else M
        keys = k[:, :last]
        logits = torch.baddbmm(added[:, :last].mT, q[:, rows] * scale, keys.mT)
        if causal:
            logits = logits + torch.full_like(logits[0], hidden(q.dtype)).triu(rows.start + 1)
        return _less_covariance(logits, r[:, rows] @ keys.mT, v[:, :last]), None

    return rows_in_turn(one, [(rows,) for rows in row_blocks(N, _ROWS)], N)[0]
