"""Kimi delta attention: gated DeltaNet with a rate of decay for each channel of the keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import softplus

from attnbench.catalogue.engines import forms
from attnbench.catalogue.engines.precision import LOG2E, accumulator
from attnbench.catalogue.engines.recurrent.decayed_sums import HalvedChunk
from attnbench.catalogue.engines.recurrent.erasing_core import ErasingCore
from attnbench.catalogue.engines.recurrent.erasing_layer import ErasingByChannel, Groups
from attnbench.catalogue.engines.recurrent.short_convolution import Width
from attnbench.contract.problem.shape import Shape
from attnbench.contract.reads import BETA, CHANNEL_DECAY
from attnbench.contract.variant import CORE, SUMMED, Core, register

_LOWEST = -5.0
"""Logarithm of the strongest decay of the bounded gate."""


class KimiDeltaRule(ErasingCore):
    """The gated delta rule with a decay for each channel of the keys.

    q, k ``(B, H, N, D)``, v ``(B, H, N, E)``, β ``(B, H, N, 1)`` and log2(α) ``(B, H, N, D)``: S_t = S' + β_t k_t
    (v_t - S'ᵀ k_t)ᵀ with S' = Diag(α_t) S_{t-1}, and o_t = S_tᵀ q_t / √D. q and k get length 1 here, as in the layer,
    whose convolution, norm and gate are left out. β goes up to 2. A padded token neither fades nor writes.

    Not causal: the sum of two recurrences, the second from the end, in which a token reads those after it, faded by its
    own rates.

    Differs from the paper: the recurrence alone is here, without its layer.
    """

    fused = "kda"

    def __init__(self, shape: Shape, *, chunk: HalvedChunk = 64, form: forms.Fla = "auto") -> None:
        super().__init__(shape, chunk=chunk, form=form)


@register(
    "kda",
    kind="mixer",
    family="recurrence",
    also=("kernel",),
    source="Kimi Team 2025, arXiv:2510.26692, section 3",
    formula="S_t = (I - β_t k_t k_tᵀ) Diag(α_t) S_{t-1} + β_t k_t v_tᵀ,  o_t = S_tᵀ q_t / √D,  "
    "α = exp(-A·softplus(x W₁W₂ + b))",
    cost="O(n·d²)",
    memory_exponent=1.0,
    traits=SUMMED,
    settings=("chunk=4", "chunk=16,decay=bounded,negative=true", "value_groups=3,chunk=4"),
    core=Core(
        make=KimiDeltaRule,
        formula="S_t = (I - β_t k_t k_tᵀ) Diag(α_t) S_{t-1} + β_t k_t v_tᵀ,  o_t = S_tᵀ q_t / √D,  ‖k‖ = ‖q‖ = 1",
        traits=replace(CORE, reads=(BETA, CHANNEL_DECAY)),
        settings=("chunk=4", "chunk=64"),
    ),
)
class KimiDeltaAttention(ErasingByChannel):
    """Kimi delta attention: gated DeltaNet that forgets channel by channel.

    Kimi Team 2025, "Kimi Linear: An Expressive, Efficient Attention Architecture". Every channel c of the keys has a
    decay α_tc of its own at each token. The state fades first, S' = Diag(α_t) S_{t-1}; then the value that is left for
    k_t moves by β_t towards v_t: S_t = S' + β_t k_t (v_t - S'ᵀ k_t)ᵀ. β = sigmoid(x·w) is one number for each head;
    with ``negative`` it goes up to 2, so that I - β k kᵀ has eigenvalues down to -1. With ``decay=softplus``
    α = exp(-A·softplus(x W₁W₂ + b)), where W₁ has D columns and A is the head's; with ``decay=bounded``
    α = exp(-5·sigmoid(A·(x W₁W₂ + b))) and lies above 0.0067.

    x ``(B, N, C)`` gives q, k and v, D wide in each head, without biases. Each channel of them goes through a causal
    convolution over ``width`` tokens and silu; then q and k get length 1, and q is divided by √D. Every head's output
    goes through a root-mean-square norm and is multiplied by the sigmoid of a gate made of x through D columns; the
    output projection follows. There are no positions. A is drawn from U[1, 16] and b such that its softplus is
    log-uniform in [0.001, 0.1]. A padded token is passed over as if it were absent.

    Chunks are halved as in ``gla``: all exponents are sums of logarithms of one sign, and nothing overflows.

    Not causal: a second recurrence runs over the turned sequence, convolution included, in which a token reads those
    after it, faded by its own rate, and not itself; what both give is added before the norm. The paper defines the
    causal form.

    With ``value_groups`` G above 1 head h of G·H heads of values reads head h // G of q and k, with a state and rates
    of its own, as in flash-linear-attention's layer and ``gated-delta``; in the paper there are as many of both.

    Differs from the paper: in its models each fourth layer is softmax attention, and here all layers are alike; linear
    layers start as PyTorch's.
    """

    fused = "kda"

    def __init__(
        self,
        shape: Shape,
        *,
        decay: Annotated[
            Literal["softplus", "bounded"], Field(description="what keeps the logarithm of α below 0")
        ] = "softplus",
        value_groups: Groups = 1,
        negative: Annotated[bool, Field(description="β = 2σ(·): a step may turn a value round")] = False,
        width: Width = 4,
        chunk: HalvedChunk = 64,
        form: forms.Fla = "auto",
    ) -> None:
        super().__init__(shape, own=shape.H * value_groups, width=width, chunk=chunk, groups=value_groups)
        self.takes_form(form)
        self.bounded, self.strongest = decay == "bounded", 2.0 if negative else 1.0

    def plain_gates(self, rest: Tensor) -> tuple[Tensor, ...]:
        H, D, A = self.heads * self.groups, self.decay.in_features, self.log_A.exp()[:, None, None]
        steps = rest[:, -D:] @ self.decay.weight.T + self.step_bias
        beta, steps = (torch.unflatten(part, 1, (H, -1)).transpose(0, 1) for part in (rest[:, :-D], steps))
        log_alpha = _LOWEST * torch.sigmoid(A * steps) if self.bounded else -A * softplus(steps)
        return self.strongest * torch.sigmoid(beta), log_alpha

    def rates(self, gates: Tensor) -> tuple[Tensor, ...]:
        dtype, H = accumulator(gates.dtype), self.heads * self.groups
        steps = self.decay(gates[..., H:]).to(dtype) + self.step_bias.to(dtype)
        steps = torch.unflatten(steps, -1, (H, -1)).transpose(1, 2)
        A = self.log_A.to(dtype).exp()[:, None, None]
        log_decay = _LOWEST * torch.sigmoid(A * steps) if self.bounded else -A * softplus(steps)
        return self.strongest * torch.sigmoid(gates[..., :H].to(dtype)).mT, log_decay * LOG2E
