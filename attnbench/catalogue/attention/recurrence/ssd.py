"""State space duality: linear attention in which each token chooses one decay for each head."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import softplus

from attnbench.catalogue.engines import fla, forms
from attnbench.catalogue.engines.head_layer import HeadLayer
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
from attnbench.catalogue.engines.recurrent.stretches import by_rows
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import MIRRORED, Knob, register


@register(
    "ssd",
    kind="mixer",
    family="recurrence",
    source="Dao and Gu 2024, arXiv:2405.21060, section 6, theorem 6.1",
    formula="y_i = Σ_{j<=i} (C_i·B_j) a_{j+1}···a_i Δ_j x_j,  a_t = exp(-Δ_t·A),  Δ = softplus(W u + b)",
    cost="O(n·d²)",
    memory_exponent=1.0,
    traits=replace(MIRRORED, knob=Knob("state")),
    settings=("state=3,chunk=5", "chunk=64", "state=3,groups=2,chunk=5"),
    core=DECAYED_SUMS,
)
class SSD(HeadLayer):
    """Mamba-2: linear attention with a decay per token and head.

    Dao and Gu 2024, "Transformers are SSMs", the state space dual layer: h_t = a_t h_{t-1} + B_t (Δ_t x_t)ᵀ and
    y_t = C_tᵀ h_t, with one number a_t = exp(-Δ_t A) per token and head. This is a product with the semiseparable
    matrix (C_i·B_j) a_{j+1}···a_i Δ_j. u ``(B, N, C)`` gives x (by C × C), Δ (one per head), and B and C, of width
    ``state``, which all heads share; the output projection is C × C. Computed chunk by chunk; the state of a head is
    ``state`` × D. With ``groups`` above 1 the heads fall into so many groups, one after the other, and each group has a
    B and a C of its own.

    A is drawn from U[1, 16] for each head, and the bias of Δ such that its softplus is log-uniform in [0.001, 0.1].
    A padded token has Δ = 0: it neither writes nor lets the state fade.

    Not causal: the decay between two tokens is the same in both directions, exp(-|L_i - L_j|) with L the running sum
    of -Δ·A, as if the semiseparable matrix were mirrored; the paper's layer is causal.

    Differs from the authors' code: the block around the layer is left out, that is the short convolution of x, B and C,
    the gate with its norm, and the skip connection of x.

    Raises:
        Unsupported: ``groups`` does not divide the heads.
    """

    at_once = True

    def __init__(
        self,
        shape: Shape,
        *,
        state: Annotated[int, Field(ge=1, description="width of B and C, rows of the state")] = 64,
        groups: KeyGroups = 1,
        chunk: Chunk = 64,
        form: forms.Fla = "auto",
    ) -> None:
        super().__init__()
        H, C = shape.H, shape.C
        divided(H, groups, "ssd")
        self.heads, self.groups, self.causal, self.chunk = H, groups, shape.causal, chunk
        kernel = partial(fla.run, "simple-gla")
        self.fast = {"fla": kernel if shape.causal else partial(fla.from_both_ends, kernel)} if chunk == 64 else {}
        self.form = forms.require("ssd", form, self.fast)
        self.value = nn.Linear(C, C, bias=False)
        self.key_query = nn.Linear(C, 2 * groups * state, bias=False)
        self.step_size = nn.Linear(C, H)
        self.out = nn.Linear(C, C, bias=False)
        self.log_A = nn.Parameter(torch.empty(H).uniform_(1, 16).log())
        with torch.no_grad():
            self.step_size.bias.copy_(drawn_step_sizes(H))

    def dense(self, u: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (u,) = emptied(key_mask, u)
        B, N, C = u.shape
        of_groups = torch.unflatten(self.key_query(u), -1, (2, self.groups, -1)).permute(2, 0, 3, 1, 4)
        key, query = (x.repeat_interleave(self.heads // self.groups, 1) for x in of_groups)
        size = softplus(self.step_size(u))
        if key_mask is not None:
            size = size * key_mask[..., None]
        total = (-size * self.log_A.exp()).cumsum(1).mT  # (B, H, N)
        matrix = query @ key.mT * torch.exp(-(total[..., :, None] - total[..., None, :]).abs())
        if self.causal:
            matrix = matrix.tril()
        y = torch.einsum("bhij,bjh,bjhd->bihd", matrix, size, self.value(u).view(B, N, self.heads, C // self.heads))
        return self.out(y.reshape(B, N, C))

    def _parts(self, u: Tensor, key_mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        B, N, C = u.shape
        key, query = (in_groups(x, self.groups) for x in self.key_query(u).chunk(2, -1))
        dtype = accumulator(u.dtype)
        size = softplus(self.step_size(u).to(dtype))
        if key_mask is not None:
            size = size.masked_fill(~key_mask[..., None], 0.0)
        values = self.value(u).view(B, N, self.heads, C // self.heads) * size[..., None]
        log_decay = size * (self.log_A.to(dtype).exp() * -LOG2E)
        return query, key, values.transpose(1, 2), log_decay.mT

    def forward(self, u: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (u,) = emptied(key_mask, u)
        return self.joined(self._mix(*self._parts(u, key_mask)))

    def _mix(self, *parts: Tensor) -> Tensor:
        plain = partial(attended_in_groups, causal=self.causal, chunk=self.chunk)
        return forms.attend(f"ssd, causal={self.causal}", self.form, plain, *parts, fast=self.fast)

    def prompted(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """u ``(B, n, C)``, projected once for the outputs and the state."""
        query, key, values, log_decay = self._parts(u)
        state = last_state(of_heads(key, self.heads).to(values.dtype), values, log_decay[..., None])
        return self.joined(self._mix(query, key, values, log_decay)), state

    def begin(self, u: Tensor) -> Tensor:
        """The state ``(B, H, state, D)`` after u ``(B, n, C)``, n >= 0, float32 at least."""
        _, key, values, log_decay = self._parts(u)
        return last_state(of_heads(key, self.heads).to(values.dtype), values, log_decay[..., None])

    def step(self, state: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        query, key, values, log_decay = self._parts(u)
        query, key = (of_heads(x, self.heads) for x in (query, key))
        if u.shape[1] > 1:
            y, state = by_rows(partial(decayed_from, chunk=self.chunk), state, query, key, values, log_decay)
            return self.joined(y.to(u.dtype)), state
        state = torch.addcmul(state * log_decay[..., None].exp2_(), key.mT.to(state.dtype), values)
        return self.joined((query.to(state.dtype) @ state).to(u.dtype)), state
