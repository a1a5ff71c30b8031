"""Products of readers and writers that fade with every token between the two, chunk by chunk.

Token j's writing reaches token i >= j by the factor 2^(g_{j+1} + ... + g_i), g <= 0: one number for all channels, or
one for each. No factor is a quotient of two powers: every exponent is a sum of logarithms of one sign, so that
nothing overflows, however strong a decay is, and numbers after a strong decay keep their digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnbench.catalogue.engines.recurrent.decayed_sums import STRONGEST, weights_between


class Faded(NamedTuple):
    """Decays within the chunks, and of the state in front of them."""

    products: list[list[Tensor]]
    """For each reader x and each writer y the numbers Σ_c x_ic y_jc 2^(g_{j+1,c} + ... + g_ic), ``(G, chunks, c, c)``,
    for j <= i. Entries above the diagonal are undefined.
    """
    begun: Tensor
    """The decay from a chunk's start to each reader, its own included: ``(G, chunks, c, 1 or D)``."""
    until: Tensor
    """The decay from each writer to the end of its chunk; shaped as ``begun``."""


def faded(readers: Sequence[Tensor], writers: Sequence[Tensor], log_decay: Tensor) -> Faded:
    """Products of every reader with every writer, ``(G, chunks, c, D)`` each.

    ``log_decay`` is g in log2, at most 0: ``(G, chunks, c, 1)``, or ``(G, chunks, c, D)`` for c a power of two.
    """
    if log_decay.shape[-1] == 1:
        return _by_token(readers, writers, log_decay[..., 0])
    return faded_by_channel(readers, writers, log_decay)


def _by_token(readers: Sequence[Tensor], writers: Sequence[Tensor], log_decay: Tensor) -> Faded:
    # Differences of sums, which keep their digits in float64.
    since = log_decay.clamp(min=STRONGEST).double().cumsum(-1)
    dtype = readers[0].dtype
    weights = weights_between(since, True, dtype)
    begun, until = (x[..., None].to(dtype).exp2() for x in (since, since[..., -1:] - since))
    return Faded([[x @ y.mT * weights for y in writers] for x in readers], begun, until)


SMALL = 2
"""Largest block that is faster by elementwise products and sums than by a matrix product."""


def faded_by_channel(readers: Sequence[Tensor], writers: Sequence[Tensor], log_decay: Tensor) -> Faded:
    """:func:`faded` with a rate for each channel, ``(G, chunks, c, D)``, c a power of two; zeros above the diagonal.

    A chunk is halved again and again. The product of a token of the later half with one of the earlier half is one of
    two vectors, each of which carries the powers up to the border between the halves.
    """
    x, y = ([each.unsqueeze(3) for each in some] for some in (readers, writers))
    since = log_decay.unsqueeze(3)
    # Both sums are added up, neither is a difference: numbers after a strong decay keep their digits.
    until = torch.zeros_like(since)
    products = [[torch.linalg.vecdot(one, other).unsqueeze(4) for other in y] for one in x]
    while since.shape[2] > 1:
        (early_since, late_since), (early_until, late_until) = (_halves(each) for each in (since, until))
        from_border, to_border = late_since.exp2(), early_until.exp2()
        later = [_halves(one)[1] * from_border for one in x]
        earlier = [_halves(other)[0] * to_border for other in y]
        products = [
            [_joined(one, _products(a, b)) for one, b in zip(row, earlier, strict=True)]
            for row, a in zip(products, later, strict=True)
        ]
        since, until = (
            torch.cat([early_since, late_since + early_since[:, :, :, -1:]], 3),
            torch.cat([early_until + late_since[:, :, :, -1:], late_until], 3),
        )
        x, y = ([torch.unflatten(each, 2, (-1, 2)).flatten(3, 4) for each in some] for some in (x, y))
    return Faded([[one[:, :, 0] for one in row] for row in products], since[:, :, 0].exp2(), until[:, :, 0].exp2())


def faded_values(weights: Tensor, values: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_{j<=i} w_ij 2^(g_{j+1,e} + ... + g_ie) v_je: the channels of the values fade, not those of the products.

    Halved as in :func:`faded_by_channel`.

    Args:
        weights: ``(G, chunks, c, c)``; above the diagonal anything finite.
        values, log_decay: ``(G, chunks, c, E)``, c a power of two.

    Returns:
        ``(G, chunks, c, E)``, and ``begun`` and ``until`` as in :class:`Faded`.
    """
    own, since = values.unsqueeze(3), log_decay.unsqueeze(3)
    until = torch.zeros_like(since)
    out = weights.diagonal(dim1=-2, dim2=-1)[..., None, None] * own
    while since.shape[2] > 1:
        halves, size = since.shape[2], since.shape[3]
        (early_since, late_since), (early_until, late_until) = (_halves(each) for each in (since, until))
        # Block rows of the later halves, block columns of the earlier ones, and of these each pair's own.
        blocks = torch.unflatten(torch.unflatten(weights, 3, (halves, size)), 2, (halves, size))
        across = blocks[:, :, 1::2, :, ::2].diagonal(dim1=2, dim2=4).movedim(-1, 2)
        read = across @ (_halves(own)[0] * early_until.exp2()) * late_since.exp2()
        early, late = _halves(out)
        out, since, until = (
            torch.cat([early, late + read], 3),
            torch.cat([early_since, late_since + early_since[:, :, :, -1:]], 3),
            torch.cat([early_until + late_since[:, :, :, -1:], late_until], 3),
        )
        own = torch.unflatten(own, 2, (-1, 2)).flatten(3, 4)
    return out[:, :, 0], since[:, :, 0].exp2(), until[:, :, 0].exp2()


def _halves(x: Tensor) -> tuple[Tensor, ...]:
    return torch.unflatten(x, 2, (-1, 2)).unbind(3)


def _joined(blocks: Tensor, across: Tensor) -> Tensor:
    """Blocks twice as large: two on the diagonal, ``across`` below, zeros above."""
    left, right = _halves(blocks)
    rows = torch.cat([left, torch.zeros_like(left)], -1), torch.cat([across, right], -1)
    return torch.cat(rows, -2)


def _products(x: Tensor, y: Tensor) -> Tensor:
    if x.shape[-2] > SMALL:
        return x @ y.mT
    products: Tensor = torch.linalg.vecdot(x.unsqueeze(-2), y.unsqueeze(-3))
    return products
