"""Comba: a delta rule that erases by less than it writes, with queries corrected by their own key."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench.catalogue.engines import forms
from attnbench.catalogue.engines.recurrent.decayed_sums import Chunk
from attnbench.catalogue.engines.recurrent.erase_and_write import BeforeDecay
from attnbench.catalogue.engines.recurrent.erasing_core import Erasing, ErasingCore, TokenArguments
from attnbench.catalogue.engines.recurrent.erasing_layer import ErasingByHead
from attnbench.catalogue.engines.recurrent.short_convolution import Width
from attnbench.catalogue.engines.recurrent.written_out import erased_and_written
from attnbench.contract.problem.shape import Shape
from attnbench.contract.reads import BETA, CORRECTION, DECAY, FEEDBACK
from attnbench.contract.variant import CORE, SUMMED, Core, Knob, register


class _Closed(Erasing):
    """A share of what stood for a key is taken out, and queries are corrected: β, log2(α), b and p."""

    fused = "comba"

    @staticmethod
    def written_out(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, strict: bool) -> Tensor:
        beta, log_alpha, b, p = gates
        return erased_and_written(q - p * k, k, beta * v, b * beta * k, log_alpha, strict=strict, early=True)

    def rule(self, q: Tensor, k: Tensor, v: Tensor, *rates: Tensor) -> TokenArguments:
        beta, log_decay, b, p = (rate[..., None] if i != 1 else rate for i, rate in enumerate(rates))
        return TokenArguments(q - p * q.shape[-1] ** -0.5 * k, k, beta * v, BeforeDecay(b * beta * k), log_decay)

    def given(self, q: Tensor, k: Tensor, v: Tensor, *rates: Tensor) -> tuple[Tensor, ...]:
        beta, log_decay, b, p = rates
        b, p = (part[..., None].to(k.dtype) for part in (b, p))
        return q - p * q.shape[-1] ** -0.5 * k, k, v, b * k, beta, log_decay


class CombaRule(_Closed, ErasingCore):
    """The gated delta rule with feedback from its state and from its output.

    q, k ``(B, H, N, D)``, v ``(B, H, N, E)``, β, log2(α), b and p ``(B, H, N, 1)``: S_t = α_t S_{t-1} + β_t k_t
    (v_t - b_t S_{t-1}ᵀ k_t)ᵀ and o_t = S_tᵀ (q_t - p_t k_t) / √D. q and k get length 1 here, as in the layer, whose
    convolution, norm and gate are left out, and in which b and p are parameters of a head. A padded token neither fades
    nor writes.

    Not causal: the sum of two recurrences, the second from the end, in which a token reads those after it, faded by its
    own rate.

    Differs from the paper: the recurrence alone is here, without its layer.
    """


@register(
    "comba",
    kind="mixer",
    family="recurrence",
    also=("kernel",),
    source="Hu et al. 2025, arXiv:2506.02475; flash-linear-attention, comba.py",
    formula="S_t = (α_t - b β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ,  o_t = S_tᵀ (q_t - p k_t) / √D,  b = σ(·)",
    cost="O(n·d²)",
    memory_exponent=1.0,
    traits=replace(SUMMED, knob=Knob("expand", step=1)),
    settings=("chunk=5", "expand=1,width=1,chunk=64,correction=0.02"),
    core=Core(
        make=CombaRule,
        formula="S_t = (α_t - b_t β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ,  o_t = S_tᵀ (q_t - p_t k_t) / √D,  ‖k‖=‖q‖=1",
        traits=replace(CORE, reads=(BETA, DECAY, FEEDBACK, CORRECTION)),
        settings=("chunk=5", "chunk=64"),
    ),
)
class Comba(_Closed, ErasingByHead):
    """Gated DeltaNet with feedback from its state and from its output.

    Hu et al. 2025, "Comba: Improving Bilinear RNNs with Closed-loop Control". The state fades by α_t. Of what stood for
    k_t before, the share b β_t is taken out, and β_t v_t written: S_t = α_t S_{t-1} + β_t k_t (v_t - b S_{t-1}ᵀ k_t)ᵀ.
    b = σ(·) is a parameter of the head. The part taken out is read before the decay, as in ``rwkv7`` and unlike in
    ``gated-delta``. The query is corrected by its token's key, o_t = S_tᵀ (q_t - p k_t) / √D, where p is a parameter of
    the head that starts at ``correction``; 0.02 is the authors' other choice.

    x ``(B, N, C)`` gives q and k, D wide in each head, and v, ``expand``·D wide, without biases. Each channel of them
    goes through a causal convolution over ``width`` tokens and silu; then q and k get length 1. β = sigmoid(x·w) and
    α = exp(-A·softplus(x·w' + c)) are numbers of the head. Every head's output goes through a root-mean-square norm and
    is multiplied by the sigmoid of a gate made of x; the output projection follows. As in the authors' code A is drawn
    from U(0, 16], c such that its softplus is log-uniform in [0.001, 0.1], and b starts at σ(1). A padded token is
    passed over as if it were absent.

    Computed chunk by chunk with one triangular solve, as ``gated-delta``. The part a token erases is read with the
    decays up to the token before it; no power is divided by another.

    Not causal: a second recurrence runs over the turned sequence, convolution included, in which a token reads those
    after it, faded by its own rate, and not itself; what both give is added before the norm. The paper defines the
    causal form.

    Differs from the authors' code: in flash-linear-attention q - p b k and b k get length 1 afterwards, so that b has
    no part in the erasure; linear layers start as PyTorch's.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        expand: Annotated[int, Field(ge=1, description="width of a value, in widths of a key")] = 2,
        correction: Annotated[float, Field(ge=0, description="where p, the keys' share in the queries, starts")] = 1.0,
        width: Width = 4,
        chunk: Chunk = 64,
        form: forms.Fla = "auto",
    ) -> None:
        super().__init__(shape, expand=expand, width=width, chunk=chunk)
        self.takes_form(form)
        self.feedback = nn.Parameter(torch.ones(shape.H))
        self.correction = nn.Parameter(torch.full((shape.H,), correction))

    def plain_gates(self, rest: Tensor) -> tuple[Tensor, ...]:
        b, p = (part[:, None, None] for part in (torch.sigmoid(self.feedback), self.correction))
        return *super().plain_gates(rest), b, p

    def rates(self, gates: Tensor) -> tuple[Tensor, ...]:
        """β ``(B, H, N)``, log2(α) ``(B, H, N, 1)``, and b and p ``(B, H, 1)``."""
        beta, log_decay = super().rates(gates)
        b, p = (
            part.to(beta.dtype)[:, None].expand(len(gates), -1, -1)
            for part in (self.feedback.sigmoid(), self.correction)
        )
        return beta, log_decay, b, p
