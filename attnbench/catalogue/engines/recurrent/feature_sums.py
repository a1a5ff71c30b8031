"""Sums of keys and values under a plain feature map, O(n): Σ_j φ(q_i)·ψ(k_j) v_j without a denominator.

A further column of ones in the values makes its sums the denominators.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from attnbench.catalogue.engines.linear.maps import Map
from attnbench.catalogue.engines.recurrent.stretches import STRETCH, in_turn, rows_in_turn, stretches


def with_ones(v: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """v ``(B, H, M, E)`` and a further column, 1 at real keys and 0 at padded ones: ``(B, H, M, E + 1)``."""
    ones = torch.ones_like(v[..., :1])
    if key_mask is not None:
        ones = ones * key_mask[:, None, :, None]
    return torch.cat([v, ones], -1)


def quotient(sums: Tensor) -> Tensor:
    """All columns but the last, divided by the last, or by 1 if that is 0."""
    total = sums[..., -1:]
    return sums[..., :-1] / total.masked_fill(total == 0, 1.0)


def feature_sums(q: Tensor, k: Tensor, v: Tensor, *, of_queries: Map, of_keys: Map, causal: bool, chunk: int) -> Tensor:
    """Σ_j φ(q_i)·ψ(k_j) v_j over j <= i, or over all j, ``(G, N, E)``: a computation for :func:`by_heads`.

    q is ``(G, N, D)``, k ``(G, M, D)``, v ``(G, M, E)``; ``of_queries`` is φ, ``of_keys`` ψ.
    """
    N, M = q.shape[1], k.shape[1]
    if causal:
        run = partial(_chunks, of_queries=of_queries, of_keys=of_keys)
        return rows_in_turn(run, stretches(min(chunk, N), q, k, v), N)[0]
    _, sums = in_turn(partial(_add, of_keys=of_keys), stretches(min(STRETCH, M), k, v))
    return rows_in_turn(partial(_read, of_queries=of_queries), stretches(min(STRETCH, N), q), N, sums)[0]


def _add(sums: Tensor | None, k: Tensor, v: Tensor, *, of_keys: Map) -> tuple[None, Tensor]:
    added = of_keys(k).mT @ v  # rows that fill up the last stretch have v = 0
    return None, added if sums is None else sums + added


def _read(sums: Tensor, q: Tensor, *, of_queries: Map) -> tuple[Tensor, Tensor]:
    return (of_queries(q) @ sums).flatten(1, 2), sums


def _chunks(
    sums: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *, of_queries: Map, of_keys: Map
) -> tuple[Tensor, Tensor]:
    phi_q, phi_k = of_queries(q), of_keys(k)
    added = phi_k.mT @ v
    first = torch.zeros_like(added[:, :1]) if sums is None else sums
    states = torch.cat([first, added], 1).cumsum(1)
    out = (phi_q @ phi_k.mT).tril() @ v + phi_q @ states[:, :-1]
    return out.flatten(1, 2), states[:, -1:]
