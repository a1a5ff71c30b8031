"""Exact attention in float64: the one oracle that every variant and every error number is measured against."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnbench.contract.problem.sink import Sink
from attnbench.contract.problem.visible import Visible

Tile = Callable[[slice, slice, torch.dtype], Tensor]
"""A bias on the logits: takes the ranges of n queries and m keys, and gives ``(H, n, m)``."""


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | Visible = False,
    key_mask: Tensor | None = None,
    bias: Tile | None = None,
    sink: Tensor | None = None,
    block: int = 512,
) -> Tensor:
    """softmax(q kᵀ / √D + bias) v in float64, ``block`` query rows at a time so that memory stays O(block · M).

    Args:
        q: ``(B, H, N, D)``; any floating dtype, converted to float64.
        k: ``(B, K, M, D)``; head h of the queries reads head h // (H / K).
        v: ``(B, K, M, D)``; or ``(B, H, M, D)`` with fewer heads of q and k, of which head h reads head h // (H / Q).
        causal: query i sees keys j <= i (needs N = M); or which keys each query sees.
        key_mask: ``(B, M)`` bool, True where the key may be attended to.
        bias: what to add to the logits, such as a variant's ``position_bias``.
        sink: a logit of each head without a key ``(H,)``, which takes weight and gives nothing.

    Returns:
        ``(B, H, N, D)`` float64. A query without any visible key gives 0.
    """
    q, k, v = (of_query_heads(x.double(), max(q.shape[1], v.shape[1])) for x in (q, k, v))
    M, visible = k.shape[2], causal if isinstance(causal, Visible) else Visible(causal)
    rows = []
    for start in range(0, q.shape[2], block):
        part = q[:, :, start : start + block]
        queries = slice(start, start + part.shape[2])
        allowed = visible.pairs(queries, slice(0, M), M, q.device)
        if key_mask is not None:
            allowed = allowed & key_mask[:, None, None, :]
        places = slice(visible.start + queries.start, visible.start + queries.stop)
        added = None if bias is None else bias(places, slice(0, M), torch.float64)
        rows.append(masked_attention(part, k, v, allowed, added, sink))
    return torch.cat(rows, dim=2)


def of_query_heads(x: Tensor, heads: int) -> Tensor:
    """x ``(B, K, ...)`` with each head repeated H / K times, ``(B, H, ...)``; x itself if K = H. Copies."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, bias: Tensor | None = None, sink: Tensor | None = None
) -> Tensor:
    """Dense softmax attention over the pairs where ``allowed`` is True.

    Args:
        q: ``(B, H, N, D)``; k, v: ``(B, H, M, D)``.
        allowed: bool, broadcastable to ``(B, H, N, M)``.
        bias: added to the logits, broadcastable to ``(B, H, N, M)``.
        sink: ``(H,)``, a logit without a key.

    Returns:
        ``(B, H, N, D)``. A row with nothing allowed gives 0.
    """
    logits = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    if bias is not None:
        logits = logits + bias
    return torch.matmul(_weights(logits, allowed, sink), v)


def _weights(logits: Tensor, allowed: Tensor, sink: Tensor | None) -> Tensor:
    # A finite number, because a row of -inf gives NaN; this project's output for a query that sees nothing is 0.
    logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)
    if sink is None:
        weights = logits.softmax(-1)
    else:
        column = sink.to(logits.dtype)[:, None, None].expand(*logits.shape[:3], 1)
        weights = torch.cat((logits, column), -1).softmax(-1)[..., :-1]
    return weights.masked_fill(~allowed, 0.0)


def softmax_of(logits: Tensor, visible: Visible, key_mask: Tensor | None = None, sink: Sink | None = None) -> Tensor:
    """The weights of logits ``(B, H, N, M)``, with a sink if there is one, for dense forms with logits of their own.

    A hidden pair has the weight 0; so has every pair of a query that sees no key.
    """
    N, M = logits.shape[2:]
    allowed = visible.pairs(slice(0, N), slice(0, M), M, logits.device)
    if key_mask is not None:
        allowed = allowed & key_mask[:, None, None]
    return _weights(logits, allowed, None if sink is None else sink.logit)


def relative_error(output: Tensor, exact: Tensor) -> float:
    """‖output - exact‖ / ‖exact‖ over the whole tensor (Frobenius), in float64."""
    output, exact = output.detach().double(), exact.detach().double()
    return float(torch.linalg.vector_norm(output - exact) / torch.linalg.vector_norm(exact))


def mean_of_visible(v: Tensor, n: int, *, causal: bool | Visible, key_mask: Tensor | None = None) -> Tensor:
    """The trivial answer: every query gets the mean of the values that it may see.

    Args:
        v: ``(B, K, M, D)``.
        n: queries.
        causal: query i sees the values 0 to i (needs n = M); or which values each query sees.
        key_mask: ``(B, M)`` bool, True where a token is real; the others are not seen.

    Returns:
        ``(B, K, n, D)`` float64; 0 for a query that sees nothing.
    """
    B, _, M, _ = v.shape
    real = torch.ones(B, M, dtype=torch.bool, device=v.device) if key_mask is None else key_mask
    v = v.double().masked_fill(~real[:, None, :, None], 0.0)
    counts = real.double()[:, None, :, None]
    if isinstance(causal, Visible):
        first, stop = causal.spans(slice(0, n), M, v.device)
        sums, seen = (torch.nn.functional.pad(x.cumsum(2), (0, 0, 1, 0)) for x in (v, counts))
        return (sums[:, :, stop] - sums[:, :, first]) / (seen[:, :, stop] - seen[:, :, first]).clamp(min=1)
    if causal:
        return v.cumsum(2) / counts.cumsum(2).clamp(min=1)
    return (v.sum(2, keepdim=True) / counts.sum(2, keepdim=True).clamp(min=1)).expand(-1, -1, n, -1)
