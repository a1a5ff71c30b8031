"""A cache of keys and values for decoding."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnbench.catalogue.engines.precision import accumulator
from attnbench.contract.problem.position_bias import PositionBias
from attnbench.contract.problem.sink import Sink
from attnbench.contract.problem.visible import Visible


class Cache(NamedTuple):
    """Room for ``capacity`` keys and values, the first ``length`` of them filled."""

    k: Tensor
    """``(B, K, capacity, D)``."""
    v: Tensor
    length: int

    @classmethod
    def of(cls, k: Tensor, v: Tensor, capacity: int) -> Cache:
        """A cache with room for at least ``capacity`` tokens that holds k and v ``(B, K, n, D)``."""
        n = k.shape[2]
        room_k, room_v = (x.new_zeros(*x.shape[:2], max(capacity, n), x.shape[3]) for x in (k, v))
        room_k[:, :, :n], room_v[:, :, :n] = k, v
        return cls(room_k, room_v, n)

    def append(self, k: Tensor, v: Tensor) -> Cache:
        """Append one key and value ``(B, K, 1, D)`` in place; a full cache doubles its room."""
        cache = self if self.length < self.k.shape[2] else Cache.of(self.k, self.v, 2 * self.length + 1)
        cache.k[:, :, self.length : self.length + 1] = k
        cache.v[:, :, self.length : self.length + 1] = v
        return Cache(cache.k, cache.v, self.length + 1)

    @property
    def keys(self) -> Tensor:
        return self.k[:, :, : self.length]

    @property
    def values(self) -> Tensor:
        return self.v[:, :, : self.length]

    def unused(self) -> tuple[Tensor, Tensor]:
        return self.k[:, :, self.length :], self.v[:, :, self.length :]


class AndRecent(NamedTuple):
    """A cache, and the inputs of a short convolution."""

    cache: Cache
    recent: Tensor
    """``(B, width - 1, ·)``, the last tokens, after zeros."""


def attend(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None = None, sink: Sink | None = None) -> Tensor:
    """Softmax attention of the last query ``(B, H, 1, D)`` to k and v ``(B, K, n, D)``; statistics in float32 at least.

    ``added`` ``(H, 1, n)`` is added to the logits. Head h reads head h // (H / K) of k and v; heads that share make the
    rows of one product. Returns ``(B, H, 1, E)``.
    """
    logit = None if sink is None else sink.logit[:, None, None]  # one column more
    if k.shape[1] != q.shape[1]:
        shared = (k.shape[1], q.shape[1] // k.shape[1])
        added, logit = (None if x is None else torch.unflatten(x.squeeze(-2), -2, shared) for x in (added, logit))
        rows = torch.unflatten(q.squeeze(-2), -2, shared)
        return _softmax(rows, k, v, added, logit).flatten(1, 2)[:, :, None]
    return _softmax(q, k, v, added, logit)


def _softmax(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, logit: Tensor | None) -> Tensor:
    """Attention with logits ``(B, ·, n, m)`` and a further logit ``(·, n, 1)``."""
    accumulate = accumulator(q.dtype)
    logits = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(2, 3)).to(accumulate)
    if added is not None:
        logits = logits + added
    return weighed(logits, v, logit)


def weighed(logits: Tensor, v: Tensor, sink: Tensor | None = None) -> Tensor:
    """The mean of v ``(B, K, m, E)`` by the softmax of logits ``(B, K, n, m)``, ``(B, K, n, E)`` in v's dtype.

    ``sink`` is a logit of each head, or of each of its rows, without a key: ``(K, 1 or n, 1)``.
    """
    if sink is None:
        return torch.matmul(logits.softmax(-1).to(v.dtype), v)
    weights = torch.cat((logits, sink.to(logits.dtype).expand(*logits.shape[:-1], 1)), -1).softmax(-1)
    return torch.matmul(weights[..., :-1].to(v.dtype), v)


def pick(x: Tensor, parts: list[slice]) -> Tensor:
    """Rows of x ``(..., n, d)`` in the ranges ``parts``, joined; a view for a single range."""
    pieces = [x[..., part, :] for part in parts]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -2)


def last_row(bias: PositionBias, n: int, dtype: torch.dtype) -> Tensor:
    """The bias ``(H, 1, n)`` of the last of n queries."""
    row: Tensor = bias(slice(n - 1, n), slice(0, n), dtype)
    return row


class CachedDecoding:
    """Decoding for variants without forgetting: each query sees all earlier keys, or those that ``visible`` marks.

    ``position_bias`` and ``sink`` count, if any. The state is the :class:`Cache` of all keys.
    """

    capacity: int
    """Tokens for which room is made at first."""
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
        """The first key that the last token sees."""
        return 0 if self.visible is None else self.visible.span(state.length - 1, state.length)[0]
