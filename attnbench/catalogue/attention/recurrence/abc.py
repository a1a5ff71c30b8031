"""Attention with bounded memory control: softmax over slots, each a weighted mean of the tokens so far."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from attnbench.catalogue.engines import fla, forms
from attnbench.catalogue.engines.head_layer import CoreLayer
from attnbench.catalogue.engines.masks import added_to_logits, emptied, seeing, visible_pairs
from attnbench.catalogue.engines.precision import LOG2E, accumulator, hidden
from attnbench.catalogue.engines.recurrent.decayed_sums import STRONGEST, HalvedChunk
from attnbench.catalogue.engines.recurrent.real_tokens import alone, both_ways, each_way
from attnbench.catalogue.engines.recurrent.slots import Count, slot_attention, written_share
from attnbench.catalogue.engines.recurrent.stretches import by_heads
from attnbench.contract.problem.shape import Shape
from attnbench.contract.reads import CONTROL
from attnbench.contract.variant import Core, Knob, No, Traits, register

_TRAITS = Traits(
    target="other",
    cross=No("what fills the slots is the sequence that asks them"),
    bias=No("a logit belongs to a query and a slot, and not to a pair of tokens"),
    decode=True,
    knob=Knob("slots"),
    permutable=True,
)


class Slots(NamedTuple):
    """The slots' contents and weights after the tokens so far."""

    filled: Tensor
    """Keys and values of the slots, ``(B, H, slots, D + E)``, float32 at least."""
    total: Tensor
    """log Σ exp(s) over the tokens so far, ``(B, H, 1, slots)``."""


