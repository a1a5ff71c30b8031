"""Columns and diagonals that matter to the last queries, or the first tokens and a window."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from attnbench.catalogue.engines.blocks.selecting import BlockSelecting, block_range
from attnbench.catalogue.engines.blocks.selection import (
    BlockPairs,
    Grid,
    by_distance,
    in_blocks,
    largest,
    of_last_queries,
    own_blocks,
)
from attnbench.catalogue.engines.flex.pair_pattern import COMPILED, Form
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Needs, No, Traits, register

_AHEAD = "the columns and diagonals that the last queries of the sequence attend to are those of all"
_LINES, _A_SHAPE = Needs("pattern=vertical-slash"), Needs("pattern=a-shape")


@register(
    "minference",
    family="learned pattern",
    also=("fixed pattern",),
    source="Jiang et al. 2024, arXiv:2407.02490, section 3",
    formula="softmax over the columns and the blocks on the diagonals of largest weight in the last queries' rows",
    cost="O(n·(v + s)·d)",
    time_exponent=2.0,
    memory_exponent=2.0,
    traits=Traits(
        cross=No("the last queries stand for all, at the places of their own keys"),
        bias=No("columns and diagonals are chosen by q·k, to which no bias is added"),
        decode=No("its pattern is that of the last queries of a prompt, which has to be there"),
        sink=True,
        shares="by itself",
        reads_ahead=_AHEAD,
        exact_with=("slash={n}",),
        given=(("pattern=a-shape", {"reads_ahead": ""}), COMPILED),
        own_form_both_ways="diagonals and windows reach both ways; the paper is causal",
    ),
    settings=(
        "block=4,vertical=4,first=1,slash=3,recent=1,last=3",
        "block=3,vertical=3,first=3,slash=2,recent=2,last=30",
        "pattern=a-shape,block=4,sink=3,window=6",
    ),
)
class MInference(BlockSelecting):
    """Columns and diagonals of the last queries, or a window.

    Jiang et al. 2024, "MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic Sparse Attention".
    q ``(B, H, N, D)``, k and v ``(B, K, N, ·)`` -> ``(B, H, N, E)``.

    ``pattern=vertical-slash``: the weights of the ``last`` queries are summed over columns and over diagonals. Each
    head keeps the ``vertical`` keys of the largest sums, the ``first`` ones of the sequence among them, and the
    ``slash`` distances of the largest sums, the ``recent`` shortest among them. A block of ``block`` queries takes
    one softmax over all keys of the blocks that its kept diagonals meet, which always include its own, and the kept
    columns outside of them, key by key. As many distances as there are tokens give exact attention; with the
    paper's 6096, that is so up to this length.

    ``pattern=a-shape``: the first ``sink`` keys and the ``window`` keys up to a query, widened to whole blocks. It
    reads nothing.

    If causal, no query attends to a later key; but with the first pattern, which keys it attends to depends on the last
    queries, so that this is for reading a prompt and for nothing else. With padding, the last queries are the last real
    ones. Only columns and distances of some weight are kept. Memory is O(n·(last + d) + n·vertical / block), and a bit
    for each pair of blocks.

    Differs from the authors' code: there, a search on one text gives each head of a model its pattern in advance; here
    all heads have the one that is named, and ``per-head`` gives them different ones. Their third pattern, blocks by
    pooled queries and keys, is close to what ``flexprefill:distance=1`` does.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        pattern: Annotated[
            Literal["vertical-slash", "a-shape"], Field(description="columns and diagonals, or first tokens and window")
        ] = "vertical-slash",
        block: Annotated[int, Field(ge=1, description="tokens per block")] = 64,
        vertical: Annotated[int, Field(ge=0, description="columns that each head keeps"), _LINES] = 1000,
        slash: Annotated[int, Field(ge=1, description="distances that each head keeps"), _LINES] = 6096,
        first: Annotated[int, Field(ge=0, description="first columns, kept in any case"), _LINES] = 30,
        recent: Annotated[int, Field(ge=1, description="shortest distances, kept in any case"), _LINES] = 100,
        last: Annotated[int, Field(ge=1, description="queries that stand for all"), _LINES] = 64,
        sink: Annotated[int, Field(ge=0, description="first keys that all attend to"), _A_SHAPE] = 1024,
        window: Annotated[int, Field(ge=1, description="keys up to a query"), _A_SHAPE] = 4096,
        form: Form = "auto",
    ) -> None:
        super().__init__(shape, f"minference, block={block}, pattern={pattern}", form)
        self.pattern, self.block = pattern, block
        self.vertical, self.slash, self.first, self.recent, self.rows = vertical, slash, first, recent, last
        self.ahead, self.window = sink, window

    def read(self, q: Tensor, k: Tensor, real: Tensor) -> Iterator[tuple[slice, slice]]:
        N = len(q)
        if self.pattern == "a-shape":
            blocks = {(I, J) for I, J in self._all(N) if J * self.block < self.ahead or self._near(I, J)}
        else:
            columns, distances = self._lines(q.double(), k.double(), real.nonzero()[:, 0].tolist())
            every = [i * self.block + r for i in range(-(-N // self.block)) for r in range(self.block)]
            met = {(i // self.block, (i - one) // self.block) for i in every for one in distances}
            blocks = {(I, J) for I, J in self._all(N) if I == J or (I, J) in met}
            yield from ((slice(0, N), slice(j, j + 1)) for j in columns)
        for I, J in blocks:
            yield block_range(I, self.block), block_range(J, self.block)

    def _all(self, N: int) -> list[tuple[int, int]]:
        total = -(-N // self.block)
        return [(I, J) for I in range(total) for J in range(I + 1 if self.causal else total)]

    def _near(self, I: int, J: int) -> bool:
        places = range(self.block)
        return any(
            abs(distance) < self.window for i in places for j in places for distance in [(I - J) * self.block + i - j]
        )

    def _lines(self, q: Tensor, k: Tensor, real: list[int]) -> tuple[list[int], list[int]]:
        """The columns and the distances that one head keeps, from q and k ``(N, D)``."""
        N = len(q)
        columns, distances = [0.0] * N, dict.fromkeys(range(-N, N), 0.0)
        for i in real[-self.rows :]:
            seen = [j for j in real if j <= i or not self.causal]
            for j, weight in zip(seen, (k[seen] @ q[i] * q.shape[1] ** -0.5).softmax(0).tolist(), strict=True):
                columns[j] += weight
                distances[i - j] += weight
        kept = [j for j in range(N) if columns[j] > 0]
        kept.sort(key=lambda j: (j >= self.first, -columns[j] if j >= self.first else 0.0))
        some = [one for one in distances if distances[one] > 0]
        some.sort(key=lambda one: (abs(one) >= self.recent, -distances[one] if abs(one) >= self.recent else 0.0))
        every = list(range(-N, N))
        return kept[: self.vertical], every if self.slash >= len(real) else some[: self.slash]

    def choose(self, q: Tensor, k: Tensor, real: Tensor) -> tuple[BlockPairs, ...]:
        B, H, N, _ = q.shape
        total = -(-N // self.block)
        if self.pattern == "a-shape":
            kept = self._a_shape(total, q).expand(B, H, -1, -1)
            return (Grid(self.block, self.block, kept),)
        groups = H // k.shape[1]
        found = [self._of_head(q[:, h], k[:, h // groups], real) for h in range(H)]
        kept = torch.stack([blocks for blocks, _ in found], 1)
        columns = torch.stack([one for _, one in found], 1)
        return Grid(self.block, self.block, kept), self._beside(kept, columns)

    def _beside(self, kept: Tensor, columns: Tensor) -> BlockPairs:
        """Single keys of the columns ``(B, H, N)`` bool that are in no kept block of a block of queries."""
        total = kept.shape[2]
        head, keys = columns.flatten(0, 1).nonzero(as_tuple=True)
        inside = kept.flatten(0, 1).transpose(1, 2)[head, keys // self.block]  # by column and block of queries
        wanted = ~inside
        if self.causal:
            at = torch.arange(1, total + 1, device=keys.device) * self.block
            wanted &= keys[:, None] < at
        line, block = wanted.nonzero(as_tuple=True)
        return BlockPairs(self.block, 1, head[line] * total + block, keys[line])

    def _of_head(self, q: Tensor, k: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """The blocks that diagonals meet ``(B, blocks, blocks)``, and columns ``(B, N)``, of one head."""
        N = q.shape[1]
        total = -(-N // self.block)
        own, before = own_blocks(slice(0, total), self.block, total, self.block, q)
        found = of_last_queries(q, k, real, self.rows, causal=self.causal)
        of_columns, of_distances = found.weights.sum(1), by_distance(found, total * self.block)
        places = torch.arange(N, device=q.device)
        columns = largest(of_columns, self.vertical, allowed=of_columns > 0, forced=places < self.first)
        distance = torch.arange(-total * self.block, total * self.block, device=q.device).abs()
        some = largest(of_distances, self.slash, allowed=of_distances > 0, forced=distance < self.recent)
        some |= (self.slash >= real.sum(1))[:, None]
        met = in_blocks(some, self.block)
        whole, rest = met.any(2), met[..., 1:].any(2)  # of a distance that is no multiple, a block meets two blocks
        i = torch.arange(total, device=q.device)
        apart = i[:, None] - i + total
        blocks = whole[:, apart] | rest[:, apart - 1] | own
        return blocks & before if self.causal else blocks, columns

    def _a_shape(self, total: int, like: Tensor) -> Tensor:
        """The blocks of first keys and of the window, ``(blocks, blocks)``."""
        i = torch.arange(total, device=like.device)
        nearest = ((i[:, None] - i).abs() - 1) * self.block + 1  # distance between two blocks
        kept = (nearest < self.window) | (i * self.block < self.ahead)
        return kept & (i <= i[:, None]) if self.causal else kept
