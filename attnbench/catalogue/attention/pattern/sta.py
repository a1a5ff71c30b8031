"""Sliding tile attention: a window that moves over a video tile by tile, and never leaves it."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from attnbench.catalogue.engines.flex.pair_pattern import COMPILED, Form
from attnbench.catalogue.engines.patterns.canvas import Layout, OnCanvas, in_tiles, sides
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import No, Traits, register


@register(
    "sta",
    family="fixed pattern",
    source="Zhang et al. 2025, arXiv:2502.04507, section 3",
    formula="softmax over the tiles {J : |Jₐ - clamp(Iₐ)| ≤ wₐ/2 on each axis a}, the centre clamped so that all fit",
    cost="O(n·w·d)",
    memory_exponent=1.0,
    traits=Traits(
        causal=No("the frames of a video are made together, and a window reaches to later ones"),
        cross=No("a window lies around the place of a query, among the keys of the same video"),
        key_padding=No("where a window is clamped depends on the size of the video, which padding would change"),
        bias=No("its tiles hold tokens of several rows and frames, whose places in the sequence mean nothing"),
        sink=True,
        shares="by itself",
        given=(COMPILED,),
        exact_with=("window={n}x{n}x{n},frame=2x2,tile=2x2x2", "frame=1x1,text={n}"),
    ),
    settings=(
        "frame=2x3,tile=1x2x2,window=2x1x1",
        "frame=3x2,tile=2x2x1,window=1x2x1,text=4",
        "frame=2x2,tile=2x2x2,window=3x3x3",
    ),
)
class SlidingTile(OnCanvas):
    """A window of whole tiles on a canvas of frames, rows and columns.

    Zhang et al. 2025, "Fast Video Generation with Sliding Tile Attention". q ``(B, H, N, D)``, k and v ``(B, K, N, ·)``
    -> ``(B, H, N, E)``. The tokens are those of a video, frame by frame, each frame of ``frame`` rows × columns row by
    row; the last frame may be incomplete. The video is cut into tiles of ``tile`` frames × rows × columns. A query
    attends to the tiles of a window of ``window`` tiles around its own. At the sides of the video the window stays
    where it still fits, so that every query has a whole one. All queries of a tile have the same keys: every product
    is one of whole tiles, and none is hidden but what lies outside the video.

    The last ``text`` tokens are no part of the video: they attend to all tokens, and all attend to them.

    A window as large as the video gives exact attention. Tokens are brought into the order of tiles and back in each
    call, in O(n·d). Scores exist for some tiles at a time, forward and backward: memory is O(n·d). A frame or tile
    whose sides do not divide the lengths they cut leaves gaps, whose products are computed and hidden. The tile is the
    paper's, for latents of 30 × 48 × 80, and so is the smallest of its windows, one of 18 × 24 × 24.

    Differs from the authors' code: that keeps tokens in the order of tiles through all layers, has a window for each
    head, found by search, takes one size of video, which its tiles divide, and runs a kernel for Hopper GPUs.

    Raises:
        UsageError: ``frame``, ``tile`` or ``window`` is no list of whole numbers.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        frame: Annotated[str, Field(description="rows x columns of a frame")] = "16x16",
        tile: Annotated[str, Field(description="frames x rows x columns of a tile")] = "6x8x8",
        window: Annotated[str, Field(description="frames x rows x columns of a window, in tiles")] = "3x3x3",
        text: Annotated[int, Field(ge=0, description="last tokens, which attend to all and all attend to")] = 0,
        form: Form = "auto",
    ) -> None:
        super().__init__(shape, f"sta, frame={frame}, tile={tile}, window={window}", text, form)
        self.frame = sides(frame, 2, "sta: option frame")
        self.tile, self.window = (
            sides(x, 3, f"sta: option {name}") for name, x in (("tile", tile), ("window", window))
        )

    def read(self, n: int, device: torch.device) -> Tensor:
        rows, columns = self.frame
        at = [(i // (rows * columns), i // columns % rows, i % columns) for i in range(n)]
        canvas = (-(-n // (rows * columns)), rows, columns)
        near = torch.ones(n, n, dtype=torch.bool, device=device)
        for axis, (length, tile, window) in enumerate(zip(canvas, self.tile, self.window, strict=True)):
            tiles = -(-length // tile)
            for i, one in enumerate(at):
                first = max(0, min(one[axis] // tile - window // 2, tiles - window))
                inside = [first <= other[axis] // tile < first + window for other in at]
                near[i] &= torch.tensor(inside, dtype=torch.bool, device=device)
        return near

    def _plan(self, n: int, device: torch.device) -> tuple[Layout, Tensor]:
        rows, columns = self.frame
        canvas = (-(-n // (rows * columns)), rows, columns)
        tile, place = in_tiles(n, canvas, self.tile, device)
        many = [-(-length // side) for length, side in zip(canvas, self.tile, strict=True)]
        number = (tile[:, 0] * many[1] + tile[:, 1]) * many[2] + tile[:, 2]
        block = math.prod(self.tile)
        layout = Layout(number * block + place, block, math.prod(many))
        seen = [self._window(tiles, window, device) for tiles, window in zip(many, self.window, strict=True)]
        ranges = [torch.arange(tiles, device=device) for tiles in many]
        at = torch.cartesian_prod(*ranges)
        of_windows = torch.cartesian_prod(*(torch.arange(one.shape[1], device=device) for one in seen))
        keys = [one[at[:, axis, None], of_windows[:, axis]] for axis, one in enumerate(seen)]
        blocks = (keys[0] * many[1] + keys[1]) * many[2] + keys[2]
        queries = torch.arange(len(at), device=device)[:, None].expand_as(blocks)
        return layout, torch.stack([queries.flatten(), blocks.flatten()], 1)

    def _window(self, tiles: int, window: int, device: torch.device) -> Tensor:
        window_of = torch.arange(tiles, device=device) - window // 2
        first = window_of.clamp(max=tiles - window).clamp(min=0)
        return first[:, None] + torch.arange(min(window, tiles), device=device)
