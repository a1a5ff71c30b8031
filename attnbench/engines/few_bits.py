"""Numbers as a few bits can say them, kept in the dtype that they had."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

GROUP = 16
"""Neighbours that share a scale of their own where a number has 4 bits."""


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
    scale = torch.where(scale > 0, scale, 1.0)  # what is too small for a scale becomes 0
    return (e2m1(groups / scale) * scale).flatten(-2)[..., :n]


ROUNDING: dict[str, tuple[float, Callable[[Tensor], Tensor]]] = {
    "int8": (127.0, whole),
    "float8_e4m3": (448.0, e4m3),
    "float4_e2m1": (6.0 * 448.0, grouped_e2m1),
}
"""By dtype: what the largest number under one scale becomes, and what is done with the numbers after that."""


def scaled(x: Tensor, over: tuple[int, ...], dtype: str) -> Tensor:
    """x rounded under one scale for all numbers along the dimensions ``over``; neighbours are along the last one.

    The scale has a gradient, and rounding has none. Zeros stay zeros.
    """
    most, nearest = ROUNDING[dtype]
    scale = x.abs().amax(over, keepdim=True) / most
    scale = torch.where(scale > 0, scale, 1.0)
    return nearest((x / scale).detach()) * scale
