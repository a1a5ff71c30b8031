"""Blocks of keys are chosen by mean queries and keys, if these represent their blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from attnbench.catalogue.engines.blocks.selecting import BlockSelecting
from attnbench.catalogue.engines.blocks.selection import (
    BlockPairs,
    Grid,
    heaviest,
    in_blocks,
    means,
    own_blocks,
    products,
    within,
)
from attnbench.catalogue.engines.flex.pair_pattern import COMPILED, Form
from attnbench.contract.problem.reference import of_query_heads
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import No, Traits, register
from attnbench.errors import UsageError


@register(
    "sparge",
    family="learned pattern",
    source="Zhang et al. 2025, arXiv:2502.18137, section 3; authors' code, spas_sage_attn/utils.py",
    formula="softmax over the blocks of largest mean q·k whose masses stay within τ, and all blocks of unlike tokens",
    cost="O(n²·d)",
    memory_exponent=2.0,
    traits=Traits(
        cross=No("not built here: blocks of queries and of keys are those of one sequence"),
        rows_sum_to_one=False,
        bias=No("blocks are chosen by mean queries and keys, which know nothing of a bias"),
        decode=No("it chooses for a block of queries at a time, while a prompt is read"),
        sink=True,
        shares="by itself",
        reads_ahead="the queries of a block share a choice, to which the later ones of them contribute",
        exact_with=("threshold=1",),
        given=(
            COMPILED,
            (
                "smooth_k=false",
                {"own_form": "compares keys as they are; the authors' code takes the mean of all keys off them first"},
            ),
            (
                "rule=holding",
                {
                    "rows_sum_to_one": True,
                    "own_form": "keeps own blocks and the block that passes the share; the authors' code keeps neither",
                },
            ),
        ),
    ),
    settings=(
        "queries=4,keys=2,similarity=0,threshold=0.5",
        "queries=6,keys=3,similarity=0.3,threshold=0.5",
        "queries=4,keys=4,similarity=0.4,threshold=0.7",
        "queries=4,keys=2,similarity=0.3,threshold=0.5,rule=holding",
        "queries=6,keys=3,similarity=0.3,threshold=0.5,smooth_k=false",
    ),
)
class Sparge(BlockSelecting):
    """Blocks of keys by mean query and key, where these stand for them.

    Zhang et al. 2025, "SpargeAttn: Accurate and Training-free Sparse Attention Accelerating Any Model Inference".
    q ``(B, H, N, D)``, k and v ``(B, K, N, ·)`` -> ``(B, H, N, E)``. Blocks of ``queries`` queries and of ``keys`` keys
    are averaged. A block stands for its tokens if the mean cosine of all pairs of them, each with itself included, is
    ``similarity`` or more; a token of zeros has no cosine, and its block stands for nothing. A block of queries takes a
    softmax over the products of its mean with those of the blocks of keys that stand for theirs, and keeps of these, in
    falling order, as many as together stay within the share ``threshold``, and the first in any case. All that does not
    stand for its tokens is computed: a block of unlike keys for everybody, and all blocks for unlike queries. Then it
    takes one softmax over the keys of its blocks; a query before all of them gives 0.

    With ``smooth_k`` cosines are those of keys less the mean of all keys, which moves no mass: what all keys share
    makes no keys alike. ``rule=holding`` keeps the own blocks, and as many others as it takes to hold the share.

    The share 1 gives exact attention, and so do tokens that are not alike, such as Gaussian ones, with the default. If
    causal, blocks that begin after the last query of a block do not count; the queries of a block share their choice,
    and the mean of the keys is that of the whole sequence. With padding, means and cosines are those of real tokens.
    Memory is O(n·d), and a bit for each pair of blocks.

    Differs from the authors' code: the second stage, which leaves out products with values while the kernel runs
    where a block's largest logit is far below the row's, is not here; nor are 8-bit products; nor is a share of
    blocks in place of a share of mass, or thresholds that are tuned for each layer of a model.

    Raises:
        UsageError: ``keys`` does not divide ``queries``: a block of keys would reach behind queries that see it.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        queries: Annotated[int, Field(ge=1, description="queries per block")] = 128,
        keys: Annotated[int, Field(ge=1, description="keys per block; divides queries")] = 64,
        similarity: Annotated[float, Field(ge=0, le=1, description="mean cosine below which all is computed")] = 0.6,
        threshold: Annotated[float, Field(gt=0, le=1, description="share of the estimated mass that is kept")] = 0.98,
        rule: Annotated[
            Literal["within", "holding"],
            Field(description="one block, and all within the share; or own ones, and the fewest that hold it"),
        ] = "within",
        smooth_k: Annotated[bool, Field(description="take the mean of all keys off them before cosines")] = True,
        form: Form = "auto",
    ) -> None:
        super().__init__(shape, f"sparge, queries={queries}, keys={keys}", form)
        if queries % keys:
            raise UsageError(f"sparge: option keys={keys} must divide queries={queries}; try keys={queries}")
        self.queries, self.keys = queries, keys
        self.similarity, self.threshold, self.smooth_k = similarity, threshold, smooth_k
        self.holding = rule == "holding"

    def read(self, q: Tensor, k: Tensor, real: Tensor) -> Iterator[tuple[slice, slice]]:
        """Block by block, with the cosine of every pair of tokens."""
        N, D = q.shape
        keys = k - k[real].mean(0) if self.smooth_k and real.any() else k
        rows, columns = ([slice(s, min(s + size, N)) for s in range(0, N, size)] for size in (self.queries, self.keys))
        of_rows, of_columns = (
            [one[place][real[place]] for place in places] for one, places in ((q, rows), (keys, columns))
        )
        for I, row in enumerate(of_rows):
            seen = [J for J, one in enumerate(columns) if not self.causal or one.start < (I + 1) * self.queries]
            own = [J for J in seen if columns[J].start < rows[I].stop and rows[I].start < columns[J].stop]
            ranked = [J for J in seen if len(row) and len(of_columns[J]) and self._alike(of_columns[J])]
            kept = {*own * self.holding, *(J for J in seen if J not in ranked)}
            if ranked:
                scores = torch.stack([of_columns[J].mean(0) for J in ranked]) @ row.mean(0) * D**-0.5
                mass = dict(zip(ranked, scores.softmax(0).tolist(), strict=True))
                held = {J for J in own if J in mass and self.holding}
                for rank, J in enumerate(sorted(ranked, key=lambda J: -mass[J])):
                    before = sum(mass[one] for one in held)
                    fits = before < self.threshold if self.holding else before + mass[J] <= self.threshold
                    if not (fits or (rank == 0 and not self.holding) or self.threshold == 1):
                        break
                    held.add(J)
                kept |= held
            if not len(row) or not self._alike(row):
                kept = set(seen)
            yield from ((rows[I], columns[J]) for J in kept)

    def _alike(self, tokens: Tensor) -> bool:
        """Return True if the mean cosine of all pairs of ``(n, D)`` is large enough; False if a token has none."""
        units = tokens / tokens.norm(dim=1, keepdim=True)
        return float((units @ units.mT).mean().clamp(min=0)) >= self.similarity

    def choose(self, q: Tensor, k: Tensor, real: Tensor) -> tuple[BlockPairs, ...]:
        _, H, N, D = q.shape
        rows, total = -(-N // self.queries), -(-N // self.keys)
        own, before = own_blocks(slice(0, rows), self.queries, total, self.keys, q)
        of_blocks = in_blocks(real, self.keys).any(2)[:, None, None]
        allowed = of_blocks & before if self.causal else of_blocks.expand(-1, -1, rows, -1)
        alike_q, smooth = self.alike(q, real, self.queries), k
        if self.smooth_k:
            of_all = k.sum(2, keepdim=True) / real.sum(1).clamp(min=1)[:, None, None, None]
            smooth = (k - of_all) * real[:, None, :, None]
        alike_k = self.alike(smooth, real, self.keys)
        alike_k = of_query_heads(alike_k, H)[:, :, None]
        scores = products(means(q, real, self.queries) * D**-0.5, means(k, real, self.keys))
        ranked = allowed & alike_k
        masses = scores.masked_fill_(~ranked, -torch.inf).softmax(-1).nan_to_num_(0.0)
        kept = self.keep(masses, ranked, own) | ~alike_k | ~alike_q[..., None]
        return (Grid(self.queries, self.keys, kept & allowed),)

    def keep(self, masses: Tensor, allowed: Tensor, forced: Tensor) -> Tensor:
        """The kept blocks ``(B, H, n, blocks)`` among those represented by their means."""
        if self.holding:
            return heaviest(masses, self.threshold, allowed=allowed, forced=forced) | forced
        return within(masses, self.threshold, allowed=allowed)

    def alike(self, x: Tensor, real: Tensor, size: int) -> Tensor:
        """The blocks that their means represent, ``(B, H, blocks)``: the mean cosine is the mean unit's square.

        A token of zeros has no cosine: its block is NaN, and is not represented.
        """
        units = (x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)).masked_fill(~real[:, None, :, None], 0.0)
        return means(units, real, size).square().sum(-1) >= self.similarity
