"""Memory-compressed attention: keys and values are shortened by a convolution with stride."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad

from attnbench.catalogue.engines.decoding import kv_cache
from attnbench.catalogue.engines.decoding.kv_cache import Cache
from attnbench.catalogue.engines.low_rank.segments import any_real, attend_to_filled, strided_convolution
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.patterns.keys import Window
from attnbench.catalogue.engines.patterns.pattern_softmax import attend
from attnbench.catalogue.engines.patterns.tiles import Blocks, Tile, batches, minus_infinity
from attnbench.catalogue.engines.precision import accumulator
from attnbench.catalogue.engines.tiling import tile_scores
from attnbench.contract.problem.reference import masked_attention
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, No, Traits, register


class CompressedBlocks(NamedTuple):
    """State of decoding: the complete blocks, and the tokens since the last of them, fewer than c."""

    blocks: Cache
    k: Tensor
    v: Tensor


@register(
    "memory-compressed",
    family="memory",
    also=("fixed pattern",),
    source="Liu et al. 2018, arXiv:1801.10198, section 4.2.4",
    formula="softmax(Q·conv(K)ᵀ/√D)·conv(V),  kernel = stride = c",
    cost="O(n²·d/c)",
    memory_exponent=1.0,
    traits=Traits(
        target="learned",
        shares="query by query",
        v_dim=No("its convolution of values maps as many channels as keys have"),
        stochastic=True,
        rows_sum_to_one=False,
        decode=True,
        exact_with=("compression=1,kernel=mean",),
        knob=Knob("compression", step=1, falling=True),
        own_form="each head has convolutions of its own; the paper's run over the whole width of the model",
        given=(
            (
                "kernel=mean",
                {
                    "target": "softmax",
                    "stochastic": False,
                    "rows_sum_to_one": True,
                    "own_form": "blocks of keys and values are averaged; the paper learns convolutions",
                },
            ),
        ),
    ),
    settings=("", "kernel=mean", "compression=5"),
)
class MemoryCompressed(nn.Module):
    """Attention to blocks of c keys, each convolved into one.

    Liu et al. 2018, "Generating Wikipedia by summarizing long sequences". q ``(B, H, N, D)``, k and v ``(B, H, M, D)``
    -> ``(B, H, N, D)``. Block b holds the keys b·c .. b·c + c - 1; the last block has zeros after its last key. There
    is one convolution for k and another for v, each with a D × D kernel for every head and place in the block, without
    bias, drawn from N(0, 1 / (c·D)). Time stays quadratic. c = 3 is the paper's.

    Causal: query i sees the blocks that end at or before i. If there is none, as for i < c - 1, it attends only to its
    own key, uncompressed: its output is v_i.

    ``kernel=mean`` takes the average of the real keys of a block. It has no parameters, and with ``compression=1`` it
    is softmax attention. Padded keys and values are set to zero and stay where they are; a block without a real key is
    hidden.

    Differs from the paper: it convolves the whole width of the model and does not name the keys that the first queries
    of causal attention see; it alternates this attention with local attention in the layers of a model.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        compression: Annotated[int, Field(ge=1, description="tokens c of a block: kernel and stride")] = 3,
        kernel: Annotated[
            Literal["learned", "mean"], Field(description="learned convolutions, or averages of blocks")
        ] = "learned",
    ) -> None:
        super().__init__()
        self.causal, self.compression = shape.causal, compression
        self.capacity = shape.M // compression
        self.of_keys: nn.Parameter | None = None
        self.of_values: nn.Parameter | None = None
        if kernel == "learned":
            drawn = torch.randn(2, shape.H, compression, shape.D, shape.D) * (compression * shape.D) ** -0.5
            self.of_keys, self.of_values = nn.Parameter(drawn[0].clone()), nn.Parameter(drawn[1].clone())

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """The same, block by block, with the whole matrix of queries and blocks."""
        c, M = self.compression, k.shape[2]
        real = torch.ones_like(k[:, 0, :, 0], dtype=torch.bool) if key_mask is None else key_mask
        rows: list[list[Tensor]] = [[], []]
        for start in range(0, M, c):
            inside = real[:, start : start + c]
            for row, x, kernel in ((rows[0], k, self.of_keys), (rows[1], v, self.of_values)):
                block = x[:, :, start : start + c] * inside[:, None, :, None]
                if kernel is None:
                    row.append(block.sum(2) / inside.sum(1).clamp(min=1)[:, None, None])
                else:
                    row.append(torch.einsum("bhti,htio->bho", block, kernel[:, : block.shape[2]]))
        allowed = torch.stack([x.any(1) for x in torch.split(real, c, 1)], 1)[:, None, None]
        if self.causal:
            ends = torch.arange(1, allowed.shape[-1] + 1, device=q.device) * c - 1
            allowed = allowed & (ends <= torch.arange(q.shape[2], device=q.device)[:, None])
        out = masked_attention(q, torch.stack(rows[0], 2), torch.stack(rows[1], 2), allowed)
        if not self.causal:
            return out
        return torch.where(allowed.any(-1, keepdim=True), out, v * real[:, None, :, None])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        filled = None if key_mask is None else any_real(key_mask, self.compression)
        if self.causal:
            return self._causally(q, k, v, key_mask, filled)
        keys, values = self._compress(k, self.of_keys, key_mask), self._compress(v, self.of_values, key_mask)
        return attend_to_filled(q, keys, values, filled)

    def _compress(self, x: Tensor, kernel: Tensor | None, key_mask: Tensor | None = None) -> Tensor:
        """``(B, H, ceil(n / c), D)`` from x ``(B, H, n, D)``, which is zero at padding."""
        if kernel is not None:
            return strided_convolution(x, kernel)
        c, n = self.compression, x.shape[2]
        real = torch.ones_like(x[:, 0, :, 0], dtype=torch.bool) if key_mask is None else key_mask
        count = torch.unflatten(pad(real, (0, -n % c)), 1, (-1, c)).sum(2).clamp(min=1)[:, None, :, None]
        total = torch.unflatten(pad(x, (0, 0, 0, -n % c)), 2, (-1, c)).sum(3, dtype=accumulator(x.dtype))
        return (total / count).to(x.dtype)

    def _causally(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, filled: Tensor | None) -> Tensor:
        N, c = q.shape[2], self.compression
        T = N // c  # complete blocks
        if T == 0:
            return v
        mask = None if key_mask is None else key_mask[:, : T * c]
        keys = self._compress(k[:, :, : T * c], self.of_keys, mask)
        values = self._compress(v[:, :, : T * c], self.of_values, mask)
        # Not with the fused kernel, which takes no mask with the causal one and knows no staircase.
        blocks = None if filled is None else filled[:, :T]
        out = attend(q[:, :, c - 1 :], keys, values, self._staircase(q, T), key_mask=blocks)
        if blocks is not None:
            some = (blocks.cumsum(1) > 0).repeat_interleave(c, 1)[:, None, : N - c + 1, None]
            out = torch.where(some, out, v[:, :, c - 1 :])
        return torch.cat([v[:, :, : c - 1], out], 2)

    def _staircase(self, q: Tensor, blocks: int) -> Iterator[Tile]:
        """Query i + c - 1 sees the blocks 0 .. i // c."""
        c, N = self.compression, q.shape[2] - self.compression + 1
        for start, size in batches(0, N, max(8, tile_scores(q) // blocks)):
            first, stop = start // c + 1, (start + size - 1) // c + 1
            last = torch.arange(start, start + size, device=q.device)[:, None] // c
            hidden = torch.arange(first, stop, device=q.device) > last
            masks = ((first, minus_infinity(hidden, q)),) if stop > first else ()
            yield Tile(Blocks(start, size), (Window(Blocks(0, stop), masks),))

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> CompressedBlocks:
        whole = k.shape[2] - k.shape[2] % self.compression
        keys, values = self._compress(k[:, :, :whole], self.of_keys), self._compress(v[:, :, :whole], self.of_values)
        return CompressedBlocks(Cache.of(keys, values, self.capacity), k[:, :, whole:], v[:, :, whole:])

    def step(self, state: CompressedBlocks, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, CompressedBlocks]:
        blocks, open_k, open_v = state.blocks, torch.cat([state.k, k], 2), torch.cat([state.v, v], 2)
        if open_k.shape[2] == self.compression:
            blocks = blocks.append(self._compress(open_k, self.of_keys), self._compress(open_v, self.of_values))
            open_k, open_v = open_k[:, :, :0], open_v[:, :, :0]
        out = kv_cache.attend(q, blocks.keys, blocks.values) if blocks.length else v
        return out, CompressedBlocks(blocks, open_k, open_v)
