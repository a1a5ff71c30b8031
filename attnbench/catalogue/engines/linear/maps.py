"""Feature maps as plain functions that autograd differentiates: x ``(..., D)`` to ``(..., F)``.

Shorter than a :class:`~attnbench.catalogue.engines.linear.feature_map.FeatureMap`, and without its care for numbers at
the edge.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnbench.catalogue.engines.precision import unit

Map = Callable[[Tensor], Tensor]


def elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1, with all digits where it is near 0."""
    return x.clamp(max=0.0).exp() + x.clamp(min=0.0)


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)²."""
    return x.relu().square()


def unit_and_one(x: Tensor) -> Tensor:
    """[1, x/‖x‖]: products are 1 plus the cosine of the angle; 0 stays 0."""
    return torch.cat([torch.ones_like(x[..., :1]), unit(x)], -1)


def second_power(x: Tensor) -> Tensor:
    """1 + D + D² features whose products are (1 + s)² with s = x·y/√D."""
    return _two_terms(x, 2.0**0.5, 1.0)


def products(x: Tensor) -> Tensor:
    """D² features whose products are (x·y)²."""
    return (x[..., :, None] * x[..., None, :]).flatten(-2)


def exponential_series(x: Tensor) -> Tensor:
    """1 + D + D² features whose products are 1 + s + s²/2 with s = x·y/√D, three terms of the series of exp(s)."""
    return _two_terms(x, 1.0, 0.5**0.5)


def spiky(x: Tensor) -> Tensor:
    """Softmax of [x, -x], 2D features."""
    return torch.cat([x, -x], -1).softmax(-1)


def _two_terms(x: Tensor, linear: float, quadratic: float) -> Tensor:
    x = x * x.shape[-1] ** -0.25
    return torch.cat([torch.ones_like(x[..., :1]), linear * x, quadratic * products(x)], -1)
