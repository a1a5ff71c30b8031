"""Multi-head latent attention: keys and values of all heads come from one short vector per token."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench.catalogue.engines.decoding.kv_cache import hidden_from_last
from attnbench.catalogue.engines.fused_softmax import fused_attention
from attnbench.catalogue.engines.head_layer import HeadLayer
from attnbench.catalogue.engines.masks import with_source
from attnbench.catalogue.engines.precision import accumulator
from attnbench.catalogue.engines.rotation import angles, rotate
from attnbench.catalogue.engines.tiling import row_blocks
from attnbench.contract.problem.reference import masked_attention
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Traits, register
from attnbench.errors import UsageError

_ROWS = 512
"""Tokens of a step whose logits are in memory at once."""


class Latents(NamedTuple):
    """Room for each token's latent and rotary key; the first ``length`` rows are filled."""

    room: Tensor
    """``(B, capacity, R + P)``."""
    length: int

    @classmethod
    def of(cls, rows: Tensor, capacity: int) -> Latents:
        """Room for ``capacity`` tokens (at least those of rows) that holds rows ``(B, n, R + P)``."""
        B, n, width = rows.shape
        room = rows.new_zeros(B, max(capacity, n), width)
        room[:, :n] = rows
        return cls(room, n)

    def append(self, rows: Tensor) -> Latents:
        """Write more rows ``(B, n, R + P)`` in place. If there is no room for them, it doubles."""
        end = self.length + rows.shape[1]
        kept = self if end <= self.room.shape[1] else Latents.of(self.room, self.length + end)
        kept.room[:, self.length : end] = rows
        return Latents(kept.room, end)

    @property
    def rows(self) -> Tensor:
        return self.room[:, : self.length]

    def unused(self) -> tuple[Tensor]:
        return (self.room[:, self.length :],)


