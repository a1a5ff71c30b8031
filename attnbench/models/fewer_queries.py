"""Layers with outputs shorter than their inputs: one query stands for several tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from attnbench.models.crossing import Crossing, Taking


class FewerQueries(nn.Module):
    """Attention of one query for every ``stride`` tokens: ``(B, N, C)`` to ``(B, ⌈N / stride⌉, C)``.

    The query is made of the mean of these tokens; keys and values are made of every token. From Dai et al. 2020,
    arXiv:2006.03236, section 2.2, whose blocks open with such a layer.
    """

    def __init__(self, crossing: Crossing | Taking, stride: int) -> None:
        super().__init__()
        self.crossing = crossing
        self.stride = stride

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Attend over x ``(B, N, C)``; ``key_mask`` is ``(B, N)``, True where a token is real."""
        y: Tensor = self.crossing(means(x, self.stride, key_mask), x, key_mask=key_mask)
        return y


def means(x: Tensor, stride: int, key_mask: Tensor | None = None) -> Tensor:
    """The mean of every ``stride`` tokens of x ``(B, N, C)``, ``(B, ⌈N / stride⌉, C)``; fewer tokens at the end.

    Only tokens that are real by ``key_mask`` ``(B, N)`` count; the mean of none of them is 0.
    """
    if stride == 1:
        return x
    more = -x.shape[1] % stride
    real = x.new_ones(1, x.shape[1], 1) if key_mask is None else key_mask[:, :, None].to(x.dtype)
    x = x if key_mask is None else x.masked_fill(~key_mask[:, :, None], 0.0)
    total, count = (torch.unflatten(pad(one, (0, 0, 0, more)), 1, (-1, stride)).sum(2) for one in (x, real))
    return total / count.clamp(min=1)


def remaining(key_mask: Tensor | None, stride: int) -> Tensor | None:
    """The means with a real token: ``(B, ⌈N / stride⌉)`` of ``(B, N)``."""
    if key_mask is None or stride == 1:
        return key_mask
    return torch.unflatten(pad(key_mask, (0, -key_mask.shape[1] % stride)), 1, (-1, stride)).any(2)