class MeanSlots(nn.Module):
    """Softmax over slots, each a weighted mean of the tokens.

    q, k ``(B, H, N, D)``, v ``(B, H, N, E)`` and s ``(B, H, N, slots)``: a slot's key and value are the means of k and
    v by the weights exp(s), over the tokens so far if causal, else over all; o_t = V_tᵀ softmax(K_t q_t/√D). The
    layer's projections are left out. A padded token counts 0.

    Differs from the paper: the attention alone is here, without its layer.
    """

    def dense(self, q: Tensor, k: Tensor, v: Tensor, control: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """The means of the tokens that each token sees, from their plain weights."""
        k, v, control = emptied(key_mask, k, v, control)
        seen = visible_pairs(q, k, self.causal, key_mask)[..., None]
        shares = control[:, :, None].masked_fill(~seen, hidden(control.dtype)).softmax(3) * seen
        keys, values = (torch.einsum("bhijm,bhjd->bhimd", shares, x) for x in (k, v))
        weights = (torch.einsum("bhimd,bhid->bhim", keys, q) / q.shape[-1] ** 0.5).softmax(-1)
        return torch.einsum("bhim,bhimd->bhid", weights, values)

    def __init__(self, shape: Shape, *, slots: Count = 64, chunk: HalvedChunk = 64, form: forms.Fla = "auto") -> None:
        super().__init__()
        self.fused = {"fla": partial(fla.run, "abc")} if shape.causal and chunk == 64 else {}
        self.form = forms.require("abc", form, self.fused)
        self.causal, self.chunk = shape.causal, chunk

    def forward(self, q: Tensor, k: Tensor, v: Tensor, control: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        parts = q, *emptied(key_mask, k, v, control)
        if not self.causal:
            return self.of_all(*parts, key_mask=key_mask).to(v.dtype)
        return each_way(lambda _, *x: self.so_far(*x), parts, key_mask, causal=True).to(v.dtype)

    def so_far(self, *parts: Tensor) -> Tensor:
        return forms.attend("abc", self.form, self._by_chunks, *parts, fast=self.fused)

    def _by_chunks(self, q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
        q, k, v, s = _scaled(q, k, v, s)
        return by_heads(partial(slot_attention, chunk=self.chunk), q, k, v, self._log_decay(s))

    def _log_decay(self, s: Tensor) -> Tensor:
        """log2(α) of each token; the first fills empty slots."""
        before = s.logcumsumexp(2)[:, :, :-1]
        first = torch.full_like(s[:, :, :1], STRONGEST)
        return torch.cat([first, _kept(before, s[:, :, 1:])], 2)

    def of_all(self, *parts: Tensor, key_mask: Tensor | None) -> Tensor:
        q, k, v, s = _scaled(*parts)
        if key_mask is not None:
            s = s + added_to_logits(key_mask, s.dtype)[:, None, :, None]
        shares = s.softmax(2).mT
        y = (q @ (shares @ k).mT).softmax(-1) @ (shares @ v)
        return y if key_mask is None else y.masked_fill(~seeing(key_mask, causal=False), 0.0)

    @torch.no_grad()
    def begin(self, q: Tensor, k: Tensor, v: Tensor, control: Tensor) -> Slots:
        _, k, v, s = _scaled(q, k, v, control)
        if not k.shape[2]:
            nothing = k.new_zeros(*k.shape[:2], s.shape[3], k.shape[3] + v.shape[3])
            return Slots(nothing, s.new_full((*s.shape[:2], 1, s.shape[3]), hidden(s.dtype)))
        return Slots(s.softmax(2).mT @ torch.cat([k, v], -1), s.logsumexp(2, keepdim=True))

    @torch.no_grad()
    def step(self, state: Slots, q: Tensor, k: Tensor, v: Tensor, control: Tensor) -> tuple[Tensor, Slots]:
        q, k, v, s, dtype = *_scaled(q, k, v, control), v.dtype
        log_decay = _kept(state.total, s)
        new = written_share(log_decay)
        filled = torch.addcmul(state.filled * log_decay.mT.exp2(), new.mT, torch.cat([k, v], -1))
        keys, values = torch.split(filled, [k.shape[-1], v.shape[-1]], -1)
        y = (q @ keys.mT).softmax(-1) @ values
        return y.to(dtype), Slots(filled, torch.logaddexp(state.total, s))


@register(
    "abc",
    kind="mixer",
    family="recurrence",
    source="Peng et al. 2021, arXiv:2110.02488, section 3, the control called MLP; flash-linear-attention, abc.py",
    formula="o_t = V_tᵀ softmax(K_t q_t/√D),  K_t = Σ_{i<=t} φ_i k_iᵀ / Σ_{i<=t} φ_i,  V_t likewise,  φ = exp(x W)",
    cost="O(n·m·d)",
    memory_exponent=1.0,
    traits=replace(_TRAITS, stochastic=True, rows_sum_to_one=False),
    settings=("slots=3,chunk=4", "slots=5,chunk=16", "chunk=64"),
    core=Core(
        make=MeanSlots,
        formula="o_t = V_tᵀ softmax(K_t q_t/√D),  K_t = Σ_{i<=t} exp(s_i) k_iᵀ / Σ_{i<=t} exp(s_i),  V_t likewise",
        traits=replace(_TRAITS, reads=(CONTROL,)),
        settings=("slots=3,chunk=4", "slots=5,chunk=16"),
    ),
)
class ABC(CoreLayer):
    """Softmax over slots, each a weighted mean of the tokens so far.

    Peng et al. 2021, "ABC: Attention with Bounded-memory Control", the ancestor of ``gsa``. A head has ``slots`` slots.
    Token i counts φ_i = exp(s_i) in each, with s = x W one number for a slot, and a slot's key and value are the means
    of k and v by these weights. The output is softmax attention to the slots, o_t = V_tᵀ softmax(K_t q_t/√D). Causal,
    the means are over the tokens so far; else over all.

    x ``(B, N, C)`` gives q, k and v by a C × C projection each; the output projection is C × C, and no projection has a
    bias. A padded token counts 0.

    A mean over one token more is the old mean, faded by α = σ(z - s), and the new token with 1 - α, where z is the
    running log Σ exp(s): so it is computed as ``gsa`` is, with a gate that depends on all tokens so far, and nothing
    overflows whatever s is. Decoding keeps the slots and z.

    Differs from the paper: every head has a W of its own. In the code of flash-linear-attention keys are half as wide,
    s is cut off at ±32, q and k are turned by their places, and the output has a norm and a gate.
    """

    def __init__(self, shape: Shape, *, slots: Count = 64, chunk: HalvedChunk = 64, form: forms.Fla = "auto") -> None:
        super().__init__()
        C, self.heads, self.causal = shape.C, shape.H, shape.causal
        self.core = MeanSlots(shape, slots=slots, chunk=chunk, form=form)
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.control = nn.Linear(C, shape.H * slots, bias=False)
        self.out = nn.Linear(C, C, bias=False)

    @alone
    def dense(self, x: Tensor) -> Tensor:
        """The formula of the operator within, between projections."""
        parts = *(x @ self.qkv.weight.T).chunk(3, 1), x @ self.control.weight.T
        y = self.core.dense(*(torch.unflatten(y, 1, (self.heads, -1)).transpose(0, 1)[None] for y in parts))
        return self.joined(y)[0]

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return *self.projected(x), torch.unflatten(self.control(x), 2, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        if not self.causal:
            return self.joined(self.core.of_all(*self._parts(x), key_mask=key_mask).to(x.dtype))
        return self.out(both_ways(self._run, x, key_mask, causal=True).to(x.dtype))

    def _run(self, x: Tensor, _: int) -> Tensor:
        y: Tensor = self.core.so_far(*self._parts(x))
        return y.transpose(1, 2).flatten(2)


def _scaled(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, s = (y.to(accumulator(y.dtype)) for y in (q, k, v, s))
    return q * q.shape[-1] ** -0.5, k, v, s


def _kept(total: Tensor, s: Tensor) -> Tensor:
    """log2 of a slot's kept share, if its weights sum to exp(total)."""
    return (logsigmoid(total - s) * LOG2E).clamp(min=STRONGEST)
