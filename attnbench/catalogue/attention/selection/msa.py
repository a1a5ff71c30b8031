"""An index ranks single keys, and the heads that share keys read the blocks that hold the best of them."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear, pad, rms_norm

from attnbench.catalogue.engines.blocks.selecting import BlockSelecting
from attnbench.catalogue.engines.blocks.selection import BlockPairs, BlockSelection
from attnbench.catalogue.engines.decoding.kv_cache import Cache
from attnbench.catalogue.engines.flex.pair_pattern import COMPILED, Form
from attnbench.catalogue.engines.gathered.chosen import answer_from_chosen, best
from attnbench.catalogue.engines.gathered.key_index import Index, Ranked, lesson, probabilities, taught
from attnbench.catalogue.engines.masks import emptied, visible_pairs
from attnbench.catalogue.engines.precision import accumulator
from attnbench.catalogue.engines.rotation import angles, rotate
from attnbench.catalogue.engines.tiling import budget, tiles
from attnbench.contract.problem.reference import of_query_heads
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, Needs, No, Traits, register
from attnbench.errors import Unsupported

_INDEXED = Needs("indexer=random or indexer=learned")


class Ranking(NamedTuple):
    """A ranking of keys for each head of keys and all that read it: a_t·b_j, or Σ_i w_ti·relu(a_ti·b_j)."""

    a: Tensor
    """``(B, K, N, I, d)``."""
    b: Tensor
    """``(B, K or 1, M, d)``."""
    w: Tensor | None
    """``(B, K, N, I)``; None: 1."""
    plain: bool = False

    def groups(self) -> list[Index]:
        """One index for each head of keys."""
        K, S = self.a.shape[1], self.b.shape[1]
        w = [None] * K if self.w is None else self.w.unbind(1)
        return [Index(self.a[:, g], self.b[:, g % S], w[g], self.plain) for g in range(K)]


def _at_its_place(x: Tensor, first: int, norm: nn.RMSNorm | None = None) -> Tensor:
    """x ``(B, K, n, I, d)`` or ``(B, K, n, d)``, normed, and turned by the places from ``first`` on."""
    x = rms_norm(x, x.shape[-1:], None if norm is None else norm.weight.to(x.dtype), _EPS)
    rows = x if x.ndim == 5 else x.unsqueeze(3)
    cos, sin = (part[:, None] for part in angles(first, x.shape[2], rows[:, :, :, 0]))
    return rotate(rows, cos, sin).view_as(x)


_EPS = 1e-6


class RandomRanking(nn.Module):
    """A ranking that learns nothing: queries and keys through one random projection.

    A product of projections estimates a logit (Johnson and Lindenstrauss 1984); an index head stands for every I-th
    head of queries that reads a head of keys, and has the sum of their estimates. With ``plain`` there is one.
    """

    projection: Tensor

    def __init__(self, shape: Shape, heads: int, width: int, *, plain: bool) -> None:
        super().__init__()
        self.heads, self.plain = min(heads, shape.G), plain
        self.register_buffer("projection", torch.randn(width, shape.D) * width**-0.5)

    def forward(self, q: Tensor, k: Tensor, first: int = 0) -> Ranking:
        """q ``(B, H, n, D)``, k ``(B, K, n, D)``, in the dtype of sums, of tokens from place ``first`` on."""
        a, b = (linear(x, self.projection.to(x.dtype)) for x in (q, k))
        of_group = torch.unflatten(a, 1, (k.shape[1], -1))
        parts = [of_group[:, :, i :: self.heads].sum(2) for i in range(self.heads)]
        a = torch.stack(parts, 3)
        return (
            Ranking(_at_its_place(a, first), _at_its_place(b, first), None, True) if self.plain else Ranking(a, b, None)
        )


class LearnedRanking(nn.Module):
    """Learned projections to I queries for each head of keys and to one key, which are normed; else also to weights."""

    def __init__(self, shape: Shape, heads: int, width: int, *, plain: bool) -> None:
        super().__init__()
        C = shape.H * shape.D
        self.of_queries = nn.Linear(C, shape.K * heads * width, bias=False)
        self.of_keys = nn.Linear(shape.K * shape.D, width, bias=False)
        self.sizes, self.scale, self.plain = (shape.K, heads, width), float((heads * width) ** -0.5), plain
        if plain:
            self.q_norm, self.k_norm = (nn.RMSNorm(width, eps=_EPS) for _ in range(2))
        else:
            self.norm, self.weights = nn.LayerNorm(width), nn.Linear(C, shape.K * heads, bias=False)

    def forward(self, q: Tensor, k: Tensor, first: int = 0) -> Ranking:
        """q ``(B, H, n, D)``, k ``(B, K, n, D)``, in the dtype of sums, of tokens from place ``first`` on."""
        x, y = (one.transpose(1, 2).flatten(2) for one in (q, k))
        a, b = linear(x, self.of_queries.weight.to(x.dtype)), linear(y, self.of_keys.weight.to(y.dtype))
        if self.plain:
            a = torch.unflatten(a, 2, self.sizes).transpose(1, 2)
            a, b = _at_its_place(a, first, self.q_norm), _at_its_place(b[:, None], first, self.k_norm)
            return Ranking(a * self.scale, b, None, True)
        w, norm = linear(x, self.weights.weight.to(x.dtype)), self.norm
        b = layer_norm(b, norm.normalized_shape, norm.weight.to(b.dtype), norm.bias.to(b.dtype), norm.eps)
        a, w = torch.unflatten(a, 2, self.sizes), torch.unflatten(w, 2, self.sizes[:2])
        return Ranking(a.transpose(1, 2), b[:, None], w.transpose(1, 2) * self.scale)


@register(
    "msa",
    family="learned pattern",
    source="MiniMax 2026, arXiv:2606.13392, as in transformers; DeepSeek-AI 2025, arXiv:2512.02556, section 2.1",
    formula="softmax over the blocks Tᵢ: the own one and the t - 1 others of largest max_{j∈J} (Rᵢ·aᵢ)·(Rⱼ·bⱼ)",
    cost="O(n²·d)",
    memory_exponent=1.0,
    traits=Traits(
        cross=No("a query always attends to the keys of its own block"),
        bias=No("blocks are ranked by an index that knows no position, before any bias is added"),
        decode=True,
        stochastic=True,
        shares="by itself",
        heads_apart=False,
        exact_with=("blocks={n},block=2", "blocks={n},block=2,indexer=exact"),
        knob=Knob("blocks", step=1),
        own_form="ranks keys by a random projection of q and k; the paper trains an indexer",
        given=(
            COMPILED,
            (
                "indexer=learned",
                {
                    "target": "learned",
                    "own_form": "trains the indexer on q and k beside the model; the paper trains it on the layer's "
                    "input",
                },
            ),
            (
                "score=relu",
                {"own_form": "ranks by weights times relu(a·b), DeepSeek's index; the paper by the product alone"},
            ),
            (
                "indexer=exact",
                {
                    "stochastic": False,
                    "own_form": "ranks keys by their probabilities, which costs all of attention; the paper trains an "
                    "indexer",
                },
            ),
        ),
    ),
    settings=(
        "block=3,blocks=3,index_dim=4",
        "block=4,blocks=2,indexer=exact",
        "block=5,blocks=2,index_dim=4,indexer=learned",
        "block=3,blocks=3,index_heads=1,index_dim=3,score=relu",
        "block=5,blocks=2,index_heads=2,index_dim=3,indexer=learned,score=relu",
    ),
)
class MSA(BlockSelecting):
    """MiniMax sparse attention (MSA): the blocks that hold the best keys.

    MiniMax 2026, arXiv:2606.13392. q ``(B, H, N, D)``, k ``(B, K, N, D)`` and v ``(B, K, N, E)`` -> ``(B, H, N, E)``.
    Tokens are cut into blocks of ``block``; the last may be shorter. An index gives each key j a number for query i,
    the product a_i·b_j of an index query and an index key ``index_dim`` wide. Both are normed by their mean square and
    turned by their places, as rotary positions are. A block has the largest number of its keys that the query sees. The
    query takes one softmax over the keys of ``blocks`` blocks: its own, and the others of the largest numbers. The
    heads of queries that share a head of keys have one index query, and make one choice; each head of keys has a choice
    of its own.

    ``score=relu`` is the index of DeepSeek-AI 2025, arXiv:2512.02556, section 2.1: Σ_h w_ih·relu(a_ih·b_j), with
    ``index_heads`` index queries for each head of keys, layer norm for the index keys alone, and no places.

    ``indexer`` says what ranks the keys. ``random`` learns nothing: an index query is the sum of one random projection
    over the heads of queries that it stands for, and an index key is a key's. ``exact`` takes the probabilities
    themselves, summed over these heads: the best that an index can know, at the price of all of attention. ``learned``
    has projections with a loss of their own, the cross entropy of the index's softmax over the keys kept with the mean
    of the heads' weights; its gradient reaches the projections alone, apart from the model's own loss.

    As many blocks as there are give exact attention. The index costs N² products of ``index_dim`` numbers for each of
    its heads, some queries at a time: memory is O(n·d). Numbers are compared in float32; of equal ones the later block
    is taken. Decoding keeps all keys and values and the index's keys, and reads the blocks that a query chooses. The
    number of blocks is this project's.

    Without causality all blocks compete; the paper is causal.

    Differs from the authors' code: that makes index queries and keys of the layer's input, and turns a part of their
    channels.

    Raises:
        Unsupported: an odd ``index_dim``, unless nothing is turned.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        block: Annotated[int, Field(ge=1, description="tokens per block")] = 128,
        blocks: Annotated[int, Field(ge=1, description="blocks that a query attends to, its own included")] = 4,
        index_heads: Annotated[
            int, Field(ge=1, description="index heads of a head of keys; random: at most G"), Needs("score=relu")
        ] = 1,
        index_dim: Annotated[int, Field(ge=1, description="width of a head of the index"), _INDEXED] = 64,
        indexer: Annotated[
            Literal["random", "exact", "learned"], Field(description="what the keys are ranked by")
        ] = "random",
        score: Annotated[
            Literal["product", "relu"],
            Field(description="a·b of normed and turned a and b, or Σ w·relu(a·b)"),
            _INDEXED,
        ] = "product",
        form: Form = "auto",
    ) -> None:
        super().__init__(shape, f"msa, block={block}", form)
        plain = score == "product"
        if plain and indexer != "exact" and index_dim % 2:
            raise Unsupported(f"index queries and keys are turned in pairs of channels: index_dim {index_dim} is odd")
        self.capacity, self.block, self.blocks = shape.M, block, blocks
        self.index: RandomRanking | LearnedRanking | None = None
        if indexer == "random":
            self.index = RandomRanking(shape, index_heads, index_dim, plain=plain)
        elif indexer == "learned":
            self.index = LearnedRanking(shape, index_heads, index_dim, plain=plain)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """N × N matrices of scores; of each row the blocks whose largest score ranks below ``blocks``."""
        q, k, v = emptied(key_mask, q, k, v)
        (B, H, N, D), K = q.shape, k.shape[1]
        seen = visible_pairs(q, k, self.causal, key_mask)
        logits = (q @ of_query_heads(k, H).mT).detach() * D**-0.5
        if self.index is None:
            weights = logits.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0)
            scores = torch.unflatten(weights, 1, (K, -1)).sum(2)
        else:
            a, b, w, plain = self.index(q.detach(), k.detach())
            each = torch.einsum("bknid,bkmd->bknim", a, b.expand(-1, K, -1, -1))
            each = each if plain else each.clamp(min=0)
            scores = (each if w is None else each * w[..., None]).sum(3)
        i = torch.arange(N, device=q.device)
        places, own = torch.arange(-(-N // self.block), device=q.device), i[:, None] // self.block
        parts = torch.split(scores.masked_fill(~seen, -torch.inf), self.block, -1)
        largest = torch.stack([part.amax(-1) for part in parts], -1).masked_fill(places == own, torch.inf)
        # A stable order from the last block back: of equal numbers that of the later block comes first.
        order = largest.float().flip(-1).argsort(dim=-1, descending=True, stable=True).argsort(-1).flip(-1)
        taken = (order < self.blocks) & (largest > -torch.inf)
        kept = taken[..., i // self.block] & seen
        out = self.over(of_query_heads(kept, H), (q, k, v), key_mask)
        if not isinstance(self.index, LearnedRanking):
            return out
        kept = kept.expand(B, K, N, N)
        share = logits.masked_fill(~of_query_heads(kept, H), -torch.inf).softmax(-1).nan_to_num(0)
        guess = scores.masked_fill(~kept, torch.finfo(scores.dtype).min).log_softmax(-1)
        each_row = -(torch.unflatten(share, 1, (K, -1)).mean(2) * guess).sum(-1)
        real = torch.ones(B, 1, N, device=q.device) if key_mask is None else key_mask[:, None]
        return taught(out, (each_row * real).sum() / real.sum())

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        if not isinstance(self.index, LearnedRanking) or not torch.is_grad_enabled():
            return super().forward(q, k, v, key_mask=key_mask)
        q, k, v = emptied(key_mask, q, k, v)
        (B, H, N), dtype = q.shape[:3], accumulator(q.dtype)
        real = torch.ones(B, N, dtype=torch.bool, device=q.device) if key_mask is None else key_mask
        x, y = (one.detach().to(dtype) for one in (q, k))
        with torch.no_grad():
            chosen = self._chosen(x, y, real)
        out = self.attend(q, k, v, BlockSelection((B, H, N), self.causal, self._pairs(chosen, H), key_mask))
        ranking: Ranking = self.index(x, y)
        losses = []
        for g, index in enumerate(ranking.groups()):
            heads = slice(g * (H // k.shape[1]), (g + 1) * (H // k.shape[1]))
            losses.append(lesson(index, self._keys(chosen[:, g], real), x[:, heads], y[:, g : g + 1], key_mask))
        return taught(out, torch.stack(losses).sum())

    def choose(self, q: Tensor, k: Tensor, real: Tensor) -> tuple[BlockPairs, ...]:
        return self._pairs(self._chosen(q, k, real), q.shape[1])

    def _chosen(self, q: Tensor, k: Tensor, real: Tensor) -> Tensor:
        """The blocks of each query, ``(B, K, N, min(blocks, all))`` int32, a choice for each head of keys; -1: none."""
        (B, _, N, _), K = q.shape, k.shape[1]
        ranking: Ranking | None = None if self.index is None else self.index(q, k)
        numbers = N * (q.shape[1] if ranking is None else K * ranking.a.shape[3])
        count = min(self.blocks, -(-N // self.block))
        chosen = torch.full((B, K, N, count), -1, dtype=torch.int32, device=q.device)
        for examples, a, b in tiles(B, N, numbers, budget("topk.logits", q.device)):
            last = b if self.causal else N
            unseen = ~real[examples, None, :last]
            if self.causal:
                unseen = unseen | torch.ones(b - a, last, dtype=torch.bool, device=q.device).triu(a + 1)
            if ranking is None:
                scores = probabilities(q[examples, :, a:b], k[examples, :, :last], unseen, K)
            else:
                scores = torch.stack([one.scores(examples, slice(a, b), last) for one in ranking.groups()], 1)
            own = torch.arange(a, b, device=q.device) // self.block
            found = self._best(scores.masked_fill(unseen[:, None], -torch.inf), own)
            chosen[examples, :, a:b, : found.shape[3]] = found
        return chosen

    def _best(self, scores: Tensor, own: Tensor) -> Tensor:
        """The blocks of largest score ``(B, K, n, ·)`` from those of keys ``(B, K, n, m)``; the own ones first."""
        of_blocks = torch.unflatten(
            pad(scores, (0, -scores.shape[3] % self.block), value=-torch.inf), 3, (-1, self.block)
        )
        largest = of_blocks.amax(-1)
        forced = torch.arange(largest.shape[3], device=own.device) == own[:, None]
        return best(largest.masked_fill(forced, torch.inf), self.blocks)

    def _pairs(self, chosen: Tensor, H: int) -> tuple[BlockPairs, ...]:
        every = of_query_heads(chosen, H)
        T, keys = every.shape[3], every.flatten()
        kept = keys >= 0
        queries = torch.arange(len(keys) // T, device=keys.device).repeat_interleave(T)
        return (BlockPairs(1, self.block, queries[kept], keys[kept].long()),)

    def _keys(self, chosen: Tensor, real: Tensor) -> Tensor:
        N = chosen.shape[1]
        keys = chosen.long()[..., None] * self.block + torch.arange(self.block, device=chosen.device)
        keys = torch.where(chosen[..., None] < 0, -1, keys).flatten(2)
        seen = (keys >= 0) & (keys < N)
        seen &= real.gather(1, keys.clamp(0, N - 1).flatten(1)).view_as(keys)
        if self.causal:
            seen &= keys <= torch.arange(N, device=keys.device)[:, None]
        return torch.where(seen, keys, -1).to(torch.int32)

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Ranked:
        b = self._index_keys(q, k, 0)
        return Ranked(Cache.of(k, v, self.capacity), Cache.of(b, b[..., :0], self.capacity))

    def step(self, state: Ranked, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Ranked]:
        place = state.cache.length
        b = self._index_keys(q, k, place)
        state = Ranked(state.cache.append(k, v), state.ranking.append(b, b[..., :0]))
        keys, n, dtype = state.cache.keys, state.cache.length, accumulator(q.dtype)
        with torch.no_grad():
            if self.index is None:
                unseen = torch.zeros(1, 1, n, dtype=torch.bool, device=q.device)
                scores = probabilities(q, keys, unseen, k.shape[1])
            else:
                own: Ranking = self.index(q.to(dtype), k.to(dtype), place)
                groups = own._replace(b=state.ranking.keys).groups()
                scores = torch.stack([one.scores(slice(None), slice(None), n) for one in groups], 1)
            chosen = self._best(scores, torch.full((1,), (n - 1) // self.block, device=q.device))
        return answer_from_chosen(q, keys, state.cache.values, chosen, self.block), state

    @torch.no_grad()
    def _index_keys(self, q: Tensor, k: Tensor, first: int) -> Tensor:
        """The index's part of the cache, ``(B, K or 1, n, index_dim)``, in the dtype of the ranking."""
        if self.index is None:
            return k.new_zeros(*k.shape[:3], 0)
        dtype = accumulator(q.dtype)
        ranking: Ranking = self.index(q.to(dtype), k.to(dtype), first)
        return ranking.b

    @staticmethod
    def cached_bytes(shape: Shape, width: int, *, indexer: str, index_dim: int, **_: object) -> int:
        """A token's key and value in each head of keys, and the index's keys, which have float32 at least."""
        heads = {"random": shape.K, "learned": 1, "exact": 0}[indexer]
        return shape.K * (shape.D + shape.E) * width + heads * index_dim * max(width, 4)
