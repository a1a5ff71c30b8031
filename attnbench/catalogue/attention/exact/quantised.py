"""Attention with inputs rounded to a few bits, block by block: the cost in accuracy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad

from attnbench.catalogue.engines.masks import emptied, token_mean
from attnbench.catalogue.engines.precision import accumulator, hidden
from attnbench.catalogue.engines.tiling import budget, recomputed, row_blocks
from attnbench.contract.problem.reference import masked_attention, of_query_heads
from attnbench.contract.problem.shape import Shape
from attnbench.contract.problem.visible import Visible
from attnbench.contract.variant import VARIANTS, No, Rounds, Traits, register

_MOST = {"int8": 127.0, "float8_e4m3": 448.0, "float4_e2m1": 2688.0}
"""The largest number under a scale after scaling, for :meth:`Quantised.dense`."""

_FLOATS = Rounds(smooth="smooth_k")
"""Numbers that have exponents: a block's scale decides little."""


@register(
    "quantised",
    family="exact",
    source="Zhang et al. 2024, arXiv:2410.02367, section 4; arXiv:2411.10958, section 3; Zhang et al. 2025, "
    "arXiv:2505.11594, section 3; Shah et al. 2024, arXiv:2407.08608, section 3.3",
    formula="O = softmax(s_q·s_k·Q̂·K̂ᵀ/√D)·V,  Q̂ = round(Q/s_q), K̂ = round((K - mean K)/s_k),  s = max|block|/127",
    cost="O(n²·d)",
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
        emulated="numbers are rounded to a few bits and multiplied in float32, which says nothing of a kernel for them",
        given=(
            ("dtype=float8_e4m3", {"rounds": _FLOATS}),
            ("dtype=float4_e2m1", {"rounds": _FLOATS}),
            ("values=float8_e4m3", {"rounds": replace(_FLOATS, values=True), "rows_sum_to_one": False}),
            ("values=float4_e2m1", {"rounds": replace(_FLOATS, values=True), "rows_sum_to_one": False}),
        ),
    ),
    settings=(
        "q_block=5,k_block=7",
        "dtype=float8_e4m3,q_block=4,k_block=3",
        "q_block=3,k_block=5,smooth_k=false",
        "values=float8_e4m3,q_block=5,k_block=7",
        "dtype=float4_e2m1,values=float4_e2m1,q_block=4,k_block=5",
    ),
)
class Quantised(nn.Module):
    """Inputs rounded to a few bits in blocks: the error of it.

    Q and K are cut into blocks of ``q_block`` and ``k_block`` consecutive tokens of a head. Each block has one scale,
    its largest magnitude over 127 (``dtype=int8``) or over 448 (``dtype=float8_e4m3``), and its numbers, divided by the
    scale, are rounded to whole numbers or to 4 bits of exponent and 3 of fraction. With ``dtype=float4_e2m1`` the scale
    is over 448·6. Each 16 neighbouring channels of a token then have a second scale in e4m3, which makes their largest
    6, and each quotient is one of 0, ±0.5, ±1, ±1.5, ±2, ±3, ±4, ±6. Products are exact. The defaults are those of
    SageAttention, Zhang et al. 2024, with ``int8``.

    Softmax and values are those of the inputs' dtype, float32 at least, unless ``values`` names a type to round them
    to. Then each channel of V has one scale. The weights of a query are exp(logit - largest logit), rounded under a
    scale of 1 over the same number, and divided by what their sum was before: rows do not quite sum to one. With
    ``values=float8_e4m3`` that is SageAttention2. With ``float4_e2m1``, SageAttention3, each 16 consecutive keys share
    a second scale.

    ``smooth_k`` takes the mean of the real keys off every key first. That moves the logits of a query by one number,
    which a softmax does not see, and what all keys have in common is then not rounded: the output for K + 1·cᵀ is the
    output for K.

    q ``(B, H, N, D)``, k ``(B, K, M, D)`` and v ``(B, K, M, E)`` -> ``(B, H, N, E)``. This is an emulation in ordinary
    arithmetic: the rounded numbers are multiplied as float32, by PyTorch's fused attention (``sdpa``) if values are not
    rounded. Its error is that of the rounding; its time and memory mean nothing, and are refused. Where it is causal, a
    later token still moves how the tokens of its block are rounded, all keys by way of the mean, and all values by way
    of their scales. Its content stays unseen, and rounding shows that it is there, as in the kernels. A padded token
    does none of that. Rounding has no gradient: only that of the scales, and of the weights' sums, is left.

    Differs from the papers: the first rounds values and weights to float16; one scale for each block, not for each warp
    or thread; the second also takes the mean off the queries, and has 4 bits for int8's 8; the third has no scale above
    the e4m3 ones of q, k and v; weights are relative to the largest logit of a row, not to the largest so far; no
    rotation of q and k; where M = N the key mask holds for queries too.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        dtype: Annotated[
            Literal["int8", "float8_e4m3", "float4_e2m1"], Field(description="what queries and keys are rounded to")
        ] = "int8",
        values: Annotated[
            Literal["exact", "float8_e4m3", "float4_e2m1"], Field(description="what weights and values are rounded to")
        ] = "exact",
        q_block: Annotated[int, Field(ge=1, description="queries that share a scale")] = 128,
        k_block: Annotated[int, Field(ge=1, description="keys that share a scale")] = 64,
        smooth_k: Annotated[bool, Field(description="take the mean of the keys off them first")] = True,
    ) -> None:
        super().__init__()
        self.dtype, self.values, self.blocks, self.smooth_k = dtype, values, (q_block, k_block), smooth_k
        self.places = Visible.of(shape)
        self.attend = VARIANTS.get("sdpa").make(shape)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        N, M = q.shape[2], k.shape[2]
        real = torch.ones(len(k), M, dtype=torch.bool, device=k.device) if key_mask is None else key_mask
        there = real if N == M else torch.ones(len(q), N, dtype=torch.bool, device=q.device)
        q, k, v = (torch.where(mask[:, None, :, None], x, 0.0) for x, mask in ((q, there), (k, real), (v, real)))
        if self.smooth_k:
            count = real.sum(1)[:, None, None, None].clamp(min=1)
            k = (k - k.sum(2, keepdim=True) / count) * real[:, None, :, None]
        rounded = [
            torch.cat([_coarse(part, (2, 3), self.dtype) for part in torch.split(x, block, 2)], 2)
            for x, block in zip((q, k), self.blocks, strict=True)
        ]
        allowed = self.places.pairs(slice(0, N), slice(0, M), M, q.device) & real[:, None, None]
        keys, values = (of_query_heads(x, q.shape[1]) for x in (rounded[1], v))
        if self.values == "exact":
            return masked_attention(rounded[0], keys, values, allowed)
        logits = (rounded[0] @ keys.mT * q.shape[3] ** -0.5).masked_fill(~allowed, -torch.inf)
        weights = (logits - logits.amax(-1, keepdim=True).nan_to_num(neginf=0.0)).exp()
        total = weights.sum(-1, keepdim=True)
        weights = _bits(weights.detach() * _MOST[self.values], self.values) / _MOST[self.values]
        return weights @ _coarse(values.mT, (3,), self.values).mT / torch.where(total > 0, total, 1.0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        (q,) = emptied(key_mask if q.shape[2] == k.shape[2] else None, q)  # it would move the scale of its block
        out, sums = q.dtype, accumulator(q.dtype)
        q, k, v = (x.to(sums) for x in (q, k, v))
        if self.smooth_k:
            (k,) = emptied(key_mask, k - token_mean(k, key_mask))
        q, k = (rounded(x, block, self.dtype) for x, block in zip((q, k), self.blocks, strict=True))
        if self.values == "exact":
            y: Tensor = self.attend(q, k, v, key_mask=key_mask)
        else:
            y = self._rounded_too(q, k, v, key_mask)
        return y.to(out)

    def _rounded_too(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        (B, H, N, _), M = q.shape, k.shape[2]
        v = scaled(v.mT, (3,), self.values).mT
        most = max(1, budget("gathered.listed", q.device) // (B * H * M))
        rows, outputs = row_blocks(N, most), []
        for block, part in zip(rows, torch.split(q, most, 2), strict=True):
            seen = self.places.pairs(block, slice(0, M), M, q.device)
            if key_mask is not None:
                seen = seen & key_mask[:, None, None]
            outputs.append(recomputed(self._answers, part, k, v, seen, wanted=len(rows) > 1))
        return torch.cat(outputs, 2)

    def _answers(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """The readings of some queries ``(B, H, n, D)`` of the keys that they see, ``(..., n, M)``."""
        most, nearest = ROUNDING[self.values]
        shared = torch.unflatten(q * q.shape[-1] ** -0.5, 1, (k.shape[1], -1))
        logits = torch.matmul(shared, k[:, :, None].mT).flatten(1, 2).masked_fill(~seen, hidden(q.dtype))
        weights = (logits - logits.amax(-1, keepdim=True)).exp().masked_fill(~seen, 0.0)
        total = weights.sum(-1, keepdim=True)
        few = nearest(weights.detach() * most) / most
        read = torch.matmul(torch.unflatten(few, 1, shared.shape[1:3]), v[:, :, None]).flatten(1, 2)
        return read / total.masked_fill(total == 0, 1.0)


def rounded(x: Tensor, block: int, dtype: str) -> Tensor:
    """x ``(B, H, n, D)`` in a few bits, each block of tokens with a scale; 0 for a block of zeros."""
    n = x.shape[2]
    blocks = torch.unflatten(pad(x, (0, 0, 0, -n % block)), 2, (-1, block))
    return scaled(blocks, (3, 4), dtype).flatten(2, 3)[:, :, :n]


def _coarse(x: Tensor, over: tuple[int, ...], dtype: str) -> Tensor:
    """For the dense form: x rounded under one scale for all numbers along some dimensions."""
    scale = x.abs().amax(over, keepdim=True) / _MOST[dtype]
    scale = torch.where(scale > 0, scale, 1.0)
    return _bits((x / scale).detach(), dtype) * scale


def _bits(x: Tensor, dtype: str) -> Tensor:
    """For the dense form: the nearest representable number, 16 by 16 along the last dimension for 4 bits."""
    if dtype == "int8":
        return x.round()
    if dtype == "float8_e4m3":
        return x.to(torch.float8_e4m3fn).to(x.dtype)
    there = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=x.dtype, device=x.device)
    between, parts = (there[1:] + there[:-1]) / 2, []
    for part in torch.split(x, 16, -1):
        scale = (part.abs().amax(-1, keepdim=True) / 6).to(torch.float8_e4m3fn).to(x.dtype)
        scale = torch.where(scale > 0, scale, 1.0)
        size = (part / scale).abs().contiguous()
        below, above = (torch.bucketize(size, between, right=right) for right in (False, True))
        parts.append(there[torch.where(below % 2 == 0, below, above)] * part.sign() * scale)
    return torch.cat(parts, -1)


GROUP = 16
"""Neighbours that share a scale of their own if a number has 4 bits."""


def whole(x: Tensor) -> Tensor:
    """The nearest whole number, which is one of 8 bits up to 127; between two the even one."""
    return x.round()


def e4m3(x: Tensor) -> Tensor:
    """The nearest number of 4 bits of exponent and 3 of fraction, up to 448."""
    return x.to(torch.float8_e4m3fn).to(x.dtype)


def e2m1(x: Tensor) -> Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6, with a sign; between two the one whose bit of fraction is 0."""
    _, exponent = torch.frexp(x)  # 2^(exponent - 1) is the power of two at or below |x|
    unit = torch.ldexp(torch.ones_like(x), exponent.clamp(min=1) - 2)
    return ((x / unit).round() * unit).clamp(-6.0, 6.0)


