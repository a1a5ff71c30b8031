"""Clustered attention: queries with similar hashes share one row of weights."""

from __future__ import annotations

from itertools import product
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from attnbench.catalogue.engines.gathered.largest import largest
from attnbench.catalogue.engines.masks import added_to_logits, emptied, seeing
from attnbench.catalogue.engines.precision import accumulator
from attnbench.catalogue.engines.tiling import budget, tiles
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, No, Traits, register

_SLOTS = 32
"""Queries of one cluster that are multiplied with its keys at a time."""


@register(
    "clustered",
    family="learned pattern",
    source="Vyas et al. 2020, arXiv:2007.04825, sections 3.2 and 3.3",
    formula="oᵢ = softmax(q̄_c·Kᵀ/√D)·V, q̄_c the mean query of the cluster of i; improved: its top keys for each query",
    cost="O(n·c·(d + b·t))",
    memory_exponent=1.0,
    traits=Traits(
        mask=No("members of a cluster share one row of weights, and do not see the same keys under a mask"),
        causal=No("a cluster's mean query holds later queries, and its members share one row of weights"),
        bias=No("members of a cluster stand at different positions and share one row of weights"),
        stochastic=True,
        exact_with=("improved={n}",),
        knob=Knob("clusters"),
    ),
    settings=("clusters=4,bits=6,iterations=3", "clusters=4,bits=6,improved=3"),
)
class Clustered(nn.Module):
    """Queries are clustered by hash; each cluster shares one softmax.

    Vyas et al. 2020, "Fast Transformers with Clustered Attention". q ``(B, H, N, D)``, k and v ``(B, H, M, D)`` ->
    ``(B, H, N, D)``. Each query is hashed to ``bits`` signs of random projections, shared by the heads. Lloyd's
    algorithm in Hamming distance puts the hashes into at most c = ``clusters`` clusters. It starts from the hashes of
    queries evenly spaced over the sequence and assigns ``iterations`` times. In between it moves each centroid to the
    majority of its members, bit by bit (a tie gives 1; an empty cluster stays). The mean query of a cluster attends to
    all keys, and all members get its output. Of equally near centroids the first is taken; distances are whole numbers,
    so that clusters do not depend on rounding once the signs are known.

    With t = ``improved`` it is the paper's i-clustered attention: the t largest weights of each cluster are added up,
    and each member spreads the sum over these keys by its own softmax. The other keys keep the weight that the mean
    query gives them. t >= M gives exact attention. It costs O(n·t·D) more. The largest are found as in ``topk``.

    By default ``bits`` and ``iterations`` are those of the authors' code.

    Padding is cut out: with ``key_mask``, padded queries (unless queries are another sequence) are in no cluster and
    give 0. Gradients flow through means and weights, not through the clusters.

    Differs from the authors' code: hashes are signs of projections without a random offset, so that they follow angles
    instead of distances; memory is O(n·d) forward unless ``improved``; padding may stand anywhere.
    """

    directions: Tensor

    def __init__(
        self,
        shape: Shape,
        *,
        clusters: Annotated[int, Field(ge=1, le=65536, description="clusters of queries, at most one per query")] = 100,
        improved: Annotated[
            int | None, Field(ge=1, description="keys of a cluster that each member weighs itself; none: plain")
        ] = None,
        bits: Annotated[int, Field(ge=1, le=64, description="signs in the hash of a query")] = 32,
        iterations: Annotated[int, Field(ge=1, description="assignments of hashes to clusters")] = 10,
    ) -> None:
        super().__init__()
        self.clusters, self.improved, self.iterations, self.cross = clusters, improved, iterations, shape.cross
        self.register_buffer("directions", torch.randn(shape.D, bits))

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        for b, h in product(range(q.shape[0]), range(q.shape[1])):
            keys = torch.arange(k.shape[2], device=q.device) if key_mask is None else key_mask[b].nonzero()[:, 0]
            queries = torch.arange(q.shape[2], device=q.device) if self.cross else keys
            if len(keys) == 0:
                continue
            x, y, n = q[b, h, queries], k[b, h, keys], len(queries)
            C, codes = min(self.clusters, n), x @ self.directions.to(x.dtype) > 0
            centroids = codes[[j * n // C for j in range(C)]]
            for _ in range(self.iterations):
                cluster = (codes[:, None] != centroids).sum(-1).argmin(1)
                members = [codes[cluster == c] for c in range(C)]
                centroids = torch.stack(
                    [2 * m.sum(0) >= len(m) if len(m) else old for m, old in zip(members, centroids, strict=True)]
                )
            mean = torch.stack([x[cluster == c].mean(0) for c in cluster.tolist()])
            weights = (mean @ y.mT * x.shape[1] ** -0.5).softmax(1)
            if self.improved is not None:
                best = weights.argsort(dim=1, descending=True).argsort(dim=1) < self.improved
                own = (x @ y.mT * x.shape[1] ** -0.5).masked_fill(~best, -torch.inf).softmax(1)
                weights = torch.where(best, own * (weights * best).sum(1, keepdim=True), weights)
            out[b, h, queries] = weights @ v[b, h, keys]
        return out

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        B, H, N, D = q.shape
        C, G = min(self.clusters, N), B * H
        real = None if key_mask is None or self.cross else key_mask.repeat_interleave(H, 0)
        flat = q.reshape(G, N, D)
        with torch.no_grad():
            cluster = self.assign(flat, real)
        # One more cluster for padding.
        at = (cluster + (C + 1) * torch.arange(G, device=q.device).unsqueeze(1)).flatten()
        count = at.new_zeros(G * (C + 1)).index_add_(0, at, torch.ones_like(at)).view(G, C + 1)
        dtype = accumulator(q.dtype)
        total = torch.zeros((G * (C + 1), D), dtype=dtype, device=q.device).index_add(
            0, at, flat.flatten(0, 1).to(dtype)
        )
        mean = (total.view(G, C + 1, D) / count.clamp(min=1).unsqueeze(2)).view(B, H, C + 1, D)
        bias = None if key_mask is None else added_to_logits(key_mask, q.dtype)[:, None, None]
        if self.improved is None:
            rows = scaled_dot_product_attention(mean.to(q.dtype), k, v, attn_mask=bias).reshape(-1, v.shape[3])
            # In float32, so that the gradients of a cluster's members are summed in float32.
            out = rows.to(dtype)[at].to(q.dtype).view(B, H, N, -1)
        else:
            out = self._improved(q, k, v, mean, bias, cluster, count)
        if key_mask is None:
            return out
        seen = seeing(key_mask, False) if self.cross else key_mask[:, None, :, None]
        return out.masked_fill(~seen, 0)

    def _improved(
        self, q: Tensor, k: Tensor, v: Tensor, mean: Tensor, bias: Tensor | None, cluster: Tensor, count: Tensor
    ) -> Tensor:
        (B, H, N, D), (M, E) = q.shape, v.shape[2:]
        (G, C), device = count.shape, q.device
        dtype = accumulator(q.dtype)
        logits = torch.matmul(mean * D**-0.5, k.mT.to(dtype))
        weights = (logits if bias is None else logits + bias).softmax(-1).view(G, C, M)
        keys = min(self.improved or M, M)
        best = largest(weights.detach().flatten(0, 1), keys)[1].view(G, C, keys)
        own = weights.gather(2, best).sum(2)
        others = torch.bmm(weights.scatter(2, best, 0.0).to(v.dtype), v.reshape(G, M, E)).to(dtype)
        # Each cluster is cut into blocks of one size, the last one with empty slots; ``blocks`` bounds their number.
        filled = (count + _SLOTS - 1) // _SLOTS
        blocks, ends = N // _SLOTS + min(C, N), filled.cumsum(1)
        order = cluster.argsort(dim=1, stable=True)
        sorted_ = cluster.gather(1, order)
        rank = torch.arange(N, device=device) - (count.cumsum(1) - count).gather(1, sorted_)
        slot = (ends - filled).gather(1, sorted_) * _SLOTS + rank
        token = slot.new_zeros((G, blocks * _SLOTS)).scatter_(1, slot, order)
        owner = torch.searchsorted(ends, torch.arange(blocks, device=device).repeat(G, 1), right=True).clamp_(max=C - 1)
        heads = torch.arange(G, device=device).unsqueeze(1)
        chosen = best[heads, owner] + M * heads.unsqueeze(2)
        queries = q.reshape(G * N, D)[token + N * heads].view(G, blocks, _SLOTS, D)
        if bias is not None:
            bias = bias[:, 0, 0].repeat_interleave(H, 0).flatten()[chosen].unsqueeze(2)
        # In float32, so that the gradients of a key that several blocks choose are summed in float32.
        near, values = (x.reshape(G * M, -1).to(dtype)[chosen].to(x.dtype) for x in (k, v))
        mixed = scaled_dot_product_attention(queries, near, values, attn_mask=bias)
        back = torch.empty_like(slot).scatter_(1, order, slot) + blocks * _SLOTS * heads
        at = cluster + C * heads
        out = mixed.reshape(-1, E)[back] * own.flatten()[at].unsqueeze(2) + others.reshape(-1, E)[at]
        return out.to(v.dtype).view(B, H, N, E)

    def assign(self, q: Tensor, real: Tensor | None = None) -> Tensor:
        """The cluster of every query, ``(G, N)`` int64; padding has cluster min(clusters, N) for itself.

        ``q`` is ``(G, N, D)``, ``real`` ``(G, N)`` bool.
        """
        G, N, _ = q.shape
        C, bits = min(self.clusters, N), self.directions.shape[1]
        dtype = accumulator(q.dtype)
        codes = torch.where(torch.matmul(q.to(dtype), self.directions.to(dtype)) > 0, 1.0, -1.0)
        tokens = torch.full((G, 1), N, device=q.device)
        if real is not None:
            codes, tokens = codes * real.unsqueeze(2), real.sum(1, keepdim=True)
        index = torch.arange(C, device=q.device)
        used = tokens.clamp(min=1, max=C)
        start = index * tokens // used
        if real is not None:
            start = (~real).to(torch.uint8).argsort(dim=1, stable=True).gather(1, start.clamp(max=N - 1))
        centroids = codes.gather(1, start.unsqueeze(2).expand(-1, -1, bits))
        # amax is many times faster than argmax, so the index goes into the last digits of whole numbers below 2^24.
        base = 1 << (C - 1).bit_length()
        digits = torch.where(index < used, 0, -4 * bits * base).add_(base - 1 - index).to(codes.dtype).unsqueeze(2)
        columns, heads = codes.mT.contiguous(), torch.arange(G, device=q.device).unsqueeze(1)
        nearest, best = torch.empty(0), torch.empty((G, N), dtype=codes.dtype, device=q.device)
        for step in range(self.iterations):
            for some, a, b in tiles(G, N, C, budget("clustered.products", q.device)):
                scores = torch.baddbmm(digits[some], centroids[some], columns[some, :, a:b], alpha=base)
                best[some, a:b] = scores.amax(1)
            nearest = base - 1 - (best.long() & (base - 1))
            if step + 1 < self.iterations:
                at = (nearest + C * heads).flatten()
                sums = torch.zeros_like(centroids).view(-1, bits).index_add_(0, at, codes.view(-1, bits))
                ones = torch.ones_like(codes[:, :, 0]) if real is None else real.to(codes.dtype)
                members = torch.zeros_like(sums[:, 0]).index_add_(0, at, ones.flatten()).view(G, C, 1)
                moved = torch.where(sums.view(G, C, bits) >= 0, 1.0, -1.0).to(codes.dtype)
                centroids = torch.where(members > 0, moved, centroids)
        return nearest if real is None else nearest.masked_fill_(~real, C)
