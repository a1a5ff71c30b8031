"""Attention along the edges of a graph: a ring with random short cuts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from attnbench.engines.decoding import kv_cache
from attnbench.engines.decoding.kv_cache import Cache
from attnbench.engines.masks import emptied, visible_pairs
from attnbench.engines.precision import accumulator
from attnbench.engines.tiling import budget
from attnbench.errors import Unsupported
from attnbench.reference import masked_attention
from attnbench.shape import Shape
from attnbench.variant import Knob, No, Traits, register


@register(
    "graph",
    family="fixed pattern",
    source="Dwivedi and Bresson 2020, arXiv:2012.09699, section 2; Watts and Strogatz 1998, doi:10.1038/30918",
    formula="oᵢ = Σ_{j∈Nᵢ} softmax_{j∈Nᵢ}(qᵢ·kⱼ/√D) vⱼ, Nᵢ the neighbours of i in a graph",
    cost="O(n·K·d)",
    memory_exponent=1.0,
    traits=Traits(
        cross=No("the nodes of the graph are the tokens of one sequence"),
        decode=True,
        bias=No("the graph is all that it knows of positions; edges have no features here"),
        longer=No("the graph is drawn for the tokens that it is made for"),
        stochastic=True,
        exact_with=("ring={n}",),
        knob=Knob("edges"),
    ),
    settings=("ring=2,edges=3",),
)
class Graph(nn.Module):
    """Softmax over the neighbours in a graph: a ring and random edges.

    A sparse Transformer whose pattern is a graph, after Dwivedi and Bresson 2020, "A Generalization of Transformer
    Networks to Graphs": every token attends to its neighbours. The graph stands for one that data might bring. It is
    that of small worlds: a ring, in which a token sees itself and ``ring`` tokens on either side, the first and the
    last tokens being neighbours, and ``edges`` random ones, drawn from the seed for each token, which lead from the
    token to another one. Causal: only the edges that lead back. A key that is listed twice counts once.

    q, k, v ``(B, H, N, D)`` -> ``(B, H, N, D)``. All heads have the same graph. The keys of each query are gathered,
    some queries at a time, as for any graph: that the ring is regular is not made use of. The graph is drawn for
    ``shape.N`` tokens; in a shorter input, edges to what is not there are missing.

    Differs from the paper: the graph does not come from data; self-edges; no features of edges and no embedding of
    positions.

    Raises:
        Unsupported: in ``forward`` and ``step``, more tokens than the graph has nodes.
    """

    neighbours: Tensor
    """``(N, K)``, positions; -1 where a neighbour is listed already."""

    def __init__(
        self,
        shape: Shape,
        *,
        edges: Annotated[int, Field(ge=0, description="random neighbours of each token")] = 8,
        ring: Annotated[int, Field(ge=0, description="neighbours on either side along the ring")] = 4,
    ) -> None:
        super().__init__()
        N = shape.N
        self.causal, self.longest = shape.causal, N
        own, reach = torch.arange(N)[:, None], min(ring, N)
        near = (own + torch.arange(-reach, reach + 1)) % N
        # From floats, since shapes must be traceable, and integers drawn at random are not of one kind everywhere.
        far = (torch.rand(N, edges) * N).long().clamp(max=N - 1)
        listed = torch.cat([near, far], 1).sort(1).values
        again = torch.cat([torch.zeros_like(own, dtype=torch.bool), listed[:, 1:] == listed[:, :-1]], 1)
        self.register_buffer("neighbours", listed.masked_fill(again, -1))

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """The N × N matrix of edges as a mask."""
        N = q.shape[2]
        edges = torch.zeros(self.longest, self.longest, dtype=torch.bool, device=q.device)
        for i, row in enumerate(self.neighbours.tolist()):
            edges[i, [j for j in row if j >= 0]] = True
        return masked_attention(q, k, v, edges[:N, :N] & visible_pairs(q, k, self.causal, key_mask))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        N = q.shape[2]
        table = self._rows(slice(0, N))
        seen = (table >= 0) & (table < N)
        if self.causal:
            seen = seen & (table <= torch.arange(N, device=q.device)[:, None])
        table = table.clamp(0, N - 1)
        seen = seen[None] if key_mask is None else seen & key_mask[:, table]
        return attend_to_listed(q, k, v, table, seen)

    def _rows(self, tokens: slice) -> Tensor:
        if tokens.stop > self.longest:
            raise Unsupported(f"{tokens.stop} tokens, but the graph was drawn for at most {self.longest}")
        return self.neighbours[tokens]

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Cache:
        return Cache.of(k, v, self.longest)

    def step(self, state: Cache, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Cache]:
        (row,) = self._rows(slice(state.length, state.length + 1))
        state = state.append(k, v)
        row = row[(row >= 0) & (row < state.length)]
        return kv_cache.attend(q, state.keys[:, :, row], state.values[:, :, row]), state


def attend_to_listed(q: Tensor, k: Tensor, v: Tensor, table: Tensor, seen: Tensor) -> Tensor:
    """Σ_j softmax_j(q_i·k_j/√D) v_j over the keys j that row i of the table lists.

    Args:
        q: ``(B, H, N, D)``; k, v: ``(B, H, M, D)``, finite at padded keys.
        table: ``(N, K)``, positions of keys, each at most once in a row among those that are seen.
        seen: ``(B, N, K)`` or ``(1, N, K)`` bool, which of the listed keys count.

    Returns:
        ``(B, H, N, D)`` in v's dtype. A row that lists no key that counts gives 0.
    """
    dtype = accumulator(q.dtype)
    # Heads of an example side by side, so that one index fetches all of them.
    rows = [x.to(dtype).transpose(1, 2).contiguous() for x in (q, k, v)]
    out: Tensor = _Attend.apply(*rows, table, seen)  # type: ignore[no-untyped-call]  # untyped in torch
    return out.transpose(1, 2).to(v.dtype)


def _blocks(q: Tensor, table: Tensor) -> Iterator[tuple[int, slice]]:
    """An example and some of its queries."""
    B, N, H, D = q.shape
    rows = max(1, budget("gathered.listed", q.device) // (table.shape[1] * H * D))
    for b in range(B):
        for start in range(0, N, rows):
            yield b, slice(start, min(start + rows, N))


def _weights(q: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
    """Softmax weights ``(n, H, K)`` of queries ``(n, H, D)`` and their keys ``(n, K, H, D)``."""
    logits = torch.einsum("nhd,nkhd->nhk", q * q.shape[-1] ** -0.5, keys).masked_fill_(~seen[:, None], -torch.inf)
    return logits.softmax(-1).masked_fill_(~seen.any(-1)[:, None, None], 0.0)


class _Attend(torch.autograd.Function):
    """q ``(B, N, H, D)``, k ``(B, M, H, D)``, v ``(B, M, H, E)``; only the inputs are kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, table: Tensor, seen: Tensor) -> Tensor:
        out = q.new_empty(*q.shape[:3], v.shape[3])
        for b, rows in _blocks(q, table):
            listed = table[rows]
            weights = _weights(q[b, rows], k[b, listed], seen[b % len(seen), rows])
            out[b, rows] = torch.einsum("nhk,nkhd->nhd", weights, v[b, listed])
        ctx.save_for_backward(q, k, v, table, seen)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, table, seen = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        scale = q.shape[-1] ** -0.5
        for b, rows in _blocks(q, table):
            listed, above = table[rows], grad[b, rows]
            keys, values = k[b, listed], v[b, listed]
            weights = _weights(q[b, rows], keys, seen[b % len(seen), rows])
            d_weights = torch.einsum("nhd,nkhd->nhk", above, values)
            d_logits = (d_weights - (d_weights * weights).sum(-1, keepdim=True)) * weights * scale
            dq[b, rows] = torch.einsum("nhk,nkhd->nhd", d_logits, keys)
            for total, shares, sources in ((dk, d_logits, q[b, rows]), (dv, weights, above)):
                parts = shares.mT[..., None] * sources[:, None]  # (n, K, H, D)
                total[b].index_add_(0, listed.flatten(), parts.flatten(0, 1))
        return dq, dk, dv, None, None
