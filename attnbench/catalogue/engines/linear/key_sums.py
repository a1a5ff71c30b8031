"""Running sums of linear attention over keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnbench.catalogue.engines.linear.feature_map import FeatureMap, LogKeys
from attnbench.catalogue.engines.precision import accumulator, hidden
from attnbench.catalogue.engines.products import best_for, laid_out
from attnbench.catalogue.engines.tiling import Group, within


def weigh(values: Tensor, weight: Tensor | None, spare: Tensor | None = None) -> Tensor:
    """Values times weights, ``(G, c, E)``, laid out for products.

    ``spare`` is contiguous memory that may be overwritten, ``(G, ·, E)`` with at least c rows.
    """
    if weight is None:
        return laid_out(values, spare)
    return values * weight if spare is None else torch.mul(values, weight, out=within(spare, values.shape))


def weigh_ones(weight: Tensor | None, phi: Tensor) -> Tensor:
    """Σ weight · φ over the tokens, ``(G, 1, F)``; None: all weights are 1."""
    return phi.sum(1, keepdim=True) if weight is None else torch.bmm(weight.mT, phi)


def relative(phi: Tensor, log_weight: Tensor, top: Tensor) -> tuple[Tensor, Tensor | None]:
    """Features and weights ``(G, c, 1)``, relative to the largest; for :class:`LogKeys`, features and None."""
    if log_weight is phi:
        return log_weight.sub_(top).exp2_(), None
    return phi, (log_weight - top).exp2_()


class KeySums(NamedTuple):
    """Sums over keys, for each pair of batch entry and head."""

    of_values: Tensor
    """Σ v φ(k)ᵀ / 2^top, ``(G, E, F)``; in memory ``(G, F, E)``, since a product transposes its right side slowly."""
    of_ones: Tensor
    """Σ φ(k)ᵀ / 2^top, ``(G, 1, F)``. Kept apart, since oneDNN takes a quarter longer for 65 columns than for 64."""
    top: Tensor
    """The largest log weight, ``(G, 1, 1)``; that of each feature, ``(G, 1, F)``, for :class:`LogKeys`."""

    @classmethod
    def empty(cls, like: Tensor, values: int, features: FeatureMap, *count: int) -> KeySums:
        """Sums without keys. The largest log weight is finite, so that the difference of two such is 0 and not NaN."""
        dtype, levels = accumulator(like.dtype), features.width if isinstance(features, LogKeys) else 1
        return cls(
            like.new_zeros(*count, features.width, values, dtype=dtype).mT,
            like.new_zeros(*count, 1, features.width, dtype=dtype),
            like.new_full((*count, 1, levels), hidden(dtype), dtype=dtype),
        )

    def of(self, group: Group) -> KeySums:
        """Views of one group of ``(B, H, ...)``, with its pairs in one dimension."""
        return KeySums(*(each[group].flatten(0, 1) for each in self))

    def add_(self, values: Tensor, phi: Tensor, log_weight: Tensor | None, spare: Tensor | None = None) -> None:
        """Add a tile of keys; ``spare`` as in :func:`weigh`."""
        weight = None
        if log_weight is None:
            self.top.zero_()
        else:
            top = torch.maximum(self.top, log_weight.amax(1, keepdim=True))
            decay = (self.top - top).exp2_()
            phi, weight = relative(phi, log_weight, top)
            self.of_values.mul_(decay)
            self.of_ones.mul_(decay)
            self.top.copy_(top)
        keys, weighed = phi.mT, weigh(values, weight, spare)
        with best_for(keys, weighed):
            self.of_values.mT.baddbmm_(keys, weighed)
        self.of_ones.add_(weigh_ones(weight, phi))

    def read(self, phi: Tensor, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Numerators ``(G, c, E)``, in ``into`` if given, and denominators ``(G, c, 1)``; overwrites ``phi``."""
        return torch.bmm(phi, self.of_values.mT, out=into), phi.mul_(self.of_ones).sum(-1, keepdim=True)
