"""Gated DeltaNet: the delta rule on a state that fades at a rate that each token chooses for a head."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field
from torch import Tensor
from torch.nn.functional import silu

from attnbench.catalogue.engines import forms
from attnbench.catalogue.engines.recurrent.decayed_sums import Chunk
from attnbench.catalogue.engines.recurrent.erasing_core import ErasingCore
from attnbench.catalogue.engines.recurrent.erasing_layer import ErasingByHead, Groups
from attnbench.catalogue.engines.recurrent.short_convolution import Width
from attnbench.contract.problem.shape import Shape
from attnbench.contract.reads import BETA, DECAY
from attnbench.contract.variant import CORE, SUMMED, Core, Knob, register


class GatedDeltaRule(ErasingCore):
    """The gated delta rule: a state that fades by α and moves by β towards each value.

    q, k ``(B, H, N, D)``, v ``(B, H, N, E)``, β and log2(α) ``(B, H, N, 1)``: S_t = S' + β_t k_t (v_t - S'ᵀ k_t)ᵀ with
    S' = α_t S_{t-1}, and o_t = S_tᵀ q_t / √D. q and k get length 1 here, as in the layer, whose convolution, norm and
    gate are left out. β goes up to 2. A padded token neither fades nor writes.

    Not causal: the sum of two recurrences, the second from the end, in which a token reads those after it, faded by its
    own rate.

    Differs from the paper: the recurrence alone is here, without its layer.
    """

    fused = "gated-delta"


@register(
    "gated-delta",
    kind="mixer",
    family="recurrence",
    also=("kernel",),
    source="Yang et al. 2024, arXiv:2412.06464, section 3.1",
    formula="S_t = α_t (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ,  o_t = S_tᵀ q_t / √D,  α = exp(-A·softplus(w·x + b))",
    cost="O(n·d²)",
    memory_exponent=1.0,
    traits=replace(SUMMED, knob=Knob("expand", step=1)),
    settings=("chunk=5", "expand=1,width=1,negative=true,chunk=64", "value_groups=2,chunk=5"),
    core=Core(
        make=GatedDeltaRule,
        formula="S_t = α_t (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ,  o_t = S_tᵀ q_t / √D,  ‖k‖ = ‖q‖ = 1",
        traits=replace(CORE, reads=(BETA, DECAY)),
        settings=("chunk=5", "chunk=64"),
    ),
)
class GatedDelta(ErasingByHead):
    """Gated DeltaNet: DeltaNet that also forgets, as Mamba-2 does.

    Yang et al. 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule". The state fades by α_t first, then the
    value that is left for k_t moves by β_t towards v_t: S_t = S' + β_t k_t (v_t - S'ᵀ k_t)ᵀ with S' = α_t S_{t-1}. Both
    numbers are the head's own: β = sigmoid(x·w), α = exp(-A·softplus(x·w' + b)). With ``negative`` β goes up to 2, so
    that I - β k kᵀ has eigenvalues down to -1.

    x ``(B, N, C)`` gives q and k, D wide in each head, and v, ``expand``·D wide, without biases. Each channel of them
    goes through a causal convolution over ``width`` tokens and silu; then q and k get length 1, and q is divided by √D.
    Every head's output goes through a root-mean-square norm and is multiplied by silu of a gate made of x; the output
    projection follows. Computed chunk by chunk, with one triangular solve for all chunks. A padded token is passed over
    as if it were absent. As in the authors' code A is drawn from U(0, 16] and b such that its softplus is log-uniform
    in [0.001, 0.1]; the defaults of ``expand`` and ``width`` are from there, too.

    Not causal: a second recurrence runs over the turned sequence, convolution included, in which a token reads those
    after it, faded by its own rate, and not itself; what both give is added before the norm. The paper defines the
    causal form.

    With ``value_groups`` G above 1 each of the H heads of q and k serves G heads of values, as Qwen3-Next has 16 for
    32: head h of the G·H heads of values reads head h // G, and has a state, β, α and gate of its own.

    Differs from the authors' code: linear layers start as PyTorch's.
    """

    fused = "gated-delta"

    def __init__(
        self,
        shape: Shape,
        *,
        expand: Annotated[int, Field(ge=1, description="width of a value, in widths of a key")] = 2,
        value_groups: Groups = 1,
        negative: Annotated[bool, Field(description="β = 2σ(·): a step may turn a value round")] = False,
        width: Width = 4,
        chunk: Chunk = 64,
        form: forms.Fla = "auto",
    ) -> None:
        super().__init__(shape, expand=expand, width=width, chunk=chunk, groups=value_groups)
        self.takes_form(form)
        self.strongest = 2.0 if negative else 1.0

    def opened(self, x: Tensor) -> Tensor:
        return silu(self.gate(x))
