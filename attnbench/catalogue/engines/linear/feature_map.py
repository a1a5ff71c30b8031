"""The interface of feature maps, and the tiles of queries, keys and values that engines work on.

A tile holds c tokens of G pairs of batch entry and head: ``(G, c, D)`` inputs, ``(G, c, F)`` features. It is small
enough to stay in the cache; the features of a whole sequence never exist in memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from attnbench.catalogue.engines.precision import accumulator, hidden
from attnbench.catalogue.engines.tiling import Group, cut, fill, put


class FeatureMap(ABC):
    """φ with φ(q)·φ(k) in place of exp(q·k/√D); the same for keys and queries unless a subclass says otherwise.

    A row of query features may carry any positive factor, which cancels in the output. Key features come with a log
    weight w to the base 2, ``(G, c, 1)``, or None for w = 0: φ(k) = 2^w · features, so that nothing overflows.
    """

    width: int
    """F, the number of features."""

    def of(self, group: Group) -> FeatureMap:
        """The map for one group of pairs; itself if all share it."""
        return self

    def tiles(self, group: Group, rows: int, like: Tensor, count: int = 1) -> Tiles:
        """The memory for one group's tiles if all queries see the same keys."""
        return Tiles(self, group, rows, like, count)

    @abstractmethod
    def queries(self, x: Tensor, out: Tensor) -> None:
        """Write the features of ``x`` ``(G, c, D)`` into ``out`` ``(G, c, F)``."""

    def keys(self, x: Tensor, out: Tensor) -> Tensor | None:
        """Write the features of ``x`` into ``out`` and return w."""
        self.queries(x, out)
        return None

    @abstractmethod
    def queries_grad(self, x: Tensor, features: Tensor, grad: Tensor) -> Tensor:
        """The gradient of ``x`` from ``grad``, that of its features; it may overwrite ``features`` and ``grad``."""

    def keys_grad(self, x: Tensor, features: Tensor, grad: Tensor) -> Tensor:
        """Like :meth:`queries_grad`, but through 2^w · features."""
        return self.queries_grad(x, features, grad)


class LogKeys(FeatureMap):
    """A map whose key features are their own log weights: :meth:`keys` writes and returns these, ``(G, c, F)``.

    Taken relative to the largest of each feature, no sum underflows. Only if all queries see the same keys.
    """

    @abstractmethod
    def at(self, level: Tensor) -> FeatureMap:
        """The map for queries that makes up for the ``level`` ``(G, 1, F)`` divided out of keys."""


