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
from attnbench.catalogue.engines.head_layer import HeadLayer
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import LOG2E, accumulator
from attnbench.catalogue.engines.recurrent.decayed_sums import HalvedChunk, last_state
from attnbench.catalogue.engines.recurrent.real_tokens import alone, both_ways
from attnbench.catalogue.engines.recurrent.slots import slot_attention, written_share
from attnbench.catalogue.engines.recurrent.stretches import by_heads
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import RECURRENCE, Knob, No, register


@register(
    "gsa",
    kind="mixer",
    family="recurrence",
    source="Zhang et al. 2024, arXiv:2409.07146; flash-linear-attention, gsa.py",
    formula="K_t = diag(α_t) K_{t-1} + (1 - α_t) k_tᵀ,  V_t likewise with v_t,  o_t = V_tᵀ softmax(K_t q_t),  "
    "α = σ(x W)^(1/τ)",
    cost="O(n·m·d)",
    memory_exponent=1.0,
    traits=replace(
        RECURRENCE,
        bias=No("a logit belongs to a query and a slot, and not to a pair of tokens"),
        knob=Knob("slots"),
        own_form_both_ways="two recurrences, one from either end, added; the paper defines the causal form only",
    ),
    settings=("slots=3,chunk=4", "slots=5,chunk=16,temperature=1.0", "chunk=64"),
)
class GSA(HeadLayer):
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
        slots: Annotated[int, Field(ge=1, description="keys and values that a head keeps")] = 64,
        temperature: Annotated[float, Field(gt=0, description="τ: α = σ(·)^(1/τ)")] = 8.0,
        chunk: HalvedChunk = 64,
        form: forms.Fla = "auto",
    ) -> None:
        super().__init__()
        C = shape.C
        self.heads, self.causal, self.chunk, self.temperature = shape.H, shape.causal, chunk, temperature
        self.fast = {"fla": _fused} if chunk == 64 else {}
        self.form = forms.require("gsa", form, self.fast)
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.decay = nn.Linear(C, shape.H * slots, bias=False)
        self.norm = nn.RMSNorm(C, eps=1e-5)
        self.out = nn.Linear(C, C, bias=False)

    @alone
    def dense(self, x: Tensor) -> Tensor:
        """Each token's share in each slot when another reads it, N × N × slots numbers, for logits and for values."""
        read = []
        for side in (x,) if self.causal else (x, x.flip(0)):
            projected = side @ self.qkv.weight.T
            projected = projected * torch.sigmoid(projected)
            q, k, v = (torch.unflatten(each, 1, (self.heads, -1)) for each in projected.chunk(3, 1))
            alpha = torch.sigmoid(torch.unflatten(side @ self.decay.weight.T, 1, (self.heads, -1)))
            alpha = alpha ** (1 / self.temperature)
            total = alpha.log().cumsum(0)
            between = torch.exp(-(total[:, None] - total).abs())  # (reader, writer, head, slot)
            left = between * (1 - alpha) * between.new_ones(len(x), len(x)).tril()[:, :, None, None]
            weights = torch.softmax(torch.einsum("ihd,jhd,ijhm->ihm", q, k, left), -1)
            y = torch.einsum("ihm,ijhm,jhd->ihd", weights, left, v).flatten(1)
            read.append(y if side is x else y.flip(0))
        y = torch.stack(read).sum(0)
        y = y * torch.sigmoid(y)
        y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.norm.weight
        return self.out(y)

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v = (
            torch.unflatten(each, 2, (self.heads, -1)).transpose(1, 2) for each in silu(self.qkv(x)).chunk(3, -1)
        )
        logits = torch.unflatten(self.decay(x).to(accumulator(x.dtype)), 2, (self.heads, -1))
        return q, k, v, (logsigmoid(logits) * (LOG2E / self.temperature)).transpose(1, 2)

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        return self._finish(both_ways(self._run, x, key_mask, causal=self.causal))

    def _run(self, x: Tensor, _: int) -> Tensor:
        plain = partial(by_heads, partial(slot_attention, chunk=self.chunk))
        y = forms.attend("gsa", self.form, plain, *self._parts(x), fast=self.fast)
        return y.transpose(1, 2).flatten(2)

    def _finish(self, y: Tensor) -> Tensor:
        return self.out(self.norm(silu(y)))

    def begin(self, x: Tensor) -> Tensor:
        """The slots' keys and values ``(B, H, slots, 2·D)`` after x ``(B, n, C)``, n >= 0, float32 at least."""
        _, k, v, log_decay = self._parts(x)
        return last_state(written_share(log_decay), torch.cat([k, v], -1).to(log_decay.dtype), log_decay)

    def step(self, state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, log_decay = self._parts(x)
        own = torch.cat([k, v], -1).to(state.dtype)
        state = torch.addcmul(state * log_decay.mT.exp2(), written_share(log_decay).mT, own)
        keys, values = state.chunk(2, -1)
        y = torch.softmax(q.to(state.dtype) @ keys.mT, -1) @ values
        return self._finish(y.transpose(1, 2).flatten(2).to(x.dtype)), state


def _fused(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    return fla.run("gsa", q, k, v, written_share(log_decay), log_decay)
