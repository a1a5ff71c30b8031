"""Gated linear attention: every channel of the state fades at a rate that the token chooses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, silu

from attnbench.catalogue.engines import fla, forms
from attnbench.catalogue.engines.head_layer import CoreLayer
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import LOG2E, LayerNorm, accumulator
from attnbench.catalogue.engines.recurrent.decayed_sums import HalvedChunk, last_state, states_before
from attnbench.catalogue.engines.recurrent.fading import faded_by_channel
from attnbench.catalogue.engines.recurrent.stretches import by_heads, by_rows, in_turn, rows_in_turn, stretches
from attnbench.contract.problem.shape import Shape
from attnbench.contract.reads import SLOW_DECAY
from attnbench.contract.variant import MIRRORED, Core, register


class GatedLinear(nn.Module):
    """Linear attention with a decay for each token and channel of the keys.

    q, k ``(B, H, N, D)``, v ``(B, H, N, E)`` and log2(α) ``(B, H, N, D)``: S_t = Diag(α_t) S_{t-1} + k_t v_tᵀ and
    o_t = S_tᵀ q_t / √D. The layer's norm and gate are left out. A padded token neither fades nor writes. Not causal:
    the decay between two tokens is the same in both directions.

    Differs from the paper: the recurrence alone is here, without its layer.
    """

    def dense(self, q: Tensor, k: Tensor, v: Tensor, log2_decay: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v, log2_decay = emptied(key_mask, k, v, log2_decay)
        total = log2_decay.cumsum(2)
        fading = torch.exp2(-(total[:, :, :, None] - total[:, :, None]).abs())
        weights = torch.einsum("bhid,bhjd,bhijd->bhij", q, k, fading.to(q.dtype)) * q.shape[-1] ** -0.5
        out: Tensor = (weights.tril() if self.causal else weights) @ v
        return out

    at_once = True

    def __init__(self, shape: Shape, *, chunk: HalvedChunk = 64, form: forms.Fla = "auto") -> None:
        super().__init__()
        self.causal, self.chunk = shape.causal, chunk
        kernel = partial(fla.run, "gla")
        both = partial(fla.from_both_ends, kernel, scale=shape.D**-0.5)
        self.fast = {"fla": kernel if shape.causal else both} if chunk == 64 else {}
        self.form = forms.require("gla", form, self.fast)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, log2_decay: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        plain = partial(by_heads, partial(gated_attention, causal=self.causal, chunk=self.chunk))
        parts = q, *emptied(key_mask, k, v, log2_decay)
        return forms.attend(f"gla, causal={self.causal}", self.form, plain, *parts, fast=self.fast)

    def begin(self, q: Tensor, k: Tensor, v: Tensor, log2_decay: Tensor) -> Tensor:
        """The state ``(B, H, D, E)`` after n >= 0 tokens, float32 at least."""
        dtype = accumulator(v.dtype)
        return last_state(k.to(dtype), v.to(dtype), log2_decay.to(dtype))

    def step(self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, log2_decay: Tensor) -> tuple[Tensor, Tensor]:
        if q.shape[2] > 1:
            return by_rows(partial(read_by_channel, chunk=self.chunk), state, q, k, v, log2_decay)
        state = torch.addcmul(state * log2_decay.to(state.dtype).mT.exp2(), k.mT.to(state.dtype), v.to(state.dtype))
        y = q.to(state.dtype) * q.shape[-1] ** -0.5 @ state
        return y.to(v.dtype), state


@register(
    "gla",
    kind="mixer",
    family="recurrence",
    source="Yang et al. 2023, arXiv:2312.06635, section 4, equations 3 and 4",
    formula="S_t = α_tᵀ1 ⊙ S_{t-1} + k_t v_tᵀ,  o_t = q_tᵀ S_t / √D,  α = σ(x W₁W₂ + b)^(1/τ)",
    cost="O(n·d²)",
    memory_exponent=1.0,
    traits=MIRRORED,
    settings=("rank=3,chunk=16", "rank=3,chunk=4,temperature=1.0", "rank=3,chunk=8,temperature=2.0,tied_keys=true"),
    core=Core(
        make=GatedLinear,
        formula="S_t = α_tᵀ1 ⊙ S_{t-1} + k_t v_tᵀ,  o_t = q_tᵀ S_t / √D",
        traits=replace(MIRRORED, stochastic=False, reads=(SLOW_DECAY,)),
        settings=("chunk=16", "chunk=4"),
    ),
)
class GLA(CoreLayer):
    """GLA: linear attention with a learned decay per token and channel.

    Yang et al. 2023, "Gated Linear Attention Transformers with Hardware-Efficient Training". Token t keeps α_t of the
    state (equation 3), one number in (0, 1) for each channel of the keys: α = σ(x W₁ W₂ + b)^(1/``temperature``), where
    W₁ has ``rank`` columns. x ``(B, N, C)`` gives q, k, v and a gate r, each by a C × C projection. Every head's output
    goes through a layer norm over its D channels and is multiplied by silu(r); the output projection follows. By
    default ``rank`` and ``temperature`` are the paper's.

    With ``tied_keys`` there is no projection for k: k_t = 1 - α_t, a token writes as much as the decay takes, as in
    HGRN2 (Qin et al. 2024, arXiv:2404.07904). There α is the sigmoid of a whole C × C projection (``temperature=1.0``,
    and C for ``rank``), with a lower bound in all layers but the first; q goes through silu, and there is no gate.

    A chunk is halved again and again. The score of two tokens is a product of q and k, each of which carries the powers
    of α up to the border between their halves. All exponents are sums of logarithms of one sign: nothing overflows,
    however small α is, and what follows a strong decay keeps its digits.

    A padded token writes nothing and does not let the state fade. Not causal: the decay between two tokens is the same
    in both directions, the product of α over the tokens after the first up to the second; the paper is causal.

    Differs from the paper: keys are as wide as values, D, not half; q is divided by √D.
    """

    at_once = True

    def __init__(
        self,
        shape: Shape,
        *,
        rank: Annotated[int, Field(ge=1, description="columns of the first matrix of the decay")] = 16,
        temperature: Annotated[float, Field(gt=0, description="τ: α = σ(·)^(1/τ)")] = 16.0,
        tied_keys: Annotated[bool, Field(description="k = 1 - α instead of a projection")] = False,
        chunk: HalvedChunk = 64,
        form: forms.Fla = "auto",
    ) -> None:
        super().__init__()
        C = shape.C
        self.heads, self.causal = shape.H, shape.causal
        self.temperature, self.tied_keys = temperature, tied_keys
        self.core = GatedLinear(shape, chunk=chunk, form=form)
        self.qkv = nn.Linear(C, (2 if tied_keys else 3) * C, bias=False)
        self.decay = nn.Sequential(nn.Linear(C, rank, bias=False), nn.Linear(rank, C))
        self.gate = nn.Linear(C, C)
        self.norm = LayerNorm(shape.D)
        self.out = nn.Linear(C, C, bias=False)

    def dense(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        B, N, C = x.shape
        log_alpha = logsigmoid(self.decay(x)).view(B, N, self.heads, C // self.heads) / self.temperature
        q, *keys, v = (each.view_as(log_alpha) for each in torch.split(self.qkv(x), C, -1))
        k = keys[0] if keys else 1 - log_alpha.exp()
        parts = (each.transpose(1, 2) for each in (q, k, v, log_alpha * LOG2E))
        y = self.core.dense(*parts, key_mask=key_mask)
        y = nn.functional.layer_norm(y, y.shape[-1:], self.norm.weight, self.norm.bias).transpose(1, 2)
        gate = self.gate(x)
        return self.out(y.reshape(B, N, C) * gate * torch.sigmoid(gate))

    def _parts(self, x: Tensor, key_mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, *keys, v = self.projected(x)
        logits = self.decay(x).to(accumulator(x.dtype))
        log_decay = logsigmoid(logits) * (LOG2E / self.temperature)
        log_decay = torch.unflatten(log_decay, 2, (self.heads, -1)).transpose(1, 2)
        k = keys[0] if keys else -torch.expm1(log_decay / LOG2E)
        if key_mask is not None:
            padded = ~key_mask[:, None, :, None]
            k, log_decay = k.masked_fill(padded, 0.0), log_decay.masked_fill(padded, 0.0)
        return q, k, v, log_decay

    def _finish(self, x: Tensor, y: Tensor) -> Tensor:
        return self.out(self.norm(y.transpose(1, 2)).flatten(2) * silu(self.gate(x)))

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        return self._finish(x, self._mix(*self._parts(x, key_mask)))

    def _mix(self, *parts: Tensor) -> Tensor:
        out: Tensor = self.core(*parts)
        return out

    def prompted(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x ``(B, n, C)``, projected once for the outputs and the state."""
        parts = self._parts(x)
        return self._finish(x, self._mix(*parts)), self.core.begin(*parts)

    def step(self, state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y, state = self.core.step(state, *self._parts(x))
        return self._finish(x, y), state


def gated_attention(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, causal: bool, chunk: int) -> Tensor:
    """Σ_j Σ_c q_ic k_jc 2^-|L_ic - L_jc| v_j / √D over j <= i, or over all j; q, k, v ``(G, N, D)``.

    ``log_decay`` is log2(α) <= 0, ``(G, N, D)``; L is its running sum. ``chunk`` is a power of two.
    """
    if causal:
        return read_by_channel(q, k, v, log_decay, chunk=chunk)[0]
    N = q.shape[1]
    while chunk >= 2 * N:
        chunk //= 2
    parts = stretches(chunk, q, k, v, log_decay)
    # Going backwards, the decay between tokens t + 1 and t is that of t + 1.
    later, _ = in_turn(_backwards, stretches(chunk, q, k, v, log_decay.roll(-1, 1))[::-1])
    return rows_in_turn(_stretch, [(*part, rows) for part, rows in zip(parts, later[::-1], strict=True)], N)[0]


def read_by_channel(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor | None = None, *, chunk: int
) -> tuple[Tensor, Tensor]:
    """The causal outputs ``(G, N, E)`` from a state ``(G, D, E)`` on, and the state after the last token."""
    N = q.shape[1]
    while chunk >= 2 * N:
        chunk //= 2
    return rows_in_turn(_stretch, stretches(chunk, q, k, v, log_decay), N, state)


def _backwards(state: Tensor | None, *part: Tensor) -> tuple[Tensor, Tensor]:
    out, state = _stretch(state, *(x.flip(1, 2) for x in part), strict=True)
    return out.flip(1), state


def _stretch(
    state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    later: Tensor | None = None,
    *,
    strict: bool = False,
) -> tuple[Tensor, Tensor]:
    """The causal form, plus ``later``; with ``strict``, a token does not see itself."""
    q = q * q.shape[-1] ** -0.5
    ((scores,),), begun, until = faded_by_channel([q], [k], log_decay)
    if strict:
        scores = scores.tril(-1)
    past, state = states_before((k * until).mT @ v, begun[:, :, -1:].mT, state)
    out = (scores @ v + (q * begun) @ past).flatten(1, 2)
    return out if later is None else out + later, state
