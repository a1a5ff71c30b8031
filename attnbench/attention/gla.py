"""Gated linear attention: every channel of the state fades at a rate that the token chooses."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, silu

from attnbench.attention.decayed_sums import by_heads, in_turn, last_state, rows_in_turn, states_before, stretches
from attnbench.attention.feature_tiles import LOG2E
from attnbench.attention.precision import LayerNorm, accumulator
from attnbench.errors import UsageError
from attnbench.shape import Shape
from attnbench.variant import No, Traits, register


@register(
    "gla",
    kind="mixer",
    family="recurrence",
    source="Yang et al. 2023, arXiv:2312.06635, section 4, equations 3 and 4",
    formula="S_t = α_tᵀ1 ⊙ S_{t-1} + k_t v_tᵀ,  o_t = q_tᵀ S_t / √D,  α = σ(x W₁W₂ + b)^(1/τ)",
    cost="O(n·d²)",
    traits=Traits(
        target="other",
        cross=No("one recurrence runs over one sequence: each token is both a query and a key"),
        bias=No("there are no logits: the decay is what depends on the distance"),
        decode=True,
        stochastic=True,
        rows_sum_to_one=False,
    ),
    settings=("rank=3,chunk=16", "rank=3,chunk=4,temperature=1.0"),
)
class GLA(nn.Module):
    """Linear attention with a learned decay per token and channel, GLA.

    Yang et al. 2023, "Gated Linear Attention Transformers with Hardware-Efficient Training". Token t keeps α_t of the
    state (equation 3), one number in (0, 1) for each channel of the keys: α = σ(x W₁ W₂ + b)^(1/``temperature``) with
    W₁ of ``rank`` columns. x ``(B, N, C)`` gives q, k, v and a gate r, each by a C × C projection; every head's output
    goes through a layer norm over its D channels, is multiplied by silu(r), and the output projection follows. ``rank``
    and ``temperature`` are the paper's by default.

    Pairs within a chunk are products of q and k that carry powers of α up to a token between the two: the middle of
    runs of 8 tokens, and the border of two halves for all others. No power overflows, however small α is; inside a run
    an α below 2^-25 in float32 (2^-225 in float64) counts as that, which is less than rounding.

    A padded token writes nothing and does not let the state fade. Not causal: the decay between two tokens is the same
    in both directions, the product of α over the tokens after the first up to the second; the paper is causal.

    Differs from the paper: keys are as wide as values, D, not half; q is divided by √D.

    Raises:
        UsageError: ``chunk`` is not a power of two.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        rank: Annotated[int, Field(ge=1, description="columns of the first matrix of the decay")] = 16,
        temperature: Annotated[float, Field(gt=0, description="τ: α = σ(·)^(1/τ)")] = 16.0,
        chunk: Annotated[
            int, Field(ge=1, description="tokens whose pairs are formed, a power of two. Moves time and memory only")
        ] = 64,
    ) -> None:
        super().__init__()
        if chunk & (chunk - 1):
            raise UsageError(f"gla: option chunk={chunk} must be a power of two")
        C = shape.C
        self.heads, self.causal, self.chunk, self.temperature = shape.H, shape.causal, chunk, temperature
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.decay = nn.Sequential(nn.Linear(C, rank, bias=False), nn.Linear(rank, C))
        self.gate = nn.Linear(C, C)
        self.norm = LayerNorm(shape.D)
        self.out = nn.Linear(C, C, bias=False)

    def _parts(self, x: Tensor, key_mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and log2(α), each ``(B, H, N, D)``."""
        B, N, C = x.shape
        q, k, v = self.qkv(x).view(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        logits = self.decay(x).to(accumulator(x.dtype))
        log_decay = (
            (logsigmoid(logits) * (LOG2E / self.temperature)).view(B, N, self.heads, C // self.heads).transpose(1, 2)
        )
        if key_mask is not None:
            padded = ~key_mask[:, None, :, None]
            k, log_decay = k.masked_fill(padded, 0.0), log_decay.masked_fill(padded, 0.0)
        return q, k, v, log_decay

    def _finish(self, x: Tensor, y: Tensor) -> Tensor:
        """Norm, gate and output projection of the heads' outputs ``(B, H, N, D)``."""
        out: Tensor = self.out(self.norm(y.transpose(1, 2)).flatten(2) * silu(self.gate(x)))
        return out

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """x ``(B, N, C)``; ``key_mask`` ``(B, N)``, True where a token is real."""
        compute = partial(gated_attention, causal=self.causal, chunk=self.chunk)
        return self._finish(x, by_heads(compute, *self._parts(x, key_mask)))

    def dense(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Weights Σ_c q_ic k_jc exp(-|L_ic - L_jc|), N × N × D numbers, with L the running sum of log(α)."""
        B, N, C = x.shape
        q, k, v = (each.view(B, N, self.heads, C // self.heads) for each in self.qkv(x).chunk(3, -1))
        alpha = torch.sigmoid(self.decay(x)).view_as(q) ** (1 / self.temperature)
        if key_mask is not None:
            real = key_mask[:, :, None, None]
            k, alpha = k * real, torch.where(real, alpha, torch.ones_like(alpha))
        total = alpha.log().cumsum(1)
        fading = torch.exp(-(total[:, :, None] - total[:, None]).abs())
        weights = torch.einsum("bihd,bjhd,bijhd->bhij", q, k, fading) * q.shape[-1] ** -0.5
        y = (weights.tril() if self.causal else weights) @ v.transpose(1, 2)
        y = nn.functional.layer_norm(y, y.shape[-1:], self.norm.weight, self.norm.bias).transpose(1, 2)
        gate = self.gate(x)
        out: Tensor = self.out(y.reshape(B, N, C) * gate * torch.sigmoid(gate))
        return out

    def begin(self, x: Tensor) -> Tensor:
        """The state ``(B, H, D, D)`` after x ``(B, n, C)``, n >= 0, float32 at least."""
        _, k, v, log_decay = self._parts(x)
        return last_state(k.to(log_decay.dtype), v.to(log_decay.dtype), log_decay)

    def step(self, state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """x ``(B, 1, C)``."""
        q, k, v, log_decay = self._parts(x)
        state = state * log_decay.mT.exp2() + k.mT.to(state.dtype) * v
        y = q.to(state.dtype) * q.shape[-1] ** -0.5 @ state
        return self._finish(x, y.to(x.dtype)), state


RUN = 8
"""Tokens whose pairs share one point of reference."""


def gated_attention(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, causal: bool, chunk: int) -> Tensor:
    """Σ_j Σ_c q_ic k_jc 2^-|L_ic - L_jc| v_j / √D over j <= i, or over all j.

    Args:
        q, k, v: ``(G, N, D)``.
        log_decay: log2(α) <= 0, ``(G, N, D)``; L is its running sum.
        chunk: a power of two.
    """
    N = q.shape[1]
    while chunk >= 2 * N:
        chunk //= 2
    parts = stretches(chunk, q, k, v, log_decay)
    if causal:
        return rows_in_turn(_stretch, parts, N)[0]
    # Backwards, what lies between tokens t and t + 1 is the decay of t + 1.
    later, _ = in_turn(_backwards, stretches(chunk, q, k, v, log_decay.roll(-1, 1))[::-1])
    return rows_in_turn(_stretch, [(*part, rows) for part, rows in zip(parts, later[::-1], strict=True)], N)[0]


def _backwards(state: Tensor | None, *part: Tensor) -> tuple[Tensor, Tensor]:
    """What a stretch reads from later tokens, for one that comes after all of them."""
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
    """The causal form, to which ``later`` is added; with ``strict`` a token does not see itself."""
    q = q * q.shape[-1] ** -0.5
    scores, since = _pairs(q, k, log_decay, strict)
    end = since[:, :, -1:]
    past, state = states_before((k * (end - since).exp2()).mT @ v, end.mT.exp2(), state)
    out = (scores @ v + (q * since.exp2()) @ past).flatten(1, 2)
    return out if later is None else out + later, state


def _pairs(q: Tensor, k: Tensor, log_decay: Tensor, strict: bool) -> tuple[Tensor, Tensor]:
    """Scores ``(G, chunks, c, c)`` of each chunk, and sums of log_decay from its start, for ``(G, chunks, c, D)``."""
    size = min(RUN, q.shape[2])
    q, k, log_decay = (torch.unflatten(x, 2, (-1, size)) for x in (q, k, log_decay))
    sums = torch.ones(size, size, dtype=q.dtype, device=q.device).tril()  # a product is faster than cumsum here
    since = sums @ log_decay
    # At most four tokens lie between the middle of a run and its ends.
    weakest = -225.0 if q.dtype == torch.float64 else -25.0
    limited = sums @ log_decay.clamp(min=weakest)
    limited = limited - limited[:, :, :, (size - 1) // 2, None]
    scores = ((q * limited.exp2()) @ (k * limited.neg().exp2()).mT).tril(-1 if strict else 0)
    while q.shape[2] > 1:
        (first, second), (earlier, _), (_, later) = (torch.unflatten(x, 2, (-1, 2)).unbind(3) for x in (since, k, q))
        left, right = torch.unflatten(scores, 2, (-1, 2)).unbind(3)
        end = first[:, :, :, -1:]
        across = (later * second.exp2()) @ (earlier * (end - first).exp2()).mT
        rows = torch.cat([left, torch.zeros_like(left)], -1), torch.cat([across, right], -1)
        scores = torch.cat(rows, -2)
        since = torch.cat([first, second + end], 3)
        q, k = (torch.unflatten(x, 2, (-1, 2)).flatten(3, 4) for x in (q, k))
    return scores[:, :, 0], since[:, :, 0]
