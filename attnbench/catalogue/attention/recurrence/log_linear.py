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
from attnbench.catalogue.engines.head_layer import LayerFromEitherEnd
from attnbench.catalogue.engines.precision import LOG2E, accumulator, unit
from attnbench.catalogue.engines.recurrent.decayed_sums import HalvedChunk, drawn_step_sizes
from attnbench.catalogue.engines.recurrent.erase_and_write import erase_and_write
from attnbench.catalogue.engines.recurrent.levels import carried, levelled_attention, levelled_delta_rule
from attnbench.catalogue.engines.recurrent.real_tokens import FromEitherEnd
from attnbench.catalogue.engines.recurrent.stretches import by_heads
from attnbench.contract.problem.shape import Shape
from attnbench.contract.reads import BETA, DECAY, LEVEL_WEIGHT
from attnbench.contract.variant import SUMMED, Core, Knob, No, register

Base = Annotated[Literal["ssd", "gated-delta"], Field(description="what a token does to the states of its past")]
Levels = Annotated[int | None, Field(ge=1, description="weights of a head; none: as many as the length needs")]
_TRAITS = replace(SUMMED, bias=No("there are no logits: decay and level are what depends on the distance"))


class Subtrees(NamedTuple):
    """The state of decoding."""

    states: Tensor
    """``(B, H, levels - 1, D, E)``, one at least; float32 at least."""
    seen: int
    """Number of tokens so far."""


