"""Attention of a cluster's queries to its keys, gathered a few clusters at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attnbench.engines.precision import accumulator, hidden
from attnbench.engines.tiling import budget, tiles


class AttendWithin(torch.autograd.Function):
    """A query's attention to the keys of each cluster that holds it, averaged; 0 where none holds it.

    q ``(N, D)``, k ``(M, D)`` and v ``(M, E)``, of all heads together; at_q ``(clusters, w)``, at_k ``(clusters, u)``
    say which rows are in a cluster; real_q, real_k, of the same shapes or None, say which of these count; times
    ``(N, 1)`` says how often a query counts, at least 1. -> ``(N, E)``. The backward pass gathers and computes the
    weights again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        at_q: Tensor,
        at_k: Tensor,
        real_q: Tensor | None,
        real_k: Tensor | None,
        times: Tensor,
    ) -> Tensor:
        total = torch.zeros(q.shape[0], v.shape[1], dtype=accumulator(q.dtype), device=q.device)
        for _, _, values, weights, to_q, _ in _pieces(q, k, v, at_q, at_k, real_q, real_k):
            total.index_add_(0, to_q, torch.bmm(weights, values).flatten(0, 1))
        ctx.save_for_backward(q, k, v, at_q, at_k, real_q, real_k, times)
        return total.div_(times).to(v.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, times = ctx.saved_tensors
        q, k, v = inputs[:3]
        dtype = times.dtype
        scale = q.shape[1] ** -0.5
        dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
        for queries, keys, values, weights, to_q, to_k in _pieces(*inputs):
            dout = grad.index_select(0, to_q).to(dtype).div_(times.index_select(0, to_q)).view(*queries.shape[:2], -1)
            dv.index_add_(0, to_k, torch.bmm(weights.mT, dout).flatten(0, 1))
            dlogits = torch.bmm(dout, values.mT)
            dlogits.sub_(torch.linalg.vecdot(weights, dlogits).unsqueeze(2)).mul_(weights).mul_(scale)
            dq.index_add_(0, to_q, torch.bmm(dlogits, keys).flatten(0, 1))
            dk.index_add_(0, to_k, torch.bmm(dlogits.mT, queries).flatten(0, 1))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None, None


def _pieces(
    q: Tensor, k: Tensor, v: Tensor, at_q: Tensor, at_k: Tensor, real_q: Tensor | None, real_k: Tensor | None
) -> Iterator[tuple[Tensor, ...]]:
    """The work in pieces: some clusters at a time, or some queries of one cluster.

    Yields:
        Queries and keys ``(c, ·, D)``, values ``(c, ·, E)``, weights, rows of the queries, and rows of the keys.
    """
    dtype, D = accumulator(q.dtype), q.shape[1]
    (clusters, w), u = at_q.shape, at_k.shape[1]
    # Weights take no more room than the queries, or than the keys if a cluster is too large for the cache.
    for some, a, b in tiles(clusters, w, u, max(min(budget("routing.weights", q.device), q.numel()), u * D)):
        to_q, to_k = at_q[some, a:b].flatten(), at_k[some].flatten()
        # An index_select costs a seventh of an indexing.
        queries = q.index_select(0, to_q).view(-1, b - a, D).to(dtype)
        keys, values = (x.index_select(0, to_k).view(-1, u, x.shape[1]).to(dtype) for x in (k, v))
        weights = queries.new_empty((len(keys), b - a, u))
        torch.baddbmm(weights, queries, keys.mT, beta=0, alpha=D**-0.5, out=weights)
        if real_k is not None:
            weights.masked_fill_(~real_k[some].unsqueeze(1), hidden(dtype))
        torch.softmax(weights, -1, out=weights)
        if real_q is not None:
            weights.masked_fill_(~real_q[some, a:b].unsqueeze(2), 0)
        if real_k is not None:
            weights.masked_fill_(~real_k[some].any(1)[:, None, None], 0)
        yield queries, keys, values, weights, to_q, to_k
