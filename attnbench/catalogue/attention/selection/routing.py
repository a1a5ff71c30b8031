"""Attention within clusters: every centroid picks the queries and keys nearest to it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import layer_norm, normalize

from attnbench.catalogue.engines.gathered.largest import largest
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import accumulator, hidden
from attnbench.catalogue.engines.tiling import budget, tiles
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, No, Traits, register


@register(
    "routing",
    family="learned pattern",
    source="Roy et al. 2021, arXiv:2003.05997, section 4.1",
    formula="oᵢ = mean over centroids c that pick i of Σ_{j∈K_c} softmax_{j∈K_c}(LN(qᵢ)·LN(kⱼ)/√D) vⱼ",
    cost="O(n·(c + w)·d)",
    time_exponent=1.5,
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        causal=No("a centroid ranks tokens against later ones, so that which of them meet depends on the future"),
        bias=No("centroids pick tokens by their content alone, which knows nothing of a bias"),
        stochastic=True,
        rows_sum_to_one=False,
        permutable=True,
        knob=Knob("window"),
    ),
    settings=("clusters=3", "clusters=3,window=5,kmeans=2", "clusters=1"),
)
class Routing(nn.Module):
    """Centroids pick their nearest tokens, which attend to each other.

    Roy et al. 2021, "Efficient Content-Based Sparse Attention with Routing Transformers". q ``(B, H, N, D)``, k and v
    ``(B, H, M, D)`` -> ``(B, H, N, D)``. Queries and keys are layer-normalised without scale and bias. Each of the
    ``clusters`` centroids μ of a head picks the ``window`` queries of largest μ·LN(q) and the ``window`` keys of
    largest μ·LN(k), by default as many as a cluster has on average. These queries attend only to these keys.

    A query that several centroids pick gets the average of their outputs. One that none picks gets 0; with directions
    drawn at random, that is more than a third of them; :meth:`coverage` counts. Gradients do not flow through the
    choice. Memory is O(n·d): the scores of a few centroids at a time are ranked, as in ``topk``.

    Centroids are unit vectors drawn in the constructor. The paper moves them in training, by a running average of the
    tokens assigned to them, and leaves them alone at inference. ``kmeans=0`` has the cost of inference; only training
    can tell where centroids end. ``kmeans`` > 0 moves them in each call instead, by that many steps of spherical
    k-means on the keys of the head, at O(n·clusters·d) each; a centroid with no key stays.

    Padding is cut out: with ``key_mask`` (for queries too, unless they are another sequence), the number of tokens that
    a centroid picks follows the real ones, so that a padded sequence gives the output of the shorter one; padded
    queries give 0. The number of centroids follows ``shape``, not the call.

    Differs from the authors' code: there is no causal form (theirs makes queries and keys one, and which tokens meet
    still depends on later ones); no loss pulls tokens to centroids; all heads route, while theirs share a layer with
    heads of local attention, as ``per-head`` can.

    ``window`` above the number of tokens means all of them. Which of equal entries are taken is not defined.
    """

    centroids: Tensor

    def __init__(
        self,
        shape: Shape,
        *,
        clusters: Annotated[
            int | None, Field(ge=1, description="centroids of each head; none: √M, the paper's")
        ] = None,
        window: Annotated[
            int | None, Field(ge=1, description="queries, and keys, that a centroid picks; none: n / clusters, upwards")
        ] = None,
        kmeans: Annotated[int, Field(ge=0, description="steps of k-means on the keys in each call")] = 0,
    ) -> None:
        super().__init__()
        self.window, self.kmeans, self.cross = window, kmeans, shape.cross
        count = clusters or max(1, round(math.sqrt(shape.M)))
        self.register_buffer("centroids", normalize(torch.randn(shape.H, count, shape.D), dim=-1))

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        q, k = ((x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt() for x in (q, k))
        for b, h in product(range(q.shape[0]), range(q.shape[1])):
            keys = torch.arange(k.shape[2], device=q.device) if key_mask is None else key_mask[b].nonzero()[:, 0]
            queries = torch.arange(q.shape[2], device=q.device) if self.cross else keys
            x, y, centroids = q[b, h, queries], k[b, h, keys], self.centroids[h].to(q.dtype)
            C = len(centroids)
            for _ in range(self.kmeans):
                nearest = (y @ centroids.mT).argmax(1)
                sums = torch.stack([y[nearest == c].sum(0) for c in range(C)])
                centroids = torch.where(sums.abs().sum(1, keepdim=True) > 0, normalize(sums, dim=1), centroids)
            total, times = x.new_zeros(len(x), v.shape[3]), torch.zeros_like(x[:, :1])
            for c in range(C if len(keys) else 0):
                rank_q, rank_k = ((z @ centroids[c]).argsort(descending=True).argsort() for z in (x, y))
                inside_q, inside_k = (rank < (self.window or -(-len(rank) // C)) for rank in (rank_q, rank_k))
                weights = (x @ y.mT * q.shape[-1] ** -0.5).masked_fill(~inside_k, -torch.inf).softmax(-1)
                total += inside_q[:, None] * (weights @ v[b, h, keys])
                times += inside_q[:, None]
            out[b, h, queries] = total / times.clamp(min=1)
        return out

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        B, H, N, _ = q.shape
        q, k = _normed(q), _normed(k)
        with torch.no_grad():
            (at_q, real_q), (at_k, real_k) = self._pick(q, k, key_mask)
        times = self._times_picked(at_q, real_q, B * H * N).clamp_(min=1).to(accumulator(q.dtype)).unsqueeze(1)
        picked = (None if x is None else x.flatten(0, 1) for x in (at_q, at_k, real_q, real_k))
        out: Tensor = AttendWithin.apply(  # type: ignore[no-untyped-call] # torch
            *(x.reshape(-1, x.shape[-1]).to(v.dtype) for x in (q, k, v)), *picked, times
        )
        return out.view(B, H, N, -1)

    def coverage(self, q: Tensor, k: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """``(B, H)``: the share of (real) queries that at least one centroid picks; the others give 0."""
        B, H, N, _ = q.shape
        q, k = _normed(q), _normed(k)
        (at_q, real_q), _ = self._pick(q, k, key_mask)
        picked = (self._times_picked(at_q, real_q, B * H * N).view(B, H, N) > 0).sum(2)
        real = q.new_full((B,), N) if key_mask is None or self.cross else key_mask.sum(1).clamp(min=1).to(q.dtype)
        return picked / real.unsqueeze(1)

    @staticmethod
    def _times_picked(at: Tensor, real: Tensor | None, tokens: int) -> Tensor:
        ones = torch.ones_like(at) if real is None else real.to(at.dtype).expand_as(at)
        return at.new_zeros(tokens).index_add_(0, at.flatten(), ones.flatten())

    def _pick(
        self, q: Tensor, k: Tensor, key_mask: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
        """The queries and keys picked, ``(B·H, clusters, window)`` rows of all heads, and masks of those that count."""
        heads = len(self.centroids)
        dtype = accumulator(q.dtype)
        centroids = self.centroids.to(dtype).repeat(len(q) // heads, 1, 1)
        real = None if key_mask is None else key_mask.repeat_interleave(heads, 0)
        q, k = q.to(dtype), k.to(dtype)
        centroids = self._move(centroids, k, real)
        return self._nearest(centroids, q, None if self.cross else real), self._nearest(centroids, k, real)

    def _nearest(self, centroids: Tensor, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor | None]:
        (G, N, _), C = x.shape, centroids.shape[1]
        most = min(N, self.window or -(-N // C))
        chosen = torch.empty((G, C, most), dtype=torch.long, device=x.device)
        # No more scores than x has numbers, or memory would grow faster than n until the caches of all cores are full.
        together = min(budget("routing.ranks", x.device), x.numel())
        room = x.new_empty(max(N, min(G * C * N, together)))
        for heads, a, b in tiles(G, C, N, together):
            scores = room[: (heads.stop - heads.start) * (b - a) * N].view(-1, b - a, N)
            torch.bmm(centroids[heads, a:b], x[heads].mT, out=scores)
            if real is not None:
                scores.masked_fill_(~real[heads].unsqueeze(1), -torch.inf)
            _, found = largest(scores.flatten(0, 1), most, ordered=real is not None)
            chosen[heads, a:b] = found.view(-1, b - a, most)
        chosen += N * torch.arange(G, device=x.device).view(G, 1, 1)
        if real is None:
            return chosen, None
        tokens = real.sum(1)
        some = -(-tokens // C) if self.window is None else tokens.clamp(max=self.window)
        return chosen, (torch.arange(most, device=x.device) < some.unsqueeze(1)).unsqueeze(1).expand(-1, C, -1)

    def _move(self, centroids: Tensor, x: Tensor, real: Tensor | None) -> Tensor:
        (G, N, D), C = x.shape, centroids.shape[1]
        if real is not None:
            x = x.masked_fill(~real.unsqueeze(2), 0)
        for _ in range(self.kmeans):
            nearest = torch.empty((G, N), dtype=torch.long, device=x.device)
            for heads, a, b in tiles(G, N, C, budget("routing.products", x.device)):
                nearest[heads, a:b] = torch.bmm(x[heads, a:b], centroids[heads].mT).argmax(2)
            nearest += C * torch.arange(G, device=x.device).unsqueeze(1)
            sums = x.new_zeros((G * C, D)).index_add_(0, nearest.flatten(), x.flatten(0, 1)).view(G, C, D)
            moved = torch.linalg.vector_norm(sums, dim=2, keepdim=True) > 0
            centroids = torch.where(moved, normalize(sums, dim=2), centroids)
        return centroids


def _normed(x: Tensor) -> Tensor:
    """LN(x) ``(B·H, N, D)``, in float32 at least: rounding would make other centroids the nearest."""
    return layer_norm(x.to(accumulator(x.dtype)), x.shape[-1:]).flatten(0, 1)


class AttendWithin(torch.autograd.Function):
    """A query's attention to the keys of each cluster that holds it, averaged; 0 for none.

    q ``(N, D)``, k ``(M, D)`` and v ``(M, E)`` of all heads; at_q ``(clusters, w)``, at_k ``(clusters, u)`` are a
    cluster's rows; real_q, real_k, of the same shapes or None, mark those that count; times ``(N, 1)`` is the number of
    a query's clusters, at least 1. -> ``(N, E)``. The backward pass gathers and computes the weights again.
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
