"""Log-linear attention: as many states as a place has bits, each read with a weight of its own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad, silu, softplus

from attnbench.catalogue.engines import fla, forms
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import LOG2E, accumulator, unit
from attnbench.catalogue.engines.recurrent.decayed_sums import HalvedChunk, drawn_step_sizes
from attnbench.catalogue.engines.recurrent.erase_and_write import erase_and_write
from attnbench.catalogue.engines.recurrent.levels import carried, levelled_attention, levelled_delta_rule
from attnbench.catalogue.engines.recurrent.real_tokens import alone, both_ways
from attnbench.catalogue.engines.recurrent.stretches import by_heads
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import RECURRENCE, Knob, No, register


class Subtrees(NamedTuple):
    """The state of decoding."""

    states: Tensor
    """``(B, H, levels - 1, state, D)``, one at least; float32 at least."""
    seen: int
    """Number of tokens so far."""


@register(
    "log-linear",
    kind="mixer",
    family="recurrence",
    source="Guo et al. 2025, arXiv:2506.04761; flash-linear-attention, log_linear_mamba2.py",
    formula="y_i = Σ_{j<=i} λ_i(ℓ(i, j)) (C_i·B_j) a_{j+1}···a_i Δ_j x_j,  ℓ(i, i) = 0,  "
    "ℓ(i, j) = 1 + highest bit of i xor j",
    cost="O(n·d²·log n)",
    memory_exponent=1.0,
    traits=replace(
        RECURRENCE,
        bias=No("there are no logits: decay and level are what depends on the distance"),
        knob=Knob("state"),
        own_form_both_ways="two recurrences, one from either end, added; the paper defines the causal form only",
    ),
    settings=(
        "state=3,chunk=4",
        "state=3,chunk=8,levels=3",
        "chunk=64",
        "base=gated-delta,state=3,chunk=4",
        "base=gated-delta,state=5,chunk=8,levels=3",
    ),
)
class LogLinear(nn.Module):
    """Log-linear attention: a state for each power of two of the past.

    Guo et al. 2025, "Log-Linear Attention", with the decays of Mamba-2, or over the gated delta rule. Token i sees the
    tokens before it in pieces, one for each bit that is 1 in its place i: a piece of level ℓ has 2^(ℓ-1) tokens, and
    the larger it is, the longer ago it was. Level 0 is the token itself. Its reading of each piece is multiplied by a
    weight λ that it chooses for the level; with all weights 1 this is its base, ``ssd``.

    u ``(B, N, C)`` gives x (by C × C), a step size Δ = softplus(·) for each head, B and C, of width ``state``, which
    all heads share, and λ = softplus(r ⊙ (u W)) for each head and level, where r is a parameter. a_t = exp(-Δ_t A). The
    output projection is C × C. A, r and the bias of Δ start as in the authors' code and in ``ssd``: r is 1, A is drawn
    from U[1, 16].

    With ``base=gated-delta`` a head has queries and keys of its own, ``state`` wide, and a rate β = sigmoid(u·w). Both
    are silu(·)/‖silu(·)‖, and q is divided by √``state``. A token changes each state of the past as the gated delta
    rule changes its one, S ← P_t S with P_t = a_t (I - β_t k_t k_tᵀ), and then writes β_t k_t x_tᵀ. So
    y_i = Σ_{j<=i} λ_i(ℓ(i, j)) (q_iᵀ P_i···P_{j+1} k_j) β_j x_j.

    ``levels`` counts the weights of a head, by default as many as shape.N tokens need. Levels above the last share its
    weight, so that longer sequences can be read; with ``levels=1`` all do. Chunks form their pairs as in ``ssd``; above
    them there is one state for each bit of a chunk's place, O(n log n) in all. A decoding step keeps ``levels`` - 1
    states. A padded token is passed over as if it were absent.

    Not causal: a second recurrence runs over the turned sequence, and what both give is added, a token's reading of
    itself twice; the paper defines the causal form.

    Differs from the authors' code: the block around either state is left out, as in ``ssd``: convolution, gate, norm
    and skip connection. Their number of levels is fixed at 15, and sequences end at 16,384 tokens.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        base: Annotated[
            Literal["ssd", "gated-delta"], Field(description="what a token does to the states of its past")
        ] = "ssd",
        state: Annotated[int, Field(ge=1, description="width of B and C, or of q and k, rows of a state")] = 64,
        levels: Annotated[
            int | None, Field(ge=1, description="weights of a head; none: as many as the length needs")
        ] = None,
        chunk: HalvedChunk = 64,
        form: forms.Fla = "auto",
    ) -> None:
        super().__init__()
        H, C = shape.H, shape.C
        self.heads, self.causal, self.chunk = H, shape.causal, chunk
        self.levels = levels or 1 + (shape.N - 1).bit_length()
        self.value = nn.Linear(C, C, bias=False)
        self.erases = base == "gated-delta"
        self.fast = {"fla": partial(fla.run, "log-linear")} if chunk == 64 and not self.erases else {}
        self.form = forms.require("log-linear", form, self.fast)
        self.key_query = nn.Linear(C, 2 * state * (H if self.erases else 1), bias=False)
        self.beta = nn.Linear(C, H, bias=False) if self.erases else None
        self.step_size = nn.Linear(C, H)
        self.weight = nn.Linear(C, H * self.levels, bias=False)
        self.slope = nn.Parameter(torch.ones(H, self.levels))
        self.out = nn.Linear(C, C, bias=False)
        self.log_A = nn.Parameter(torch.empty(H).uniform_(1, 16).log())
        with torch.no_grad():
            self.step_size.bias.copy_(drawn_step_sizes(H))

    @alone
    def dense(self, u: Tensor) -> Tensor:
        """The matrix of each head, written out, with the level of each pair from the bits of both places."""
        n, H, read = len(u), self.heads, []
        place = torch.arange(n, device=u.device)
        _, level = torch.frexp((place[:, None] ^ place).double())  # bits of the number, and 0 for 0
        level = level.long().clamp(max=self.levels - 1)
        for side in (u,) if self.causal else (u, u.flip(0)):
            key, query = self.key_query(side).chunk(2, 1)
            size = softplus(self.step_size(side)).T
            total = (-size * self.log_A.exp()[:, None]).cumsum(1)
            between = (total[:, :, None] - total[:, None]).tril().exp().tril()
            weights = softplus(torch.unflatten(self.weight(side), 1, (H, -1)) * self.slope)
            weights = torch.stack([weights[i, :, level[i]] for i in range(n)], 1)
            x = torch.unflatten(self.value(side), 1, (H, -1)).transpose(0, 1)
            if self.beta is None:
                matrix = query @ key.T * between * size[:, None]
            else:
                key, query = (torch.unflatten(z, 1, (H, -1)).transpose(0, 1) for z in (key, query))
                key, query = (z * torch.sigmoid(z) for z in (key, query))
                lengths = [torch.linalg.vector_norm(z, dim=-1, keepdim=True) for z in (key, query)]
                key, query = (z / s.masked_fill(s == 0, 1.0) for z, s in zip((key, query), lengths, strict=True))
                beta = torch.sigmoid(side @ self.beta.weight.T).T
                system = torch.eye(n, dtype=u.dtype, device=u.device) + (
                    beta[..., None] * (key @ key.mT * between)
                ).tril(-1)
                inverse = torch.linalg.solve(system, torch.diag_embed(beta))
                matrix = query @ key.mT * between @ inverse * key.shape[2] ** -0.5
            y = (matrix * weights) @ x
            read.append(y if side is u else y.flip(1))
        out: Tensor = self.out(torch.stack(read).sum(0).transpose(0, 1).flatten(1))
        return out

    def _parts(self, u: Tensor) -> tuple[Tensor, ...]:
        """C and B ``(B, H, N, state)``, Δx ``(B, H, N, D)``, log2(a) ``(B, H, N)``, and λ ``(B, H, N, levels)``.

        If the base erases: q and k, x, log2(a), λ, and β ``(B, H, N)``.
        """
        key, query = self.key_query(u).chunk(2, -1)
        dtype = accumulator(u.dtype)
        size = softplus(self.step_size(u).to(dtype))
        values, rates = torch.unflatten(self.value(u), -1, (self.heads, -1)), []
        if self.beta is None:
            query, key = (x[:, None].expand(-1, self.heads, -1, -1) for x in (query, key))
            values = values * size[..., None]
        else:
            query, key = (torch.unflatten(x, -1, (self.heads, -1)).transpose(1, 2) for x in (query, key))
            query, key = (unit(silu(x)) for x in (query, key))
            query, rates = query * query.shape[-1] ** -0.5, [torch.sigmoid(self.beta(u).to(dtype)).mT]
        weights = softplus(torch.unflatten(self.weight(u).to(dtype), -1, (self.heads, -1)) * self.slope.to(dtype))
        log_decay = size * (self.log_A.to(dtype).exp() * -LOG2E)
        return query, key, values.transpose(1, 2), log_decay.mT, weights.transpose(1, 2), *rates

    def forward(self, u: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (u,) = emptied(key_mask, u)
        out: Tensor = self.out(both_ways(self._run, u, key_mask, causal=self.causal))
        return out

    def _run(self, u: Tensor, _: int) -> Tensor:
        query, key, *others = self._parts(u)
        if not self.erases:  # all heads share them
            query, key = query[:, :1], key[:, :1]
        y = forms.attend("log-linear", self.form, self._plain, query, key, *others, fast=self.fast)
        return y.transpose(1, 2).flatten(2)

    def _plain(self, query: Tensor, key: Tensor, values: Tensor, *others: Tensor) -> Tensor:
        compute = levelled_delta_rule if self.erases else levelled_attention
        query, key = (x.expand(-1, values.shape[1], -1, -1) for x in (query, key))
        return by_heads(partial(compute, chunk=self.chunk), query, key, values, *others)

    def begin(self, u: Tensor) -> Subtrees:
        _, key, values, log_decay, _, *rates = self._parts(u)
        dtype, n, last = accumulator(u.dtype), u.shape[1], max(1, self.levels - 1) - 1
        key, values = key.to(dtype), values.to(dtype)
        pieces = [s for s in reversed(range(n.bit_length())) if n >> s & 1]  # the oldest first
        written = (
            self._erased(pieces, key, values, log_decay, *rates) if rates else _faded(pieces, key, values, log_decay)
        )
        states = [key[:, :, :0].mT @ values[:, :, :0] for _ in range(last + 1)]
        for s, state in zip(pieces, written, strict=True):
            states[min(s, last)] = states[min(s, last)] + state
        return Subtrees(torch.stack(states, 2), n)

    def _erased(
        self, pieces: list[int], key: Tensor, values: Tensor, log_decay: Tensor, beta: Tensor
    ) -> tuple[Tensor, ...]:
        (B, H, _, D), E, start = key.shape, values.shape[3], 0
        state = key.new_zeros(B * H, D, 0)
        for s in pieces:
            k, v, g, b = (x[:, :, start : start + 2**s].flatten(0, 1) for x in (key, values, log_decay, beta))
            others = v.new_zeros(*v.shape[:2], state.shape[2])
            state = torch.cat([state, state.new_zeros(B * H, D, E)], 2)
            _, state = erase_and_write(k, k, torch.cat([others, v], 2), b, g[..., None], chunk=self.chunk, state=state)
            start += 2**s
        return torch.split(torch.unflatten(state, 0, (B, H)), E, 3) if pieces else ()

    def step(self, state: Subtrees, u: Tensor) -> tuple[Tensor, Subtrees]:
        query, key, values, log_decay, weights, *rates = self._parts(u)
        states = state.states * log_decay[..., None, None].exp2()
        query, key = query.to(states.dtype), key.to(states.dtype)
        added = key.mT * values
        for beta in rates:
            k, rate = key[:, :, None], beta[..., None]
            states = states - rate[..., None] * (k.mT @ (k @ states))
            added = rate * added
        earlier = weights[:, :, 0, 1:] if self.levels > 1 else weights[:, :, 0]
        read = (earlier[..., None, None] * states).sum(2) + weights[..., :1] * added
        y = (query @ read).transpose(1, 2).flatten(2).to(u.dtype)
        return self.out(y), Subtrees(carried(states, added, state.seen), state.seen + 1)


def _faded(pieces: list[int], key: Tensor, values: Tensor, log_decay: Tensor) -> list[Tensor]:
    # Summed over the tokens after each: nothing is subtracted, and numbers after a strong decay keep their digits.
    until = pad(log_decay[:, :, 1:], (0, 1)).flip(2).cumsum(2).flip(2)[..., None].exp2()
    kept, lengths = key * until, [2**s for s in pieces]
    parts = zip(torch.split(kept, lengths, 2), torch.split(values, lengths, 2), strict=True)
    return [k.mT @ v for k, v in parts]
