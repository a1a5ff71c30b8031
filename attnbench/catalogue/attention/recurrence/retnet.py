"""Retention: linear attention with keys that fade at a fixed rate for each head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench.catalogue.engines import fla, forms
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import LOG2E, accumulator
from attnbench.catalogue.engines.recurrent.decayed_sums import Chunk, decayed_attention, decayed_from
from attnbench.catalogue.engines.recurrent.stretches import by_heads, by_rows
from attnbench.catalogue.engines.rotation import angles, frequencies, rotate
from attnbench.contract.problem.reference import of_query_heads
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import No, Traits, register
from attnbench.errors import Unsupported


@dataclass(frozen=True, slots=True)
class RetentionConstants:
    """Constants of decoding: no part of the state, but made with it, so that a step need not make them again."""

    gamma: Tensor
    """``(H, 1, 1)``."""
    theta: Tensor
    """Angles from one position to the next, ``(1, D/2)``, float64."""


class Retained(NamedTuple):
    """The state of decoding."""

    state: Tensor
    """Σ γ^(t-j) (R_j k_j) v_jᵀ, ``(B, H, D, E)``, float32 at least."""
    length: int
    fixed: RetentionConstants


Decay = Literal["retnet", "lightning", "lightning-linear"]


@register(
    "retnet",
    family="recurrence",
    source="Sun et al. 2023, arXiv:2307.08621, section 2.1",
    formula="(QKᵀ ⊙ Γ) V / √D,  Γ_ij = γ^(i-j),  γ_h = 1 - 2^(-5-h),  q, k rotated by position",
    cost="O(n·d²)",
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        bias=No("there are no logits: the decay is what depends on the distance"),
        decode=True,
        rows_sum_to_one=False,
        shares="by itself",
        own_form_both_ways="weights fade with the distance in both directions; the paper defines the causal form only",
    ),
    settings=("chunk=5", "chunk=7,rotation=false", "chunk=5,decay=lightning", "chunk=5,decay=lightning-linear"),
)
class RetNet(nn.Module):
    """RetNet: linear attention that fades by a fixed factor per step.

    Sun et al. 2023, "Retentive Network", section 2.1. Head h = 0, 1, ... keeps γ_h = 1 - 2^(-5-h) of its state at each
    step, S_t = γ S_{t-1} + k_t v_tᵀ, and o_t = q_tᵀ S_t / √D: a product with the matrix (q_i·k_j) γ^(i-j), j <= i.
    There is no softmax and no denominator. q ``(B, H, N, D)``, k ``(B, K, M, D)`` and v ``(B, K, M, E)``; computed
    chunk by chunk. Heads of queries that share keys and values have a rate and a state each.

    ``rotation`` turns q and k by the angles i·θ, θ_c = 10000^(-2c/D), in the planes of the channels c and c + D/2, as
    the paper's complex decay γ·exp(iθ) does. A padded key is left out; the positions of the others stay.

    ``decay`` is the table of γ. With ``decay=lightning`` γ_h = exp(-s_h), where s_h are the slopes of ALiBi,
    2^(-8(h+1)/H) for a power of two: the first layer of Lightning Attention (Qin et al. 2024, arXiv:2401.04658), which
    has no rotation (``rotation=false``); its deeper layers fade more slowly. A public library has slopes under this
    name that are linear in h, ``decay=lightning-linear``: γ_h = exp(-8h/H), and head 0 forgets nothing.

    Not causal: the weight is γ^|i-j|, the same for both directions; the paper defines only the causal form. With
    M != N the decay counts from position to position, as if both sequences began together.

    Differs from the paper: of its three normalisations of the scores, only the first, 1/√D, is applied. The other two
    divide whole rows, which the group norm after the heads undoes. That norm, the gate and the projections belong to
    the layer and are not here.

    Raises:
        Unsupported: ``rotation`` with an odd D.
    """

    at_once = True

    def __init__(
        self,
        shape: Shape,
        *,
        rotation: Annotated[bool, Field(description="turn q and k by an angle that grows with the position")] = True,
        decay: Annotated[Decay, Field(description="the table of the heads' γ")] = "retnet",
        chunk: Chunk = 64,
        form: forms.Fla = "auto",
    ) -> None:
        super().__init__()
        if rotation and shape.D % 2:
            raise Unsupported(
                f"rotation pairs the channels: head_dim must be even, not {shape.D}; or set rotation=false"
            )
        self.causal, self.rotation, self.decay, self.chunk = shape.causal, rotation, decay, chunk
        self.form = forms.require("retnet", form, self._fast())

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        H, D = q.shape[1], q.shape[3]
        k, v = (of_query_heads(x, H) for x in (k, v))
        i, j = (torch.arange(x.shape[2], dtype=torch.float64, device=q.device) for x in (q, k))
        apart = i[:, None] - j
        if self.rotation:
            theta = 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64, device=q.device) / D)
            a, b = (torch.complex(*x.double().chunk(2, -1)) for x in (q, k))
            phase = torch.polar(torch.ones_like(apart)[..., None], apart[..., None] * theta)
            scores = torch.einsum("bhic,bhjc,ijc->bhij", a, b.conj(), phase).real
        else:
            scores = q.double() @ k.double().mT
        h = torch.arange(H, dtype=torch.float64, device=q.device)
        if self.decay == "retnet":
            gamma = 1 - 2.0 ** (-5 - h)
        elif self.decay == "lightning-linear":
            gamma = torch.exp(-8 * h / H)
        else:  # of a power of two, then every other one of twice as many
            power = 1 << (H.bit_length() - 1)
            slopes = torch.where(h < power, 2.0 ** (-8 * (h + 1) / power), 2.0 ** (-4 * (2 * (h - power) + 1) / power))
            gamma = torch.exp(-slopes)
        weights: Tensor = scores * gamma[:, None, None] ** apart.abs() / D**0.5
        if self.causal:
            weights = weights.tril()
        if key_mask is not None:
            weights = weights * key_mask[:, None, None]
        return (weights @ v.double()).to(v.dtype)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        N = q.shape[2]
        if k.shape[2] != N:  # pairs of a missing query or key are zero
            longest = max(N, k.shape[2])
            q, k, v = (nn.functional.pad(x, (0, 0, 0, longest - x.shape[2])) for x in (q, k, v))
        name = f"retnet, causal={self.causal}, rotation={self.rotation}, decay={self.decay}"
        return forms.attend(name, self.form, self._plain, q, k, v, fast=self._fast())[:, :, :N]

    def _fast(self) -> dict[str, fla.Kernel]:
        return {"fla": self._fused} if self.chunk == 64 else {}

    def _fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (of_query_heads(x, q.shape[1]) for x in (k, v))
        if self.rotation:
            turns = angles(0, q.shape[2], q)
            q, k = (rotate(x, *turns).to(v.dtype) for x in (q, k))
        gamma, scale = log2_gamma(q, self.decay)[:, 0] * fla.LN2, q.shape[-1] ** -0.5
        kernel = partial(fla.run, "simple-gla", g_gamma=gamma, scale=scale)
        return kernel(q, k, v) if self.causal else fla.from_both_ends(kernel, q, k, v, scale=scale)

    def _plain(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, H, K = *q.shape[:2], k.shape[1]
        turns = angles(0, q.shape[2], q) if self.rotation else None
        compute = partial(_retain, turns=turns, causal=self.causal, chunk=self.chunk)
        each = torch.unflatten(log2_gamma(q, self.decay), 0, (K, -1)).expand(B, K, H // K, 1)
        of_group = torch.unflatten(q, 1, (K, -1))
        outputs = [by_heads(compute, of_group[:, :, g], k, v, each[:, :, g]) for g in range(H // K)]
        return outputs[0] if H == K else torch.stack(outputs, 2).flatten(1, 2)

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Retained:
        n, dtype = k.shape[2], accumulator(k.dtype)
        position = torch.arange(n, device=k.device)
        k = k.to(dtype)
        if self.rotation:
            k = rotate(k, *angles(0, n, k))
        k, v = (of_query_heads(x, q.shape[1]) for x in (k, v))
        rates = log2_gamma(k, self.decay)[..., None]
        fading = rates * (n - 1 - position[:, None]).to(dtype)
        return Retained((k * fading.exp2()).mT @ v.to(dtype), n, RetentionConstants(rates.exp2(), frequencies(k)[None]))

    def step(self, state: Retained, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Retained]:
        dtype, H, n = state.state.dtype, q.shape[1], q.shape[2]
        a, b, values = (of_query_heads(x.to(dtype), H) for x in (q, k, v))
        if n > 1:
            if self.rotation:
                a, b = (rotate(x, *angles(state.length, n, x)) for x in (a, b))
            rates = log2_gamma(a, self.decay).expand(len(a), H, n)
            compute = partial(decayed_from, chunk=self.chunk)
            out, retained = by_rows(compute, state.state, a * q.shape[-1] ** -0.5, b, values, rates)
            return out.to(v.dtype), Retained(retained, state.length + n, state.fixed)
        if self.rotation:
            turn = state.fixed.theta * state.length
            a, b = rotate(torch.stack((a, b)), turn.cos().to(dtype), turn.sin().to(dtype)).unbind()
        retained = torch.addcmul(state.state * state.fixed.gamma, b.mT, values)
        out = torch.matmul(a, retained).mul_(q.shape[-1] ** -0.5)
        return out.to(v.dtype), Retained(retained, state.length + 1, state.fixed)


def _retain(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, turns: tuple[Tensor, Tensor] | None, causal: bool, chunk: int
) -> Tensor:
    scale = q.shape[-1] ** -0.5
    if turns is None:
        q = q * scale
    else:
        q, k = rotate(q, *(turn * scale for turn in turns)), rotate(k, *turns)
    return decayed_attention(q, k, v, log_decay, causal=causal, chunk=chunk)


def log2_gamma(like: Tensor, decay: Decay) -> Tensor:
    """log2(γ) of each head in ``(B, H, ...)``: ``(H, 1)``."""
    H = like.shape[1]
    h = torch.arange(H, device=like.device, dtype=torch.float64)
    if decay == "retnet":
        logs = torch.log1p(-torch.exp2(-5.0 - h))
    elif decay == "lightning":
        power = 1 << (H.bit_length() - 1)  # as in Alibi, whose numbers would have to be copied to a GPU in each call
        logs = -torch.exp2(torch.where(h < power, 2 * h + 2, 2 * (h - power) + 1) * (-4 / power))
    else:
        logs = h * (-8 / H)
    return (logs * LOG2E).to(accumulator(like.dtype))[:, None]
