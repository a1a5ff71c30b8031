"""Feature maps of inputs that are changed row by row first, tile by tile, so that no changed copy of them exists."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from attnbench.attention.feature_tiles import FeatureMap, Group


class Prepared(FeatureMap):
    """φ of what ``prepare(x, *parameters)`` makes of each row, without gradients.

    Args:
        prepare: takes x ``(G, c, D)`` and the parameters ``(G, ...)``.
        parameters: ``(B, H, ...)``.
    """

    def __init__(self, features: FeatureMap, prepare: Callable[..., Tensor], parameters: tuple[Tensor, ...]) -> None:
        self.features, self.prepare, self.parameters = features, prepare, parameters
        self.width, self.offset, self.by_feature = features.width, features.offset, features.by_feature

    def of(self, group: Group) -> Prepared:
        return Prepared(self.features, self.prepare, tuple(x[group].flatten(0, 1) for x in self.parameters))

    def at(self, level: Tensor) -> Prepared:
        return Prepared(self.features.at(level), self.prepare, self.parameters)

    def queries(self, x: Tensor, out: Tensor) -> None:
        self.features.queries(self.prepare(x, *self.parameters), out)

    def keys(self, x: Tensor, out: Tensor) -> Tensor | None:
        return self.features.keys(self.prepare(x, *self.parameters), out)

    def queries_grad(self, x: Tensor, features: Tensor, grad: Tensor) -> Tensor:
        raise NotImplementedError