def grouped_e2m1(x: Tensor) -> Tensor:
    """x ``(..., n)``, each 16 neighbours with a scale in e4m3 that makes their largest 6, and then :func:`e2m1`.

    Magnitudes up to 6·448.
    """
    n = x.shape[-1]
    groups = torch.unflatten(pad(x, (0, -n % GROUP)), -1, (-1, GROUP))
    scale = e4m3(groups.abs().amax(-1, keepdim=True) / 6)
    scale = torch.where(scale > 0, scale, 1.0)  # numbers too small for a scale become 0
    return (e2m1(groups / scale) * scale).flatten(-2)[..., :n]


ROUNDING: dict[str, tuple[float, Callable[[Tensor], Tensor]]] = {
    "int8": (127.0, whole),
    "float8_e4m3": (448.0, e4m3),
    "float4_e2m1": (6.0 * 448.0, grouped_e2m1),
}
"""By dtype: the largest number under one scale after scaling, and the rounding that follows."""


def scaled(x: Tensor, over: tuple[int, ...], dtype: str) -> Tensor:
    """x rounded under one scale for all numbers along the dimensions ``over``; neighbours are along the last one.

    The scale has a gradient, and rounding has none. Zeros stay zeros.
    """
    most, nearest = ROUNDING[dtype]
    scale = x.abs().amax(over, keepdim=True) / most
    scale = torch.where(scale > 0, scale, 1.0)
    return nearest((x / scale).detach()) * scale
