"""Sums of keys and values that fade, read with a weight for each level of distance: O(n log n).

Tokens are the leaves of a binary tree. The level of two tokens is 0 for a token and itself, and otherwise 1 plus the
highest bit in which their places differ: the height of the smallest subtree that holds both. A token i reads what token
j wrote with its weight for their level. All that it reads at one level was written in one half of a subtree, whose sum
is one state; so there is one state for each bit of its place. Levels from the last weight on share that weight, and
their states are one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnbench.engines.recurrent.decayed_sums import STRONGEST, weights_between
from attnbench.engines.recurrent.stretches import rows_in_turn, stretches


def levelled_attention(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, weights: Tensor, *, chunk: int) -> Tensor:
    """Σ_j (q_i·k_j) 2^(L_i - L_j) λ_i(level of i and j) v_j over j <= i, with L the running sum of ``log_decay``.

    Args:
        q, k: ``(G, N, D)``; v: ``(G, N, E)``.
        log_decay: in log2, at most 0, ``(G, N)``.
        weights: λ ``(G, N, levels)``.
        chunk: tokens whose pairs are formed, a power of two.
    """
    N, levels = q.shape[1], weights.shape[2]
    while chunk >= 2 * N:
        chunk //= 2
    parts, first, numbered = stretches(chunk, q, k, v, log_decay, weights), 0, []
    for part in parts:
        numbered.append((first, *part))
        first += part[0].shape[1]
    above = max(1, min(levels - chunk.bit_length(), (first - 1).bit_length()))
    return rows_in_turn(_read, numbered, N, q.new_zeros(q.shape[0], above, q.shape[2], v.shape[2]))[0]


def _read(
    state: Tensor, first: int, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Chunks ``(G, chunks, c, ·)`` in a row, after ``first`` others that are in the states ``(G, above, D, E)``."""
    c, levels, above = q.shape[2], weights.shape[3], state.shape[1]
    since = log_decay.clamp(min=STRONGEST).cumsum(-1, dtype=torch.float64)
    begun, until = (x[..., None].to(k.dtype).exp2() for x in (since, since[..., -1:] - since))
    added, kept, states = (k * until).mT @ v, begun[:, :, -1:], []
    for i, (more, factor) in enumerate(zip(added.unbind(1), kept.unbind(1), strict=True)):
        states.append(state)
        state = carried(state * factor[:, None], more, first + i)
    level = tree(c, q.device).clamp(max=levels - 1).expand(*q.shape[:2], -1, -1)
    near = (q @ k.mT * weights_between(since, True, q.dtype) * weights.gather(3, level)) @ v
    own = c.bit_length()
    far = weights[..., own : own + above] if own < levels else weights[..., -1:]
    readers = ((q * begun)[..., None, :] * far[..., None]).flatten(3)
    return (near + readers @ torch.stack(states, 1).flatten(2, 3)).flatten(1, 2), state


def carried(states: Tensor, added: Tensor, place: int) -> Tensor:
    """The states ``(..., above, D, E)`` once the unit at ``place`` has added its own ``(..., D, E)``, as one carries 1.

    State s holds the sums of 2^s units if bit s of the place is 1, and zeros otherwise; the last one holds all that is
    larger, too.
    """
    carry = min((~place & (place + 1)).bit_length() - 1, states.shape[-3] - 1)
    whole = added[..., None, :, :] + states[..., : carry + 1, :, :].sum(-3, keepdim=True)
    return torch.cat([torch.zeros_like(states[..., :carry, :, :]), whole, states[..., carry + 1 :, :, :]], -3)


def tree(tokens: int, device: torch.device) -> Tensor:
    """The level of each two of ``tokens`` tokens, a power of two, ``(tokens, tokens)``."""
    levels, height = torch.zeros(1, 1, dtype=torch.long, device=device), 0
    while len(levels) < tokens:
        height += 1
        across = torch.full_like(levels, height)
        levels = torch.cat([torch.cat([levels, across], 1), torch.cat([across, levels], 1)])
    return levels
