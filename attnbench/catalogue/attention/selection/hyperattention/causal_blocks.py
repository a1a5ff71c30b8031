"""Causal HyperAttention: small causal blocks on the diagonal, rectangles of later queries and earlier keys below it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnbench.catalogue.engines.decoding.kv_cache import Cache, attend
from attnbench.catalogue.engines.precision import accumulator, hidden, softmax_and_log_sum
from attnbench.catalogue.engines.tiling import budget

GRID = 20
"""Bits of a drawn position: integers stay exact in a module cast to half precision."""
_ROWS = 64  # queries of a chunk: more leave more slots empty, fewer read the keys of their block more often


def strata(draws: Tensor, tokens: int) -> Tensor:
    """Ranks ``(S,)`` of the keys sampled of ``tokens`` sorted ones, one in each of S = min(m, tokens) equal strata."""
    S = min(len(draws), tokens)
    return ((torch.arange(S, device=draws.device) << GRID) + draws[:S]) * tokens // (max(S, 1) << GRID)


def place(left: Tensor, right: Tensor, at: Tensor | int, tokens: int, block: int) -> Tensor:
    """The block of sorted keys that a query picks.

    Args:
        left: number of keys with a smaller hash.
        right: number of keys with a smaller or the same hash.
        at: place of the query among the ``tokens`` places of its rectangle, which spreads equal hashes.
    """
    return (left + (right - left) * at // tokens).clamp(max=tokens - 1) // block


class Rectangles(NamedTuple):
    """``repeats`` rectangles, ``step`` tokens apart; squares on the diagonal, with equal first tokens."""

    first_key: int
    first_query: int
    step: int
    repeats: int
    keys: int
    queries: int


def rectangles(n: int, block: int) -> Iterator[Rectangles]:
    """The recursion over n tokens, by size: the cut-off end keeps all its keys, unless it is the last square."""
    whole, rest = divmod(n, block)
    if whole:
        yield Rectangles(0, 0, block, whole, block, block)
    if rest:
        yield Rectangles(n - rest, n - rest, block, 1, rest, rest)
    while block < n:
        whole, rest = divmod(n, 2 * block)
        if whole:
            yield Rectangles(0, block, 2 * block, whole, block, block)
        if rest > block:
            yield Rectangles(n - rest, n - rest + block, 2 * block, 1, block, rest - block)
        block *= 2


def spans(n: int, block: int) -> Iterator[tuple[int, int]]:
    """First token and number of the keys of each rectangle in which token n is a query; n is a multiple of block."""
    first = 0
    for bit in reversed(range((n // block).bit_length())):
        if n // block >> bit & 1:
            yield first, block << bit
            first += block << bit


class _RectanglePart(NamedTuple):
    """Chunks of r queries, each with one block of keys and the sample of its rectangle; q has T rows in all."""

    asked: Tensor
    """``(chunks, r)``: rows of q; T in an empty slot."""
    block: Tensor
    """``(chunks,)``: the block of keys that they see."""
    own: Tensor
    """``(blocks, b)``: rows of k."""
    sample: Tensor
    """``(rectangles, S)``: rows of k."""
    bias: Tensor
    """``(blocks of a rectangle, S)``: added to the logits of the sample."""
    diagonal: bool


@dataclass(frozen=True)
class RectanglePlan:
    """The pairs of queries and keys."""

    queries: Tensor
    """``(heads, n)``: hashes."""
    keys: Tensor
    draws: Tensor
    block: int
    bits: int

    def parts(self) -> Iterator[_RectanglePart]:
        # Not kept for the backward pass: all of them together take O(n log n) memory.
        return map(self._part, rectangles(self.keys.shape[1], self.block))

    @torch.no_grad()
    def _part(self, at: Rectangles) -> _RectanglePart:
        (heads, n), device = self.keys.shape, self.keys.device
        b, M, Q, G = min(self.block, at.keys), at.keys, at.queries, heads * at.repeats
        P = M // b

        def arange(stop: int) -> Tensor:
            return torch.arange(stop, device=device)

        origin = (arange(heads)[:, None] * n + arange(at.repeats) * at.step).view(-1, 1)
        keys, queries = origin + at.first_key + arange(M), origin + at.first_query + arange(Q)
        drawn = strata(self.draws, M) if P > 1 else arange(0)
        block = arange(G).unsqueeze(1).expand(G, Q) * P
        if P > 1:
            # One flat sort is several times faster than one per rectangle.
            head = arange(G).unsqueeze(1) << self.bits
            codes, order = (self.keys.reshape(-1)[keys] + head).view(-1).sort(stable=True)
            keys = keys.view(-1)[order].view(G, M)
            wanted = self.queries.reshape(-1)[queries] + head
            left, right = (
                torch.searchsorted(codes, wanted, right=r) - arange(G).unsqueeze(1) * M for r in (False, True)
            )
            block = block + place(left, right, arange(Q), M, b)
        r = min(_ROWS, b)
        sorted_blocks, by_block = block.reshape(-1).sort(stable=True)
        count = keys.new_zeros(G * P).scatter_add_(0, sorted_blocks, torch.ones_like(sorted_blocks))
        chunks = (count + r - 1) // r
        ends = chunks.cumsum(0)
        first_slot = (ends - chunks) * r - (count.cumsum(0) - count)
        most = (G * Q + G * min(P, Q) * (r - 1)) // r  # however the queries fall
        asked = keys.new_full((most * r,), heads * n)
        asked[first_slot[sorted_blocks] + arange(G * Q)] = queries.view(-1)[by_block]
        bias = torch.full((P, len(drawn)), hidden(torch.float32), dtype=torch.float64, device=device)
        bias.masked_fill_(drawn // b != arange(P).unsqueeze(1), math.log(M / max(len(drawn), 1)))
        return _RectanglePart(
            asked.view(-1, r),
            torch.searchsorted(ends, arange(most), right=True).clamp(max=G * P - 1),
            keys.view(-1, b),
            keys[:, drawn],
            bias,
            at.first_key == at.first_query,
        )


class CausalSoftmax(torch.autograd.Function):
    """q, k, v ``(heads · n, D)`` -> the same shape; parts are merged by log-sum-exp, and none of them is kept."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: RectanglePlan) -> Tensor:
        T, dtype = len(q), accumulator(q.dtype)
        # The row behind the last is written by empty slots, and never read.
        out = q.new_empty(T + 1, q.shape[1], dtype=dtype)
        lse = q.new_empty(T + 1, dtype=dtype)
        for part in plan.parts():
            for rows, _, _, _, values, weights, here in _tiles(part, q, k, v):
                new = torch.bmm(weights, values).view(-1, q.shape[1])
                if not part.diagonal:  # every query is on the diagonal once, and first
                    before = lse[rows]
                    both = torch.logaddexp(before, here)
                    new.mul_((here - both).exp_().unsqueeze(1))
                    new.addcmul_(out.index_select(0, rows), (before - both).exp_().unsqueeze(1))
                    here = both
                out.index_copy_(0, rows, new)
                lse.index_copy_(0, rows, here)
        lse[T].fill_(-hidden(dtype))  # an empty slot weighs nothing
        result = out[:T].to(q.dtype)
        ctx.save_for_backward(q, k, v, lse, result)
        ctx.plan = plan
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, lse, result = ctx.saved_tensors
        (T, D), dtype = q.shape, lse.dtype
        dot = torch.zeros(T + 1, dtype=dtype, device=q.device)
        dot[:T] = torch.linalg.vecdot(grad.to(dtype), result.to(dtype))
        dq, dk, dv = (torch.zeros(T + 1, D, dtype=dtype, device=q.device) for _ in range(3))
        for part in ctx.plan.parts():
            (blocks, b), (G, S) = part.own.shape, part.sample.shape
            own = [dk.new_zeros(blocks, b * D) for _ in range(2)]
            sample = [dk.new_zeros(G, S * D) for _ in range(2)]
            for rows, block, queries, keys, values, weights, here in _tiles(part, q, k, v):
                source, share = rows.clamp(max=T - 1), (here - lse[rows]).exp_()
                dout = (grad.index_select(0, source) * share.unsqueeze(1)).view_as(queries)
                dout.masked_fill_((rows == T).view(*dout.shape[:2], 1), 0.0)
                dvalues = torch.bmm(weights.mT, dout)
                dlogits = torch.bmm(dout, values.mT).sub_((dot[rows] * share).view(*dout.shape[:2], 1)).mul_(weights)
                dkeys = torch.bmm(dlogits.mT, queries)
                for both, to_own, to_sample in zip((dkeys, dvalues), own, sample, strict=True):
                    to_own.index_add_(0, block, both[:, :b].flatten(1))
                    to_sample.index_add_(0, block // (blocks // G), both[:, b:].flatten(1))
                new = torch.bmm(dlogits, keys).mul_(D**-0.5).view(-1, D)
                dq.index_copy_(0, rows, new if part.diagonal else new.add_(dq.index_select(0, rows)))
            for total, to_own, to_sample in zip((dk, dv), own, sample, strict=True):
                total.index_add_(0, part.own.view(-1), to_own.view(blocks * b, D))
                total.index_add_(0, part.sample.reshape(-1), to_sample.view(G * S, D))
        return dq[:T].to(q.dtype), dk[:T].to(k.dtype), dv[:T].to(v.dtype), None


def _tiles(part: _RectanglePart, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Chunks whose logits stay in cache.

    Yields:
        Rows of q in each slot ``(t·r,)``, block of each chunk ``(t,)``, scaled queries ``(t, r, D)``, keys and values
        ``(t, b + S, D)``, their weights ``(t, r, b + S)``, log-sum-exp of the logits ``(t·r,)``.
    """
    (chunks, r), (blocks, b), (G, S) = part.asked.shape, part.own.shape, part.sample.shape
    D, dtype = q.shape[1], accumulator(q.dtype)
    step = max(1, budget("hyperattention.weights", q.device) // (r * (b + S)))
    for first in range(0, chunks, step):
        asked, block = (x[first : first + step] for x in (part.asked, part.block))
        columns = torch.cat([part.own[block], part.sample[block // (blocks // G)]], 1)
        rows = asked.reshape(-1)
        queries = q.index_select(0, rows.clamp(max=len(q) - 1)).to(dtype).mul_(D**-0.5).view(-1, r, D)
        queries.masked_fill_((asked == len(q)).unsqueeze(2), 0.0)  # the last row may hold NaN, and 0·NaN is it
        keys, values = (x.index_select(0, columns.view(-1)).to(dtype).view(-1, b + S, D) for x in (k, v))
        logits = torch.bmm(queries, keys.mT)
        if S:
            logits[:, :, b:] += part.bias[block % (blocks // G)].to(dtype).unsqueeze(1)
        if part.diagonal:
            logits.masked_fill_(columns.unsqueeze(1) > asked.unsqueeze(2), hidden(dtype))
        weights, lse = softmax_and_log_sum(logits)
        yield rows, block, queries, keys, values, weights, lse.view(-1)


class Span(NamedTuple):
    """The keys of one rectangle, sorted by hash and position; ``(B, H, M)`` int32 each."""

    codes: Tensor
    """Hashes, ascending."""
    tokens: Tensor
    """Their positions."""


class HyperState(NamedTuple):
    """State of decoding: all tokens, and two integers for each token before the current block."""

    cache: Cache
    spans: tuple[Span, ...]
    """Largest first, one for each 1 in the number of whole blocks written in binary."""


class HyperDecoding:
    """``begin`` and ``step`` of a module with the options of HyperAttention."""

    block: int
    length: int
    """Tokens for which room is made from the start; more are allowed."""
    draws: Tensor

    def codes(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> HyperState:
        whole = k.shape[2] // self.block * self.block
        return HyperState(Cache.of(k, v, self.length), tuple(self._span(k, *span) for span in spans(whole, self.block)))

    def step(self, state: HyperState, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, HyperState]:
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
        return out, HyperState(cache, kept)

    def _span(self, k: Tensor, first: int, tokens: int) -> Span:
        codes, order = self.codes(k[:, :, first : first + tokens]).sort(dim=2, stable=True)
        return Span(codes.int(), (order + first).int())
