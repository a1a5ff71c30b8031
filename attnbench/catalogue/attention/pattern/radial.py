"""Radial attention: the farther two frames of a video are apart, the fewer of their tokens meet."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from attnbench.catalogue.engines.flex.pair_pattern import COMPILED, Form
from attnbench.catalogue.engines.patterns.canvas import Layout, OnCanvas
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import No, Traits, register


@register(
    "radial",
    family="fixed pattern",
    source="Li et al. 2025, arXiv:2506.19852; authors' code, attn_mask.py",
    formula="softmax over the first frame and the blocks with |x - y| < s/r, r = 2^⌊log₂ max(Δ, 1)⌋ for frames Δ apart",
    cost="O(n·s·d·log(n))",
    # The logarithm is that of few frames: pairs grow as n^1.29 from 16 frames to 64, as n^1.13 from 512 to 1024.
    time_exponent=1.2,
    memory_exponent=1.0,
    traits=Traits(
        causal=No("the frames of a video are made together, and look at later ones as at earlier ones"),
        cross=No("the distance of two frames is that of their places in one video"),
        key_padding=No("frames are counted by their tokens, and a padded batch would have videos of several lengths"),
        bias=No("it is a pattern of places in frames, whose distance in the sequence means nothing"),
        sink=True,
        shares="by itself",
        given=(COMPILED,),
        exact_with=("frame={n}", "frame=2,text={n}"),
    ),
    settings=("frame=4,block=2", "frame=5,block=2,text=3", "frame=2,block=2", "frame=9,block=4"),
)
class Radial(OnCanvas):
    """Bands in a video that narrow with the distance of frames.

    Li et al. 2025, "Radial Attention: O(n log n) Sparse Attention with Energy Decay for Long Video Generation".
    q ``(B, H, N, D)``, k and v ``(B, K, N, ·)`` -> ``(B, H, N, E)``. The tokens are those of a video, frame by frame, s
    = ``frame`` of them each; the last frame may be incomplete. A token sees all of its own frame and of its neighbours,
    and of a frame at distance Δ those whose place in it is less than s/r from its own, where r is the largest power of
    two up to Δ: each time the distance doubles, the band is half as wide. It is made of blocks of ``block`` tokens: a
    pair of blocks is kept as a whole if any pair of its places is within the band. A band that would be narrower than
    a block keeps blocks at the same place alone, and only in frames whose distance is a multiple of r·``block``/s,
    rounded up. All see the whole first frame.

    The last ``text`` tokens are no part of the video: they attend to all tokens, and all attend to them.

    Each doubling of the distance adds about as many pairs as the one before: a token sees O(s·log n) others. With the
    defaults, 2048 tokens are 16 frames and form 64 % of all pairs, 8192 tokens 24 % and 131,072 tokens 2 %. Two frames
    give exact attention. Scores exist for some blocks at a time, forward and backward: memory is O(n·d), and a few
    numbers for each pair of blocks.

    Differs from the authors' code: there a band is |x - y| <= s'/2r, s' the power of two above s, if that is a block or
    more, and else a block wide on either side, in frames whose distance is a multiple of 2r·128/s', rounded down; a
    factor makes it wider or narrower, and Wan's neighbouring frames have half a frame. A block is kept there if more
    than 60 % of its columns that a band touches are covered to a third, and here if a band touches it. A frame begins
    with a block, and is filled up with gaps where blocks do not divide it (there blocks run on over the borders of
    frames). Nothing is trained along with it (there models learn the pattern for longer videos by low-rank updates),
    and no steps or layers of a model are left dense; blocks are 32 long, there 128.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        frame: Annotated[int, Field(ge=1, description="tokens of a frame, s")] = 128,
        block: Annotated[int, Field(ge=1, description="tokens per block")] = 32,
        text: Annotated[int, Field(ge=0, description="last tokens, which attend to all and all attend to")] = 0,
        form: Form = "auto",
    ) -> None:
        super().__init__(shape, f"radial, frame={frame}, block={block}", text, form)
        self.frame, self.block = frame, block

    def read(self, n: int, device: torch.device) -> Tensor:
        s, B = self.frame, self.block
        seen = torch.zeros(n, n, dtype=torch.bool, device=device)
        for i in range(n):
            for j in range(n):
                apart, one, other = abs(i // s - j // s), i % s // B, j % s // B
                r = 1
                while 2 * r <= apart:
                    r *= 2
                if s >= r * B:
                    # The nearest places of two blocks are (their distance - 1)·B + 1 apart.
                    near = one == other or ((abs(one - other) - 1) * B + 1) * r < s
                else:
                    near = one == other and apart % -(-r * B // s) == 0
                seen[i, j] = near or apart <= 1 or j < s
        return seen

    def _plan(self, n: int, device: torch.device) -> tuple[Layout, Tensor]:
        block = min(self.block, self.frame)
        i, each = torch.arange(n, device=device), -(-self.frame // block)
        frames = -(-n // self.frame)
        places = i // self.frame * each * block + i % self.frame
        of_first = torch.cartesian_prod(
            *(torch.arange(x, device=device) for x in (frames * each, min(frames, 1) * each))
        )
        met = [self._met(apart, frames, each, device) for apart in range(frames) if self._meet(apart)]
        return Layout(places, block, frames * each), torch.cat([self._to_first(of_first), *met])

    def _to_first(self, pairs: Tensor) -> Tensor:
        """Pairs of any block with one of the first frame, ``(P, 2)``: all of them are kept."""
        return pairs

    def _meet(self, apart: int) -> bool:
        """Return True if frames so far apart have pairs: all for a band at least a block wide, else some."""
        r = 1 << max(0, apart.bit_length() - 1)
        return apart <= 1 or apart % -(-r * self.block // self.frame) == 0 or self.frame >= r * self.block

    def _met(self, apart: int, frames: int, each: int, device: torch.device) -> Tensor:
        """Pairs of blocks of frames that are so far apart, ``(P, 2)``, but for keys of the first frame."""
        f = torch.arange(frames - apart, device=device)
        one, other = (torch.cat(x) for x in (((f, f + apart), (f + apart, f)) if apart else ((f,), (f,))))
        later = other > 0
        return self._pairs(one[later], other[later], self._band(apart, each, device), each)

    @staticmethod
    def _pairs(one: Tensor, other: Tensor, within: Tensor, each: int) -> Tensor:
        frames = torch.stack([one, other], 1)[:, None] * each
        return (frames + within).flatten(0, 1)

    def _band(self, apart: int, each: int, device: torch.device) -> Tensor:
        every = torch.arange(each, device=device)
        between = (every[:, None] - every).abs()
        if apart <= 1:
            return torch.ones_like(between, dtype=torch.bool).nonzero()
        r, s = 1 << (apart.bit_length() - 1), self.frame
        if s >= r * self.block:
            return ((between == 0) | (((between - 1) * self.block + 1) * r < s)).nonzero()
        return ((between == 0) & (apart % -(-r * self.block // s) == 0)).nonzero()
