"""Attention whose queries and keys are rounded to eight bits, block by block: what that costs in accuracy."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad

from attnbench.engines.masks import emptied
from attnbench.engines.precision import accumulator
from attnbench.reference import masked_attention, of_query_heads
from attnbench.shape import Shape
from attnbench.variant import VARIANTS, No, Rounds, Traits, register
from attnbench.visible import Visible

_MOST = {"int8": 127.0, "float8_e4m3": 448.0}
"""The number that the largest of a block becomes."""


@register(
    "quantised",
    family="exact",
    source="Zhang et al. 2024, arXiv:2410.02367, section 4; Shah et al. 2024, arXiv:2407.08608, section 3.3",
    formula="O = softmax(s_q·s_k·Q̂·K̂ᵀ/√D)·V,  Q̂ = round(Q/s_q), K̂ = round((K - mean K)/s_k),  s = max|block|/127",
    cost="O(n²·d)",
    time_exponent=2.0,
    memory_exponent=1.0,
    traits=Traits(
        bias=No("the kernels that it stands for add nothing to their logits"),
        mask=True,
        q_start=No("a query is rounded with those of its block, and later queries alone would start other blocks"),
        sink=No("not built here: the kernels that it stands for have none"),
        decode=No("a block of keys has its scale only when it is full, so that a step would round otherwise"),
        shares="by itself",
        rounds_together=True,
        rounds=Rounds(("q_block", "k_block"), smooth="smooth_k"),
        emulated="numbers are rounded to 8 bits and multiplied in float32, which says nothing of a kernel for 8 bits",
        given=(("dtype=float8_e4m3", {"rounds": Rounds(smooth="smooth_k")}),),
    ),
    settings=("q_block=5,k_block=7", "dtype=float8_e4m3,q_block=4,k_block=3", "q_block=3,k_block=5,smooth_k=false"),
)
class Quantised(nn.Module):
    """Queries and keys rounded to 8 bits in blocks: the error of it.

    Q and K are cut into blocks of ``q_block`` and ``k_block`` consecutive tokens of a head. Each block has one scale,
    its largest magnitude over 127 (``dtype=int8``) or over 448 (``dtype=float8_e4m3``), and its numbers, divided by the
    scale, are rounded to whole numbers or to 4 bits of exponent and 3 of fraction. Their products are exact; softmax
    and values are those of the inputs' dtype, float32 at least. The defaults are those of SageAttention, Zhang et al.
    2024, with ``int8``.

    ``smooth_k`` takes the mean of the real keys off every key first. That moves the logits of a query by one number,
    which a softmax does not see, and what all keys have in common is then not rounded: the output for K + 1·cᵀ is the
    output for K.

    q ``(B, H, N, D)``, k ``(B, K, M, D)`` and v ``(B, K, M, E)`` -> ``(B, H, N, E)``. This is an emulation in ordinary
    arithmetic: the rounded numbers go through PyTorch's fused attention (``sdpa``) as float32. Its error is that of the
    rounding; its time and memory mean nothing, and are refused. Where it is causal, a later token still moves how the
    tokens of its block are rounded, and all keys by way of the mean. What it holds stays unseen, and rounding shows
    that it is there, as in the kernels. A padded token does neither. Rounding has no gradient: only that of the scales
    is left to q and k.

    Differs from the papers: values and weights are not rounded (the first rounds them to float16, its second version
    and the other paper to 8 bits); one scale for each block, not for each warp or thread; no rotation of q and k; where
    M = N the key mask holds for queries too.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        dtype: Annotated[
            Literal["int8", "float8_e4m3"], Field(description="what queries and keys are rounded to")
        ] = "int8",
        q_block: Annotated[int, Field(ge=1, description="queries that share a scale")] = 128,
        k_block: Annotated[int, Field(ge=1, description="keys that share a scale")] = 64,
        smooth_k: Annotated[bool, Field(description="take the mean of the keys off them first")] = True,
    ) -> None:
        super().__init__()
        self.dtype, self.blocks, self.smooth_k = dtype, (q_block, k_block), smooth_k
        self.places = Visible.of(shape)
        self.attend = VARIANTS.get("sdpa").make(shape)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Block after block of each example and head, and N × M weights."""
        N, M = q.shape[2], k.shape[2]
        real = torch.ones(len(k), M, dtype=torch.bool, device=k.device) if key_mask is None else key_mask
        there = real if N == M else torch.ones(len(q), N, dtype=torch.bool, device=q.device)
        q, k, v = (torch.where(mask[:, None, :, None], x, 0.0) for x, mask in ((q, there), (k, real), (v, real)))
        if self.smooth_k:
            count = real.sum(1)[:, None, None, None].clamp(min=1)
            k = (k - k.sum(2, keepdim=True) / count) * real[:, None, :, None]
        rounded = []
        for x, block in zip((q, k), self.blocks, strict=True):
            parts = []
            for part in torch.split(x, block, 2):
                scale = part.abs().amax((2, 3), keepdim=True) / _MOST[self.dtype]
                scale = torch.where(scale > 0, scale, 1.0)
                whole = (part / scale).detach()
                whole = whole.round() if self.dtype == "int8" else whole.to(torch.float8_e4m3fn).to(x.dtype)
                parts.append(whole * scale)
            rounded.append(torch.cat(parts, 2))
        allowed = self.places.pairs(slice(0, N), slice(0, M), M, q.device) & real[:, None, None]
        keys, values = (of_query_heads(x, q.shape[1]) for x in (rounded[1], v))
        return masked_attention(rounded[0], keys, values, allowed)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        (q,) = emptied(key_mask if q.shape[2] == k.shape[2] else None, q)  # it would move the scale of its block
        out, sums = q.dtype, accumulator(q.dtype)
        q, k, v = (x.to(sums) for x in (q, k, v))
        if self.smooth_k:
            (k,) = emptied(key_mask, k - _mean(k, key_mask))
        q, k = (rounded(x, block, self.dtype) for x, block in zip((q, k), self.blocks, strict=True))
        y: Tensor = self.attend(q, k, v, key_mask=key_mask)
        return y.to(out)


def _mean(k: Tensor, key_mask: Tensor | None) -> Tensor:
    """The mean of the real keys, ``(B, K, 1, D)``; padded ones are 0."""
    if key_mask is None:
        return k.mean(2, keepdim=True)
    return k.sum(2, keepdim=True) / key_mask.sum(1)[:, None, None, None].clamp(min=1)


def rounded(x: Tensor, block: int, dtype: str) -> Tensor:
    """x ``(B, H, n, D)`` as 8 bits can say it, each block of tokens with a scale of its own. 0 for a block of zeros."""
    n = x.shape[2]
    blocks = torch.unflatten(pad(x, (0, 0, 0, -n % block)), 2, (-1, block))
    scale = blocks.abs().amax((3, 4), keepdim=True) / _MOST[dtype]
    scale = torch.where(scale > 0, scale, 1.0)
    whole = (blocks / scale).detach()
    whole = whole.round() if dtype == "int8" else whole.to(torch.float8_e4m3fn).to(x.dtype)
    return (whole * scale).flatten(2, 3)[:, :, :n]
