"""The operator within Mamba-2 and its like: keys and values whose sum fades by one number for each token."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from attnbench.catalogue.engines import fla, forms
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import accumulator
from attnbench.catalogue.engines.recurrent.decayed_sums import Chunk, decayed_attention, decayed_from, last_state
from attnbench.catalogue.engines.recurrent.stretches import by_heads, by_rows
from attnbench.contract.problem.shape import Shape
from attnbench.contract.reads import DECAY
from attnbench.contract.variant import MIRRORED, Core


class DecayedSums(nn.Module):
    """The state space of Mamba-2: a sum that fades by one number for each token.

    q (C), k (B) ``(B, H, N, D)``, v (Δ·x) ``(B, H, N, E)`` and log2(α) ``(B, H, N, 1)``: S_t = α_t S_{t-1} + k_t v_tᵀ
    and o_t = S_tᵀ q_t. Each head has a q and a k of its own. What surrounds it in the layer is left out, and v is
    multiplied by Δ there. A padded token neither fades nor writes. Not causal: the decay between two tokens is the same
    in both directions.

    Differs from the paper: the recurrence alone is here, without its layer.
    """

    def dense(self, q: Tensor, k: Tensor, v: Tensor, log2_decay: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """o_i = Σ_j (q_i·k_j) a_{j+1}···a_i v_j, all pairs at once."""
        k, v, log2_decay = emptied(key_mask, k, v, log2_decay)
        total = log2_decay.cumsum(2)
        weights = q @ k.mT * torch.exp2(-(total - total.mT).abs()).to(q.dtype)
        return (weights.tril() if self.causal else weights) @ v

    at_once = True

    def __init__(self, shape: Shape, *, chunk: Chunk = 64, form: forms.Fla = "auto") -> None:
        super().__init__()
        self.causal, self.chunk = shape.causal, chunk
        kernel = partial(fla.run, "simple-gla")
        self.fast = {"fla": kernel if shape.causal else partial(fla.from_both_ends, kernel)} if chunk == 64 else {}
        self.form = forms.require("ssd", form, self.fast)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, log2_decay: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v, log2_decay = emptied(key_mask, k, v, log2_decay)
        plain = partial(by_heads, partial(decayed_attention, causal=self.causal, chunk=self.chunk))
        name = f"ssd alone, causal={self.causal}"
        return forms.attend(name, self.form, plain, q, k, v, log2_decay[..., 0], fast=self.fast)

    def begin(self, q: Tensor, k: Tensor, v: Tensor, log2_decay: Tensor) -> Tensor:
        """The state ``(B, H, D, E)`` after n >= 0 tokens, float32 at least."""
        dtype = accumulator(v.dtype)
        return last_state(k.to(dtype), v.to(dtype), log2_decay.to(dtype))

    def step(self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, log2_decay: Tensor) -> tuple[Tensor, Tensor]:
        if q.shape[2] > 1:
            return by_rows(partial(decayed_from, chunk=self.chunk), state, q, k, v, log2_decay[..., 0])
        state = torch.addcmul(state * log2_decay.to(state.dtype).exp2(), k.mT.to(state.dtype), v.to(state.dtype))
        return (q.to(state.dtype) @ state).to(v.dtype), state


DECAYED_SUMS = Core(
    make=DecayedSums,
    formula="o_i = Σ_{j<=i} (q_i·k_j) α_{j+1}···α_i v_j",
    traits=replace(MIRRORED, stochastic=False, reads=(DECAY,)),
    settings=("chunk=5", "chunk=64"),
)
"""The core of ``ssd`` and of ``mamba2``."""