@register(
    "mla",
    kind="mixer",
    family="exact",
    source="DeepSeek-AI 2024, arXiv:2405.04434, section 2.1 and appendix C",
    formula="o_h = softmax([q_h; ρ(p_h)]·[U_h·c; ρ(r)]ᵀ/√(D + P))·(V_h·c),  c = norm(W·x),  r = R·x",
    cost="O(n²·d)",
    memory_exponent=1.0,
    traits=Traits(target="other", decode=True, stochastic=True, rows_sum_to_one=False),
    settings=("kv_rank=5,q_rank=3", "form=absorbed", "form=expanded,rope_dim=6,value_dim=3"),
)
class MLA(HeadLayer):
    """Multi-head latent attention (MLA) of DeepSeek-V2 and V3.

    DeepSeek-AI 2024, "DeepSeek-V2". x ``(B, N, C)`` -> ``(B, N, C)``. Of each token two vectors are kept for all heads
    together: the latent c = norm(W x) of ``kv_rank`` numbers, and the rotary key ρ(R x) of ``rope_dim`` numbers, which
    holds the position. Keys and values of a head are linear maps of c; each key has the rotary key behind it. Queries
    come from a latent of ``q_rank`` numbers, with a rotary part for each head. Logits are divided by √(D + rope_dim),
    the width of a whole key.

    The same output is computed in two forms. ``expanded``: keys of width D + rope_dim and values of width ``value_dim``
    are made for every head. ``absorbed``: the map of the keys goes to the query, so that all heads read the kept rows
    themselves as one shared head of width kv_rank + rope_dim, whose first kv_rank columns are also the values; it
    multiplies more and reads less. ``auto`` takes the expanded form for whole sequences and for steps of more than 2·D
    tokens, and the absorbed one for other steps. Decoding in the expanded form makes keys and values of all earlier
    tokens again at each step, and shows what absorbing saves. Either way a token costs kv_rank + rope_dim numbers of
    cache, where attention with H heads keeps 2·H·D.

    With a ``source`` ``(B, M, C)`` latents and rotary keys are those of its tokens, each turned by its place there.

    The defaults are those of DeepSeek-V3 in proportion to its head dimension of 128: kv_rank = 4·D (512), q_rank = 12·D
    (1536), rope_dim = D/2 (64), value_dim = D (128). A rank is at most C, since a longer latent of C numbers says no
    more; V3 has 56·D of these. Memory is O(n); whole sequences use PyTorch's fused kernel, whose values are filled up
    with zeros to the width of keys.

    Differs from the authors' code: rotary pairs are the channels c and c + rope_dim/2, not neighbours, which is the
    same up to the order of learned columns; no extension of the rotary angles to longer contexts; without causality a
    token sees all.

    Raises:
        UsageError: ``rope_dim`` is odd: rotary positions turn pairs.
    """

    at_once = True

    def __init__(
        self,
        shape: Shape,
        *,
        kv_rank: Annotated[
            int | None, Field(ge=1, description="width of the latent kept; none: 4·D, at most C")
        ] = None,
        q_rank: Annotated[
            int | None, Field(ge=1, description="width of the queries' latent; none: 12·D, at most C")
        ] = None,
        rope_dim: Annotated[int | None, Field(ge=2, description="width of the rotary key, even; none: D/2")] = None,
        value_dim: Annotated[int | None, Field(ge=1, description="width of a head's values; none: D")] = None,
        form: Annotated[
            Literal["auto", "expanded", "absorbed"],
            Field(description="keys of all heads, or one shared head; auto: absorbed for short steps only"),
        ] = "auto",
    ) -> None:
        super().__init__()
        C, self.H, self.D, self.E = shape.C, shape.H, shape.D, value_dim or shape.D
        self.rank, self.P = _kept(shape, kv_rank, rope_dim)
        if self.P % 2:
            raise UsageError(f"mla: option rope_dim={self.P} must be even: rotary positions turn pairs of channels")
        self.causal, self.capacity, self.form = shape.causal, shape.N, form
        query_rank = q_rank or min(12 * shape.D, C)
        self.down = nn.Linear(C, self.rank + self.P, bias=False)
        self.norm = nn.RMSNorm(self.rank, eps=1e-6)
        self.up = nn.Linear(self.rank, self.H * (self.D + self.E), bias=False)
        self.q_down = nn.Linear(C, query_rank, bias=False)
        self.q_norm = nn.RMSNorm(query_rank, eps=1e-6)
        self.q_up = nn.Linear(query_rank, self.H * (self.D + self.P), bias=False)
        self.out = nn.Linear(self.H * self.E, C, bias=False)

    def dense(self, x: Tensor, *, source: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor:
        x, source = with_source(key_mask, x, source)
        N, M, P = x.shape[1], source.shape[1], self.P
        latent, query = source @ self.down.weight[: self.rank].mT, x @ self.q_down.weight.mT
        latent, query = (
            y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
            for y, norm in ((latent, self.norm), (query, self.q_norm))
        )
        i = torch.arange(max(N, M), device=x.device, dtype=x.dtype)[:, None]
        angle = i * 10000.0 ** (-torch.arange(0, P, 2, device=x.device, dtype=x.dtype) / P)
        turn = torch.polar(torch.ones_like(angle), angle)

        def turned(y: Tensor) -> Tensor:
            y = torch.complex(y[..., : P // 2], y[..., P // 2 :]) * turn[: y.shape[1]]
            return torch.cat([y.real, y.imag], -1)

        allowed = torch.ones(N, M, dtype=torch.bool, device=x.device)
        allowed = allowed.tril() if self.causal else allowed
        allowed = allowed if key_mask is None else allowed & key_mask[:, None, None]
        rotary_key = turned(source @ self.down.weight[self.rank :].mT)
        heads = []
        for to_key_and_value, to_query in zip(
            self.up.weight.chunk(self.H), self.q_up.weight.chunk(self.H), strict=True
        ):
            own = query @ to_query.mT
            q = torch.cat([own[..., : self.D], turned(own[..., self.D :])], -1)
            k = torch.cat([latent @ to_key_and_value[: self.D].mT, rotary_key], -1)
            v = latent @ to_key_and_value[self.D :].mT
            heads.append(masked_attention(q[:, None], k[:, None], v[:, None], allowed)[:, 0])
        return self.out(torch.cat(heads, -1))

    def forward(self, x: Tensor, *, source: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor:
        """x ``(B, N, C)``; ``key_mask`` ``(B, N)``, True for a real token, or ``(B, M)`` with a ``source``."""
        x, source = with_source(key_mask, x, source)
        q, turned = self._queries(x, 0)
        rows = self._rows(source, 0)
        attend = partial(fused_attention, causal=self.causal, scale=self.scale, key_mask=key_mask)
        if self.form == "absorbed":
            keys = rows[:, None]
            mixed = attend(torch.cat([self._absorbed(q), turned], -1), keys, keys)
            return self.joined(self._values(mixed[..., : self.rank]))
        return self.joined(attend(torch.cat([q, turned], -1), *self._expanded(rows)))

    @property
    def scale(self) -> float:
        """The factor of logits, in either form: the root of the width of a head's whole key."""
        return float((self.D + self.P) ** -0.5)

    def _rows(self, x: Tensor, first: int) -> Tensor:
        latent, key = torch.split(self.down(x), [self.rank, self.P], -1)
        return torch.cat([self.norm(latent), _turned(key[:, None], first)[:, 0]], -1)

    def _queries(self, x: Tensor, first: int) -> tuple[Tensor, Tensor]:
        q = torch.unflatten(self.q_up(self.q_norm(self.q_down(x))), 2, (self.H, -1)).transpose(1, 2)
        return q[..., : self.D], _turned(q[..., self.D :], first)

    def _maps(self) -> tuple[Tensor, Tensor]:
        """From the latent to each head's keys ``(H, D, R)`` and values ``(H, E, R)``, views of one weight."""
        both = torch.unflatten(self.up.weight, 0, (self.H, -1))
        return both[:, : self.D], both[:, self.D :]

    def _expanded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        made = torch.unflatten(self.up(rows[..., : self.rank]), 2, (self.H, -1)).transpose(1, 2)
        turned = rows[:, None, :, self.rank :].expand(-1, self.H, -1, -1)
        return torch.cat([made[..., : self.D], turned], -1), made[..., self.D :]

    def _absorbed(self, q: Tensor) -> Tensor:
        return torch.matmul(q, self._maps()[0])

    def _values(self, mixed: Tensor) -> Tensor:
        return torch.matmul(mixed, self._maps()[1].mT)

    def begin(self, x: Tensor) -> Latents:
        return Latents.of(self._rows(x, 0), self.capacity)

    def step(self, state: Latents, x: Tensor) -> tuple[Tensor, Latents]:
        if x.shape[1] > _ROWS:
            outputs = []
            for rows in row_blocks(x.shape[1], _ROWS):
                output, state = self.step(state, x[:, rows])
                outputs.append(output)
            return torch.cat(outputs, 1), state
        q, turned = self._queries(x, state.length)
        state, n = state.append(self._rows(x, state.length)), x.shape[1]
        dtype = accumulator(x.dtype)
        if self.form == "expanded" or (self.form == "auto" and n > 2 * self.D):
            k, v = self._expanded(state.rows)
            query = torch.cat([q, turned], -1)
            if n > 1:
                later = hidden_from_last(n, state.length, x)
                return self.joined(fused_attention(query, k, v, causal=False, scale=self.scale, added=later)), state
            weights = torch.matmul(query * self.scale, k.mT).to(dtype).softmax(-1)
            return self.joined(torch.matmul(weights.to(v.dtype), v)), state
        query = torch.cat([self._absorbed(q), turned], -1).flatten(1, 2)  # heads and tokens are rows of one product
        logits = torch.matmul(query * self.scale, state.rows.mT).to(dtype)
        if n > 1:
            later = hidden_from_last(n, state.length, logits)
            logits = (torch.unflatten(logits, 1, (self.H, n)) + later).flatten(1, 2)
        mixed = torch.matmul(logits.softmax(-1).to(x.dtype), state.rows[..., : self.rank])
        return self.joined(self._values(torch.unflatten(mixed, 1, (self.H, n)))), state

    @staticmethod
    def cached_bytes(
        shape: Shape, width: int, *, kv_rank: int | None = None, rope_dim: int | None = None, **_: object
    ) -> int:
        return sum(_kept(shape, kv_rank, rope_dim)) * width


def _kept(shape: Shape, kv_rank: int | None, rope_dim: int | None) -> tuple[int, int]:
    """Widths of the latent and of the rotary key: the options, or DeepSeek-V3's for each channel of a head."""
    return kv_rank or min(4 * shape.D, shape.C), rope_dim or max(2, shape.D // 4 * 2)


def _turned(x: Tensor, first: int) -> Tensor:
    return rotate(x, *angles(first, x.shape[2], x)).to(x.dtype)
