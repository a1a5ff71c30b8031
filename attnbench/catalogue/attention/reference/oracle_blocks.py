"""The bound of attention to a few blocks of keys: a choice by the exact probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from attnbench.catalogue.engines.blocks.selecting import BlockSelecting, block_range
from attnbench.catalogue.engines.blocks.selection import BlockPairs, in_blocks, largest, listed, own_blocks, products
from attnbench.catalogue.engines.flex.pair_pattern import COMPILED, Form
from attnbench.catalogue.engines.precision import hidden
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, No, Traits, register


@register(
    "oracle-blocks",
    family="reference",
    source="this project's reference line",
    formula="softmax over the blocks of keys Tᵢ: the own one and the t - 1 others of largest Σ_{j∈J} pᵢⱼ",
    cost="O(n²·d)",
    memory_exponent=1.0,
    traits=Traits(
        cross=No("a query always attends to the keys of its own block"),
        bias=No("the methods that it stands for choose by q and k alone"),
        decode=No("the methods that it stands for choose while a prompt is read"),
        sink=True,
        shares="by itself",
        exact_with=("blocks={n},block=2",),
        given=(COMPILED,),
        knob=Knob("blocks", step=1),
    ),
    settings=("block=3,blocks=3", "block=4,blocks=1", "block=5,blocks=2"),
)
class OracleBlocks(BlockSelecting):
    """The most probable blocks of keys: line for block methods.

    q ``(B, H, N, D)``, k and v ``(B, K, N, ·)`` -> ``(B, H, N, E)``. It computes the exact probabilities, in float32 at
    least, sums them over blocks of ``block`` keys, and takes one softmax over the keys of ``blocks`` blocks: the
    query's own and the others of the largest sums. So it keeps the most mass that a method can keep that chooses as
    many blocks for each query, its own among them, as ``moba`` does. A method loses more by its choice; the loss
    against ``oracle-topk`` is the form of blocks.

    It is no lower bound of the error: where attention is flat, a few renormalised keys are noise. Its choice takes all
    scores, some queries at a time; its time says nothing about a method. As many blocks as there are give exact
    attention.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        block: Annotated[int, Field(ge=1, description="tokens per block")] = 64,
        blocks: Annotated[int, Field(ge=1, description="blocks that a query attends to, its own included")] = 4,
        form: Form = "auto",
    ) -> None:
        super().__init__(shape, f"oracle-blocks, block={block}", form)
        self.block, self.blocks = block, blocks

    def read(self, q: Tensor, k: Tensor, real: Tensor) -> Iterator[tuple[slice, slice]]:
        for i, query in enumerate(q):
            seen = real & (torch.arange(len(q), device=q.device) <= i) if self.causal else real
            logits = (k @ query * q.shape[1] ** -0.5).masked_fill(~seen, -torch.inf)
            mass = [float(one.sum()) for one in logits.softmax(0).nan_to_num(0.0).split(self.block)]
            own = i // self.block
            others = sorted((J for J in range(len(mass)) if own != J), key=lambda J: -mass[J])
            for J in [own, *others[: self.blocks - 1]]:
                yield slice(i, i + 1), block_range(J, self.block)

    def choose(self, q: Tensor, k: Tensor, real: Tensor) -> tuple[BlockPairs, ...]:
        N, D = q.shape[2:]
        total, at = -(-N // self.block), torch.arange(N, device=q.device)

        def kept(queries: slice) -> Tensor:
            logits = products(q[:, :, queries] * D**-0.5, k).masked_fill_(~real[:, None, None], hidden(q.dtype))
            own, before = own_blocks(queries, 1, total, self.block, q)
            if self.causal:
                logits.masked_fill_(at > at[queries, None], hidden(q.dtype))
            masses = in_blocks(logits.softmax(-1), self.block).sum(-1)
            return largest(masses, self.blocks, allowed=before if self.causal else torch.ones_like(before), forced=own)

        return (listed((1, self.block), N, N, kept, q),)
