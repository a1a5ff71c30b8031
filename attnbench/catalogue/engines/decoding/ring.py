"""A ring buffer of the last keys and values."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from attnbench.catalogue.engines.decoding.kv_cache import Cache


class Ring(NamedTuple):
    """The last ``size`` keys and values; token j is in slot j mod ``size``."""

    k: Tensor
    """``(B, H, slots, D)``; slots not yet filled mean nothing."""
    v: Tensor
    length: int
    """Tokens seen so far."""
    size: int

    @classmethod
    def of(cls, k: Tensor, v: Tensor, size: int, room: int) -> Ring:
        """A ring with the last of k, v ``(B, H, n, D)``; starts with at least ``min(size, room)`` slots."""
        first = max(0, k.shape[2] - size)
        last_k, last_v = (x[:, :, first:].roll(first % size, 2) for x in (k, v))
        cache = Cache.of(last_k, last_v, min(size, room))
        return cls(cache.k, cache.v, k.shape[2], size)

    def append(self, k: Tensor, v: Tensor) -> Ring:
        """Append one key and value ``(B, H, 1, D)`` in place; a full ring overwrites the oldest."""
        if self.length < self.size:
            cache = Cache(self.k, self.v, self.length).append(k, v)
            return Ring(cache.k, cache.v, cache.length, self.size)
        slot = self.length % self.size
        self.k[:, :, slot : slot + 1] = k
        self.v[:, :, slot : slot + 1] = v
        return Ring(self.k, self.v, self.length + 1, self.size)

    @property
    def overwrites(self) -> tuple[str, ...]:
        return ("k", "v")

    @property
    def keys(self) -> Tensor:
        return self.k[:, :, : min(self.length, self.size)]

    @property
    def values(self) -> Tensor:
        return self.v[:, :, : min(self.length, self.size)]

    def unused(self) -> tuple[Tensor, Tensor]:
        filled = min(self.length, self.size)
        return self.k[:, :, filled:], self.v[:, :, filled:]
