"""PyTorch's fused attention for calls without a form: values of another width, or a key mask with causality."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from attnbench.catalogue.engines.masks import seeing

EXTRA = 8
"""Columns for a key mask; fused kernels want widths in multiples of 8."""


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    key_mask: Tensor | None = None,
    added: Tensor | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ + ``added``) v in O(n) memory beside ``added``.

    Args:
        q: ``(B, H, N, D)``.
        k: ``(B, H, M, D)``, or one head ``(B, 1, M, D)`` for all heads of q, which is not repeated in memory.
        v: ``(B, H, M, E)`` or ``(B, 1, M, E)``, E <= D. At padded keys, k and v must be finite.
        key_mask: ``(B, M)`` bool, True for a real key.
        added: ``(N, M)`` in q's dtype, if neither causal nor masked.

    Returns:
        ``(B, H, N, E)``. A query that sees no key gives 0.
    """
    H, E = q.shape[1], v.shape[3]
    if key_mask is not None:
        q, k, v = _with_mask_columns(q, k, v, key_mask, seeing(key_mask, causal))
    if v.shape[3] < k.shape[3]:
        v = pad(v, (0, k.shape[3] - v.shape[3]))
    if k.shape[1] != H:
        k, v = (x.expand(-1, H, -1, -1) for x in (k, v))
    out = scaled_dot_product_attention(q, k, v, added, is_causal=causal, scale=scale)[..., :E]
    return out if key_mask is None else out.masked_fill(~seeing(key_mask, causal), 0)


def _with_mask_columns(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, seen: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with :data:`EXTRA` more columns that give hidden keys a logit far below all others.

    Queries that are not ``seen`` to see a key get zeros: a row of nothing but such logits makes NaN of gradients.
    """
    # The kernels multiply in float32 at least, where every product and their sum must stay finite.
    far = min(torch.finfo(k.dtype).max, torch.finfo(torch.float32).max ** 0.5 / EXTRA)
    of_queries = torch.zeros_like(seen, dtype=q.dtype).masked_fill_(seen, far)
    q = torch.cat([q, of_queries.expand(*q.shape[:3], EXTRA)], -1)
    columns = torch.zeros_like(key_mask, dtype=k.dtype).masked_fill_(~key_mask, -far)
    k = torch.cat([k, columns[:, None, :, None].expand(*k.shape[:3], EXTRA)], -1)
    return q, k, pad(v, (0, EXTRA))
