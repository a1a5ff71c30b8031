"""Sparse attention by an index: few small heads rank all keys, and every head reads the best of them."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear

from attnbench.catalogue.engines.decoding.kv_cache import Cache
from attnbench.catalogue.engines.gathered.choice import Choice
from attnbench.catalogue.engines.gathered.chosen import answer_from_chosen, attend_to_chosen, best
from attnbench.catalogue.engines.gathered.key_index import Index, Ranked, lesson, probabilities, taught
from attnbench.catalogue.engines.masks import emptied, visible_pairs
from attnbench.catalogue.engines.precision import accumulator
from attnbench.catalogue.engines.tiling import budget, tiles
from attnbench.contract.problem.reference import masked_attention, of_query_heads
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, Needs, No, Traits, register

_INDEXED = Needs("indexer=random or indexer=learned")


class RandomIndex(nn.Module):
    """An index that learns nothing: queries and keys, all heads joined, through one random projection.

    A product of projections estimates logits (Johnson and Lindenstrauss 1984), summed over the heads of attention that
    an index head stands for: every I-th.
    """

    of_queries: Tensor
    of_keys: Tensor

    def __init__(self, shape: Shape, heads: int, width: int) -> None:
        super().__init__()
        heads = min(heads, shape.H)
        keys = torch.randn(width, shape.K, shape.D) * width**-0.5
        queries = torch.zeros(heads, width, shape.H, shape.D)
        for head in range(shape.H):
            queries[head % heads, :, head] = keys[:, head // shape.G]
        self.heads = heads
        self.register_buffer("of_queries", queries.flatten(2).flatten(0, 1))
        self.register_buffer("of_keys", keys.flatten(1))

    def forward(self, q: Tensor, k: Tensor) -> Index:
        x, y = _side_by_side(q), _side_by_side(k)
        a = linear(x, self.of_queries.to(x.dtype))
        return Index(torch.unflatten(a, 2, (self.heads, -1)), linear(y, self.of_keys.to(y.dtype)), None)


class LearnedIndex(nn.Module):
    """The lightning indexer: learned projections to I queries and one key, which is normalised, and I weights."""

    def __init__(self, shape: Shape, heads: int, width: int) -> None:
        super().__init__()
        C = shape.H * shape.D
        self.of_queries = nn.Linear(C, heads * width, bias=False)
        self.of_keys = nn.Linear(shape.K * shape.D, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.weights = nn.Linear(C, heads, bias=False)
        self.heads, self.scale = heads, float((heads * width) ** -0.5)

    def forward(self, q: Tensor, k: Tensor) -> Index:
        x, y = _side_by_side(q), _side_by_side(k)
        a, w = (linear(x, one.weight.to(x.dtype)) for one in (self.of_queries, self.weights))
        b, norm = linear(y, self.of_keys.weight.to(y.dtype)), self.norm
        b = layer_norm(b, norm.normalized_shape, norm.weight.to(b.dtype), norm.bias.to(b.dtype), norm.eps)
        return Index(torch.unflatten(a, 2, (self.heads, -1)), b, w * self.scale)


def _side_by_side(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2).to(accumulator(x.dtype))


@register(
    "indexed",
    family="learned pattern",
    source="DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556, section 2.1",
    formula="oᵢ = Σ_{j∈Tᵢ} softmax_{j∈Tᵢ}(qᵢ·kⱼ/√D) vⱼ, Tᵢ the t keys of largest Σ_h wᵢ_h·relu(aᵢ_h·bⱼ), for all heads",
    cost="O(n²·d)",
    memory_exponent=1.0,
    traits=Traits(
        cross=No("queries and keys are one sequence: the indexer makes its queries and keys of the same tokens"),
        decode=True,
        stochastic=True,
        bias=No("keys are ranked by an index that knows no position, before any bias is added"),
        shares="by itself",
        heads_apart=False,
        exact_with=("top_k={n}", "top_k={n},indexer=exact"),
        knob=Knob("top_k"),
        own_form="ranks keys by a random projection of q and k; the paper trains an indexer on the layer's input",
        given=(
            (
                "indexer=exact",
                {
                    "stochastic": False,
                    "permutable": True,
                    "own_form": "ranks keys by their probabilities, which costs all of attention; the paper trains an "
                    "indexer",
                },
            ),
            (
                "indexer=learned",
                {
                    "target": "learned",
                    "own_form": "trains the indexer on q and k beside the model from the start; the paper trains it on "
                    "the layer's input, at first beside dense attention",
                },
            ),
        ),
    ),
    settings=(
        "top_k=20,index_heads=1,index_dim=3",
        "top_k=3,index_heads=2,index_dim=5",
        "top_k=3,indexer=exact",
        "top_k=3,index_heads=3,index_dim=5,indexer=learned",
    ),
)
class IndexedAttention(nn.Module):
    """DeepSeek Sparse Attention: a small indexer chooses keys for all heads.

    DeepSeek-AI 2025, "DeepSeek-V3.2". q ``(B, H, N, D)``, k ``(B, K, N, D)`` and v ``(B, K, N, E)`` ->
    ``(B, H, N, E)``. The index of the pair t, s is Σ_h w_th·relu(a_th·b_s) over ``index_heads`` heads of width
    ``index_dim``, whose keys b all heads share. The top_k keys of largest index are kept, the same ones for all heads
    of attention, and every head takes a softmax over them. The index itself meets all pairs: time stays quadratic, in
    index_heads · index_dim multiplications a pair in place of 2·H·D. Indices exist for a tile of queries at a time, and
    only the kept keys are gathered: memory is O(n·top_k).

    ``indexer``: ``random`` projects q and k by Gaussian matrices, so that a product of projections estimates the sum of
    logits, with w = 1; it has no more heads than attention has. ``learned`` has the paper's projections, and a layer
    norm on b. Its gradient comes from nothing but the paper's loss: the Kullback-Leibler divergence of softmax(index)
    from the mean of the heads' weights, both over the kept keys, averaged over the tokens. That loss has the weight 1,
    whatever the loss of the model. The indexer gets no gradient from the model, and gives none to q and k. ``exact``
    ranks by the probability itself, summed over the heads: the most that any index can keep, at the price of all
    logits.

    Indices are compared in float32, and of keys with the same index the latest are kept: where no product of a pair is
    above 0, its index is 0. The default
    top_k, 256, is this project's; the paper keeps 2048 of up to 128 Ki tokens, with 64 index heads of width 128 for 128
    heads of attention.

    Differs from the paper: there it is built on latent attention, and the indexer reads the layer's input and a latent
    of its queries, of which q and k are maps here. The indexer has no rotary part, Hadamard rotation or 8-bit numbers,
    and no first stage of training beside dense attention. Without causality all keys compete; the paper is causal. Its
    inference code scores all pairs at once and masks them.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        top_k: Annotated[int, Field(ge=1, description="keys kept for each query")] = 256,
        index_heads: Annotated[int, Field(ge=1, description="heads of the index; random: at most H"), _INDEXED] = 4,
        index_dim: Annotated[int, Field(ge=1, description="width of a head of the index"), _INDEXED] = 64,
        indexer: Annotated[
            Literal["random", "exact", "learned"], Field(description="what the keys are ranked by")
        ] = "random",
    ) -> None:
        super().__init__()
        self.causal, self.capacity, self.top_k, self.indexer = shape.causal, shape.M, top_k, indexer
        self.index: RandomIndex | LearnedIndex | None = None
        if indexer == "random":
            self.index = RandomIndex(shape, index_heads, index_dim)
        elif indexer == "learned":
            self.index = LearnedIndex(shape, index_heads, index_dim)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        q, k, v = emptied(key_mask, q, k, v)
        K, V = of_query_heads(k, q.shape[1]), of_query_heads(v, q.shape[1])
        logits, seen = q @ K.mT * q.shape[-1] ** -0.5, visible_pairs(q, k, self.causal, key_mask)
        if self.index is None:
            scores = logits.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0).sum(1, keepdim=True)
        else:
            a, b, w, _ = self.index(q.detach(), k.detach())
            each = torch.einsum("bnid,bmd->bnim", a, b).clamp(min=0)
            scores = (each if w is None else each * w[..., None]).sum(2)[:, None]
        # A stable order from the last key back: of equal indices the latest comes first.
        backwards = scores.masked_fill(~seen, -torch.inf).float().flip(-1).argsort(dim=-1, descending=True, stable=True)
        kept = seen & (backwards.argsort(-1).flip(-1) < self.top_k)
        out = masked_attention(q, K, V, kept)
        if self.indexer != "learned":
            return out
        weights = logits.detach().masked_fill(~kept, -torch.inf).softmax(-1).nan_to_num(0).mean(1)
        guess = scores.masked_fill(~kept, torch.finfo(scores.dtype).min)[:, 0].log_softmax(-1)
        each_row = -(weights * guess).sum(-1)
        real = torch.ones_like(each_row) if key_mask is None else key_mask.to(each_row.dtype)
        loss = (each_row * real).sum() / real.sum()
        return taught(out, loss)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        q, k, v = emptied(key_mask, q, k, v)
        chosen = self._choose(q, k, key_mask)
        out = attend_to_chosen(q, k, v, chosen[:, None])
        if not isinstance(self.index, LearnedIndex) or not torch.is_grad_enabled():
            return out
        index: Index = self.index(q.detach(), k.detach())
        return taught(out, lesson(index, chosen, q, k, key_mask))

    def select(self, q: Tensor, k: Tensor, *, key_mask: Tensor | None = None) -> Choice:
        q, k = emptied(key_mask, q, k)
        chosen = self._choose(q, k, key_mask)[:, None]
        return Choice(chosen, q.shape[1], k.shape[2], causal=self.causal, real=key_mask)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: Choice) -> Tensor:
        return selection.attend(q, k, v)

    @torch.no_grad()
    def _choose(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor:
        """The keys kept for each query, ``(B, N, min(top_k, M))`` int32; -1 if fewer are visible."""
        (B, H, N), M = q.shape[:3], k.shape[2]
        index: Index | None = None if self.index is None else self.index(q, k)
        heads = H if index is None else index.a.shape[2]
        chosen = torch.full((B, N, min(self.top_k, M)), -1, dtype=torch.int32, device=q.device)
        for examples, a, b in tiles(B, N, heads * M, budget("topk.logits", q.device)):
            last = b if self.causal else M
            unseen = torch.zeros(1, b - a, last, dtype=torch.bool, device=q.device)
            if self.causal:
                unseen = unseen.logical_not().triu(a + 1)
            if key_mask is not None:
                unseen = unseen | ~key_mask[examples, None, :last]
            if index is None:
                scores = probabilities(q[examples, :, a:b], k[examples, :, :last], unseen)[:, 0]
            else:
                scores = index.scores(examples, slice(a, b), last)
            found = best(scores.masked_fill(unseen, -torch.inf), self.top_k)
            chosen[examples, a:b, : found.shape[2]] = found
        return chosen

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Ranked:
        b = self._index_keys(q, k)
        return Ranked(Cache.of(k, v, self.capacity), Cache.of(b, b[..., :0], self.capacity))

    def step(self, state: Ranked, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Ranked]:
        b = self._index_keys(q, k)
        state = Ranked(state.cache.append(k, v), state.ranking.append(b, b[..., :0]))
        keys, n = state.cache.keys, state.cache.length
        with torch.no_grad():
            if self.index is None:
                scores = probabilities(q, keys, torch.zeros(1, 1, n, dtype=torch.bool, device=q.device))[:, 0]
            else:
                own: Index = self.index(q, k)
                index = own._replace(b=state.ranking.keys[:, 0])
                scores = index.scores(slice(None), slice(None), n)
            chosen = best(scores, self.top_k)
        return answer_from_chosen(q, keys, state.cache.values, chosen[:, None]), state

    @torch.no_grad()
    def _index_keys(self, q: Tensor, k: Tensor) -> Tensor:
        """The index's part of the cache, ``(B, 1, n, index_dim)``, in the dtype of the ranking."""
        if self.index is None:
            return k.new_zeros(k.shape[0], 1, k.shape[2], 0)
        index: Index = self.index(q, k)
        return index.b[:, None]

    @staticmethod
    def cached_bytes(shape: Shape, width: int, *, indexer: str, index_dim: int, **_: object) -> int:
        """A token's key and value in each head of keys, and its key in the index, which has float32 at least."""
        return shape.K * (shape.D + shape.E) * width + (0 if indexer == "exact" else index_dim * max(width, 4))
