"""A pattern of blocks for each head and input, found from the last queries."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from attnbench.catalogue.engines.blocks.selecting import BlockSelecting, block_range
from attnbench.catalogue.engines.blocks.selection import (
    BlockPairs,
    Grid,
    LastQueries,
    by_distance,
    heaviest,
    in_blocks,
    largest,
    means,
    of_last_queries,
    own_blocks,
)
from attnbench.catalogue.engines.flex.pair_pattern import COMPILED, Form
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import No, Traits, register

One = TypeVar("One", int, tuple[int, int])


@register(
    "flexprefill",
    family="learned pattern",
    source="Lai et al. 2025, arXiv:2502.20766, section 3",
    formula="softmax over blocks of keys that hold a share γ: of pooled q·k, or of the last queries' lines",
    cost="O(n²·d)",
    memory_exponent=2.0,
    traits=Traits(
        cross=No("the last queries stand for all, at the places of their own keys"),
        bias=No("blocks are chosen by q·k, to which no bias is added"),
        decode=No("its pattern is that of the last queries of a prompt, which has to be there"),
        sink=True,
        shares="by itself",
        reads_ahead="the last queries of the sequence choose for all, or all blocks of a head are ranked together",
        exact_with=("mass=1",),
        given=(COMPILED,),
        own_form_both_ways="distances of either sign count as diagonals; the paper is causal",
    ),
    settings=(
        "block=4,mass=0.5,least=0,distance=0",
        "block=3,mass=0.5,least=0,distance=1",
        "block=5,mass=0.3,least=10,distance=0.3",
    ),
)
class FlexPrefill(BlockSelecting):
    """Pooled blocks, or columns and diagonals of the last queries.

    Lai et al. 2025, "FlexPrefill: A Context-Aware Sparse Attention Mechanism for Efficient Long-Sequence
    Inference". q ``(B, H, N, D)``, k and v ``(B, K, N, ·)`` -> ``(B, H, N, E)``. The last ``block`` queries of a
    head speak for all. Their weights, summed over blocks of keys, are compared with the softmax over the products
    of their mean with the blocks' mean keys. If the root of the Jensen-Shannon divergence of the two, in natural
    logarithms, is below ``distance``, the means say enough: all pairs of blocks of the head are ranked by the
    softmax of mean query and mean key, and as many are kept as hold the share ``mass`` of all. Else the head keeps
    the fewest columns of blocks that hold this share of the last queries' weights, and the fewest diagonals that
    do. In both cases each block of queries keeps the first block and its own, and ``least`` tokens' worth of ranked
    blocks at least. Then it takes one softmax over the keys of its blocks.

    The share 1 gives exact attention. If causal, no query attends to a later key; but which keys it attends to depends
    on the last queries, so that this is for reading a prompt and for nothing else. With padding, the last queries are
    the last real ones, and means are those of real tokens. Memory is O(n·block), and a bit for each pair of blocks.

    Differs from the authors' code: that counts single columns and single distances until they hold the share, keeps
    as many blocks of either as makes as many 128s, and one more, and keeps one diagonal of blocks for a block of
    distances, which meets two. If means choose, it keeps pairs while they stay within the share, and beside them
    ``least`` tokens' worth of columns and of distances; here pairs hold the share, and ``least`` is that of each row.
    Up to two blocks, or ``least`` tokens, it takes all keys. It takes one example at a time.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        block: Annotated[int, Field(ge=1, description="tokens per block, and queries that stand for all")] = 128,
        mass: Annotated[float, Field(gt=0, le=1, description="share of the estimated mass that is kept")] = 0.9,
        distance: Annotated[float, Field(ge=0, description="divergence below which means choose")] = 0.1,
        least: Annotated[int, Field(ge=0, description="tokens that are kept at least")] = 1024,
        form: Form = "auto",
    ) -> None:
        super().__init__(shape, f"flexprefill, block={block}", form)
        self.block, self.mass, self.distance = block, mass, distance
        self.least = -(-least // block)

    def read(self, q: Tensor, k: Tensor, real: Tensor) -> Iterator[tuple[slice, slice]]:
        tokens = real.nonzero()[:, 0].tolist()
        blocks = [[j for j in tokens if s <= j < s + self.block] for s in range(0, len(q), self.block)]
        for I, J in self._kept(q.double(), k.double(), tokens, blocks):
            yield block_range(I, self.block), block_range(J, self.block)

    def _kept(self, q: Tensor, k: Tensor, real: list[int], blocks: list[list[int]]) -> set[tuple[int, int]]:
        scale, total = q.shape[1] ** -0.5, len(blocks)
        past = [(I, J) for I in range(total) for J in range(I + 1 if self.causal else total)]
        always = {(I, J) for I, J in past if J in (0, I)}
        last = real[-self.block :]
        if not last:
            return always
        columns, diagonals = [0.0] * total, dict.fromkeys(range(-total, total), 0.0)
        for i in last:
            seen = [j for j in real if j <= i or not self.causal]
            for j, weight in zip(seen, (k[seen] @ q[i] * scale).softmax(0).tolist(), strict=True):
                columns[j // self.block] += weight / len(last)
                diagonals[(i - j) // self.block] += weight / len(last)
        some = [J for J in range(total) if any(j <= last[-1] or not self.causal for j in blocks[J])]
        mean = {J: k[blocks[J]].mean(0) for J in some}
        pooled = torch.stack([mean[J] for J in some]) @ q[last].mean(0) * scale
        true, guess = q.new_tensor([columns[J] for J in some]), pooled.softmax(0)
        middle = (true + guess) / 2
        parts = [torch.special.xlogy(p, p) - torch.special.xlogy(p, middle) for p in (true, guess)]
        apart = torch.stack(parts).sum() / 2
        if float(apart.clamp(min=0)) ** 0.5 < self.distance:
            masses: dict[tuple[int, int], float] = {}
            for I in range(total):
                keys = [J for J in some if (I, J) in past]
                if blocks[I] and keys:
                    row = torch.stack([mean[J] for J in keys]) @ q[blocks[I]].mean(0) * scale
                    masses |= {(I, J): one for J, one in zip(keys, row.softmax(0).tolist(), strict=True)}
            kept = always | set(_fewest(masses, self.mass, 0, {one for one in always if one in masses}))
            for I in range(total):
                kept |= set(_fewest({one: masses[one] for one in masses if one[0] == I}, 0.0, self.least, always))
            return kept
        of_columns = _fewest({J: columns[J] for J in some}, self.mass, self.least, {0})
        offsets = {o: one for o, one in diagonals.items() if o >= 0 or not self.causal}
        of_diagonals = _fewest(offsets, self.mass, self.least, {0})
        near = {*of_diagonals, *(o + 1 for o in of_diagonals)}
        return always | {(I, J) for I, J in past if J in of_columns or I - J in near}

    def choose(self, q: Tensor, k: Tensor, real: Tensor) -> tuple[BlockPairs, ...]:
        H, groups = q.shape[1], q.shape[1] // k.shape[1]
        kept = torch.stack([self._of_head(q[:, h], k[:, h // groups], real) for h in range(H)], 1)
        return (Grid(self.block, self.block, kept),)

    def _of_head(self, q: Tensor, k: Tensor, real: Tensor) -> Tensor:
        N, D = q.shape[1:]
        total = -(-N // self.block)
        own, before = own_blocks(slice(0, total), self.block, total, self.block, q)
        found = self.last(q, k, real)
        of_blocks = in_blocks(real, self.block).any(2)
        columns = in_blocks(found.weights.sum(1), self.block).sum(2)
        mean_q, mean_k = (means(x[:, None], real, self.block)[:, 0] for x in (q, k))
        mean = found.rows.sum(1) / (found.at >= 0).sum(1, keepdim=True).clamp(min=1)
        pooled = (mean_k @ mean[..., None])[..., 0].mul_(D**-0.5).masked_fill_(~of_blocks, -torch.inf)
        close = _divergence(columns / columns.sum(1, keepdim=True), pooled.softmax(-1)) < self.distance

        first = torch.arange(total, device=q.device) == 0
        of_columns = heaviest(columns, self.mass, allowed=of_blocks, forced=first, least=self.least)
        sums = in_blocks(by_distance(found, total * self.block), self.block).sum(2)
        offset = torch.arange(-total, total, device=q.device)
        past = offset >= 0 if self.causal else offset >= -total
        of_offsets = heaviest(sums, self.mass, allowed=past, forced=offset == 0, least=self.least)
        i = torch.arange(total, device=q.device)
        apart = i[:, None] - i + total
        lines = of_columns[:, None] | of_offsets[:, apart] | of_offsets[:, apart - 1]  # a distance meets two of blocks

        allowed = of_blocks[:, None] & before if self.causal else of_blocks[:, None].expand(-1, total, -1)
        scores = (mean_q @ mean_k.mT).mul_(D**-0.5).masked_fill_(~(allowed & of_blocks[..., None]), -torch.inf)
        masses, always = scores.softmax(-1).nan_to_num_(0.0), (own | first) & allowed
        ranked = heaviest(masses.flatten(1), self.mass, allowed=allowed.flatten(1), forced=always.flatten(1))
        pairs = ranked.view_as(masses) | largest(masses, self.least, allowed=allowed, forced=always)
        return (torch.where(close[:, None, None], pairs, lines) | always) & allowed

    def last(self, q: Tensor, k: Tensor, real: Tensor) -> LastQueries:
        return of_last_queries(q, k, real, self.block, causal=self.causal)


def _divergence(p: Tensor, guess: Tensor) -> Tensor:
    middle = (p + guess) / 2
    parts = [torch.special.xlogy(x, x) - torch.special.xlogy(x, middle) for x in (p, guess)]
    return torch.stack(parts).sum((0, -1)).div_(2).clamp_(min=0).sqrt_()


def _fewest(masses: Mapping[One, float], share: float, least: int, forced: Collection[One]) -> list[One]:
    """The fewest that hold the share, but at least ``least``: forced ones first, then the largest masses."""
    kept: list[One] = []
    for rank, one in enumerate(sorted(masses, key=lambda one: (one not in forced, -masses[one]))):
        enough = sum(masses[other] for other in kept) >= share * sum(masses.values())
        if one in forced or rank < least or share == 1 or not enough:
            kept.append(one)
    return kept
