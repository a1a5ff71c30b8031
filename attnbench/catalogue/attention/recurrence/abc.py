"""Attention with bounded memory control: softmax over slots, each a weighted mean of the tokens so far."""

from __future__ import annotations

from functools import partial
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from attnbench.catalogue.engines import fla, forms
from attnbench.catalogue.engines.head_layer import HeadLayer
from attnbench.catalogue.engines.masks import added_to_logits, emptied, seeing
from attnbench.catalogue.engines.precision import LOG2E, accumulator, hidden
from attnbench.catalogue.engines.recurrent.decayed_sums import STRONGEST, HalvedChunk
from attnbench.catalogue.engines.recurrent.real_tokens import alone, both_ways
from attnbench.catalogue.engines.recurrent.slots import slot_attention, written_share
from attnbench.catalogue.engines.recurrent.stretches import by_heads
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, No, Traits, register


class Slots(NamedTuple):
    """The slots' contents and weights after the tokens so far."""

    filled: Tensor
    """Keys and values of the slots, ``(B, H, slots, 2·D)``, float32 at least."""
    total: Tensor
    """log Σ exp(s) over the tokens so far, ``(B, H, 1, slots)``."""


@register(
    "abc",
    kind="mixer",
    family="recurrence",
    source="Peng et al. 2021, arXiv:2110.02488, section 3, the control called MLP; flash-linear-attention, abc.py",
    formula="o_t = V_tᵀ softmax(K_t q_t/√D),  K_t = Σ_{i<=t} φ_i k_iᵀ / Σ_{i<=t} φ_i,  V_t likewise,  φ = exp(x W)",
    cost="O(n·m·d)",
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        cross=No("what fills the slots is the sequence that asks them"),
        bias=No("a logit belongs to a query and a slot, and not to a pair of tokens"),
        decode=True,
        stochastic=True,
        knob=Knob("slots"),
        rows_sum_to_one=False,
        permutable=True,
    ),
    settings=("slots=3,chunk=4", "slots=5,chunk=16", "chunk=64"),
)
class ABC(HeadLayer):
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

    def __init__(
        self,
        shape: Shape,
        *,
        slots: Annotated[int, Field(ge=1, description="keys and values that a head keeps")] = 64,
        chunk: HalvedChunk = 64,
        form: forms.Fla = "auto",
    ) -> None:
        super().__init__()
        self.fused = {"fla": partial(fla.run, "abc")} if shape.causal and chunk == 64 else {}
        forms.require("abc", form, self.fused)
        C, self.form = shape.C, form
        self.heads, self.causal, self.chunk = shape.H, shape.causal, chunk
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.control = nn.Linear(C, shape.H * slots, bias=False)
        self.out = nn.Linear(C, C, bias=False)

    @alone
    def dense(self, x: Tensor) -> Tensor:
        """The means of the tokens that each token sees, from their plain weights."""
        q, k, v = (torch.unflatten(y, 1, (self.heads, -1)) for y in (x @ self.qkv.weight.T).chunk(3, 1))
        s = torch.unflatten(x @ self.control.weight.T, 1, (self.heads, -1))
        rows = []
        for t in range(len(x)):
            seen = slice(0, t + 1 if self.causal else len(x))
            shares = s[seen].softmax(0)
            keys, values = (torch.einsum("jhm,jhd->hmd", shares, y[seen]) for y in (k, v))
            weights = (torch.einsum("hmd,hd->hm", keys, q[t]) / q.shape[-1] ** 0.5).softmax(-1)
            rows.append(torch.einsum("hm,hmd->hd", weights, values).flatten())
        return self.out(torch.stack(rows))

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        return *self.projected(x), torch.unflatten(self.control(x), 2, (self.heads, -1)).transpose(1, 2)

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _scaled(*self._projected(x))

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        y = both_ways(self._run, x, key_mask, causal=True) if self.causal else self._of_all(x, key_mask)
        return self.out(y.to(x.dtype))

    def _run(self, x: Tensor, _: int) -> Tensor:
        y = forms.attend("abc", self.form, self._by_chunks, *self._projected(x), fast=self.fused)
        return y.transpose(1, 2).flatten(2)

    def _by_chunks(self, q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
        q, k, v, s = _scaled(q, k, v, s)
        return by_heads(partial(slot_attention, chunk=self.chunk), q, k, v, self._log_decay(s))

    def _log_decay(self, s: Tensor) -> Tensor:
        """log2(α) of each token; the first fills empty slots."""
        before = s.logcumsumexp(2)[:, :, :-1]
        first = torch.full_like(s[:, :, :1], STRONGEST)
        return torch.cat([first, _kept(before, s[:, :, 1:])], 2)

    def _of_all(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        """o ``(B, N, C)`` if all tokens fill the slots."""
        q, k, v, s = self._parts(x)
        if key_mask is not None:
            s = s + added_to_logits(key_mask, s.dtype)[:, None, :, None]
        shares = s.softmax(2).mT
        y = (q @ (shares @ k).mT).softmax(-1) @ (shares @ v)
        if key_mask is not None:
            y = y.masked_fill(~seeing(key_mask, causal=False), 0.0)
        return y.transpose(1, 2).flatten(2)

    @torch.no_grad()
    def begin(self, x: Tensor) -> Slots:
        _, k, v, s = self._parts(x)
        if not x.shape[1]:
            nothing = k.new_zeros(*k.shape[:2], s.shape[3], 2 * k.shape[3])
            return Slots(nothing, s.new_full((*s.shape[:2], 1, s.shape[3]), hidden(s.dtype)))
        return Slots(s.softmax(2).mT @ torch.cat([k, v], -1), s.logsumexp(2, keepdim=True))

    @torch.no_grad()
    def step(self, state: Slots, x: Tensor) -> tuple[Tensor, Slots]:
        q, k, v, s = self._parts(x)
        log_decay = _kept(state.total, s)
        new = written_share(log_decay)
        filled = torch.addcmul(state.filled * log_decay.mT.exp2(), new.mT, torch.cat([k, v], -1))
        keys, values = filled.chunk(2, -1)
        y = (q @ keys.mT).softmax(-1) @ values
        return self.out(y.transpose(1, 2).flatten(2).to(x.dtype)), Slots(filled, torch.logaddexp(state.total, s))


def _scaled(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, s = (y.to(accumulator(y.dtype)) for y in (q, k, v, s))
    return q * q.shape[-1] ** -0.5, k, v, s


def _kept(total: Tensor, s: Tensor) -> Tensor:
    """log2 of a slot's kept share, if its weights sum to exp(total)."""
    return (logsigmoid(total - s) * LOG2E).clamp(min=STRONGEST)
