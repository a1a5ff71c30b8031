"""The whole layer of Mamba-2: the state space of ``ssd`` and its surroundings, which count in time and memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm, silu, softplus

from attnbench.catalogue.engines import fla, forms
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import LOG2E, accumulator
from attnbench.catalogue.engines.recurrent.decayed_core import DECAYED_SUMS
from attnbench.catalogue.engines.recurrent.decayed_sums import (
    Chunk,
    KeyGroups,
    attended_in_groups,
    decayed_from,
    divided,
    drawn_step_sizes,
    in_groups,
    last_state,
    of_heads,
)
from attnbench.catalogue.engines.recurrent.real_tokens import alone, both_ways
from attnbench.catalogue.engines.recurrent.short_convolution import Remembered, ShortConvolution, Width
from attnbench.catalogue.engines.recurrent.stretches import by_rows
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import SUMMED, Knob, register


@register(
    "mamba2",
    kind="mixer",
    family="recurrence",
    source="Dao and Gu 2024, arXiv:2405.21060, section 7",
    formula="h_t = a_t h_{t-1} + B_t (Δ_t x_t)ᵀ,  y_t = C_tᵀ h_t + p x_t,  a = exp(-Δ·A),  out = W norm(y ⊙ silu(z))",
    cost="O(n·d²)",
    memory_exponent=1.0,
    traits=replace(SUMMED, knob=Knob("state")),
    settings=("state=3,chunk=5", "state=4,expand=1,width=1,chunk=64", "state=3,groups=2,chunk=5"),
    core=DECAYED_SUMS,
)
class Mamba2(nn.Module):
    """The layer of Mamba-2: convolution, state space, skip and gate.

    Dao and Gu 2024, "Transformers are SSMs": the block around the state space that ``ssd`` has alone. u ``(B, N, C)``
    gives z and x, ``expand``·C wide, B and C, ``state`` wide, and a step size Δ = softplus(·) for each of the
    ``expand``·H heads, which are D wide. Each channel of x, B and C goes through a causal convolution over ``width``
    tokens, with a bias, and silu. A head's h_t = a_t h_{t-1} + B_t (Δ_t x_t)ᵀ with a_t = exp(-Δ_t A) gives
    y_t = C_tᵀ h_t + p x_t, p one number for each head; all heads share B and C. A root-mean-square norm over all
    channels of y ⊙ silu(z), and the output projection, follow. Computed chunk by chunk. With ``groups`` above 1 the
    heads fall into so many groups, one after the other; each has a B and a C, and a norm over its channels alone.

    As in the authors' code ``state`` is 128, ``expand`` 2 and ``width`` 4; A is drawn from U[1, 16], the bias of Δ such
    that its softplus is log-uniform in [0.001, 0.1], and p is 1. A padded token is passed over as if it were absent.

    Not causal: a second recurrence runs over the turned sequence, convolution included, and what both give is added
    before the norm, a token's reading of itself twice; the paper defines the causal form.

    Differs from the authors' code: linear layers start as PyTorch's.

    Raises:
        Unsupported: ``groups`` does not divide the heads.
    """

    at_once = True

    def __init__(
        self,
        shape: Shape,
        *,
        state: Annotated[int, Field(ge=1, description="width of B and C, rows of the state")] = 128,
        expand: Annotated[int, Field(ge=1, description="width of x, in widths of u")] = 2,
        groups: KeyGroups = 1,
        width: Width = 4,
        chunk: Chunk = 64,
        form: forms.Fla = "auto",
    ) -> None:
        super().__init__()
        H, inner = expand * shape.H, expand * shape.C
        divided(H, groups, "mamba2")
        self.heads, self.groups, self.causal, self.chunk = H, groups, shape.causal, chunk
        self.fast = {"fla": partial(fla.run, "simple-gla")} if chunk == 64 else {}
        self.form = forms.require("mamba2", form, self.fast)
        self.sizes = [inner, groups * state, groups * state]
        self.project = nn.Linear(shape.C, inner + sum(self.sizes) + H, bias=False)
        self.short = ShortConvolution(sum(self.sizes), width, bias=True)
        self.norm = nn.RMSNorm(inner, eps=1e-5)
        self.out = nn.Linear(inner, shape.C, bias=False)
        self.log_A = nn.Parameter(torch.empty(H).uniform_(1, 16).log())
        self.step_bias = nn.Parameter(drawn_step_sizes(H))
        self.skip = nn.Parameter(torch.ones(H))

    @alone
    def dense(self, u: Tensor) -> Tensor:
        """The matrix of each head, written out: y_i = Σ_{j<=i} (C_i·B_j) a_{j+1}···a_i Δ_j x_j + p x_i."""
        n, (inner, state, _) = len(u), self.sizes
        z = u @ self.project.weight[:inner].T

        def read(side: Tensor, _: int) -> Tensor:
            tokens, steps = torch.split(side @ self.project.weight[inner:].T, [inner + 2 * state, self.heads], 1)
            taps = self.short.weight.T.flip(0)  # the token's own first
            mixed = torch.stack([pad(tokens, (0, 0, s, 0))[:n] * tap for s, tap in enumerate(taps)]).sum(0)
            assert self.short.b is not None
            mixed = mixed + self.short.b
            x, B, C = torch.split(mixed * torch.sigmoid(mixed), self.sizes, 1)
            size = softplus(steps + self.step_bias).T
            total = (-size * self.log_A.exp()[:, None]).cumsum(1)
            between = (total[:, :, None] - total[:, None]).tril().exp()
            x = torch.unflatten(x, 1, (self.heads, -1)).transpose(0, 1)
            C, B = (torch.unflatten(part, 1, (self.groups, -1)).transpose(0, 1) for part in (C, B))
            C, B = (part.repeat_interleave(self.heads // self.groups, 0) for part in (C, B))
            return (C @ B.mT * between).tril() @ (size[..., None] * x) + self.skip[:, None, None] * x

        y = both_ways(read, u, None, causal=self.causal).transpose(0, 1).flatten(1) * z * torch.sigmoid(z)
        y = torch.unflatten(y, 1, (self.groups, -1))
        y = (y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(1)
        out: Tensor = self.out(y * self.norm.weight)
        return out

    def forward(self, u: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (u,) = emptied(key_mask, u)
        z, driving = self._split(u)
        return self._finish(both_ways(self._run, driving, key_mask, causal=self.causal), z)

    def _split(self, u: Tensor) -> tuple[Tensor, Tensor]:
        projected, inner = self.project(u), self.sizes[0]
        return projected[..., :inner], projected[..., inner:]

    def _run(self, driving: Tensor, _: int) -> Tensor:
        tokens, steps = self._tokens(driving)
        x, query, key, values, log_decay = self._parts(self.short(tokens), steps)
        return self._skipped(self._mix(query, key, values, log_decay), x)

    def _mix(self, *parts: Tensor) -> Tensor:
        plain = partial(attended_in_groups, causal=True, chunk=self.chunk)
        return forms.attend("mamba2", self.form, plain, *parts, fast=self.fast)

    def prompted(self, u: Tensor) -> tuple[Tensor, Remembered]:
        """u ``(B, n, C)``, n >= 1, projected and convolved once for the outputs and the state."""
        z, driving = self._split(u)
        tokens, steps = self._tokens(driving)
        x, query, key, values, log_decay = self._parts(self.short(tokens), steps)
        state = last_state(of_heads(key, self.heads).to(values.dtype), values, log_decay[..., None])
        y = self._skipped(self._mix(query, key, values, log_decay), x)
        return self._finish(y, z), Remembered(state, self.short.begin(tokens))

    def _tokens(self, driving: Tensor) -> tuple[Tensor, Tensor]:
        return driving[..., : sum(self.sizes)], driving[..., sum(self.sizes) :]

    def _parts(self, tokens: Tensor, steps: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """x ``(B, H, N, D)``, C and B ``(B, groups, N, state)``, Δx ``(B, H, N, D)``, and log2(a) ``(B, H, N)``."""
        x, key, query = torch.split(silu(tokens), self.sizes, -1)
        dtype = accumulator(tokens.dtype)
        size = softplus(steps.to(dtype) + self.step_bias.to(dtype))
        log_decay = size * (self.log_A.to(dtype).exp() * -LOG2E)
        x = torch.unflatten(x, -1, (self.heads, -1))
        values = (x * size[..., None]).transpose(1, 2)
        query, key = (in_groups(each, self.groups) for each in (query, key))
        return x.transpose(1, 2), query, key, values, log_decay.mT

    def _skipped(self, y: Tensor, x: Tensor) -> Tensor:
        """y + p x of the heads ``(B, H, N, D)``, as ``(B, N, H·D)``."""
        return (y + x * self.skip[:, None, None]).transpose(1, 2).flatten(2)

    def _finish(self, y: Tensor, z: Tensor) -> Tensor:
        y = y * silu(z)
        if self.groups == 1:
            y = self.norm(y)
        else:
            y = torch.unflatten(y, -1, (self.groups, -1))
            y = rms_norm(y, y.shape[-1:], eps=1e-5).flatten(-2) * self.norm.weight
        out: Tensor = self.out(y)
        return out

    def begin(self, u: Tensor) -> Remembered:
        tokens, steps = self._tokens(self._split(u)[1])
        _, _, key, values, log_decay = self._parts(self.short(tokens), steps)
        return Remembered(
            last_state(of_heads(key, self.heads).to(values.dtype), values, log_decay[..., None]),
            self.short.begin(tokens),
        )

    def step(self, state: Remembered, u: Tensor) -> tuple[Tensor, Remembered]:
        z, driving = self._split(u)
        tokens, steps = self._tokens(driving)
        tokens, last = self.short.step(state.last, tokens)
        x, query, key, values, log_decay = self._parts(tokens, steps)
        query, key = (of_heads(each, self.heads) for each in (query, key))
        if u.shape[1] > 1:
            y, h = by_rows(partial(decayed_from, chunk=self.chunk), state.state, query, key, values, log_decay)
            return self._finish(self._skipped(y.to(u.dtype), x), z), Remembered(h, last)
        h = torch.addcmul(state.state * log_decay[..., None].exp2_(), key.to(values.dtype).mT, values)
        y = (query.to(h.dtype) @ h).to(u.dtype)
        return self._finish(self._skipped(y, x), z), Remembered(h, last)
