"""The cache of keys and values against which one query at a time is answered."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnbench.engines.precision import accumulator
from attnbench.position_bias import PositionBias
from attnbench.sink import Sink
from attnbench.visible import Visible


class Cache(NamedTuple):
    """Room for ``capacity`` keys and values, the first ``length`` of them filled."""

    k: Tensor
    """``(B, K, capacity, D)``."""
    v: Tensor
    length: int

    @classmethod
    def of(cls, k: Tensor, v: Tensor, capacity: int) -> Cache:
        """A cache with room for ``capacity`` tokens (at least those of k) that holds k and v ``(B, K, n, D)``."""
        n = k.shape[2]
        room_k, room_v = (x.new_zeros(*x.shape[:2], max(capacity, n), x.shape[3]) for x in (k, v))
        room_k[:, :, :n], room_v[:, :, :n] = k, v
        return cls(room_k, room_v, n)

    def append(self, k: Tensor, v: Tensor) -> Cache:
        """The cache with one more key and value ``(B, K, 1, D)``, written in place; a full cache doubles its room."""
        cache = self if self.length < self.k.shape[2] else Cache.of(self.k, self.v, 2 * self.length + 1)
        cache.k[:, :, self.length : self.length + 1] = k
        cache.v[:, :, self.length : self.length + 1] = v
        return Cache(cache.k, cache.v, self.length + 1)

    @property
    def keys(self) -> Tensor:
        """``(B, K, length, D)``, a view."""
        return self.k[:, :, : self.length]

    @property
    def values(self) -> Tensor:
        return self.v[:, :, : self.length]

    def unused(self) -> tuple[Tensor, Tensor]:
        """The room behind the last key."""
        return self.k[:, :, self.length :], self.v[:, :, self.length :]


class AndRecent(NamedTuple):
    """A cache, and the last tokens of what a short convolution reads."""

    cache: Cache
    recent: Tensor
    """``(B, width - 1, ·)``, zeros in front of the first."""


def attend(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None = None, sink: Sink | None = None) -> Tensor:
    """Softmax attention of the last query ``(B, H, 1, D)`` to k and v ``(B, K, n, D)``; statistics in float32 at least.

    Args:
        added: what is added to the logits, ``(H, 1, n)``.
        sink: a logit of each head without a key.

    Returns:
        ``(B, H, 1, E)``. Head h reads head h // (H / K) of k and v; heads that share make the rows of one product.
    """
    logit = None if sink is None else sink.logit[:, None, None]  # one column more
    if k.shape[1] != q.shape[1]:
        shared = (k.shape[1], q.shape[1] // k.shape[1])
        added, logit = (None if x is None else torch.unflatten(x.squeeze(-2), -2, shared) for x in (added, logit))
        rows = torch.unflatten(q.squeeze(-2), -2, shared)
        return _softmax(rows, k, v, added, logit).flatten(1, 2)[:, :, None]
    return _softmax(q, k, v, added, logit)


def _softmax(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, logit: Tensor | None) -> Tensor:
    """The further logit is ``(·, n, 1)`` where those of the keys are ``(B, ·, n, m)``."""
    accumulate = accumulator(q.dtype)
    logits = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(2, 3)).to(accumulate)
    if added is not None:
        logits = logits + added
    return weighed(logits, v, logit)


def weighed(logits: Tensor, v: Tensor, sink: Tensor | None = None) -> Tensor:
    """The mean of v ``(B, K, m, E)`` by the softmax of logits ``(B, K, n, m)``, ``(B, K, n, E)`` in v's dtype.

    Args:
        sink: a logit of each head, or of each of its rows, without a key: ``(K, 1 or n, 1)``.
    """
    if sink is None:
        return torch.matmul(logits.softmax(-1).to(v.dtype), v)
    weights = torch.cat((logits, sink.to(logits.dtype).expand(*logits.shape[:-1], 1)), -1).softmax(-1)
    return torch.matmul(weights[..., :-1].to(v.dtype), v)


def pick(x: Tensor, parts: list[slice]) -> Tensor:
    """Rows of x ``(..., n, d)`` in the ranges ``parts``, side by side; a view if there is only one range."""
    pieces = [x[..., part, :] for part in parts]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -2)


def last_row(bias: PositionBias, n: int, dtype: torch.dtype) -> Tensor:
    """The bias ``(H, 1, n)`` of the last of n queries."""
    row: Tensor = bias(slice(n - 1, n), slice(0, n), dtype)
    return row


class CachedDecoding:
    """Decoding for variants whose every query sees all earlier keys, with their ``position_bias`` and ``sink``, if any.

    Where a mask hides some of these, ``visible`` says which. The state is the :class:`Cache`, of all keys.
    """

    capacity: int
    """Tokens for which room is made at once."""
    visible: Visible | None = None

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Cache:
        return Cache.of(k, v, self.capacity)

    def step(self, state: Cache, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Cache]:
        state = state.append(k, v)
        bias: PositionBias | None = getattr(self, "position_bias", None)
        added = None if bias is None else last_row(bias, state.length, accumulator(q.dtype))
        sink: Sink | None = getattr(self, "sink", None)
        if first := self.first_seen(state):
            added = None if added is None else added[..., first:]
            return attend(q, state.keys[:, :, first:], state.values[:, :, first:], added, sink), state
        return attend(q, state.keys, state.values, added, sink), state

    def first_seen(self, state: Cache) -> int:
        """The first key that the last token sees; the token itself is the last."""
        return 0 if self.visible is None else self.visible.span(state.length - 1, state.length)[0]
