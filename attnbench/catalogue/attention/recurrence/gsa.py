"""Gated slot attention: softmax over a fixed number of slots, with keys and values that fade as the token chooses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, silu

from attnbench.catalogue.engines import fla, forms
from attnbench.catalogue.engines.head_layer import LayerFromEitherEnd
from attnbench.catalogue.engines.precision import LOG2E, accumulator
from attnbench.catalogue.engines.recurrent.decayed_sums import HalvedChunk, last_state
from attnbench.catalogue.engines.recurrent.real_tokens import FromEitherEnd
from attnbench.catalogue.engines.recurrent.slots import Count, slot_attention, written_share
from attnbench.catalogue.engines.recurrent.stretches import by_heads
from attnbench.contract.problem.shape import Shape
from attnbench.contract.reads import SLOT_DECAY
from attnbench.contract.variant import SUMMED, Core, Knob, No, register

_TRAITS = replace(
    SUMMED,
    bias=No("a logit belongs to a query and a slot, and not to a pair of tokens"),
    knob=Knob("slots"),
)


class SlotRule(FromEitherEnd):
    """Softmax over slots that fade, each at a rate of its own.

    q, k ``(B, H, N, D)``, v ``(B, H, N, E)`` and log2(α) ``(B, H, N, slots)``: K_t = diag(α_t) K_{t-1} +
    (1 - α_t) k_tᵀ, V_t likewise, and o_t = V_tᵀ softmax(K_t q_t). The layer's projections, silu and norm are left out.
    A padded token is passed over as if it were absent. Not causal: two recurrences, one from either end, added, a
    token's reading of itself twice.

    Differs from the paper: the recurrence alone is here, without its layer.
    """

    def written_out(self, *parts: Tensor) -> Tensor:
        """Each token's share in each slot when another reads it, N × N × slots numbers, for logits and for values."""
        q, k, v, log2_decay = parts
        total, seen = log2_decay.cumsum(2), q.new_ones(q.shape[2], q.shape[2]).tril()[:, :, None]
        left = (
            torch.exp2(-(total[:, :, :, None] - total[:, :, None]).abs()) * (1 - log2_decay.exp2())[:, :, None] * seen
        )
        weights = torch.softmax(torch.einsum("bhid,bhjd,bhijm->bhim", q, k, left), -1)
        return torch.einsum("bhim,bhijm,bhjd->bhid", weights, left, v)

    def __init__(self, shape: Shape, *, slots: Count = 64, chunk: HalvedChunk = 64, form: forms.Fla = "auto") -> None:
        super().__init__()
        self.causal, self.chunk = shape.causal, chunk
        self.fast = {"fla": _fused} if chunk == 64 else {}
        self.form = forms.require("gsa", form, self.fast)

    def one_way(self, *parts: Tensor) -> Tensor:
        plain = partial(by_heads, partial(slot_attention, chunk=self.chunk))
        return forms.attend("gsa", self.form, plain, *parts, fast=self.fast)

    def begin(self, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
        """The slots' keys and values ``(B, H, slots, D + E)`` after n >= 0 tokens, float32 at least."""
        log2_decay = gates[0].to(accumulator(v.dtype))
        return last_state(written_share(log2_decay), torch.cat([k, v], -1).to(log2_decay.dtype), log2_decay)

    def step(self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> tuple[Tensor, Tensor]:
        own, log2_decay = torch.cat([k, v], -1).to(state.dtype), gates[0].to(state.dtype)
        state = torch.addcmul(state * log2_decay.mT.exp2(), written_share(log2_decay).mT, own)
        keys, values = torch.split(state, [k.shape[-1], v.shape[-1]], -1)
        return (torch.softmax(q.to(state.dtype) @ keys.mT, -1) @ values).to(v.dtype), state


@register(
    "gsa",
    kind="mixer",
    family="recurrence",
    source="Zhang et al. 2024, arXiv:2409.07146; flash-linear-attention, gsa.py",
    formula="K_t = diag(α_t) K_{t-1} + (1 - α_t) k_tᵀ,  V_t likewise with v_t,  o_t = V_tᵀ softmax(K_t q_t),  "
    "α = σ(x W)^(1/τ)",
    cost="O(n·m·d)",
    memory_exponent=1.0,
    traits=_TRAITS,
    settings=("slots=3,chunk=4", "slots=5,chunk=16,temperature=1.0", "chunk=64"),
    core=Core(
        make=SlotRule,
        formula="K_t = diag(α_t) K_{t-1} + (1 - α_t) k_tᵀ,  V_t likewise with v_t,  o_t = V_tᵀ softmax(K_t q_t)",
        traits=replace(_TRAITS, stochastic=False, reads=(SLOT_DECAY,)),
        settings=("slots=3,chunk=4", "slots=5,chunk=16"),
    ),
)
class GSA(LayerFromEitherEnd):
    """Gated slot attention: softmax over slots that fade.

    Zhang et al. 2024, "Gated Slot Attention for Efficient Linear-Time Sequence Modeling". A head has ``slots`` slots,
    each with a key and a value. Token t keeps the share α of each slot, a number in (0, 1) for every slot, and fills
    the rest with its own key and value: K_t = diag(α_t) K_{t-1} + (1 - α_t) k_tᵀ, and V_t likewise. The output is
    softmax attention to the slots, o_t = V_tᵀ softmax(K_t q_t). α = σ(x W)^(1/``temperature``). Slots start empty: the
    weights of a token's softmax sum to one, but an empty slot's value is 0.

    x ``(B, N, C)`` gives q, k and v, each by a C × C projection and silu. A root-mean-square norm over all channels of
    silu(o), and the output projection, follow. As in the authors' code no projection has a bias, ``temperature`` is 8,
    and logits are not divided by √D.

    Two scans with a softmax between. In the first the decay belongs to the columns of the state, in the second to its
    rows; a chunk is halved again and again in both, as in ``gla``, so that nothing overflows, however small α is.
    A padded token is passed over as if it were absent.

    Not causal: a second recurrence runs over the turned sequence, and what both give is added before silu, a token's
    reading of itself twice; the paper defines the causal form.

    Differs from the authors' code: 64 slots by default, where theirs has as many as a key has channels; linear layers
    start as PyTorch's.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        slots: Count = 64,
        temperature: Annotated[float, Field(gt=0, description="τ: α = σ(·)^(1/τ)")] = 8.0,
        chunk: HalvedChunk = 64,
        form: forms.Fla = "auto",
    ) -> None:
        super().__init__()
        C = shape.C
        self.heads, self.causal, self.temperature = shape.H, shape.causal, temperature
        self.core = SlotRule(shape, slots=slots, chunk=chunk, form=form)
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.decay = nn.Linear(C, shape.H * slots, bias=False)
        self.norm = nn.RMSNorm(C, eps=1e-5)
        self.out = nn.Linear(C, C, bias=False)

    def plainly(self, x: Tensor) -> tuple[Tensor, ...]:
        projected = x @ self.qkv.weight.T
        q, k, v = (torch.unflatten(y, 1, (self.heads, -1)) for y in (projected * projected.sigmoid()).chunk(3, 1))
        alpha = torch.unflatten(x @ self.decay.weight.T, 1, (self.heads, -1)).sigmoid() ** (1 / self.temperature)
        return q, k, v, alpha.log2()

    def plainly_finished(self, y: Tensor) -> Tensor:
        y = y * torch.sigmoid(y)
        return self.out(y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.norm.weight)

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v = map(silu, self.projected(x))
        logits = torch.unflatten(self.decay(x).to(accumulator(x.dtype)), 2, (self.heads, -1))
        return q, k, v, (logsigmoid(logits) * (LOG2E / self.temperature)).transpose(1, 2)

    def finished(self, y: Tensor) -> Tensor:
        return self.out(self.norm(silu(y)))


def _fused(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    return fla.run("gsa", q, k, v, written_share(log_decay), log_decay)
