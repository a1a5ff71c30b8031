"""Second-order Taylor attention: the exponential replaced by the first three terms of its series."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from attnbench.catalogue.engines import fla, forms
from attnbench.catalogue.engines.linear.feature_attention import Chunk, FeatureAttention
from attnbench.catalogue.engines.linear.feature_map import ColumnTiles, FeatureMap, Tiles
from attnbench.catalogue.engines.tiling import Group
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import No, Traits, register


class TaylorFeatures(FeatureMap):
    """φ(x) with φ(x)·φ(y) = 1 + s + s²/2, s = x·y/√D: 1, x, and products of two channels.

    x_i x_j and x_j x_i are one feature, unless both channels are in the same block of 8, so that a few large products
    of blocks replace one for each channel: D = 64 gives 2369 features, not 4161 (2145 without the blocks).
    """

    block = 8

    def __init__(self, head_dim: int) -> None:
        self.head_dim = head_dim
        self.scale = head_dim**-0.25
        self.width = 1 + head_dim + sum(height * (head_dim - start) for start, height in self._blocks())

    def tiles(self, group: Group, rows: int, like: Tensor, count: int = 1) -> Tiles:
        return ColumnTiles(self, group, rows, like, count)

    def _blocks(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self.head_dim, self.block):
            yield start, min(self.block, self.head_dim - start)

    def _pairs(self, features: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """First channel, height, and products ``(G, c, height, D - start)`` with own and later channels, by block."""
        at = 1 + self.head_dim
        for start, height in self._blocks():
            size = height * (self.head_dim - start)
            yield start, height, torch.unflatten(features[..., at : at + size], -1, (height, self.head_dim - start))
            at += size

    def queries(self, x: Tensor, out: Tensor) -> None:
        out[..., 0] = 1.0
        own = out[..., 1 : 1 + self.head_dim]
        torch.mul(x, self.scale, out=own)
        for start, height, pairs in self._pairs(out):
            torch.mul(own[..., start : start + height, None], own[..., None, start:], out=pairs)
            pairs[..., :height].mul_(0.5**0.5)  # pairs within a block occur in both orders

    def queries_grad(self, x: Tensor, features: Tensor, grad: Tensor) -> Tensor:
        own = features[..., 1 : 1 + self.head_dim]
        d_own = grad[..., 1 : 1 + self.head_dim].clone()
        for start, height, d_pairs in self._pairs(grad):
            d_pairs[..., :height].mul_(0.5**0.5)
            for i, d_row in enumerate(d_pairs.unbind(-2), start):
                d_own[..., i] += (d_row * own[..., start:]).sum(-1)
                d_own[..., start:].addcmul_(d_row, own[..., i : i + 1])
        return d_own.mul_(self.scale)


@register(
    "taylor",
    family="kernel",
    source="Arora et al. 2024, arXiv:2402.18668, section 4.1, equation 4",
    formula="w_ij = 1 + s + s²/2,  s = q_i·k_j/√D;  o_i = Σ_j w_ij v_j / Σ_j w_ij",
    cost="O(n·d³)",
    memory_exponent=1.0,
    traits=Traits(
        decode=True,
        shares="query by query",
        permutable=True,
        own_form="the series is taken of all channels of q and k; Based projects them to 16 first and adds a "
        "sliding window",
        given=(("form=fla", {"key_padding": No(fla.NO_MASK)}),),
    ),
    settings=("chunk=5",),
)
class Taylor(FeatureAttention):
    """Softmax by three terms of the series of exp, as in Based.

    The feature map of Arora et al. 2024, "Simple linear attention language models balance the recall-throughput
    tradeoff": exp(s) is replaced by 1 + s + s²/2 with s = q·k/√D, which is at least 1/2, so that every row of weights
    is positive and sums to 1. It is close to softmax attention where |s| is small, and grows as s² where it is not.
    Nothing is random and nothing is learned. q ``(B, H, N, D)``, k and v ``(B, H, M, D)``; the sums of a head have
    about D²/2 features, so that time is O(n·D³); ``form=triton`` keeps them all. ``form=fla`` is causal and forms the
    weights of all pairs, for O(n²·D), if D is above 16, where ``form=auto`` does not take it.

    Differs from the paper: Based projects q and k to 16 channels first and mixes in sliding-window attention; here
    the map is applied to all D channels of q and k as they are.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        chunk: Chunk = None,
        form: Annotated[Literal["auto", "torch", "triton", "fla"], Field(description=forms.WHICH)] = "auto",
    ) -> None:
        widest = 128 if form == "fla" else 16
        alone = shape.causal and not shape.cross and widest >= shape.D and chunk is None
        kernel = partial(fla.run, "based" if shape.D > 16 else "based-sums")
        super().__init__(shape, chunk, form, {"fla": kernel} if alone else {})

    def pair_weights(self, q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
        s = q @ k.mT / q.shape[-1] ** 0.5
        weights: Tensor = 1 + s + s.square() / 2
        return weights

    def feature_map(self, dtype: torch.dtype) -> FeatureMap:
        return TaylorFeatures(self.head_dim)
