"""Recurrences as N × N matrices: for dense forms, which share no code with what they check."""

from __future__ import annotations

import torch
from torch import Tensor


def erased_and_written(
    q: Tensor, k: Tensor, v: Tensor, erase: Tensor, log_alpha: Tensor, *, strict: bool, early: bool = False
) -> Tensor:
    """tril(X(q, k)) U / √D with (I + tril(X(e, k), -1)) U = V and X_ij(q, k) = Σ_c q_ic k_jc α_{j+1,c}···α_ic.

    q, k, erase e: ``(..., n, D)``; the written v: ``(..., n, E)``; log_alpha: ``(..., n, 1)`` or ``(..., n, D)``.
    ``strict`` leaves out the diagonal of X(q, k); ``early``, e reads the state before the decay of its own token.
    """
    total = log_alpha.cumsum(-2)
    eye = torch.eye(q.shape[-2], dtype=q.dtype, device=q.device)
    system = eye + left_to_read(erase, k, total - log_alpha if early else total, total)
    updates = torch.linalg.solve_triangular(system, v, upper=False, unitriangular=True)
    out: Tensor = left_to_read(q, k, total, total, own=not strict) @ updates * q.shape[-1] ** -0.5
    return out


def left_to_read(q: Tensor, k: Tensor, until: Tensor, since: Tensor, *, own: bool = False) -> Tensor:
    """Σ_c q_ic k_jc exp(until_ic - since_jc) for j < i, and for j = i if ``own``, else 0: ``(..., n, n)``.

    q, k: ``(..., n, D)``; until, since: sums of the decays' logarithms, ``(..., n, 1)`` or ``(..., n, D)``.
    """
    n, D = q.shape[-2:]
    seen = torch.ones(n, n, dtype=torch.bool, device=q.device).tril(0 if own else -1)[..., None]
    # Zeros before the exponentials too: nothing overflows above the diagonal.
    between = (until[..., :, None, :] - since[..., None, :, :]).masked_fill(~seen, 0.0).exp() * seen
    return torch.einsum("...ic,...jc,...ijc->...ij", q, k, between.expand(*between.shape[:-1], D))
