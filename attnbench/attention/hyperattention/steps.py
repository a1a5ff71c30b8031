"""Decoding of causal HyperAttention."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attnbench.attention.hyperattention.causal import place, spans, strata
from attnbench.engines.decoding.kv_cache import Cache, attend
from attnbench.engines.precision import accumulator, hidden


class Span(NamedTuple):
    """The keys of one rectangle, sorted by hash and position; ``(B, H, M)`` int32 each."""

    codes: Tensor
    """Hashes, ascending."""
    tokens: Tensor
    """Their positions."""


class State(NamedTuple):
    """What decoding keeps: all tokens, and two integers for each of those before the current block."""

    cache: Cache
    spans: tuple[Span, ...]
    """Largest first, one for each 1 in the number of whole blocks written in binary."""


class Decoding:
    """``begin`` and ``step`` of a module with the options of HyperAttention."""

    block: int
    length: int
    """Tokens for which room is made from the start; more are allowed."""
    draws: Tensor

    def codes(self, x: Tensor) -> Tensor:
        """Hashes ``(B, H, n)`` of x ``(B, H, n, D)``."""
        raise NotImplementedError

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> State:
        """q, k, v ``(B, H, n, D)``, n >= 0."""
        whole = k.shape[2] // self.block * self.block
        return State(Cache.of(k, v, self.length), tuple(self._span(k, *span) for span in spans(whole, self.block)))

    def step(self, state: State, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, State]:
        """q, k, v ``(B, H, 1, D)``."""
        (B, H, _, D), b, now, device = q.shape, self.block, state.cache.length, q.device
        cache = state.cache.append(k, v)
        code = self.codes(q).int()
        tokens = [torch.arange(now // b * b, now + 1, device=device).expand(B, H, -1)]
        added = [q.new_zeros(tokens[0].shape, dtype=accumulator(q.dtype))]
        for span, (first, M) in zip(state.spans, spans(now // b * b, b), strict=True):
            left, right = (torch.searchsorted(span.codes, code, right=r) for r in (False, True))
            own = place(left, right, now - first - M, M, b)
            ranks = strata(self.draws, M) if b < M else tokens[0].new_empty(0)
            seen = torch.cat([own * b + torch.arange(b, device=device), ranks.expand(B, H, -1)], 2)
            tokens.append(span.tokens.gather(2, seen).long())
            weight = torch.full_like(seen, 0, dtype=added[0].dtype)
            weight[:, :, b:] = math.log(M / max(1, len(ranks)))
            added.append(weight)
            weight[:, :, b:].masked_fill_(ranks // b == own, hidden(weight.dtype))
        at = torch.cat(tokens, 2).unsqueeze(3).expand(-1, -1, -1, D)
        out = attend(q, cache.k.gather(2, at), cache.v.gather(2, at), torch.cat(added, 2).unsqueeze(2))
        kept = state.spans
        if (now + 1) % b == 0:
            *earlier, last = spans(now + 1, b)
            kept = (*kept[: len(earlier)], self._span(cache.k, *last))
        return out, State(cache, kept)

    def _span(self, k: Tensor, first: int, tokens: int) -> Span:
        codes, order = self.codes(k[:, :, first : first + tokens]).sort(dim=2, stable=True)
        return Span(codes.int(), (order + first).int())
