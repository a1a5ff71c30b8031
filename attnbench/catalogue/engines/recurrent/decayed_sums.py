"""Sums of keys and values that fade, the engine of most recurrent variants.

S_t = a_t S_{t-1} + k_t v_tᵀ and o_t = q_tᵀ S_t, with 0 < a_t <= 1, amount to a product with a lower triangular matrix,
o_i = Σ_{j<=i} (q_i·k_j) a_{j+1}···a_i v_j. It is computed chunk by chunk: pairs within a chunk as a c x c matrix, all
earlier keys through the one state in front of the chunk, so that the work is O(n). Every factor is a power of two.
Its exponent is the sum of the logarithms between two tokens and never positive: nothing overflows, however strong a
decay is, and numbers after a strong decay keep their digits.
"""

from __future__ import annotations

from functools import partial
from math import log
from typing import Annotated

import torch
from pydantic import AfterValidator, Field
from torch import Tensor
from torch.nn.functional import pad

from attnbench.catalogue.engines.recurrent.stretches import by_heads, in_turn, rows_in_turn, stretches
from attnbench.errors import Unsupported

Chunk = Annotated[int, Field(ge=1, description="tokens whose pairs are formed. Moves time and memory only")]
"""The option of all recurrences that form the pairs within a chunk."""


def _power_of_two(chunk: int) -> int:
    if chunk & (chunk - 1):
        raise ValueError("must be a power of two")
    return chunk


HalvedChunk = Annotated[
    int,
    Field(ge=1, description="tokens whose pairs are formed, a power of two. Moves time and memory only"),
    AfterValidator(_power_of_two),
]


