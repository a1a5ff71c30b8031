"""Local attention: a sliding window, or blocks that see themselves and their neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from attnbench.attention.bands import ROWS, band, blocks_per_tile, triangle
from attnbench.attention.block_sparse import Blocks, Tile, Window, attend, batches
from attnbench.errors import UsageError
from attnbench.shape import Shape
from attnbench.variant import No, Traits, register

_WINDOW = 128


@register(
    "local",
    family="fixed pattern",
    source="Liu et al. 2018, arXiv:1801.10198, section 4.2.4; Beltagy et al. 2020, arXiv:2004.05150, section 3.1",
    formula="softmax over {j : |i − j| ≤ w}, or over the blocks within r of i's own",
    cost="O(n·w·d)",
    time_exponent=1.0,
    memory_exponent=1.0,
    traits=Traits(cross=No("the window needs queries and keys at the same positions")),
    settings=("window=3", "block=5,look_around=1"),
)
class Local(nn.Module):
    """Local attention: a sliding window, or blocks of neighbours.

    Sliding (``block`` unset): token i sees |i - j| <= ``window``, that is 2·window + 1 keys, itself included; causal,
    the window + 1 keys i - window .. i. Block-local: token i sees its own block of ``block`` tokens and
    ``look_around`` blocks on either side (causal: before it only, and j <= i), as in Liu et al. with look_around=0.

    Both are exact softmax over those keys. Elsewhere ``window`` often means both sides together. The Long Range Arena
    code of local attention attends to every (n / block)-th token instead of a block.

    q, k, v: ``(B, H, N, D)`` -> ``(B, H, N, D)``, any N. Time N·(2·window + 64)·D, scores for one tile at a time.

    Raises:
        UsageError: ``window`` and ``block`` together, or ``look_around`` without ``block``.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        window: Annotated[int, Field(ge=0, description="tokens seen on each side")] = _WINDOW,
        block: Annotated[int | None, Field(ge=1, description="block length instead of a window")] = None,
        look_around: Annotated[int, Field(ge=0, description="neighbour blocks seen on each side")] = 0,
    ) -> None:
        super().__init__()
        if block is not None and window != _WINDOW:
            raise UsageError("local: give window (sliding) or block (block-local), not both")
        if look_around and block is None:
            raise UsageError("local: look_around needs block; a sliding window has window")
        self.causal = shape.causal
        self.window = window
        self.block = block
        self.look_around = look_around

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        if self.block is None:
            tiles = band(q, before=self.window, after=0 if self.causal else self.window)
        else:
            tiles = _blocks(q, self.block, self.look_around, self.causal)
        return attend(q, k, v, tiles, key_mask=key_mask)


def _blocks(q: Tensor, block: int, around: int, causal: bool) -> Iterator[Tile]:
    n = q.shape[2]
    after = 0 if causal else around
    inner = range(around, max(around, n // block - after))
    outer = [(t, 1) for t in range(-(-n // block)) if t not in inner]
    for start, size in batches(0, min(block, n), ROWS):
        corner = triangle(q, 0, size)[0][1]
        # Causal rows stop at their own last token, and see a triangle of their own columns.
        most = blocks_per_tile(q, len(inner), size * (around + 1 + after) * block)
        for t, count in (*batches(inner.start, inner.stop, most), *outer):
            rows = range(t * block + start, min(n, t * block + start + size))
            keys = range(max(0, (t - around) * block), rows.stop if causal else min(n, (t + 1 + after) * block))
            if rows:
                part = len(rows)
                masks = ((len(keys) - part, corner[:part, :part]),) if causal else ()
                window = Window(Blocks(keys.start, len(keys), count, block), masks)
                yield Tile(Blocks(rows.start, part, count, block), (window,))
