"""Each query chooses blocks of keys by their mean, as an expert is chosen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from attnbench.catalogue.engines.blocks.selecting import BlockSelecting, block_range
from attnbench.catalogue.engines.blocks.selection import (
    BlockPairs,
    in_blocks,
    largest,
    listed,
    means,
    own_blocks,
    products,
)
from attnbench.catalogue.engines.decoding.kv_cache import Cache, attend
from attnbench.catalogue.engines.flex.pair_pattern import COMPILED, Form
from attnbench.catalogue.engines.precision import accumulator
from attnbench.contract.problem.reference import of_query_heads
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, No, Traits, register


class BlockMeans(NamedTuple):
    """The state of decoding."""

    cache: Cache
    means: Tensor
    """Mean keys of the complete blocks, ``(B, K, blocks, D)``, float32 at least."""


@register(
    "moba",
    family="learned pattern",
    source="Lu et al. 2025, arXiv:2502.13189, section 2.2",
    formula="softmax over the blocks of keys Tᵢ: the own one and the t - 1 others of largest qᵢ·mean(K_J)",
    cost="O(n²·d/B + n·t·B·d)",
    memory_exponent=1.0,
    traits=Traits(
        cross=No("a query always attends to the keys of its own block"),
        bias=No("blocks are chosen by the mean of their keys, which knows nothing of a bias"),
        decode=True,
        sink=True,
        shares="by itself",
        exact_with=("blocks={n},block=2",),
        given=(COMPILED,),
        knob=Knob("blocks", step=1),
        own_form_both_ways="later blocks compete with earlier ones; the paper is causal",
    ),
    settings=("block=3,blocks=3", "block=4,blocks=1", "block=5,blocks=2"),
)
class MoBA(BlockSelecting):
    """The own block, and those whose mean key is nearest to the query.

    Lu et al. 2025, "MoBA: Mixture of Block Attention for Long-Context LLMs". q ``(B, H, N, D)``, k and v
    ``(B, K, N, ·)`` -> ``(B, H, N, E)``. Tokens are cut into blocks of ``block``; the last may be shorter. A query
    takes one softmax over the keys of ``blocks`` blocks: its own, of which it sees the earlier keys alone if causal,
    and those among the other blocks whose mean key has the largest product with it. The choice is one of each head of
    queries, also where heads share keys, and costs n·(n / block)·d. The paper has blocks of 512 to 4096 and 3 to 12 of
    them; the defaults here are for shorter sequences.

    As many blocks as there are give exact attention. With padding, a mean is that of the real keys of a block, and a
    block without one cannot be chosen. The mean of a block that is not complete reaches no query but those that see it
    in any case. Memory is O(n·(d + blocks)): products with means exist for some queries at a time.

    Differs from the authors' code: that runs a library's kernel for the own block and another time for the chosen ones,
    and joins both by their log-sums; here all tiles are of one kind. It answers a single query, in decoding, with all
    keys; here a step chooses as the paper's formula does, among the means of the blocks that are complete, which the
    state keeps with keys and values.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        block: Annotated[int, Field(ge=1, description="tokens per block")] = 64,
        blocks: Annotated[int, Field(ge=1, description="blocks that a query attends to, its own included")] = 4,
        form: Form = "auto",
    ) -> None:
        super().__init__(shape, f"moba, block={block}, blocks={blocks}", form)
        self.block, self.blocks, self.capacity = block, blocks, shape.M

    def read(self, q: Tensor, k: Tensor, real: Tensor) -> Iterator[tuple[slice, slice]]:
        some = torch.split(real, self.block)
        mean = [keys[one].mean(0) for keys, one in zip(torch.split(k, self.block), some, strict=True)]
        for i, query in enumerate(q):
            own = i // self.block
            others = range(own if self.causal else len(mean))
            gates = {J: float(query @ mean[J]) for J in others if own != J and bool(some[J].any())}
            for J in [own, *sorted(gates, key=lambda J: -gates[J])[: self.blocks - 1]]:
                yield slice(i, i + 1), block_range(J, self.block)

    def choose(self, q: Tensor, k: Tensor, real: Tensor) -> tuple[BlockPairs, ...]:
        N = q.shape[2]
        mean, some = means(k, real, self.block), in_blocks(real, self.block).any(-1)[:, None, None]
        total = mean.shape[2]

        def kept(queries: slice) -> Tensor:
            own, before = own_blocks(queries, 1, total, self.block, q)
            allowed = some & before if self.causal else some
            return self.keep(products(q[:, :, queries], mean), allowed | own, own)

        return (listed((1, self.block), N, total, kept, q),)

    def keep(self, gates: Tensor, allowed: Tensor, own: Tensor) -> Tensor:
        """The blocks that each query keeps ``(B, H, n, blocks)``, from its products with their mean keys."""
        return largest(gates, self.blocks, allowed=allowed, forced=own)

    @torch.no_grad()
    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> BlockMeans:
        return BlockMeans(Cache.of(k, v, self.capacity), self._complete(k))

    def _complete(self, k: Tensor) -> Tensor:
        whole = k[:, :, : k.shape[2] // self.block * self.block].to(accumulator(k.dtype))
        return torch.unflatten(whole, 2, (-1, self.block)).mean(3)

    @torch.no_grad()
    def step(self, state: BlockMeans, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, BlockMeans]:
        cache, mean = state.cache.append(k, v), state.means
        before, chosen = mean.shape[2], min(self.blocks - 1, mean.shape[2])
        if cache.length % self.block == 0:
            mean = torch.cat((mean, self._complete(cache.keys[:, :, -self.block :])), 2)
        after = BlockMeans(cache, mean)
        if chosen == before:  # all of them
            return attend(q, cache.keys, cache.values, sink=self.sink), after
        gates = products(q.to(mean.dtype), mean[:, :, :before])[:, :, 0]
        which = gates.sort(dim=-1, descending=True, stable=True).indices[..., :chosen]
        keys, values = (self._of_heads(x, before, which) for x in (cache.keys, cache.values))
        return attend(q, keys, values, sink=self.sink), after

    def _of_heads(self, x: Tensor, before: int, which: Tensor) -> Tensor:
        """The chosen blocks ``(B, H, chosen)`` of x ``(B, K, n, D)``, and then the own block, ``(B, H, ·, D)``.

        ``before`` counts the blocks in front of the own one.
        """
        B, H, _ = which.shape
        start, shared = before * self.block, H // x.shape[1]
        blocks = torch.unflatten(x[:, :, :start], 2, (before, self.block))
        batch, head = (torch.arange(size, device=x.device) for size in (B, H))
        far = blocks[batch[:, None, None], head[:, None] // shared, which].flatten(2, 3)
        return torch.cat((far, of_query_heads(x[:, :, start:], H)), 2)

    @staticmethod
    def cached_bytes(shape: Shape, width: int, *, block: int, **_: object) -> int:
        """A token's key and value in each head of keys, and its part of the block's mean, rounded up."""
        return shape.K * (shape.D + shape.E) * width - (-shape.K * shape.D * max(width, 4) // block)