def states_before(added: Tensor, kept: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The state in front of each chunk, S_{b+1} = kept_b ⊙ S_b + added_b, and the one after the last.

    ``added`` is ``(G, chunks, D, E)``; ``kept`` is broadcastable against it, for one chunk only if all are alike;
    ``state`` is S_0 ``(G, D, E)``, None for 0.
    """
    state = torch.zeros_like(added[:, 0]) if state is None else state
    factors = kept.unbind(1) * (added.shape[1] if kept.shape[1] == 1 else 1)
    states = []
    for more, factor in zip(added.unbind(1), factors, strict=True):
        states.append(state)
        state = torch.addcmul(more, factor, state)
    return torch.stack(states, 1), state


STRONGEST = -1100.0
"""Lowest log2 of a decay: 2^-1100 is 0 in float64, and a lower one would cost sums with the others digits."""


def decayed_attention(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, causal: bool, chunk: int) -> Tensor:
    """The output of :func:`decayed_from` a state of 0."""
    return decayed_from(q, k, v, log_decay, causal=causal, chunk=chunk)[0]


def decayed_from(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None = None,
    *,
    causal: bool = True,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Σ_j (q_i·k_j) 2^-|L_i - L_j| v_j over j <= i, or over all j, with L the running sum of ``log_decay``.

    Args:
        q, k: ``(G, N, D)``; v: ``(G, N, E)``.
        log_decay: log2(a_t) <= 0, ``(G, N)``, or ``(G, 1)`` if it is the same for all tokens. The former is summed in
            float64: tokens after a strong decay are known only by differences of such sums.
        state: in front of the first token, ``(G, D, E)``; None for 0.

    Returns:
        ``(G, N, E)``; and the state after the last token, if ``log_decay`` is that of each.
    """
    N = q.shape[1]
    chunk = min(chunk, N)
    parts = stretches(chunk, q, k, v)
    if log_decay.shape[1] == 1:
        sums = [log_decay[:, :, None] * torch.arange(1, chunk + 1, device=q.device, dtype=q.dtype)] * len(parts)
    else:
        steps = log_decay.clamp(min=STRONGEST)
        # With dtype=, torch would add the gradients up in float32.
        sums = [x.double().cumsum(-1) for (x,) in stretches(chunk, steps)]
    coming: list[Tensor | None] = [None] * len(parts)
    if not causal:
        after = [(keys, values, since) for (_, keys, values), since in zip(parts, sums, strict=True)]
        coming[::-1], _ = in_turn(_states_after, after[::-1])
    read = partial(_read, causal=causal)
    return rows_in_turn(read, [(*part, *more) for part, *more in zip(parts, sums, coming, strict=True)], N, state)


def _states_after(state: Tensor | None, keys: Tensor, values: Tensor, since: Tensor) -> tuple[Tensor, Tensor]:
    begun = since[..., None].to(keys.dtype).exp2()
    states, state = states_before(((keys * begun).mT @ values).flip(1), begun[:, :, -1:].flip(1), state)
    return states.flip(1), state


def _read(
    state: Tensor | None,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    since: Tensor,
    later: Tensor | None,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    # The decay from the start of the chunk to a token, its own included, and from there to the end.
    begun, until = (x[..., None].to(keys.dtype).exp2() for x in (since, since[..., -1:] - since))
    past, state = states_before((keys * until).mT @ values, begun[:, :, -1:], state)
    out = (queries @ keys.mT * weights_between(since, causal, keys.dtype)) @ values + (queries * begun) @ past
    if later is not None:
        out = out + (queries * until) @ later
    return out.flatten(1, 2), state


def weights_between(since: Tensor, causal: bool, dtype: torch.dtype) -> Tensor:
    """The decay between two tokens of a chunk, ``(G, chunks, c, c)``."""
    between = (since[..., :, None] - since[..., None, :]).to(dtype)
    if not causal:
        return between.copysign(-1.0).exp2()  # -|x|
    future = torch.full(between.shape[-2:], float("-inf"), dtype=dtype, device=since.device).triu(1)
    return (between + future).exp2()


def last_state(k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """Σ_j 2^(L_n - L_j) k_j v_jᵀ after the last of n >= 0 tokens, ``(B, H, D, E)``.

    k is ``(B, H, n, D)``, v ``(B, H, n, E)``, ``log_decay`` log2(a_t), ``(B, H, n, 1)`` or ``(B, H, n, D)``.
    """
    # Summed over the tokens after each: nothing is subtracted, so that numbers after a strong decay keep their digits.
    until = pad(log_decay[:, :, 1:], (0, 0, 0, 1)).flip(2).cumsum(2).flip(2)
    return (k * until.exp2()).mT @ v


def drawn_step_sizes(count: int) -> Tensor:
    """Numbers ``(count,)`` with a softplus that is log-uniform in [0.001, 0.1]."""
    size = torch.empty(count).uniform_(log(0.001), log(0.1)).exp()
    return size + torch.log(-torch.expm1(-size))  # the inverse of softplus


KeyGroups = Annotated[int, Field(ge=1, description="groups of heads, each with a B and a C of its own; divides them")]
"""The option of layers with heads that share B and C."""


def divided(heads: int, groups: int, name: str) -> None:
    """Raise :class:`Unsupported` unless ``groups`` divides the heads."""
    if heads % groups:
        raise Unsupported(f"{name}: {heads} heads do not fall into groups={groups} of one size")


def attended_in_groups(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, causal: bool, chunk: int) -> Tensor:
    """:func:`decayed_attention` of every head, ``(B, H, N, E)``; head h reads q and k of group h // (H / groups).

    The groups take turns, so that q and k ``(B, groups, N, D)`` are views for each head and never repeated. v is
    ``(B, H, N, E)``, ``log_decay`` ``(B, H, N)``.
    """
    groups, heads = q.shape[1], v.shape[1] // q.shape[1]
    compute = partial(decayed_attention, causal=causal, chunk=chunk)
    shared = zip(torch.split(q, 1, 1), torch.split(k, 1, 1), strict=True)
    own = zip(torch.split(v, heads, 1), torch.split(log_decay, heads, 1), strict=True)
    read = [
        by_heads(compute, *(x.expand(-1, heads, -1, -1) for x in both), *rest)
        for both, rest in zip(shared, own, strict=True)
    ]
    return read[0] if groups == 1 else torch.cat(read, 1)


def in_groups(x: Tensor, groups: int) -> Tensor:
    """``(B, N, groups · D)`` as ``(B, groups, N, D)``, a view."""
    return x[:, None] if groups == 1 else torch.unflatten(x, -1, (groups, -1)).transpose(1, 2)


def of_heads(x: Tensor, heads: int) -> Tensor:
    """``(B, groups, n, D)`` as ``(B, heads, n, D)``: a view of one group, else a copy, for one token or a state."""
    if x.shape[1] == 1:
        return x.expand(-1, heads, -1, -1)
    return x[:, :, None].expand(-1, -1, heads // x.shape[1], -1, -1).flatten(1, 2)
