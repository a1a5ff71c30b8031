"""Local attention: a sliding window, dilated or not, or blocks that see themselves and their neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench.catalogue.engines.decoding import kv_cache
from attnbench.catalogue.engines.decoding.ring import Ring
from attnbench.catalogue.engines.flex.block_mask import by_places
from attnbench.catalogue.engines.flex.pair_pattern import COMPILED, FlexPattern, Form
from attnbench.catalogue.engines.patterns.bands import ROWS, band, blocks_per_tile, triangle
from attnbench.catalogue.engines.patterns.keys import Window
from attnbench.catalogue.engines.patterns.pattern_softmax import attend
from attnbench.catalogue.engines.patterns.rule import Rule
from attnbench.catalogue.engines.patterns.tiles import Blocks, Tile, batches
from attnbench.catalogue.engines.precision import accumulator
from attnbench.contract.problem.position_bias import position_bias
from attnbench.contract.problem.reference import masked_attention
from attnbench.contract.problem.shape import Shape
from attnbench.contract.problem.sink import sink_of
from attnbench.contract.variant import Knob, No, Traits, register
from attnbench.errors import UsageError

_WINDOW = 128


@register(
    "local",
    family="fixed pattern",
    source="Liu et al. 2018, arXiv:1801.10198, section 4.2.4; Beltagy et al. 2020, arXiv:2004.05150, section 3.1",
    formula="softmax over {j : |i - j| ∈ {0, δ, …, w·δ}}, or over the blocks within r of i's own",
    cost="O(n·w·d)",
    memory_exponent=1.0,
    fused="flex:window={window}",
    traits=Traits(
        cross=No("the window needs queries and keys at the same positions"),
        decode=True,
        bias=True,
        sink=True,
        exact_with=("window={n}", "block={n}", "block=3,look_around={n}"),
        knob=Knob("window"),
        given=(("block", {"knob": Knob("look_around", step=1)}), COMPILED),
    ),
    settings=("window=3", "block=5,look_around=1", "window=2,dilation=3", "block=4"),
)
class Local(nn.Module):
    """Local attention: a sliding window, or blocks of neighbours.

    Sliding (``block`` unset): token i sees the tokens i ± t·δ for t = 0 .. ``window``, δ = ``dilation``; with δ = 1
    that is |i - j| <= window, 2·window + 1 keys, itself included. Causal: the window + 1 keys i - t·δ. Block-local:
    token i sees its own block and ``look_around`` blocks on either side (causal: before it only, and j <= i); Liu et
    al. have ``look_around=0``.

    Each is an exact softmax over those keys. Windows and blocks count places, padded ones too: one that holds padding
    has fewer keys. The default window is this project's; Liu et al. take blocks of 256.

    Differs from the papers: ``window`` counts one side, Longformer's counts both sides; in Liu et al. no block sees its
    neighbours. A block is consecutive tokens; public code that reshapes the other way lets token i see every
    (n / block)-th token, which is another operator.

    q, k, v: ``(B, H, N, D)`` -> ``(B, H, N, D)``, any N. Time N·(2·window + r)·D with r = 32 or 64
    rows per product (:func:`~attnbench.catalogue.engines.patterns.bands.band_rows`), scores for one tile at a time.
    Decoding keeps the last window + 1 keys (dilated: as far as the window reaches), or look_around + 1 blocks.

    Raises:
        UsageError: ``block`` together with ``window`` or ``dilation``, or ``look_around`` without ``block``.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        window: Annotated[int, Field(ge=1, description="tokens seen on each side; causal: before")] = _WINDOW,
        block: Annotated[int | None, Field(ge=1, description="block length instead of a window")] = None,
        look_around: Annotated[int, Field(ge=0, description="neighbour blocks seen on each side; causal: before")] = 0,
        dilation: Annotated[int, Field(ge=1, description="distance between the window's tokens")] = 1,
        form: Form = "auto",
    ) -> None:
        super().__init__()
        if block is not None and window != _WINDOW:
            raise UsageError("local: give window (sliding) or block (block-local), not both")
        if block is not None and dilation != 1:
            raise UsageError("local: dilation belongs to a sliding window; a block is contiguous")
        if look_around and block is None:
            raise UsageError("local: look_around needs block; a sliding window has window")
        self.causal = shape.causal
        self.window = window
        self.block = block
        self.look_around = look_around
        self.dilation = dilation
        self.room = shape.N
        near = f"window={window}*{dilation}" if block is None else f"block={block}*{look_around}"
        self.flex = FlexPattern(f"local, {near}, causal={shape.causal}", form)
        self.position_bias, self.sink = position_bias(shape), sink_of(shape)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        i, j = torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(q.shape[2], device=q.device)
        allowed = self._sees(i, j)
        allowed = allowed if key_mask is None else allowed & key_mask[:, None, None]
        n, bias, sink = q.shape[2], self.position_bias, None if self.sink is None else self.sink.logit
        added = None if bias is None else bias(slice(0, n), slice(0, n), q.dtype)
        return masked_attention(q, k, v, allowed, added, sink)

    def _sees(self, i: Tensor, j: Tensor) -> Tensor:
        if self.block is None:
            near = ((i - j).abs() <= self.window * self.dilation) & ((i - j) % self.dilation == 0)
        else:
            near = (i // self.block - j // self.block).abs() <= self.look_around
        return near & (j <= i) if self.causal else near

    def pairs_by_place(self, keys: int, device: torch.device) -> Rule | None:
        """The pairs that count; None if a bias joins them."""
        return Rule(self._sees, keys, device) if self.position_bias is None else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        seen, bias, sink = partial(by_places, self._sees), self.position_bias, self.sink
        return self.flex.attend(self._plain, seen, q, k, v, key_mask=key_mask, bias=bias, sink=sink)

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        if self.block is None:
            tiles = _windows(q, self.window, self.dilation, self.causal)
        else:
            tiles = _blocks(q, self.block, self.look_around, self.causal)
        return attend(q, k, v, tiles, key_mask=key_mask, position_bias=self.position_bias, sink=self.sink)

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Ring:
        # A multiple of the dilation, or of the block, so that their tokens come to lie in the same slots again.
        size = (self.window + 1) * self.dilation if self.block is None else (self.look_around + 1) * self.block
        return Ring.of(k, v, size, self.room)

    def step(self, state: Ring, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Ring]:
        slot = state.length % state.size
        state = state.append(k, v)
        filled = state.keys.shape[2]
        if self.block is None:
            parts = [slice(slot % self.dilation, filled, self.dilation)]
        else:
            # The slots of this block that are not yet overwritten hold tokens of the block just out of reach.
            after = (slot // self.block + 1) * self.block
            parts = [slice(0, slot + 1), slice(after, filled)] if after < filled else [slice(0, slot + 1)]
        added = None
        if self.position_bias is not None:
            age = (slot - kv_cache.pick(torch.arange(filled, device=k.device)[:, None], parts)[:, 0]) % state.size
            added = self.position_bias.along(-age, accumulator(q.dtype))[:, None]
        keys, values = kv_cache.pick(state.keys, parts), kv_cache.pick(state.values, parts)
        return kv_cache.attend(q, keys, values, added, self.sink), state


def _windows(q: Tensor, window: int, dilation: int, causal: bool) -> Iterator[Tile]:
    for start in range(min(dilation, q.shape[2])):
        yield from band(q, (window, 0 if causal else window), tokens=range(start, q.shape[2], dilation))


def _blocks(q: Tensor, block: int, around: int, causal: bool) -> Iterator[Tile]:
    n = q.shape[2]
    after = 0 if causal else around
    inner = range(around, max(around, n // block - after))
    outer = [(t, 1) for t in range(-(-n // block)) if t not in inner]
    for start, size in batches(0, min(block, n), ROWS):
        corner = triangle(q, 0, size)[0][1]
        # If causal, rows stop at their own last token and see a triangle of their own columns.
        most = blocks_per_tile(q, len(inner), size * (around + 1 + after) * block)
        for t, count in (*batches(inner.start, inner.stop, most), *outer):
            rows = range(t * block + start, min(n, t * block + start + size))
            keys = range(max(0, (t - around) * block), rows.stop if causal else min(n, (t + 1 + after) * block))
            if rows:
                part = len(rows)
                masks = ((len(keys) - part, corner[:part, :part]),) if causal else ()
                window = Window(Blocks(keys.start, len(keys), count, block), masks)
                yield Tile(Blocks(rows.start, part, count, block), (window,))
