"""Pooling as token mixing: the average of each token's neighbours, minus the token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import accumulator
from attnbench.catalogue.engines.tiling import budget, tiles
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import No, Traits, register
from attnbench.errors import UsageError


@register(
    "pooling",
    kind="mixer",
    family="mixing",
    source="Yu et al. 2022, arXiv:2111.11418, section 3.2",
    formula="mean of x_j over |i - j| <= (pool - 1)/2, minus x_i",
    cost="O(n·d)",
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        cross=No("a token is averaged with its own neighbours; there is no second sequence"),
        bias=No("there are no logits: all tokens of a window weigh the same"),
        rows_sum_to_one=False,
        decode=True,
        given=(("causal=true", {"own_form": "the window holds the last tokens; the paper's is centred"}),),
    ),
    settings=("pool=5", "pool=15"),
)
class Pooling(nn.Module):
    """Local average minus the token itself; nothing to learn.

    Yu et al. 2022, "MetaFormer is Actually What You Need for Vision", the token mixing of PoolFormer, along one axis:
    an average over ``pool`` tokens side by side, stride 1; 3 tokens in the paper. The token itself is subtracted
    because the residual path around the layer adds it. x is ``(B, N, C)`` and so is the output; there are no parameters
    and no projections.

    The window is centred, or holds the last ``pool`` tokens if ``shape.causal``. Only tokens that are there count: at
    the ends and near padding, fewer are averaged. A token with no real one in its window gives 0. Sums of windows are
    put together from sums of 1, 2, 4, ... tokens, in float32 at least. Decoding keeps the last ``pool - 1`` tokens.

    Differs from the paper: one axis of tokens, where images have two; causal windows and padding are this project's.

    Raises:
        UsageError: an even ``pool``, unless causal.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        pool: Annotated[int, Field(ge=2, description="tokens in a window, the token itself included")] = 3,
    ) -> None:
        super().__init__()
        if pool % 2 == 0 and not shape.causal:
            raise UsageError(f"pooling: option pool={pool} must be odd: it is centred on the token")
        self.back, self.ahead = (pool - 1, 0) if shape.causal else (pool // 2, pool // 2)

    def dense(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        B, N, _ = x.shape
        position = torch.arange(N, device=x.device)
        distance = position - position[:, None]
        inside = ((-self.back <= distance) & (distance <= self.ahead)).expand(B, N, N)
        if key_mask is not None:
            inside = inside & key_mask[:, None]
            x = x.masked_fill(~key_mask[:, :, None], 0.0)
        inside = inside.to(x.dtype)
        return inside / inside.sum(-1, keepdim=True).clamp(min=1) @ x - x

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        real = torch.ones(1, x.shape[1], 1, dtype=accumulator(x.dtype), device=x.device)
        if key_mask is not None:
            real = key_mask[:, :, None].to(real.dtype)
        (x,) = emptied(key_mask, x)
        counts = _sums_inside(real, self.back, self.ahead, slice(0, real.shape[1])).clamp(min=1)
        out: Tensor = _Pool.apply(x, counts, self.back, self.ahead)  # type: ignore[no-untyped-call]  # untyped in torch
        return out

    def begin(self, x: Tensor) -> tuple[Tensor]:
        return (x[:, max(0, x.shape[1] - self.back) :].clone(),)  # not a view that keeps the whole prompt alive

    def step(self, state: tuple[Tensor], x: Tensor) -> tuple[Tensor, tuple[Tensor]]:
        window = torch.cat((state[0], x), 1)
        accumulate = accumulator(x.dtype)
        mean = window.mean(1, keepdim=True, dtype=accumulate)
        return (mean - x).to(x.dtype), self.begin(window)


class _Pool(torch.autograd.Function):
    """Sums of windows divided by their counts, minus x. Tile by tile, since little is computed per number read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Tensor, back: int, ahead: int) -> Tensor:
        ctx.save_for_backward(counts)
        ctx.back, ctx.ahead = back, ahead
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for batch, near, own, inside in _tiles(x, back, ahead):
            tile = x[batch, near].to(counts.dtype)
            mean = _sums_inside(tile, back, ahead, inside) / _of(counts, batch)[:, own]
            torch.sub(mean, tile[:, inside], out=out[batch, own])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (counts,) = ctx.saved_tensors
        dx = torch.empty_like(grad, memory_format=torch.contiguous_format)
        # A token's gradient comes from all tokens in its own window turned round: their windows hold it.
        for batch, near, own, inside in _tiles(grad, ctx.ahead, ctx.back):
            tile = grad[batch, near].to(counts.dtype)
            sums = _sums_inside(tile / _of(counts, batch)[:, near], ctx.ahead, ctx.back, inside)
            torch.sub(sums, tile[:, inside], out=dx[batch, own])
        return dx, None, None, None


def _of(counts: Tensor, batch: slice) -> Tensor:
    return counts if len(counts) == 1 else counts[batch]


def _tiles(x: Tensor, back: int, ahead: int) -> Iterator[tuple[slice, slice, slice, slice]]:
    """Tiles of ``(B, N, C)``: examples, the tokens in reach, those of the tile, and the latter among the former."""
    B, N, C = x.shape
    most = budget("pooling.tokens", x.device)
    for batch, a, b in tiles(B, N, C, most, step=max(most // C, 4 * (back + ahead))):
        first = max(0, a - back)
        yield batch, slice(first, min(N, b + ahead)), slice(a, b), slice(a - first, b - first)


def _sums_inside(x: Tensor, back: int, ahead: int, inside: slice) -> Tensor:
    """:func:`_sums` for some of the tokens. Copies x only if a window ends beyond it."""
    n, most = inside.stop - inside.start, x.shape[1] - 1
    back, ahead = min(back, most), min(ahead, most)
    beyond = max(0, back - inside.start), max(0, inside.stop + ahead - x.shape[1])
    first = inside.start - back + beyond[0]
    run = (pad(x, (0, 0, *beyond)) if any(beyond) else x)[:, first:]  # row j is the sum of ``length`` tokens from j on
    left, start, length = back + 1 + ahead, 0, 1
    sums = None
    while left:
        if left & 1:
            part = run[:, start : start + n]
            sums = part if sums is None else sums + part
            start += length
        left >>= 1
        if left:
            run = run[:, :-length] + run[:, length:]
            length *= 2
    assert sums is not None
    return sums
