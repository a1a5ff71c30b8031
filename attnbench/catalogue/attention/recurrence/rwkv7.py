"""RWKV-7: a state that fades channel by channel; one key takes out of it and another one writes to it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import exp, log
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import layer_norm, pad

from attnbench.catalogue.engines import fla, forms
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import LOG2E, accumulator, unit
from attnbench.catalogue.engines.recurrent.decayed_sums import HalvedChunk
from attnbench.catalogue.engines.recurrent.erase_and_write import erase_and_write
from attnbench.catalogue.engines.recurrent.real_tokens import FromEitherEnd, alone, both_ways
from attnbench.catalogue.engines.recurrent.short_convolution import Remembered
from attnbench.catalogue.engines.recurrent.stretches import by_heads, by_rows
from attnbench.catalogue.engines.recurrent.written_out import left_to_read
from attnbench.contract.problem.shape import Shape
from attnbench.contract.reads import BOUNDED_DECAY, REMOVAL, SHARE
from attnbench.contract.variant import CORE, SUMMED, Core, register

_LOWEST = -exp(-0.5)
"""Logarithm of the strongest decay, 0.545."""


class RemovingRule(FromEitherEnd):
    """A state that fades by channel, is erased along κ and written along k.

    q (r), k ``(B, H, N, D)``, v ``(B, H, N, E)``, κ, a and log2(w) ``(B, H, N, D)``: S_t = Diag(w_t) S_{t-1} -
    (a_t ⊙ κ_t)(κ_tᵀ S_{t-1}) + k_t v_tᵀ and o_t = S_tᵀ q_t. κ gets length 1 here, as in the layer, whose projections,
    mixing of neighbours, norm, bonus and gate are left out. No w is below 0.545. A padded token neither fades, takes
    out nor writes.

    Not causal: two recurrences, one from either end, added, a token's reading of itself twice.

    Differs from the paper: the recurrence alone is here, without its layer.
    """

    def written_out(self, *parts: Tensor) -> Tensor:
        """O = tril(X(Q, B)) U + tril(X(Q, K)) V with (I + X⁻(κ, B)) U = -X⁻(κ, K) V, B = a ⊙ κ, X as in the layer."""
        q, k, v, kappa, a, log2_w = parts
        log_w = log2_w * log(2)
        size = torch.linalg.vector_norm(kappa, dim=-1, keepdim=True)
        kappa = kappa / size.masked_fill(size == 0, 1.0)
        total, taken = log_w.cumsum(-2), a * kappa
        eye = torch.eye(k.shape[-2], dtype=k.dtype, device=k.device)
        system = eye + left_to_read(kappa, taken, total - log_w, total)
        right = -left_to_read(kappa, k, total - log_w, total) @ v
        removed = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        near: Tensor = left_to_read(q, taken, total, total, own=True) @ removed
        return near + left_to_read(q, k, total, total, own=True) @ v

    at_once = True

    def __init__(self, shape: Shape, *, chunk: HalvedChunk = 64, form: forms.Fla = "auto") -> None:
        super().__init__()
        self.causal, self.chunk = shape.causal, chunk
        self.fast = {"fla": _fused} if chunk == 64 else {}
        self.form = forms.require("rwkv7", form, self.fast)

    def one_way(self, *parts: Tensor) -> Tensor:
        plain = partial(by_heads, partial(_read, chunk=self.chunk))
        return forms.attend("rwkv7", self.form, plain, *parts, fast=self.fast)

    def prompted(self, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> tuple[Tensor, Tensor]:
        parts = (part.flatten(0, 1).to(accumulator(v.dtype)) for part in (q, k, v, *gates))
        y, state = (torch.unflatten(z, 0, k.shape[:2]) for z in _evolve(*parts, chunk=self.chunk))
        return y.to(v.dtype), state

    def begin(self, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
        """The state ``(B, H, D, E)`` after n >= 0 tokens, float32 at least."""
        return self.prompted(q, k, v, *gates)[1]

    def step(self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> tuple[Tensor, Tensor]:
        if q.shape[2] > 1:
            return by_rows(partial(_evolve, chunk=self.chunk), state, q, k, v, *gates)
        r, key, value, kappa, a, log_decay = (part.to(state.dtype) for part in (q, k, v, *gates))
        kappa = unit(kappa)
        kept = state * log_decay.mT.exp2()
        kept.addcmul_((a * kappa).mT, kappa @ state, value=-1).addcmul_(key.mT, value)
        return (r @ kept).to(v.dtype), kept


@register(
    "rwkv7",
    kind="mixer",
    family="recurrence",
    also=("kernel",),
    source="Peng et al. 2025, arXiv:2503.14456, section 4",
    formula="S_t = (Diag(w_t) - (a_t ⊙ κ_t) κ_tᵀ) S_{t-1} + k_t v_tᵀ,  o_t = S_tᵀ r_t,  "
    "w = exp(-σ(·)/√e),  a = σ(·),  ‖κ‖ = 1",
    cost="O(n·d²)",
    memory_exponent=1.0,
    traits=SUMMED,
    settings=("rank=3,chunk=4", "chunk=16"),
    core=Core(
        make=RemovingRule,
        formula="S_t = (Diag(w_t) - (a_t ⊙ κ_t) κ_tᵀ) S_{t-1} + k_t v_tᵀ,  o_t = S_tᵀ q_t,  ‖κ‖ = 1",
        traits=replace(CORE, reads=(REMOVAL, SHARE, BOUNDED_DECAY)),
        settings=("chunk=4", "chunk=16"),
    ),
)
class RWKV7(nn.Module):
    """RWKV-7: a token takes out along one key and writes along another.

    Peng et al. 2025, 'RWKV-7 "Goose" with Expressive Dynamic State Evolution', the layer that mixes tokens. Every
    channel of the state fades by w_t. Along κ_t, of length 1, the share a_t of what stood there before the decay is
    taken out, channel by channel; then k_t writes v_t: S_t = Diag(w_t) S_{t-1} - (a_t ⊙ κ_t)(κ_tᵀ S_{t-1}) + k_t v_tᵀ.
    The part taken out is read before the decay, unlike in ``gated-delta`` and ``kda``.

    x ``(B, N, C)`` is first mixed with the token before it, x_t + μ ⊙ (x_{t-1} - x_t), by a μ for each of six streams.
    From these come r, k and v by C × C products; w = exp(-σ(·)/√e), between 0.545 and 1, and a = σ(·), through ``rank``
    columns each, the former with a tanh between; and a gate through about twice as many, with a sigmoid between. In a
    head κ is k ⊙ ξ, divided by its length, and k is then multiplied by 1 + (a - 1) ⊙ α. Every head's o goes through a
    layer norm with an ε of D·10⁻⁵, and (r ⊙ k ⊙ ρ)·1 times v is added; times the gate it goes through the output
    projection. μ, ξ, α, ρ and the biases of w and a start as in the authors' code for a first layer, and without
    ``rank`` its widths follow √C as there. A padded token is passed over as if it were absent.

    The parallel form divides κ by w, which is at least 0.545, so that it reads the state after the decay. Chunks are
    halved as in ``gla``.

    Not causal: a second recurrence runs over the turned sequence, mixing of neighbours included, and what both give is
    added before the output projection, a token's reading of itself twice; the paper defines the causal form.

    Differs from the paper: values are not mixed with those of the first layer, since a layer here knows no other;
    linear layers start as PyTorch's. The layer that mixes channels belongs to the model.
    """

    at_once = True

    def __init__(
        self,
        shape: Shape,
        *,
        rank: Annotated[
            int | None, Field(ge=1, description="columns of w's and a's first matrix; none: 2.5·√C in steps of 32")
        ] = None,
        chunk: HalvedChunk = 64,
        form: forms.Fla = "auto",
    ) -> None:
        super().__init__()
        H, D, C = shape.H, shape.D, shape.C
        self.heads, self.causal, self.eps = H, shape.causal, 1e-5 * D
        self.core = RemovingRule(shape, chunk=chunk, form=form)
        narrow, wide = (rank, 2 * rank) if rank else (_in_steps(2.5 * C**0.5), _in_steps(5 * C**0.5))
        self.receptance, self.key, self.value, self.out = (nn.Linear(C, C, bias=False) for _ in range(4))
        decay, share = nn.Linear(narrow, C), nn.Linear(narrow, C)
        self.decay = nn.Sequential(nn.Linear(C, narrow, bias=False), nn.Tanh(), decay)
        self.share = nn.Sequential(nn.Linear(C, narrow, bias=False), share)
        self.gate = nn.Sequential(nn.Linear(C, wide, bias=False), nn.Sigmoid(), nn.Linear(wide, C, bias=False))
        channel, in_head = torch.linspace(0, 1, C), torch.linspace(-1, 1, D).repeat(H)
        in_head = in_head * in_head.abs()
        powers = torch.tensor([0.2, 0.9, 0.7, 0.7, 0.9, 0.2])[:, None]
        self.shift = nn.Parameter(1 - (torch.arange(C) / C) ** powers)
        with torch.no_grad():
            decay.bias.copy_(6 * channel - 5.5 + 2.5 * in_head)
            share.bias.copy_(0.3 * in_head + 0.4 * (channel - 0.5) - 0.19)
        self.removal = nn.Parameter(0.71 - 0.1 * (channel - 0.5))
        self.strengthened = nn.Parameter(torch.full((C,), 1.02))
        self.bonus = nn.Parameter(torch.full((H, D), -0.04))
        self.weight, self.bias = nn.Parameter(torch.ones(C)), nn.Parameter(torch.zeros(C))

    @alone
    def dense(self, x: Tensor) -> Tensor:
        """O = tril(X(R, B)) U + tril(X(R, K)) V with (I + X⁻(κ, B)) U = -X⁻(κ, K) V, B = a ⊙ κ.

        X_ij(q, k) = Σ_c q_ic k_jc w_{j+1,c}···w_ic, and X⁻_ij, j < i, has the product up to w_{i-1,c}.
        """
        out: Tensor = self.out(both_ways(self._one_way, x, None, causal=self.causal))
        return out

    def _one_way(self, x: Tensor, _: int) -> Tensor:
        """Tokens ``(n, C)``, up to the output projection."""
        before = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
        r, w, k, v, a, g = (x + mu * (before - x) for mu in self.shift)
        r, k, v = self.receptance(r), self.key(k), self.value(v)
        log_w, a = -torch.sigmoid(self.decay(w)) * exp(-0.5), torch.sigmoid(self.share(a))
        kappa, k = k * self.removal, k * (1 + (a - 1) * self.strengthened)
        r, log_w, k, v, a, kappa = (
            torch.unflatten(y, 1, (self.heads, -1)).transpose(0, 1) for y in (r, log_w, k, v, a, kappa)
        )
        o = self.core.written_out(r, k, v, kappa, a, log_w * LOG2E)
        o = (o - o.mean(-1, keepdim=True)) / (o.var(-1, correction=0, keepdim=True) + self.eps).sqrt()
        y = o.transpose(0, 1).flatten(1) * self.weight + self.bias
        own = (r * k * self.bonus[:, None]).sum(-1, keepdim=True) * v
        gated: Tensor = (y + own.transpose(0, 1).flatten(1)) * self.gate(g)
        return gated

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        out: Tensor = self.out(both_ways(self._run, x, key_mask, causal=self.causal))
        return out

    def _run(self, x: Tensor, _: int) -> Tensor:
        parts, gate = self._parts(x, pad(x[:, :-1], (0, 0, 1, 0)))
        return self._finish(self.core.one_way(*parts), parts, gate)

    def _parts(self, x: Tensor, before: Tensor) -> tuple[list[Tensor], Tensor]:
        """r, k, v, κ times any number, a and log2(w), each ``(B, H, N, D)``; and the gate ``(B, N, C)``.

        Args:
            before: the token before each, ``(B, N, C)``.
        """
        r, w, k, v, a, g = torch.addcmul(x, self.shift[:, None, None], before - x).unbind()
        r, k, v, a = self.receptance(r), self.key(k), self.value(v), torch.sigmoid(self.share(a))
        log_decay = torch.sigmoid(self.decay(w).to(accumulator(x.dtype))) * (_LOWEST * LOG2E)
        parts = r, k * (1 + (a - 1) * self.strengthened), v, k * self.removal, a, log_decay
        return [torch.unflatten(part, -1, (self.heads, -1)).transpose(1, 2) for part in parts], self.gate(g)

    def _finish(self, y: Tensor, parts: list[Tensor], gate: Tensor) -> Tensor:
        """Norm, a token's share of its own value, and gate; y ``(B, H, N, D)`` to ``(B, N, C)``."""
        r, k, v, *_ = parts
        own = (r * k * self.bonus[:, None]).sum(-1, keepdim=True) * v
        y = layer_norm(y, y.shape[-1:], eps=self.eps)
        y, own = (each.transpose(1, 2).flatten(2) for each in (y, own))
        return (torch.addcmul(self.bias, y, self.weight) + own) * gate

    def begin(self, x: Tensor) -> Remembered:
        return self.prompted(x)[1]

    def prompted(self, x: Tensor) -> tuple[Tensor, Remembered]:
        """x ``(B, n, C)``, in one pass over the chunks."""
        shifted = pad(x, (0, 0, 1, 0))
        parts, gate = self._parts(x, shifted[:, :-1])
        y, state = self.core.prompted(*parts)
        return self.out(self._finish(y, parts, gate)), Remembered(state, shifted[:, -1:].clone())

    def step(self, state: Remembered, x: Tensor) -> tuple[Tensor, Remembered]:
        n = x.shape[1]
        parts, gate = self._parts(x, state.last if n == 1 else torch.cat((state.last, x[:, :-1]), 1))
        y, kept = self.core.step(state.state, *parts)
        return self.out(self._finish(y, parts, gate)), Remembered(kept, x[:, n - 1 :])


def _in_steps(width: float) -> int:
    """The next multiple of 32, and 32 at least."""
    return max(32, 32 * round(width / 32))


def _fused(r: Tensor, k: Tensor, v: Tensor, kappa: Tensor, a: Tensor, log_decay: Tensor) -> Tensor:
    return fla.run("rwkv7", r, k, v, unit(kappa), a, log_decay)


def _read(r: Tensor, k: Tensor, v: Tensor, kappa: Tensor, a: Tensor, log_decay: Tensor, *, chunk: int) -> Tensor:
    return _evolve(r, k, v, kappa, a, log_decay, chunk=chunk)[0]


def _evolve(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    kappa: Tensor,
    a: Tensor,
    log_decay: Tensor,
    state: Tensor | None = None,
    *,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Outputs and last state; κ before the decay is κ / w after it."""
    kappa = unit(kappa)
    return erase_and_write(r, k, v, kappa * (-log_decay).exp2(), log_decay, along=a * kappa, chunk=chunk, state=state)
