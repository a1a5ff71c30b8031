"""An :class:`ErasingLayer` as N × N matrices: for dense forms, which share no code with the layer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnbench.catalogue.engines.recurrent.erasing_layer import ErasingLayer


def projected(layer: ErasingLayer, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q and k ``(H, n, D)`` of length 1, v ``(H, n, E)`` and the other columns, of one sequence ``(n, C)``.

    H counts the heads of values; q and k are repeated for all that read them.
    """
    widths = [layer.heads * size for size in layer.sizes]
    tokens, rest = torch.split(layer.project(x), [sum(widths), layer.project.out_features - sum(widths)], 1)
    taps = layer.short.weight.T.flip(0)  # the token's own first
    mixed = torch.stack([pad(tokens, (0, 0, s, 0))[: len(x)] * tap for s, tap in enumerate(taps)]).sum(0)
    mixed = mixed * torch.sigmoid(mixed)
    parts = torch.split(mixed, widths, 1)
    counts = layer.heads, layer.heads, layer.heads * layer.groups
    q, k, v = (torch.unflatten(part, 1, (H, -1)).transpose(0, 1) for H, part in zip(counts, parts, strict=True))
    lengths = [torch.linalg.vector_norm(part, dim=-1, keepdim=True) for part in (q, k)]
    q, k = (part / size.masked_fill(size == 0, 1.0) for part, size in zip((q, k), lengths, strict=True))
    q, k = (part.repeat_interleave(layer.groups, 0) for part in (q, k))
    return q, k, v, rest


def erased_and_written(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_alpha: Tensor, *, strict: bool) -> Tensor:
    """tril(X(q, k)) U / √D with (I + tril(B X(k, k), -1)) U = B V and X_ij(q, k) = Σ_c q_ic k_jc α_{j+1,c}···α_ic.

    q, k: ``(H, n, D)``; v: ``(H, n, E)``; beta: ``(H, n)``; log_alpha: ``(H, n, 1)`` or ``(H, n, D)``. ``strict``
    leaves out the diagonal of X(q, k).
    """
    total = log_alpha.cumsum(1)
    system = torch.eye(q.shape[1], dtype=q.dtype, device=q.device) + left_to_read(beta[..., None] * k, k, total, total)
    updates = torch.linalg.solve_triangular(system, beta[..., None] * v, upper=False, unitriangular=True)
    out: Tensor = left_to_read(q, k, total, total, own=not strict) @ updates * q.shape[2] ** -0.5
    return out


def left_to_read(q: Tensor, k: Tensor, until: Tensor, since: Tensor, *, own: bool = False) -> Tensor:
    """Σ_c q_ic k_jc exp(until_ic - since_jc) for j < i, and for j = i if ``own``, else 0: ``(H, n, n)``.

    q, k: ``(H, n, D)``; until, since: sums of the decays' logarithms, ``(H, n, 1)`` or ``(H, n, D)``.
    """
    n, D = q.shape[1:]
    seen = torch.ones(n, n, dtype=torch.bool, device=q.device).tril(0 if own else -1)[..., None]
    # Zeros before the exponentials too: nothing overflows above the diagonal.
    between = (until[:, :, None] - since[:, None]).masked_fill(~seen, 0.0).exp() * seen
    return torch.einsum("hic,hjc,hijc->hij", q, k, between.expand(-1, -1, -1, D))
