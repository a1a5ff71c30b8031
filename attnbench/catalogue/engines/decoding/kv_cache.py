"""A cache of keys and values for decoding."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnbench.catalogue.engines.decoding.pages import Paged
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
        """Append keys and values ``(B, K, n, D)`` in place; a cache without room for them doubles."""
        end = self.length + k.shape[2]
        cache = self.grown(end)
        cache.k[:, :, self.length : end] = k
        cache.v[:, :, self.length : end] = v
        return Cache(cache.k, cache.v, end)

    def grown(self, end: int) -> Cache:
        """A cache with room for ``end`` tokens: itself, if it has that."""
        return self if end <= self.k.shape[2] else Cache.of(self.k, self.v, self.length + end)

    def put(self, places: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v ``(B, K, n, ·)`` in place, each sequence at ``places`` ``(B, n)`` of its own."""
        rows = torch.arange(len(k), device=k.device)[:, None]
        self.k[rows, :, places], self.v[rows, :, places] = k.transpose(1, 2), v.transpose(1, 2)

    @property
    def keys(self) -> Tensor:
        return self.k[:, :, : self.length]

    @property
    def values(self) -> Tensor:
        return self.v[:, :, : self.length]

    def unused(self) -> tuple[Tensor, Tensor]:
        return self.k[:, :, self.length :], self.v[:, :, self.length :]


class Unequal(NamedTuple):
    """A cache of sequences of unequal length; what lies behind the end of a sequence means nothing."""

    cache: Cache | Paged
    """As long as the longest sequence."""
    lengths: Tensor
    """``(B,)``."""

    def append(self, k: Tensor, v: Tensor) -> Unequal:
        """Append keys and values ``(B, K, n, ·)`` in place, each sequence's at its own end."""
        n, end = k.shape[2], self.cache.length + k.shape[2]
        cache = self.cache.grown(end)
        cache.put(self.lengths[:, None] + torch.arange(n, device=k.device), k, v)
        return Unequal(cache._replace(length=end), self.lengths + n)

    def seen(self, rows: int) -> Tensor:
        """The keys that each of the last ``rows`` tokens of a sequence sees, ``(B, 1, rows, n)`` bool."""
        n, device = self.cache.length, self.lengths.device
        last = self.lengths[:, None] - rows + torch.arange(rows, device=device)
        return torch.arange(n, device=device) <= last[:, None, :, None]

    def held_bytes(self) -> int:
        cache = self.cache
        held = cache.held_bytes(self.lengths) if isinstance(cache, Paged) else cache.k.nbytes + cache.v.nbytes
        return held + self.lengths.nbytes


class AndRecent(NamedTuple):
    """A cache, and the inputs of a short convolution."""

    cache: Cache
    recent: Tensor
    """``(B, width - 1, ·)``, the last tokens, after zeros."""


def attend(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None = None, sink: Sink | None = None) -> Tensor:
    """Softmax attention of the last queries ``(B, H, r, D)`` to k and v ``(B, K, n, D)``.

    Statistics are in float32 at least. ``added`` ``(H or 1, r, n)``, or that of each example, is added to the logits.
    Head h reads head h // (H / K) of k and v; heads that share make the rows of one product. Returns ``(B, H, r, E)``.
    """
    logit = None if sink is None else sink.logit[:, None, None]  # one column more
    (B, H, r), K = q.shape[:3], k.shape[1]
    if K != H:
        of_shared = partial(_rows_of_shared, H=H, K=K, r=r)
        rows = _softmax(q.reshape(B, K, H // K * r, -1), k, v, of_shared(added), of_shared(logit))
        return rows.reshape(B, H, r, -1)
    return _softmax(q, k, v, added, logit)


def _rows_of_shared(x: Tensor | None, *, H: int, K: int, r: int) -> Tensor | None:
    """x ``(..., H or 1, r or 1, n)`` as ``(..., K, H / K · r, n)``."""
    return None if x is None else x.expand(*x.shape[:-3], H, r, -1).reshape(*x.shape[:-3], K, H // K * r, -1)


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


def last_row(bias: PositionBias, n: int, dtype: torch.dtype, rows: int = 1) -> Tensor:
    """The bias ``(H, 1, n)`` of the last of n queries, or of the last few."""
    row: Tensor = bias(slice(n - rows, n), slice(0, n), dtype)
    return row


def hidden_from_last(rows: int, n: int, like: Tensor, visible: Visible | None = None, first: int = 0) -> Tensor:
    """0, or -∞ for keys from ``first`` on that the last few of n queries do not see: ``(rows, n - first)``."""
    seen = (visible or Visible(causal=True)).pairs(slice(n - rows, n), slice(first, n), n, like.device)
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, -torch.inf)


class CachedDecoding:
    """Decoding for variants without forgetting: each query sees all earlier keys, or those that ``visible`` marks.

    ``position_bias`` and ``sink`` count, if any. The state is the :class:`Cache` of all keys, or the :class:`Unequal`
    one of sequences that :func:`~attnbench.catalogue.engines.decoding.unequal.joined` puts together.
    """

    capacity: int
    """Tokens for which room is made at first."""
    visible: Visible | None = None
    unequal = False
    """True if ``step`` also takes an :class:`Unequal`, without a position bias or ``visible``."""

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Cache:
        return Cache.of(k, v, self.capacity)

    def step(self, state: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Any]:
        state, rows = state.append(k, v), q.shape[2]
        if isinstance(state, Unequal):
            hidden = torch.where(state.seen(rows), 0.0, -torch.inf)
            return attend(q, state.cache.keys, state.cache.values, hidden, getattr(self, "sink", None)), state
        bias: PositionBias | None = getattr(self, "position_bias", None)
        added = None if bias is None else last_row(bias, state.length, accumulator(q.dtype), rows)
        sink: Sink | None = getattr(self, "sink", None)
        first = self.first_seen(state, rows)
        if first:
            added = None if added is None else added[..., first:]
        if rows > 1:
            hidden = hidden_from_last(rows, state.length, q, self.visible, first)
            added = hidden if added is None else added + hidden
        if first:
            return attend(q, state.keys[:, :, first:], state.values[:, :, first:], added, sink), state
        return attend(q, state.keys, state.values, added, sink), state

    def first_seen(self, state: Cache | Paged, rows: int = 1) -> int:
        """The first key that one of the last ``rows`` tokens sees."""
        return 0 if self.visible is None else self.visible.span(state.length - rows, state.length)[0]
