"""Blocks of keys are chosen by sums of logits along antidiagonals."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from attnbench.catalogue.engines.blocks.selecting import BlockSelecting, block_range
from attnbench.catalogue.engines.blocks.selection import BlockPairs, heaviest, in_blocks, listed, own_blocks, products
from attnbench.catalogue.engines.flex.pair_pattern import COMPILED, Form
from attnbench.contract.problem.reference import of_query_heads
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import No, Traits, register
from attnbench.errors import UsageError


@register(
    "xattention",
    family="learned pattern",
    source="Xu et al. 2025, arXiv:2503.16428, section 2",
    formula="softmax over the fewest blocks of keys whose antidiagonal sums, after a softmax, hold a share τ",
    cost="O(n²·d)",
    memory_exponent=2.0,
    traits=Traits(
        cross=No("a block of queries always attends to the keys at its own places"),
        bias=No("blocks are chosen by sums of q·k, to which no bias is added"),
        decode=No("it chooses for a block of queries at a time, while a prompt is read"),
        sink=True,
        shares="by itself",
        reads_ahead="the queries of a block share a choice, to which the later ones of them contribute",
        exact_with=("threshold=1",),
        given=(COMPILED,),
    ),
    settings=("block=4,stride=2,threshold=0.6", "block=6,stride=3,threshold=0.8", "block=5,stride=1,threshold=0.5"),
)
class XAttention(BlockSelecting):
    """Blocks of keys with the largest sums of logits along antidiagonals.

    Xu et al. 2025, "XAttention: Block Sparse Attention with Antidiagonal Scoring". q ``(B, H, N, D)``, k and v
    ``(B, K, N, ·)`` -> ``(B, H, N, E)``. The matrix of logits is cut into tiles of ``stride`` × ``stride``. The sum
    over the antidiagonal of a tile, i + j = stride - 1, meets each of its queries and keys once, and is one product of
    vectors of stride·D numbers. A softmax over the tiles of a row, of these sums divided by stride·√D, is summed over
    the tiles of each block of ``block`` × ``block``. A block of queries keeps the first block of keys, its own, and as
    many others, in falling order, as it takes to hold the share ``threshold`` of its mass. Then it takes one softmax
    over their keys. The choice takes n²·d / stride multiplications instead of n²·d.

    The share 1 gives exact attention. If causal, pairs of a key and an earlier query count in no sum; the queries of a
    block still share their choice, so that which keys a query attends to depends on later tokens of its own block,
    though on none behind it. With padding, a tile of no real key or query does not count. Memory is O(n·d), and a bit
    for each pair of blocks.

    Differs from the authors' code: tiles on the diagonal are summed over the pairs alone that are seen; the first
    block and the own one are kept in any case, and theirs keeps them if causal alone; the share is one for all heads,
    and theirs can be tuned for each; their stride is 16 for long prompts. As in their code, the mass of these two
    blocks counts.

    Raises:
        UsageError: ``stride`` does not divide ``block``.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        block: Annotated[int, Field(ge=1, description="tokens per block")] = 128,
        stride: Annotated[int, Field(ge=1, description="side of the tiles that are summed; divides block")] = 8,
        threshold: Annotated[float, Field(gt=0, le=1, description="share of the estimated mass that is kept")] = 0.9,
        form: Form = "auto",
    ) -> None:
        super().__init__(shape, f"xattention, block={block}", form)
        if block % stride:
            raise UsageError(f"xattention: option stride={stride} must divide block={block}; try stride=1")
        self.block, self.stride, self.threshold = block, stride, threshold

    def read(self, q: Tensor, k: Tensor, real: Tensor) -> Iterator[tuple[slice, slice]]:
        (N, D), S, side, total = q.shape, self.stride, self.block // self.stride, -(-len(q) // self.block)
        seen = real[:, None] & real
        logits = (q @ k.mT / D**0.5 / S).masked_fill(~(seen.tril() if self.causal else seen), 0.0)
        tiles = total * side
        sums = logits.new_full((tiles, tiles), -torch.inf)
        for I, J in product(range(tiles), range(tiles)):
            there = all(bool(real[block_range(one, S)].any()) for one in (I, J))
            if there and not (self.causal and J > I):
                pairs = [(I * S + S - 1 - s, J * S + s) for s in range(S)]
                sums[I, J] = sum((logits[i, j] for i, j in pairs if max(i, j) < N), torch.zeros_like(logits[0, 0]))
        weights = sums.softmax(-1).nan_to_num(0.0)
        masses = torch.unflatten(torch.unflatten(weights, 1, (total, side)).sum(2), 0, (total, side)).sum(1)
        for I, mass in enumerate(masses.tolist()):
            kept = {0, I}
            for J in sorted(range(I + 1 if self.causal else total), key=lambda J: -mass[J]):
                if self.threshold == 1 or sum(mass[J] for J in kept) < self.threshold * sum(mass):
                    kept.add(J)
            yield from ((block_range(I, self.block), block_range(J, self.block)) for J in kept)

    def choose(self, q: Tensor, k: Tensor, real: Tensor) -> tuple[BlockPairs, ...]:
        B, H, N, D = q.shape
        S, side, total = self.stride, self.block // self.stride, -(-N // self.block)
        x, y = (in_blocks(in_blocks(one, self.block, 2).flatten(2, 3), S, 2) for one in (q * (D**-0.5 / S), k))
        x = x.flip(3)  # in a tile the last query is paired with the first key
        on_diagonal = self.on_diagonal(torch.linalg.vecdot(x, of_query_heads(y, H)))
        x, y = x.flatten(3), y.flatten(3)
        some = in_blocks(real, self.block).reshape(B, -1, S).any(2)
        of_blocks = some.view(B, total, side).any(2)[:, None, None]
        at = torch.arange(total * side, device=q.device)

        def kept(blocks: slice) -> Tensor:
            rows = slice(blocks.start * side, blocks.stop * side)
            sums = products(x[:, :, rows], y)
            if self.causal:
                sums.diagonal(rows.start, 2, 3).copy_(on_diagonal[:, :, rows])
                sums.masked_fill_(at > at[rows, None], -torch.inf)
            hidden = ~(some[:, None, :] & some[:, rows, None])
            weights = sums.masked_fill_(hidden[:, None], -torch.inf).softmax(-1).nan_to_num_(0.0)
            masses = torch.unflatten(torch.unflatten(weights, 3, (total, side)).sum(4), 2, (-1, side)).sum(3)
            own, before = own_blocks(blocks, self.block, total, self.block, q)
            allowed = of_blocks & before if self.causal else of_blocks.expand(-1, -1, *before.shape)
            return self.keep(masses, allowed, own | (torch.arange(total, device=q.device) == 0))

        return (listed((self.block, self.block), total, side * side * total, kept, q),)

    def on_diagonal(self, products: Tensor) -> Tensor:
        """Sums of the tiles on the diagonal ``(B, H, tiles)``, from q·k of query stride - 1 - s and key s of each."""
        return products[..., : (self.stride + 1) // 2].sum(-1)  # no others are seen

    def keep(self, masses: Tensor, allowed: Tensor, forced: Tensor) -> Tensor:
        """The blocks that each block of queries keeps ``(B, H, n, blocks)``, from their estimated masses."""
        return heaviest(masses, self.threshold, allowed=allowed, forced=forced)
