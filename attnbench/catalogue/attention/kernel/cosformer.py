"""cosFormer: rectified queries and keys, weighted by the cosine of their distance."""

from __future__ import annotations

from functools import partial
from math import pi
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench.catalogue.engines import forms
from attnbench.catalogue.engines.linear import fused
from attnbench.catalogue.engines.linear.feature_attention import Form
from attnbench.catalogue.engines.masks import emptied, visible_pairs
from attnbench.catalogue.engines.precision import accumulator
from attnbench.catalogue.engines.recurrent.feature_sums import quotient, with_ones
from attnbench.catalogue.engines.recurrent.stretches import STRETCH, by_heads, in_turn, rows_in_turn, stretches
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import No, Traits, register
from attnbench.errors import Unsupported, UsageError


class CosineSums(NamedTuple):
    """The sums over keys so far."""

    sums: Tensor
    """Σ φ_j(k_j) (v_j, 1)ᵀ, ``(B, H, 2D, D + 1)``, float32 at least."""
    length: int


@register(
    "cosformer",
    family="kernel",
    source="Qin et al. 2022, arXiv:2202.08791, section 2",
    formula="w_ij = relu(q_i)·relu(k_j) cos(π(i-j)/2M);  o_i = Σ_j w_ij v_j / Σ_j w_ij",
    cost="O(n·d²)",
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        decode=True,
        documents=True,
        longer=No("beyond the length that it is made for, its horizon, cosines would be negative; give a horizon"),
        rows_sum_to_one=False,
        given=(("horizon", {"longer": True}),),
    ),
    settings=("chunk=5", "chunk=5,horizon=40"),
)
class CosFormer(nn.Module):
    """Rectified q and k, weighted by the cosine of their distance.

    Qin et al. 2022, "cosFormer: Rethinking Softmax in Attention". The weight of a pair is
    relu(q_i)·relu(k_j) cos(π/2 · (i - j)/M), which is never negative and separates into sums, because the cosine of a
    difference is cos·cos + sin·sin: 2D features, x cos(πi/2M) and x sin(πi/2M). Rows are divided by their sum. q and k
    are not scaled. q ``(B, H, N, D)``, k and v ``(B, H, M, D)``; a padded key is left out, the positions of the others
    stay.

    M is ``horizon``, by default the longer of the shape's two lengths, whatever the length of an input: otherwise later
    tokens would change earlier rows.

    Differs from the authors' code: a row without any positive weight gives 0 (they divide by at least 1e-6), so that
    rows sum to 1 or, rarely, to 0.

    Raises:
        UsageError: a horizon below the shape's lengths.
        Unsupported: in ``forward`` and ``step``, positions from the horizon on, where cosines become negative.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        horizon: Annotated[
            int | None, Field(ge=1, description="M, distance at which the cosine is 0; none: the longest sequence")
        ] = None,
        chunk: Annotated[
            int, Field(ge=1, description="causal: tokens whose pairs are formed. Moves time and memory only")
        ] = 64,
        form: Form = "auto",
    ) -> None:
        super().__init__()
        self.fast = {"triton": self._triton} if chunk == 64 else {}
        self.form = forms.require("cosformer", form, self.fast)
        longest = max(shape.N, shape.M)
        if horizon is not None and horizon < longest:
            raise UsageError(f"cosformer: option horizon={horizon} must be at least the {longest} tokens")
        self.causal, self.chunk, self.horizon = shape.causal, chunk, horizon or longest

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        i, j = (torch.arange(x.shape[2], dtype=q.dtype, device=q.device) for x in (q, k))
        weights = (q.relu() @ k.relu().mT) * torch.cos((i[:, None] - j) * (pi / 2 / self.horizon))
        weights = weights * visible_pairs(q, k, self.causal, key_mask)
        total = weights.sum(-1, keepdim=True)
        return weights @ v / torch.where(total > 0, total, 1.0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        name = f"cosformer, causal={self.causal}"
        return forms.attend(name, self.form, self._plain, q, k, v, fast=self.fast)

    def _plain(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        turns = tuple(self._turns(0, x.shape[2], x) for x in (q, k))
        return by_heads(partial(_attend, turns=turns, chunk=self.chunk if self.causal else None), q, k, v)

    def _triton(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        phi_q, phi_k = (_features(x.to(accumulator(x.dtype)), *self._turns(0, x.shape[2], x)) for x in (q, k))
        return fused.sums(phi_q, phi_k, v, fused.CountedKeys(self.causal, lenient=True))

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> CosineSums:
        n, dtype = k.shape[2], accumulator(k.dtype)
        features = _features(k.to(dtype), *self._turns(0, n, k))
        return CosineSums(features.mT @ with_ones(v.to(dtype)), n)

    def step(self, state: CosineSums, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, CosineSums]:
        dtype = state.sums.dtype
        turn = self._turns(state.length, 1, q)
        phi_q, phi_k = (_features(x.to(dtype), *turn) for x in (q, k))
        sums = state.sums + phi_k.mT * with_ones(v.to(dtype))
        return quotient(phi_q @ sums).to(v.dtype), CosineSums(sums, state.length + 1)

    def _turns(self, start: int, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
        if start + count > self.horizon:
            raise Unsupported(
                f"{start + count} tokens, but the cosines are positive for at most horizon = {self.horizon}"
            )
        position = torch.arange(start, start + count, dtype=torch.float64, device=like.device)[:, None]
        angle = position * (pi / 2 / self.horizon)
        dtype = accumulator(like.dtype)
        return angle.cos().to(dtype), angle.sin().to(dtype)


def _features(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x.relu()
    return torch.cat([x * cos, x * sin], -1)


def _attend(q: Tensor, k: Tensor, v: Tensor, *, turns: tuple[tuple[Tensor, Tensor], ...], chunk: int | None) -> Tensor:
    N = q.shape[1]
    of_queries, of_keys = ([x[None] for x in turn] for turn in turns)
    if chunk is None:
        _, sums = in_turn(_add, stretches(STRETCH, k, v, *of_keys))
        return rows_in_turn(_read, stretches(STRETCH, q, *of_queries), N, sums)[0]
    return rows_in_turn(_chunks, stretches(min(chunk, N), q, k, v, *of_keys), N)[0]


def _add(sums: Tensor | None, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[None, Tensor]:
    added = _features(k, cos, sin).mT @ with_ones(v)
    return None, added if sums is None else sums + added


def _read(sums: Tensor, q: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return quotient(_features(q, cos, sin) @ sums).flatten(1, 2), sums


def _chunks(sums: Tensor | None, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Chunks ``(G, chunks, c, ·)`` in a row, after those that are in the sums ``(G, 1, 2D, E + 1)``."""
    phi_q, phi_k, values = _features(q, cos, sin), _features(k, cos, sin), with_ones(v)
    added = phi_k.mT @ values
    first = torch.zeros_like(added[:, :1]) if sums is None else sums
    states = torch.cat([first, added], 1).cumsum(1)
    out = (phi_q @ phi_k.mT).tril() @ values + phi_q @ states[:, :-1]
    return quotient(out).flatten(1, 2), states[:, -1:]
