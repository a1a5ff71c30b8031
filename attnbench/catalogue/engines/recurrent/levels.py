"""Sums of keys and values that fade, read with a weight for each level of distance: O(n log n).

Tokens are the leaves of a binary tree. The level of two tokens is 0 for a token and itself, and otherwise 1 plus the
highest bit in which their places differ: the height of the smallest subtree that holds both. A token i reads token j
with its weight for their level. All tokens that it reads at one level are one half of a subtree, whose sum is one
state; so there is one state for each bit of its place. Levels from the last weight on share that weight and one
state. A later token fades, and erases from, each of these states alike.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnbench.catalogue.engines.recurrent.decayed_sums import STRONGEST, weights_between
from attnbench.catalogue.engines.recurrent.fading import faded
from attnbench.catalogue.engines.recurrent.stretches import rows_in_turn, stretches


def levelled_attention(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, weights: Tensor, *, chunk: int) -> Tensor:
    """Σ_j (q_i·k_j) 2^(L_i - L_j) λ_i(level of i and j) v_j over j <= i, with L the running sum of ``log_decay``.

    Args:
        q, k: ``(G, N, D)``; v: ``(G, N, E)``.
        log_decay: in log2, at most 0, ``(G, N)``.
        weights: λ ``(G, N, levels)``.
        chunk: a power of two.
    """
    return _levelled(_read, chunk, q, k, v, log_decay, weights)


def levelled_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, weights: Tensor, beta: Tensor, *, chunk: int
) -> Tensor:
    """Σ_j λ_i(level of i and j) (q_iᵀ P_i···P_{j+1} k_j) β_j v_j over j <= i, with P_t = (I - β_t k_t k_tᵀ) 2^g_t.

    P is the gated delta rule's change of a state; with all λ = 1 this is the rule itself. Within a chunk one triangular
    solve gives the weights of its pairs, its readers' view of the state in front of it, and the chunk's change of such
    a state, a D x D matrix that multiplies each of the states.

    Args:
        q, k: ``(G, N, D)``; v: ``(G, N, E)``.
        log_decay: g in log2, at most 0, ``(G, N)``; beta: β ``(G, N)``.
        weights: λ ``(G, N, levels)``.
        chunk: a power of two.
    """
    return _levelled(_read_erased, chunk, q, k, v, log_decay, weights, beta)


def _levelled(
    read: Callable[..., tuple[Tensor, Tensor]], chunk: int, q: Tensor, k: Tensor, v: Tensor, *others: Tensor
) -> Tensor:
    N, levels = q.shape[1], others[1].shape[2]
    while chunk >= 2 * N:
        chunk //= 2
    parts, first, numbered = stretches(chunk, q, k, v, *others), 0, []
    for part in parts:
        numbered.append((first, *part))
        first += part[0].shape[1]
    above = max(1, min(levels - chunk.bit_length(), (first - 1).bit_length()))
    return rows_in_turn(read, numbered, N, q.new_zeros(q.shape[0], above, q.shape[2], v.shape[2]))[0]


def _read_erased(
    state: Tensor, first: int, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, weights: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    c, rates = q.shape[2], beta[..., None]
    ([read], [erased]), begun, until = faded([q, k * rates], [k], log_decay[..., None])
    right = torch.cat([torch.diag_embed(beta), k * rates * begun], -1)
    solved = torch.linalg.solve_triangular(erased.tril(-1), right, upper=False, unitriangular=True)
    updates, erasing = solved[..., :c], solved[..., c:]
    read, writers = read.tril(), k * until
    added, states = writers.mT @ (updates @ v), []
    kept = torch.diag_embed(begun[:, :, -1].expand(-1, -1, q.shape[3])) - writers.mT @ erasing
    for i, (more, factor) in enumerate(zip(added.unbind(1), kept.unbind(1), strict=True)):
        states.append(state)
        state = carried(factor[:, None] @ state, more, first + i)
    return _out(read @ updates, q * begun - read @ erasing, v, weights, states), state


def _read(
    state: Tensor, first: int, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Chunks ``(G, chunks, c, ·)`` in a row, after ``first`` others that are in the states ``(G, above, D, E)``."""
    since = log_decay.clamp(min=STRONGEST).double().cumsum(-1)
    begun, until = (x[..., None].to(k.dtype).exp2() for x in (since, since[..., -1:] - since))
    added, kept, states = (k * until).mT @ v, begun[:, :, -1:], []
    for i, (more, factor) in enumerate(zip(added.unbind(1), kept.unbind(1), strict=True)):
        states.append(state)
        state = carried(state * factor[:, None], more, first + i)
    return _out(q @ k.mT * weights_between(since, True, q.dtype), q * begun, v, weights, states), state


def _out(pairs: Tensor, readers: Tensor, v: Tensor, weights: Tensor, states: list[Tensor]) -> Tensor:
    """Tokens' readings of their chunk and of the states in front of it, ``(G, chunks·c, E)``.

    ``pairs`` ``(G, chunks, c, c)`` and ``readers`` ``(G, chunks, c, D)`` come without λ.
    """
    (c, levels), above = weights.shape[2:], states[0].shape[1]
    level = tree(c, v.device).clamp(max=levels - 1).expand(*v.shape[:2], -1, -1)
    near = (pairs * weights.gather(3, level)) @ v
    own = c.bit_length()
    far = weights[..., own : own + above] if own < levels else weights[..., -1:]
    weighed = (readers[..., None, :] * far[..., None]).flatten(3)
    return (near + weighed @ torch.stack(states, 1).flatten(2, 3)).flatten(1, 2)


def carried(states: Tensor, added: Tensor, place: int) -> Tensor:
    """The states ``(..., above, D, E)`` after the unit at ``place`` has added ``(..., D, E)``, as one carries 1.

    State s holds the sums of 2^s units if bit s of the place is 1, and zeros otherwise; the last one holds all larger
    sums, too.
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