class LevelledStates(FromEitherEnd):
    """A state for each power of two of the past, read with a weight of its own.

    q, k ``(B, H, N, D)``, v ``(B, H, N, E)``, log2(a) ``(B, H, N, 1)``, λ ``(B, H, N, levels)``, and β ``(B, H, N, 1)``
    with ``base=gated-delta``: o_i = Σ_{j<=i} λ_i(ℓ(i, j)) (q_i·k_j) a_{j+1}···a_i v_j, or, with lengths of 1 given to q
    and k here, o_i = Σ_{j<=i} λ_i(ℓ(i, j)) (q_iᵀ P_i···P_{j+1} k_j) β_j v_j / √D with P_t = a_t (I - β_t k_t k_tᵀ).
    Each head has a q and a k of its own. The layer's projections are left out. A padded token is passed over as if it
    were absent. Not causal: two recurrences, one from either end, added, a token's reading of itself twice.

    Differs from the paper: the recurrence alone is here, without its layer.
    """

    def written_out(self, *parts: Tensor) -> Tensor:
        """The matrix of each head, written out, with the level of each pair from the bits of both places."""
        q, k, v, log2_decay, weights, *rates = parts
        place, total = torch.arange(q.shape[2], device=q.device), log2_decay.cumsum(2)
        _, level = torch.frexp((place[:, None] ^ place).double())  # bits of the number, and 0 for 0
        weights = weights.gather(3, level.long().clamp(max=weights.shape[3] - 1).expand(*v.shape[:3], -1))
        between = (total - total.mT).tril().exp2().tril()
        pairs: Tensor = q @ k.mT * between
        if rates:
            (beta,) = rates
            sizes = (torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (q, k))
            q, k = (x / size.masked_fill(size == 0, 1.0) for x, size in zip((q, k), sizes, strict=True))
            system = torch.eye(len(place), dtype=k.dtype, device=k.device) + (beta * (k @ k.mT * between)).tril(-1)
            inverse = torch.linalg.solve(system, torch.diag_embed(beta[..., 0])) * q.shape[3] ** -0.5
            pairs = q @ k.mT * between @ inverse
        return (pairs * weights) @ v

    def __init__(
        self,
        shape: Shape,
        *,
        base: Base = "ssd",
        levels: Levels = None,
        chunk: HalvedChunk = 64,
        form: forms.Fla = "auto",
    ) -> None:
        super().__init__()
        self.causal, self.chunk, self.erases = shape.causal, chunk, base == "gated-delta"
        self.fast = {"fla": partial(fla.run, "log-linear")} if chunk == 64 and not self.erases else {}
        self.form = forms.require("log-linear", form, self.fast)

    def _ready(self, q: Tensor, k: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        return (unit(q) * q.shape[-1] ** -0.5, unit(k), *others) if self.erases else (q, k, *others)

    def one_way(self, *parts: Tensor) -> Tensor:
        q, k, v, log2_decay, weights, *rates = self._ready(*parts)
        given = q, k, v, log2_decay[..., 0], weights, *(beta[..., 0] for beta in rates)
        return forms.attend("log-linear", self.form, self._plain, *given, fast=self.fast)

    def _plain(self, query: Tensor, key: Tensor, values: Tensor, *others: Tensor) -> Tensor:
        compute = levelled_delta_rule if self.erases else levelled_attention
        query, key = (x.expand(-1, values.shape[1], -1, -1) for x in (query, key))
        return by_heads(partial(compute, chunk=self.chunk), query, key, values, *others)

    def begin(self, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Subtrees:
        _, key, *others = self._ready(q, k, v, *gates)
        dtype = accumulator(v.dtype)
        key, values, log_decay, weights, *rates = (x.to(dtype) for x in (key, *others))
        n, last = values.shape[2], max(1, weights.shape[3] - 1) - 1
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
            _, state = erase_and_write(k, k, torch.cat([others, v], 2), b[..., 0], g, chunk=self.chunk, state=state)
            start += 2**s
        return torch.split(torch.unflatten(state, 0, (B, H)), E, 3) if pieces else ()

    def step(self, state: Subtrees, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> tuple[Tensor, Subtrees]:
        dtype, ready = state.states.dtype, self._ready(q, k, v, *gates)
        query, key, values, log_decay, weights, *rates = (x.to(dtype) for x in ready)
        states = state.states * log_decay[..., None].exp2()
        added = key.mT * values
        for beta in rates:
            own = key[:, :, None]
            states = states - beta[..., None] * (own.mT @ (own @ states))
            added = beta * added
        earlier = weights[:, :, 0, 1:] if weights.shape[3] > 1 else weights[:, :, 0]
        read = (earlier[..., None, None] * states).sum(2) + weights[..., :1] * added
        return (query @ read).to(v.dtype), Subtrees(carried(states, added, state.seen), state.seen + 1)


@register(
    "log-linear",
    kind="mixer",
    family="recurrence",
    source="Guo et al. 2025, arXiv:2506.04761; flash-linear-attention, log_linear_mamba2.py",
    formula="y_i = Σ_{j<=i} λ_i(ℓ(i, j)) (C_i·B_j) a_{j+1}···a_i Δ_j x_j,  ℓ(i, i) = 0,  "
    "ℓ(i, j) = 1 + highest bit of i xor j",
    cost="O(n·d²·log n)",
    memory_exponent=1.0,
    traits=replace(_TRAITS, knob=Knob("state")),
    settings=(
        "state=3,chunk=4",
        "state=3,chunk=8,levels=3",
        "chunk=64",
        "base=gated-delta,state=3,chunk=4",
        "base=gated-delta,state=5,chunk=8,levels=3",
    ),
    core=Core(
        make=LevelledStates,
        formula="o_i = Σ_{j<=i} λ_i(ℓ(i, j)) (q_i·k_j) a_{j+1}···a_i v_j,  ℓ(i, j) = bits of i xor j",
        traits=replace(
            _TRAITS,
            stochastic=False,
            reads=(DECAY, LEVEL_WEIGHT),
            given=(("base=gated-delta", {"reads": (DECAY, LEVEL_WEIGHT, BETA)}), *_TRAITS.given),
        ),
        settings=("chunk=4", "chunk=8,levels=3", "base=gated-delta,chunk=4"),
    ),
)
class LogLinear(LayerFromEitherEnd):
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
        base: Base = "ssd",
        state: Annotated[int, Field(ge=1, description="width of B and C, or of q and k, rows of a state")] = 64,
        levels: Levels = None,
        chunk: HalvedChunk = 64,
        form: forms.Fla = "auto",
    ) -> None:
        super().__init__()
        H, C = shape.H, shape.C
        self.heads, self.causal = H, shape.causal
        self.levels = levels or 1 + (shape.N - 1).bit_length()
        self.value = nn.Linear(C, C, bias=False)
        self.core = LevelledStates(shape, base=base, levels=levels, chunk=chunk, form=form)
        self.erases = self.core.erases
        self.key_query = nn.Linear(C, 2 * state * (H if self.erases else 1), bias=False)
        self.beta = nn.Linear(C, H, bias=False) if self.erases else None
        self.step_size = nn.Linear(C, H)
        self.weight = nn.Linear(C, H * self.levels, bias=False)
        self.slope = nn.Parameter(torch.ones(H, self.levels))
        self.out = nn.Linear(C, C, bias=False)
        self.log_A = nn.Parameter(torch.empty(H).uniform_(1, 16).log())
        with torch.no_grad():
            self.step_size.bias.copy_(drawn_step_sizes(H))

    def plainly(self, x: Tensor) -> tuple[Tensor, ...]:
        values = torch.unflatten(self.value(x), 1, (self.heads, -1))
        weights = softplus(torch.unflatten(self.weight(x), 1, (self.heads, -1)) * self.slope)
        size, rates = softplus(self.step_size(x))[..., None], []
        if self.beta is None:
            key, query = (y[:, None] for y in self.key_query(x).chunk(2, 1))
            values = values * size
        else:
            both = self.key_query(x)
            key, query = (torch.unflatten(y, 1, (self.heads, -1)) for y in (both * torch.sigmoid(both)).chunk(2, 1))
            rates = [torch.sigmoid(x @ self.beta.weight.T)[..., None]]
        return query, key, values, -size * self.log_A.exp()[:, None] * LOG2E, weights, *rates

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """C and B ``(B, 1, N, state)``, Δx ``(B, H, N, D)``, log2(a) ``(B, H, N, 1)``, and λ ``(B, H, N, levels)``.

        If the base erases: silu of q and k of each head, x, log2(a), λ, and β ``(B, H, N, 1)``.
        """
        key, query = self.key_query(x).chunk(2, -1)
        dtype = accumulator(x.dtype)
        size = softplus(self.step_size(x).to(dtype))
        values, rates = torch.unflatten(self.value(x), -1, (self.heads, -1)), []
        if self.beta is None:
            query, key, values = query[:, None], key[:, None], values * size[..., None]
        else:
            query, key = (silu(torch.unflatten(y, -1, (self.heads, -1)).transpose(1, 2)) for y in (query, key))
            rates = [torch.sigmoid(self.beta(x).to(dtype)).mT[..., None]]
        weights = softplus(torch.unflatten(self.weight(x).to(dtype), -1, (self.heads, -1)) * self.slope.to(dtype))
        log_decay = size * (self.log_A.to(dtype).exp() * -LOG2E)
        return query, key, values.transpose(1, 2), log_decay.mT[..., None], weights.transpose(1, 2), *rates


def _faded(pieces: list[int], key: Tensor, values: Tensor, log_decay: Tensor) -> list[Tensor]:
    # Summed over the tokens after each: nothing is subtracted, and numbers after a strong decay keep their digits.
    until = pad(log_decay[:, :, 1:], (0, 0, 0, 1)).flip(2).cumsum(2).flip(2).exp2()
    kept, lengths = key * until, [2**s for s in pieces]
    parts = zip(torch.split(kept, lengths, 2), torch.split(values, lengths, 2), strict=True)
    return [k.mT @ v for k, v in parts]
