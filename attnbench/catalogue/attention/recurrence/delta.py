"""DeltaNet: each key overwrites its entry in the state, instead of adding to it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad, silu, softplus

from attnbench.catalogue.engines import fla, forms
from attnbench.catalogue.engines.head_layer import HeadLayer
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import LOG2E, accumulator, unit
from attnbench.catalogue.engines.recurrent.decayed_sums import drawn_step_sizes
from attnbench.catalogue.engines.recurrent.erase_and_write import erase_and_write
from attnbench.catalogue.engines.recurrent.erasing_core import ErasingCore, TokenArguments
from attnbench.catalogue.engines.recurrent.stretches import by_heads
from attnbench.contract.problem.shape import Shape
from attnbench.contract.reads import BETA
from attnbench.contract.variant import CORE, SUMMED, Core, Knob, Traits, register

Gathered = Annotated[int, Field(ge=1, description="steps gathered by one solve. Moves time and memory only")]


class DeltaRule(ErasingCore):
    """The delta rule: each key moves its value in the state by β towards its own.

    q, k ``(B, H, N, D)``, v ``(B, H, N, E)`` and β ``(B, H, N, 1)``: S_t = S_{t-1} + β_t k_t (v_t - S_{t-1}ᵀ k_t)ᵀ and
    o_t = S_tᵀ q_t. q and k get length 1 here, as in the layer, whose norm is left out. β goes up to 2. A padded token
    writes nothing.

    Not causal: the sum of two recurrences, the second from the end, in which a token reads those after it alone.

    Differs from the paper: the recurrence alone is here, without its layer.
    """

    fused = "delta"
    fading = -1

    @staticmethod
    def written_out(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, strict: bool) -> Tensor:
        """O = tril(QKᵀ) U with (I + tril(B KKᵀ, -1)) U = B V."""
        (beta,) = gates
        system = torch.eye(k.shape[-2], dtype=k.dtype, device=k.device) + (beta * k @ k.mT).tril(-1)
        updates = torch.linalg.solve_triangular(system, beta * v, upper=False, unitriangular=True)
        out: Tensor = (q @ k.mT).tril(-1 if strict else 0) @ updates
        return out

    def __init__(self, shape: Shape, *, chunk: Gathered = 64, form: forms.Fla = "auto") -> None:
        super().__init__(shape, chunk=chunk, form=form)

    def ready(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return unit(q), unit(k), v

    def rule(self, q: Tensor, k: Tensor, v: Tensor, *rates: Tensor) -> TokenArguments:
        return TokenArguments(q, k, v, rates[0], None)


@register(
    "delta",
    kind="mixer",
    family="recurrence",
    also=("kernel",),
    source="Schlag et al. 2021, arXiv:2102.11174, section 4.2; Yang et al. 2024, arXiv:2406.06484, section 3",
    formula="S_t = (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ,  o_t = S_tᵀ q_t,  β = σ(w·x),  ‖k‖ = ‖q‖ = 1",
    cost="O(n·d²)",
    memory_exponent=1.0,
    traits=replace(SUMMED, bias=Traits.bias, knob=Knob("steps", step=1)),
    settings=("chunk=5", "chunk=64", "steps=2,negative=true,chunk=5", "steps=2,decay=true,chunk=5"),
    core=Core(
        make=DeltaRule,
        formula="S_t = (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ,  o_t = S_tᵀ q_t,  ‖k‖ = ‖q‖ = 1",
        traits=replace(CORE, reads=(BETA,)),
        settings=("chunk=5", "chunk=64"),
    ),
)
class Delta(HeadLayer):
    """DeltaNet: linear attention that overwrites instead of adding.

    The delta rule of Schlag et al. 2021, "Linear Transformers Are Secretly Fast Weight Programmers", moves the value
    that the state holds for k_t by β_t towards v_t. It runs in parallel over the sequence as in Yang et al. 2024,
    "Parallelizing Linear Transformers with the Delta Rule over Sequence Length": within a chunk, one triangular solve
    combines the rank-one updates, and chunks pass on a D × D state.

    x ``(B, N, C)`` gives q, k, v by C × C projections, q = silu(·)/‖silu(·)‖ and k alike for each head, and one
    β = sigmoid per head. Every head's output goes through a root-mean-square norm over its D channels with a learned
    scale; the output projection is C × C. A padded token has β = 0 and writes nothing.

    With ``steps`` above 1 a token makes as many steps of the rule, one after the other, each with a key, a value and a
    β of its own, and reads after the last: DeltaProduct (Siems et al. 2025, arXiv:2502.10297). There β goes up to 2, so
    that I - β k kᵀ has eigenvalues down to -1, as with ``negative``. With ``decay`` the state fades once before the
    steps of a token, to α_t S_{t-1}, at a rate which the token chooses for a head, as in ``gated-delta``:
    α = exp(-A·softplus(x·w + b)), with A and b drawn as there. A padded token lets nothing fade.

    Not causal: the readings of two recurrences are added before the norm, one over the tokens up to t inclusive and one
    from the end over the tokens after t, faded, if at all, by the rate of t; the papers define the causal form.

    Differs from the authors' code: no short convolution of q, k and v before the recurrence.
    """

    at_once = True

    def __init__(
        self,
        shape: Shape,
        *,
        steps: Annotated[int, Field(ge=1, description="steps of the rule that a token makes, each with a key")] = 1,
        negative: Annotated[bool, Field(description="β = 2σ(·): a step may turn a value round")] = False,
        decay: Annotated[bool, Field(description="the state fades once before the steps of a token")] = False,
        chunk: Gathered = 64,
        form: forms.Fla = "auto",
    ) -> None:
        super().__init__()
        C = shape.C
        self.heads, self.causal, self.chunk = shape.H, shape.causal, chunk
        self.steps, self.negative = steps, negative
        fits = steps == 1 and not decay and chunk == 64
        self.fast = {"fla": partial(_fused, causal=shape.causal)} if fits else {}
        self.form = forms.require("delta", form, self.fast)
        self.qkv = nn.Linear(C, (1 + 2 * steps) * C, bias=False)
        self.beta = nn.Linear(C, steps * shape.H, bias=False)
        self.norm = nn.RMSNorm(shape.D, eps=1e-6)
        self.out = nn.Linear(C, C, bias=False)
        self.fading = nn.Linear(C, shape.H, bias=False) if decay else None
        if decay:
            self.log_A = nn.Parameter((16 * (1 - torch.rand(shape.H))).log())  # torch.rand may give 0, and never 1
            self.step_bias = nn.Parameter(drawn_step_sizes(shape.H))

    def dense(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        q, k, v, beta, *_ = self._parts(x, key_mask)
        alpha = torch.ones_like(q[..., :1])
        if self.fading is not None:
            rate = self.log_A.exp() * softplus(x @ self.fading.weight.T + self.step_bias)
            alpha = (-rate if key_mask is None else -rate * key_mask[..., None]).exp().mT[..., None]
        lengths = [torch.linalg.vector_norm(silu(y), dim=-1, keepdim=True) for y in (q, k)]
        q, k = (silu(y) / size.masked_fill(size == 0, 1.0) for y, size in zip((q, k), lengths, strict=True))
        eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)

        def run(tokens: range, own: bool) -> list[Tensor]:
            state, outputs = torch.zeros_like(k.mT @ v), []
            for t in tokens:
                before = state = alpha[:, :, t, :, None] * state
                for step in range(self.steps * t, self.steps * (t + 1)):
                    key, rate = k[:, :, step, :, None], beta[:, :, step, None, None]
                    state = (eye - rate * key @ key.mT) @ state + rate * key * v[:, :, step, None]
                outputs.append((q[:, :, t, None] @ (state if own else before))[:, :, 0])
            return outputs

        N = x.shape[1]
        y = torch.stack(run(range(N), True), 2)
        if not self.causal:
            y = y + torch.stack(run(range(N - 1, -1, -1), False)[::-1], 2)
        y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.norm.weight
        return self.out(y.transpose(1, 2).flatten(2))

    def _parts(self, x: Tensor, key_mask: Tensor | None = None) -> list[Tensor]:
        """q ``(B, H, N, D)``, and of all steps k, v ``(B, H, N·steps, D)`` and β ``(B, H, N·steps)``.

        If the state fades, also log2(α) ``(B, H, N·steps, 1)``, all of it at the first step of each token.
        """
        q, *others = self.projected(x)
        both = others[: self.steps], others[self.steps :]
        k, v = (y[0] if self.steps == 1 else torch.stack(y, 3).flatten(2, 3) for y in both)
        beta = torch.sigmoid(self.beta(x)).view(*x.shape[:2], self.steps, self.heads).permute(0, 3, 1, 2)
        if self.negative:
            beta = 2 * beta
        if key_mask is not None:
            beta = beta.masked_fill(~key_mask[:, None, :, None], 0.0)
        parts = [q, k, v, beta.flatten(2)]
        return parts if self.fading is None else [*parts, self._log_decay(self.fading(x), key_mask)]

    def _log_decay(self, steps: Tensor, key_mask: Tensor | None) -> Tensor:
        dtype = accumulator(steps.dtype)
        log_decay = softplus(steps.to(dtype) + self.step_bias.to(dtype)) * (self.log_A.to(dtype).exp() * -LOG2E)
        if key_mask is not None:
            log_decay = log_decay.masked_fill(~key_mask[..., None], 0.0)
        return pad(log_decay.mT[..., None], (0, self.steps - 1)).flatten(2)[..., None]

    def _finish(self, y: Tensor) -> Tensor:
        return self.out(self.norm(y.transpose(1, 2)).flatten(2))

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        plain = partial(by_heads, partial(_both_ways, causal=self.causal, chunk=self.chunk))
        parts, name = self._parts(x, key_mask), f"delta, causal={self.causal}"
        return self._finish(forms.attend(name, self.form, plain, *parts, fast=self.fast))

    def begin(self, x: Tensor) -> Tensor:
        """The state ``(B, H, D, D)`` after x ``(B, n, C)``, n >= 0, float32 at least."""
        return self.prompted(x)[1]

    def prompted(self, x: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The outputs for x ``(B, n, C)``, and the state after it; ``before`` is that in front of it."""
        q, k, v, beta, *log_decay = (part.to(accumulator(x.dtype)).flatten(0, 1) for part in self._parts(x))
        q = _unit(q).repeat_interleave(self.steps, 1) if self.steps > 1 else _unit(q)
        first = None if before is None else before.flatten(0, 1)
        y, state = erase_and_write(q, _unit(k), v, beta, *log_decay, chunk=self.chunk, state=first)
        y, state = (
            torch.unflatten(z, 0, (x.shape[0], self.heads)) for z in (y[:, self.steps - 1 :: self.steps], state)
        )
        return self._finish(y.to(x.dtype)), state

    def step(self, state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.shape[1] > 1:
            return self.prompted(x, state)
        q, k, v, beta, *log_decay = (part.to(state.dtype) for part in self._parts(x))
        for fading in log_decay:
            state = state * fading[:, :, :1].exp2()
        for key, value, rate in zip(*(torch.split(y, 1, 2) for y in (_unit(k), v, beta[..., None])), strict=True):
            state = torch.addcmul(state, key.mT, rate * (value - key @ state))
        return self._finish((_unit(q) @ state).to(x.dtype)), state


def _unit(x: Tensor) -> Tensor:
    return unit(silu(x))


def _both_ways(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *log_decay: Tensor, causal: bool, chunk: int) -> Tensor:
    steps = k.shape[1] // q.shape[1]
    q, k = _unit(q), _unit(k)
    if steps > 1:  # all steps read, and one of them for its token
        q = q.repeat_interleave(steps, 1)
    out, _ = erase_and_write(q, k, v, beta, *log_decay, chunk=chunk)
    out = out[:, steps - 1 :: steps]
    if causal:
        return out
    turned = (torch.unflatten(x, 1, (-1, steps)).flip(1).flatten(1, 2) for x in (q, k, v, beta, *log_decay))
    later, _ = erase_and_write(*turned, chunk=chunk, strict=True)
    return out + later[:, ::steps].flip(1)


def _fused(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, causal: bool) -> Tensor:
    parts, kernel = (_unit(q), _unit(k), v, beta), partial(fla.run, "delta")
    out = kernel(*parts)
    return out if causal else out + fla.before(kernel, *(x.flip(2) for x in parts)).flip(2)
