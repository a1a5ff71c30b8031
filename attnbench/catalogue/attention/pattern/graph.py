"""Attention along the edges of a graph: a ring with random short cuts."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench.catalogue.engines.decoding import kv_cache
from attnbench.catalogue.engines.decoding.kv_cache import Cache
from attnbench.catalogue.engines.flex.block_mask import Seen, by_places
from attnbench.catalogue.engines.flex.flex_attention import DTYPES
from attnbench.catalogue.engines.flex.pair_pattern import FlexPattern, Form
from attnbench.catalogue.engines.gathered.chosen import attend_to_chosen
from attnbench.catalogue.engines.masks import emptied, visible_pairs
from attnbench.contract.problem.reference import masked_attention
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, No, Traits, register
from attnbench.errors import Unsupported

_MOST = 16_384
"""Most tokens of the kernel: with random edges nearly no block is empty, so that it computes all pairs."""


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
        given=(("form=flex", {"compiled": True, "dtypes": DTYPES, "cost": "O(n²·d)"}),),
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
    some queries at a time, as for any graph: that the ring is regular is not made use of. ``form=flex``, for up to
    16,384 tokens, reads a table of all pairs, a byte each, and skips blocks without an edge. With random edges few
    blocks are without one, and it computes nearly all pairs: hence the default, ``form=torch``. The graph is drawn for
    ``shape.N`` tokens; in a shorter input, edges to missing tokens are left out.

    Differs from the paper: the graph does not come from data; self-edges; no features of edges and no embedding of
    positions.

    Raises:
        Unsupported: in ``forward`` and ``step``, more tokens than the graph has nodes.
    """

    neighbours: Tensor
    """``(N, K)``, positions; -1 for a neighbour listed already."""

    def __init__(
        self,
        shape: Shape,
        *,
        edges: Annotated[int, Field(ge=0, description="random neighbours of each token")] = 8,
        ring: Annotated[int, Field(ge=0, description="neighbours on either side along the ring")] = 4,
        form: Form = "torch",
    ) -> None:
        super().__init__()
        N = shape.N
        self.causal, self.longest = shape.causal, N
        self.flex = FlexPattern(f"graph, edges={edges}, ring={ring}, causal={shape.causal}", form, fits=N <= _MOST)
        own, reach = torch.arange(N)[:, None], min(ring, N)
        near = (own + torch.arange(-reach, reach + 1)) % N
        # From floats, since shapes must be traceable, and integers drawn at random are not of one kind everywhere.
        far = (torch.rand(N, edges) * N).long().clamp(max=N - 1)
        listed = torch.cat([near, far], 1).sort(1).values
        again = torch.cat([torch.zeros_like(own, dtype=torch.bool), listed[:, 1:] == listed[:, :-1]], 1)
        self.register_buffer("neighbours", listed.masked_fill(again, -1))

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        N = q.shape[2]
        edges = torch.zeros(self.longest, self.longest, dtype=torch.bool, device=q.device)
        for i, row in enumerate(self.neighbours.tolist()):
            edges[i, [j for j in row if j >= 0]] = True
        return masked_attention(q, k, v, edges[:N, :N] & visible_pairs(q, k, self.causal, key_mask))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return self.flex.attend(self._plain, self._seen, q, k, v, key_mask=key_mask)

    def _seen(self, q: Tensor) -> Seen:
        n = q.shape[2]
        table = self._rows(slice(0, n))
        edges = torch.zeros(n, n + 1, dtype=torch.bool, device=q.device)  # the last column is no token's
        edges.scatter_(1, torch.where((table >= 0) & (table < n), table, n), 1)
        edges = edges.tril() if self.causal else edges
        return by_places(lambda i, j: edges[i, j], q)

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        table = self._rows(slice(0, q.shape[2]))
        chosen = torch.where(table < k.shape[2], table, -1).int().expand(len(q), 1, -1, -1)
        return attend_to_chosen(q, k, v, chosen, causal=self.causal, key_mask=key_mask)

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
