"""Gated DeltaNet-2: erasing and writing are chosen apart, channel by channel."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import softplus

from attnbench.catalogue.engines import forms
from attnbench.catalogue.engines.precision import LOG2E, accumulator
from attnbench.catalogue.engines.recurrent.decayed_sums import HalvedChunk
from attnbench.catalogue.engines.recurrent.erasing_core import Erasing, ErasingCore, TokenArguments
from attnbench.catalogue.engines.recurrent.erasing_layer import ErasingByChannel
from attnbench.catalogue.engines.recurrent.short_convolution import Width
from attnbench.catalogue.engines.recurrent.written_out import erased_and_written
from attnbench.contract.problem.shape import Shape
from attnbench.contract.reads import CHANNEL_DECAY, ERASE, WRITE
from attnbench.contract.variant import CORE, SUMMED, Core, register


class _Apart(Erasing):
    """Erasing and writing by gates of their own: b, w and log2(α)."""

    fused = "gated-delta-2"

    @staticmethod
    def written_out(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, strict: bool) -> Tensor:
        b, w, log_alpha = gates
        return erased_and_written(q, k, w * v, b * k, log_alpha, strict=strict)

    def rule(self, q: Tensor, k: Tensor, v: Tensor, *rates: Tensor) -> TokenArguments:
        b, w, log_decay = rates
        return TokenArguments(q, k, w * v, b * k, log_decay)


class GatedDeltaRule2(_Apart, ErasingCore):
    """The gated delta rule with gates for each channel that it erases and writes.

    q, k ``(B, H, N, D)``, v ``(B, H, N, E)``, b and log2(α) ``(B, H, N, D)``, w ``(B, H, N, E)``: S_t = S' + k_t
    (w_t ⊙ v_t - S'ᵀ(b_t ⊙ k_t))ᵀ with S' = Diag(α_t) S_{t-1}, and o_t = S_tᵀ q_t / √D. q and k get length 1 here, as in
    the layer, whose convolution, norm and gate are left out. b goes up to 2. A padded token neither fades nor writes.

    Not causal: the sum of two recurrences, the second from the end, in which a token reads those after it, faded by its
    own rates.

    Differs from the paper: the recurrence alone is here, without its layer.
    """

    fading = 2

    def __init__(self, shape: Shape, *, chunk: HalvedChunk = 64, form: forms.Fla = "auto") -> None:
        super().__init__(shape, chunk=chunk, form=form)

    def rates(self, *gates: Tensor) -> tuple[Tensor, ...]:
        return gates


@register(
    "gated-delta-2",
    kind="mixer",
    family="recurrence",
    also=("kernel",),
    source="Hatamizadeh et al. 2026, arXiv:2605.22791; flash-linear-attention, gdn2.py",
    formula="S_t = (I - k_t (b_t ⊙ k_t)ᵀ) Diag(α_t) S_{t-1} + k_t (w_t ⊙ v_t)ᵀ,  o_t = S_tᵀ q_t / √D,  b, w = σ(·)",
    cost="O(n·d²)",
    memory_exponent=1.0,
    traits=SUMMED,
    settings=("chunk=4", "chunk=16,negative=true"),
    core=Core(
        make=GatedDeltaRule2,
        formula="S_t = (I - k_t (b_t ⊙ k_t)ᵀ) Diag(α_t) S_{t-1} + k_t (w_t ⊙ v_t)ᵀ,  o_t = S_tᵀ q_t / √D,  ‖k‖=‖q‖=1",
        traits=replace(CORE, reads=(ERASE, WRITE, CHANNEL_DECAY)),
        settings=("chunk=4", "chunk=64"),
    ),
)
class GatedDelta2(_Apart, ErasingByChannel):
    """Kimi delta attention that erases and writes apart.

    Hatamizadeh et al. 2026, "Gated DeltaNet-2: Decoupling Erase and Write in Linear Attention". The state fades channel
    by channel as in ``kda``, S' = Diag(α_t) S_{t-1}. Then what b_t ⊙ k_t reads of it is taken out along k_t, and
    w_t ⊙ v_t takes its place: S_t = S' + k_t (w_t ⊙ v_t - S'ᵀ(b_t ⊙ k_t))ᵀ. b = σ(x W) has a number for each channel of
    the keys, w = σ(x W') one for each channel of the values. Where all of them are one number β this is ``kda``.

    x ``(B, N, C)`` gives q, k and v, D wide in each head, without biases. Each channel of them goes through a causal
    convolution over ``width`` tokens and silu; then q and k get length 1, and q is divided by √D. The decay is
    α = exp(-A·softplus(x W₁W₂ + c)), where W₁ has D columns and A is the head's. Every head's output goes through a
    root-mean-square norm and is multiplied by the sigmoid of a gate made of x through D columns; the output projection
    follows. With ``negative`` b goes up to 2. As in the authors' code A is drawn from U[1, 16] and c such that its
    softplus is log-uniform in [0.001, 0.1]. A padded token is passed over as if it were absent.

    Chunks are halved as in ``gla``: all exponents are sums of logarithms of one sign, and nothing overflows.

    Not causal: a second recurrence runs over the turned sequence, convolution included, in which a token reads those
    after it, faded by its own rate, and not itself; what both give is added before the norm. The paper defines the
    causal form.

    Differs from the authors' code: there are as many heads of values as of keys; linear layers start as PyTorch's.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        negative: Annotated[bool, Field(description="b = 2σ(·): what is erased may change its sign")] = False,
        width: Width = 4,
        chunk: HalvedChunk = 64,
        form: forms.Fla = "auto",
    ) -> None:
        super().__init__(shape, own=2 * shape.C, width=width, chunk=chunk)
        self.takes_form(form)
        self.strongest = 2.0 if negative else 1.0

    def plain_gates(self, rest: Tensor) -> tuple[Tensor, ...]:
        HD, D = self.decay.out_features, self.decay.in_features
        b, w, steps = torch.split(rest, [HD, HD, D], 1)
        parts = torch.sigmoid(b), torch.sigmoid(w), softplus(steps @ self.decay.weight.T + self.step_bias)
        b, w, steps = (torch.unflatten(part, 1, (self.heads, -1)).transpose(0, 1) for part in parts)
        return self.strongest * b, w, -self.log_A.exp()[:, None, None] * steps

    def rates(self, gates: Tensor) -> tuple[Tensor, ...]:
        """b, w and log2(α), each ``(B, H, N, D)``."""
        dtype, HD = accumulator(gates.dtype), self.decay.out_features
        b, w = (torch.sigmoid(part.to(dtype)) for part in (gates[..., :HD], gates[..., HD : 2 * HD]))
        steps = self.decay(gates[..., 2 * HD :]).to(dtype) + self.step_bias.to(dtype)
        b, w, steps = (torch.unflatten(part, -1, (self.heads, -1)).transpose(1, 2) for part in (b, w, steps))
        rate = self.log_A.to(dtype).exp()[:, None, None] * -LOG2E
        return self.strongest * b, w, rate * softplus(steps)
