"""Pooling as token mixing: each token against the average of its neighbours."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad

from attnbench.attention.precision import accumulator
from attnbench.errors import UsageError
from attnbench.shape import Shape
from attnbench.variant import No, Traits, register


@register(
    "pooling",
    kind="mixer",
    family="mixing",
    source="Yu et al. 2022, arXiv:2111.11418, section 3.2",
    formula="mean of x_j over |i - j| <= (pool - 1)/2, minus x_i",
    cost="O(n·d)",
    traits=Traits(
        target="other",
        cross=No("a token is averaged with its own neighbours; there is no second sequence"),
        bias=No("there are no logits: all tokens of a window weigh the same"),
        rows_sum_to_one=False,
        decode=True,
    ),
    settings=("pool=5", "pool=15"),
)
class Pooling(nn.Module):
    """Local average minus the token itself; nothing to learn.

    Yu et al. 2022, "MetaFormer is Actually What You Need for Vision", the token mixing of PoolFormer, along one axis:
    an average over ``pool`` tokens side by side, stride 1, from which the token is subtracted because the residual path
    around the layer adds it; 3 tokens in the paper. x is ``(B, N, C)`` and so is the output; there are no parameters
    and no projections.

    The window is centred, or holds the last ``pool`` tokens where ``shape.causal``. Only tokens that are there count:
    at the ends and beside padding an average is over fewer of them. A token with no real one in its window gives 0.
    Sums of windows are put together from sums of 1, 2, 4, ... tokens, in float32 at least. Decoding keeps the last
    ``pool - 1`` tokens.

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

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """x ``(B, N, C)`` of any length; ``key_mask`` ``(B, N)``, True where a token is real."""
        accumulate = accumulator(x.dtype)
        if key_mask is None:
            real = torch.ones(1, x.shape[1], 1, dtype=accumulate, device=x.device)
        else:
            real = key_mask[:, :, None].to(accumulate)
            x = x.masked_fill(~key_mask[:, :, None], 0.0)
        mean = self._window_sums(x.to(accumulate)) / self._window_sums(real).clamp(min=1)
        return (mean - x).to(x.dtype)

    def _window_sums(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        back, ahead = min(self.back, n - 1), min(self.ahead, n - 1)
        run = pad(x, (0, 0, back, ahead))  # row j: the sum of ``length`` tokens from j on
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

    def begin(self, x: Tensor) -> tuple[Tensor]:
        """x ``(B, n, C)``, n >= 0."""
        return (x[:, max(0, x.shape[1] - self.back) :].clone(),)  # not a view that keeps the whole prompt alive

    def step(self, state: tuple[Tensor], x: Tensor) -> tuple[Tensor, tuple[Tensor]]:
        """x ``(B, 1, C)``."""
        window = torch.cat((state[0], x), 1)
        accumulate = accumulator(x.dtype)
        mean = window.mean(1, keepdim=True, dtype=accumulate)
        return (mean - x).to(x.dtype), self.begin(window)

    def dense(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """The product with the N × N matrix of averages."""
        B, N, _ = x.shape
        position = torch.arange(N, device=x.device)
        distance = position - position[:, None]
        inside = ((-self.back <= distance) & (distance <= self.ahead)).expand(B, N, N)
        if key_mask is not None:
            inside = inside & key_mask[:, None]
            x = x.masked_fill(~key_mask[:, :, None], 0.0)
        inside = inside.to(x.dtype)
        return inside / inside.sum(-1, keepdim=True).clamp(min=1) @ x - x