class Tiles:
    """One group's part of the tensors, tile by tile; the features of every tile go into the same memory."""

    def __init__(self, features: FeatureMap, group: Group, rows: int, like: Tensor, count: int = 1) -> None:
        self.features, self.group = features.of(group), group
        batch, heads = group
        self.pairs = (batch.stop - batch.start) * (heads.stop - heads.start)
        self.dtype = accumulator(like.dtype)
        self._memory = like.new_empty(count, self.pairs * rows * features.width, dtype=self.dtype)

    def blank(self, tokens: int, which: int = 0) -> Tensor:
        """``(G, tokens, F)`` uninitialised; contiguous, or its transpose is."""
        return self.laid_out(self._memory[which, : self.pairs * tokens * self.features.width], tokens)

    def laid_out(self, memory: Tensor, tokens: int) -> Tensor:
        """Memory of ``G·tokens·F`` numbers as ``(G, tokens, F)``, token by token."""
        return memory.view(self.pairs, tokens, self.features.width)

    def at(self, level: Tensor) -> None:
        """From here on, make up in queries for the ``level`` divided out of keys, if that is one of each feature."""
        if isinstance(self.features, LogKeys):
            self.features = self.features.at(level)

    def product(self, a: Tensor, b: Tensor, which: int) -> Tensor:
        """a b ``(G, tokens, F)`` in a tile's memory, row by row as oneDNN writes it."""
        return torch.bmm(a, b, out=self.blank(a.shape[1], which))

    def cut(self, x: Tensor, block: slice) -> Tensor:
        return cut(x, self.group, block)

    def put(self, x: Tensor, block: slice, tile: Tensor) -> None:
        put(x, self.group, block, tile)

    def queries(self, q: Tensor, block: slice) -> tuple[Tensor, Tensor]:
        x = self.cut(q, block)
        phi = self.blank(x.shape[1])
        self.features.queries(x, phi)
        return x, phi

    def keys(
        self, k: Tensor, v: Tensor, key_mask: Tensor | None, block: slice, which: int = 0
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The keys, values and key features of the block, and log weights: -inf at padded keys, None if all are 0."""
        x, values, padded = self.cut(k, block), self.cut(v, block), None
        if key_mask is not None:
            batch, heads = self.group
            padded = ~key_mask[batch, None, block, None].expand(-1, heads.stop - heads.start, -1, -1).flatten(0, 1)
            x, values = x.masked_fill(padded, 0.0), values.masked_fill(padded, 0.0)
        phi = self.blank(x.shape[1], which)
        log_weight = self.features.keys(x, phi)
        if padded is not None:
            if log_weight is None:
                log_weight = x.new_zeros(*x.shape[:2], 1)
            log_weight = log_weight.masked_fill_(padded, float("-inf"))
        return x, values, phi, log_weight

    def divide(
        self,
        numerator: Tensor,
        denominator: Tensor,
        top: Tensor | None,
        out: Tensor,
        divisors: Tensor,
        block: slice,
        *,
        in_place: bool = False,
    ) -> None:
        """Write the quotient into ``out`` and the divisor into ``divisors``.

        A query without keys gives 0; a denominator that underflows gives NaN, and a negative one keeps its sign.

        Args:
            top: the largest log weight a query has seen (as in ``KeySums.empty``), or None if no key is padded.
            in_place: the numerator is already in the block of ``out``.
        """
        target, divisor = out[(*self.group, block)], divisors[(*self.group, block)]
        divisor.copy_(denominator.view_as(divisor))
        if top is not None:
            keyless = top.amax(-1, keepdim=True) <= hidden(top.dtype) / 2
            divisor.masked_fill_(keyless.view(*divisor.shape[:2], -1, 1), 1.0)
        if in_place:
            target.div_(divisor)
        else:
            fill(target, torch.div, numerator.view_as(target), divisor)


class ColumnTiles(Tiles):
    """Tiles written feature by feature for all tokens: faster for products of two channels, for instance."""

    def laid_out(self, memory: Tensor, tokens: int) -> Tensor:
        return memory.view(self.pairs, self.features.width, tokens).mT

    def product(self, a: Tensor, b: Tensor, which: int) -> Tensor:
        out = self.blank(a.shape[1], which)
        torch.bmm(b.mT, a.mT, out=out.mT)
        return out


class Prepared(FeatureMap):
    """φ of ``prepare(x, *parameters)``, without gradients: x ``(G, c, D)``, parameters ``(B, H, ...)``."""

    def __init__(self, features: FeatureMap, prepare: Callable[..., Tensor], parameters: tuple[Tensor, ...]) -> None:
        self.features, self.prepare, self.parameters = features, prepare, parameters
        self.width = features.width

    def of(self, group: Group) -> Prepared:
        return type(self)(self.features, self.prepare, tuple(x[group].flatten(0, 1) for x in self.parameters))

    def queries(self, x: Tensor, out: Tensor) -> None:
        self.features.queries(self.prepare(x, *self.parameters), out)

    def keys(self, x: Tensor, out: Tensor) -> Tensor | None:
        return self.features.keys(self.prepare(x, *self.parameters), out)

    def queries_grad(self, x: Tensor, features: Tensor, grad: Tensor) -> Tensor:
        raise NotImplementedError


class PreparedLogKeys(Prepared, LogKeys):
    """:class:`Prepared` for :class:`LogKeys`."""

    features: LogKeys

    def at(self, level: Tensor) -> FeatureMap:
        return Prepared(self.features.at(level), self.prepare, self.parameters)
