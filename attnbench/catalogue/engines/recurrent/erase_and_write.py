"""The delta rule with decay: a state that fades, and tokens that erase from it before they write.

S_t = (I - b_t e_tᵀ) Diag(2^g_t) S_{t-1} + k_t v_tᵀ and o_t = S_tᵀ q_t. The state fades first: e_t reads, and b_t
takes out, from the decayed state; or, :class:`BeforeDecay`, from the one before. Work and memory grow as n, forwards
and backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from attnbench.catalogue.engines.recurrent.fading import faded
from attnbench.catalogue.engines.recurrent.stretches import rows_in_turn, stretches


class BeforeDecay(NamedTuple):
    """e_t reads before the state fades: S_t = (Diag(2^g_t) - b_t e_tᵀ) S_{t-1} + k_t v_tᵀ."""

    erase: Tensor
    """e ``(G, N, D)``."""


def erase_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    erase: Tensor | BeforeDecay,
    log_decay: Tensor | None = None,
    *,
    along: Tensor | None = None,
    chunk: int,
    strict: bool = False,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The outputs ``(G, N, E)``, and the state ``(G, D, E)`` after the last of N tokens.

    With u_t, minus the number that e_t reads, the state is a plain sum: b_t u_tᵀ and k_t v_tᵀ are added to the decayed
    state. In a chunk that starts from S, (I + A) U = -(C V + R S): A are the products of e_i with b_j, and C with k_j,
    for j < i; R is e, decayed. One triangular solve for all chunks at once gives U = U₀ - W S, and then S moves on from
    chunk to chunk. If b = k, v_t is part of u_t, and V stands in place of -C V.

    Args:
        q, k: ``(G, N, D)``; v: ``(G, N, E)``.
        erase: e ``(G, N, D)``, which may be read :class:`BeforeDecay`; or rates β ``(G, N)``, for e = β k and β v in
            place of v.
        log_decay: g in log2, at most 0: ``(G, N, 1)``, or ``(G, N, D)`` for a rate for each channel; None for no decay.
        along: b ``(G, N, D)``; None for k.
        chunk: tokens whose pairs are formed; a power of two if each channel has a rate.
        strict: o_t reads the earlier tokens only, decayed to t, and not its own erasure and writing.
        state: S in front of the first token ``(G, D, E)``; None for 0.
    """
    N, E = v.shape[1:]
    if state is None:
        state = k.new_zeros(k.shape[0], k.shape[2], E)
    if not N:
        return v, state
    if log_decay is None or log_decay.shape[-1] == 1:
        chunk = min(chunk, N)
    while chunk >= 2 * N:
        chunk //= 2
    others = [x for x in (log_decay, along) if x is not None]
    early = isinstance(erase, BeforeDecay)
    if isinstance(erase, BeforeDecay):
        erase = erase.erase
    work = partial(_stretch, fading=log_decay is not None, early=early, strict=strict)
    return rows_in_turn(work, stretches(chunk, q, k, v, erase, *others), N, state)


def _stretch(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    erase: Tensor,
    *others: Tensor,
    fading: bool,
    early: bool,
    strict: bool,
) -> tuple[Tensor, Tensor]:
    log_decay = others[0] if fading else None
    along = others[-1] if len(others) > fading else None
    if erase.ndim == 3:
        rates = erase[..., None]
        erase, v = k * rates, v * rates
    writers = [k] if along is None else [along, k]
    left: Sequence[Tensor | None] = [None] * v.shape[1]
    if log_decay is None:
        read, erased = ([x @ y.mT for y in writers] for x in (q, erase))
    else:
        # Before its own decay a token reads the state left for the token in front of it.
        (read, erased), begun, until = faded([q, erase.roll(-1, 2) if early else erase], writers, log_decay)
        for_erasing = begun
        if early:
            erased = [x.roll(1, 2) for x in erased]
            for_erasing = torch.cat([torch.ones_like(begun[:, :, :1]), begun[:, :, :-1]], 2)
        q, erase = q * begun, erase * for_erasing
        writers = [x * until for x in writers]
        left = begun[:, :, -1:].mT.unbind(1)
    right = v if along is None else -(erased[1].tril(-1) @ v)
    solved = torch.linalg.solve_triangular(
        erased[0].tril(-1), torch.cat([right, erase], -1), upper=False, unitriangular=True
    )
    E = v.shape[3]
    added: Sequence[Tensor | None] = [None] * v.shape[1] if along is None else (writers[1].mT @ v).unbind(1)
    states, updates = [], []
    for x, part, kept, more in zip(writers[0].unbind(1), solved.unbind(1), left, added, strict=True):
        update = torch.baddbmm(part[..., :E], part[..., E:], state, alpha=-1)
        states.append(state)
        updates.append(update)
        if kept is not None:
            state = state * kept
        if more is not None:
            state = state + more
        state = torch.baddbmm(state, x.mT, update)
    diagonal = -1 if strict else 0
    near = read[0].tril(diagonal) @ torch.stack(updates, 1)
    if along is not None:
        near = near + read[1].tril(diagonal) @ v
    return (q @ torch.stack(states, 1) + near).flatten(1, 2), state
