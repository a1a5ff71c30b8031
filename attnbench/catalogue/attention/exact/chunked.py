"""Exact attention tile by tile: the online softmax, and a backward pass that computes the tiles again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from attnbench.catalogue.engines.decoding.kv_cache import CachedDecoding, Unequal
from attnbench.catalogue.engines.masks import added_to_logits, seeing
from attnbench.catalogue.engines.precision import accumulator, hidden, softmax_and_log_sum
from attnbench.catalogue.engines.tiling import budget, large_steps, learned, threads
from attnbench.contract.problem.position_bias import PositionBias, position_bias
from attnbench.contract.problem.shape import Shape
from attnbench.contract.problem.sink import Sink, sink_of
from attnbench.contract.problem.visible import Visible, masked
from attnbench.contract.variant import EXACT, register
from attnbench.errors import Unsupported


@register(
    "chunked",
    family="exact",
    source="Rabe and Staats 2021, arXiv:2112.05682, sections 2-4; Dao et al. 2022, arXiv:2205.14135, algorithm 4",
    formula="oᵢ = Σ_c exp(L_c - L)·softmax(qᵢ·K_cᵀ/√D)·V_c, L_c = log Σ_{j∈c} exp(qᵢ·kⱼ/√D), L = log Σ_c exp(L_c)",
    cost="O(n²·d)",
    memory_exponent=1.0,
    traits=replace(
        EXACT,
        baseline="softmax attention in tiles of plain products, where the matrix of all weights takes too much memory",
    ),
    settings=("query_chunk=5,key_chunk=7",),
)
class Chunked(CachedDecoding, nn.Module):
    """Exact softmax attention in tiles, O(n) memory forward and backward.

    q ``(B, H, N, D)``, k ``(B, K, M, D)`` and v ``(B, K, M, E)`` -> ``(B, H, N, E)``. Each tile of ``query_chunk`` ×
    ``key_chunk`` logits has a softmax of its own and the logarithm L_c of its sum, by which the tiles of a row are
    merged. Where heads share keys and values, the rows of a tile are the same queries in each of these heads.
    Causal or with a mask: keys that no query of a chunk sees are never touched. Statistics and sums are float32
    (float64 for float64). A query that sees no key gives 0. A bias of the positions is made tile by tile as well.

    What padded tokens hold must be finite.

    Differs from the paper: the backward pass is algorithm 4 of FlashAttention (q, k, v, the output and one L per query
    are kept, tiles are computed again) instead of checkpointing; heads are taken a few at a time, in tiles of
    256 × 2048 instead of 1024 × 4096, so that they stay in the cache.

    Raises:
        Unsupported: in ``step``, several tokens behind sequences of unequal length.
    """

    at_once = unequal = True

    def __init__(
        self,
        shape: Shape,
        *,
        query_chunk: Annotated[int, Field(ge=1, description="query rows of a tile")] = 256,
        key_chunk: Annotated[int, Field(ge=1, description="keys of a tile")] = 2048,
    ) -> None:
        super().__init__()
        self.causal, self.capacity, self.visible = shape.causal, shape.M, masked(shape)
        self.position_bias, self.sink = position_bias(shape), sink_of(shape)
        self.query_chunk = query_chunk
        self.key_chunk = key_chunk

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        chunks = (self.query_chunk, self.key_chunk)
        how = _ChunkedCall(self.visible or self.causal, chunks, self.position_bias, self.sink, key_mask)
        weights = list(self.parameters())
        if learned(q, k, v, *weights):
            # Function.apply has no annotations in torch.
            attended: Tensor = _ChunkedSoftmax.apply(how, q, k, v, *weights)  # type: ignore[no-untyped-call]
            return attended
        return _LogitTiles(q, k, v, how).attend(keep_log_sums=False)[0]

    @torch.no_grad()
    def step(self, state: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Any]:
        """q ``(B, H, n, D)``, k and v ``(B, K, n, ·)``; keys before one query's window are cut."""
        state, rows = state.append(k, v), q.shape[2]
        chunks, first = (self.query_chunk, self.key_chunk), 0
        if isinstance(state, Unequal):
            if rows > 1:
                raise Unsupported(
                    "padding: with unequal lengths its tiles take one token; remove new_tokens or padding"
                )
            how = _ChunkedCall(False, chunks, sink=self.sink, key_mask=state.seen(1)[:, 0, 0])
            tiles = _LogitTiles(q, state.cache.keys, state.cache.values, how)
            return tiles.attend(keep_log_sums=False)[0], state
        if rows == 1:
            first = self.first_seen(state)
        seen = rows > 1 and replace(self.visible or Visible(causal=True), start=state.length - rows)
        how = _ChunkedCall(seen, chunks, self.position_bias, self.sink, place=state.length - 1 - first)
        tiles = _LogitTiles(q, state.keys[:, :, first:], state.values[:, :, first:], how)
        return tiles.attend(keep_log_sums=False)[0], state


class _ChunkedCall(NamedTuple):
    visible: Visible | bool
    """Causality; or the keys that each query sees."""
    chunks: tuple[int, int]
    bias: PositionBias | None = None
    sink: Sink | None = None
    key_mask: Tensor | None = None
    place: int = 0
    """Place of the first query among the keys, unless ``visible`` gives it."""


class _ChunkedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: _ChunkedCall, q: Tensor, k: Tensor, v: Tensor, *weights: Tensor) -> Tensor:
        output, log_sums = _LogitTiles(q, k, v, how).attend(keep_log_sums=True)
        ctx.save_for_backward(q, k, v, output, log_sums)
        ctx.how = how
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, log_sums = ctx.saved_tensors
        return None, *_LogitTiles(q, k, v, ctx.how).gradients(grad, output, log_sums)


class _LogitTiles:
    """The logits of one call, cut up, by heads of keys: Q ``(B·K, G, N, D)``, K ``(B·K, M, D)``, V ``(B·K, M, E)``.

    Rows of a tile are those of n queries in G heads, ``(h, G·n, ·)`` for h heads of keys.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, how: _ChunkedCall) -> None:
        self.q, self.k, self.v = q, k, v
        self.shared, self.G = k.shape[1], q.shape[1] // k.shape[1]
        self.Q, self.K, self.V = self.grouped(q), _flat(k), _flat(v)
        self.visible = how.visible if isinstance(how.visible, Visible) else None
        self.causal, self.bias, self.sink = how.visible is True, how.bias, how.sink
        self.position = how.place if self.visible is None else self.visible.start
        self.query_chunk, self.key_chunk = max(1, how.chunks[0] // self.G), how.chunks[1]
        key_mask = how.key_mask
        self.scale: float = q.shape[-1] ** -0.5
        self.sums = accumulator(q.dtype)
        self.hidden = hidden(self.sums)
        self.padding = self.unseen = None
        if key_mask is not None:
            self.padding = added_to_logits(key_mask, self.sums).repeat_interleave(self.shared, 0)[:, None]
            some = seeing(key_mask, self.causal) if self.visible is None else self.visible.seeing(key_mask, q.shape[2])
            self.unseen = ~some.repeat_interleave(self.shared, 0)

    def grouped(self, x: Tensor) -> Tensor:
        return _flat(torch.unflatten(x, 1, (self.shared, self.G)))

    def rows(self) -> Iterator[tuple[slice, slice]]:
        """Heads and queries computed together: on a CPU one tile of query rows per thread, each in its own cache."""
        heads, G, N, _ = self.Q.shape
        at_once = max(1, self.query_chunk // N) * threads()
        if large_steps(self.Q):  # a single head would not fill it
            at_once = max(1, budget("chunked.logits", self.Q.device) // (G * self.query_chunk * self.key_chunk))
        for first in range(0, heads, at_once):
            for a in range(0, N, self.query_chunk):
                yield slice(first, min(first + at_once, heads)), slice(a, min(a + self.query_chunk, N))

    def keys(self, queries: slice) -> Iterator[slice]:
        first, last = 0, queries.stop if self.causal else self.K.shape[1]
        if self.visible is not None:
            some = self.visible.seen_by_some(queries, last)
            first, last = some.start, some.stop
        return (slice(c, min(c + self.key_chunk, last)) for c in range(first, last, self.key_chunk))

    def space(self) -> Tensor:
        heads, queries = next(self.rows())
        size = heads.stop * self.G * queries.stop * min(self.key_chunk, self.K.shape[1])
        return torch.empty(size, dtype=self.sums, device=self.Q.device)

    def logits(self, Q: Tensor, heads: slice, queries: slice, keys: slice, space: Tensor) -> Tensor:
        """One tile of logits in ``space``, from scaled queries; hidden pairs lie far below all others."""
        rows = _product(Q, self.K[heads, keys].mT, space)
        S = torch.unflatten(rows, 1, (self.G, -1))
        first = max(queries.start + 1, keys.start)
        if self.causal and first < keys.stop:
            corner = S[..., first - keys.start :]
            future = torch.full(corner.shape[2:], self.hidden, dtype=S.dtype, device=S.device)
            corner += future.triu_(queries.start + 1 - first)
        if self.visible is not None:
            every, total = self.visible.seen_by_all(queries, self.K.shape[1]), self.K.shape[1]
            if keys.start < every.start or keys.stop > every.stop:
                S.masked_fill_(~self.visible.pairs(queries, keys, total, S.device), self.hidden)
        if self.padding is not None:
            rows += self.padding[heads, :, keys]
        if self.bias is not None:
            S += self.added(self.bias, heads, queries, keys)
        return rows

    def added(self, bias: PositionBias, heads: slice, queries: slice, keys: slice) -> Tensor:
        """The tile of the bias for some of the B·K heads, ``(h, G, n, m)``; ``position`` is that of the first query."""
        rows = slice(queries.start + self.position, queries.stop + self.position)
        return torch.unflatten(bias(rows, keys, self.sums, self.numbers(heads)), 0, (-1, self.G))

    def numbers(self, heads: slice) -> Tensor:
        """Numbers of the H heads that read some of the B·K heads of keys, ``(h·G,)``."""
        device = self.Q.device
        return torch.arange(heads.start * self.G, heads.stop * self.G, device=device) % self.q.shape[1]

    def sinks(self, sink: Sink, heads: slice, queries: slice) -> Tensor:
        """The sink's logit in each row of some of the B·K heads, ``(h, G·n, 1)``."""
        logits = sink.logit.to(self.sums)[self.numbers(heads)].view(-1, self.G, 1)
        return logits.expand(-1, -1, queries.stop - queries.start).reshape(len(logits), -1, 1)

    def attend(self, *, keep_log_sums: bool) -> tuple[Tensor, Tensor | None]:
        """The output ``(B, H, N, E)`` and, on request, the L of every query ``(B·K, G, N, 1)``."""
        output = torch.empty(*self.Q.shape[:3], self.V.shape[2], dtype=self.q.dtype, device=self.q.device)
        log_sums = torch.empty(*self.Q.shape[:3], 1, dtype=self.sums, device=self.q.device)
        merging = keep_log_sums or self.key_chunk < self.K.shape[1] or self.sink is not None
        space = self.space()
        for heads, queries in self.rows():
            Q = _rows(self.Q, heads, queries) * self.scale
            for number, keys in enumerate(self.keys(queries)):
                S = self.logits(Q, heads, queries, keys, space)
                if not merging:
                    merged = _product(torch.softmax(S, -1, out=S), self.V[heads, keys])
                    break
                weights, L_c = softmax_and_log_sum(S)
                part = _product(weights, self.V[heads, keys])
                if number == 0:
                    merged, total = part, L_c
                    continue
                both = torch.logaddexp(total, L_c)
                merged = part.mul_((L_c - both).exp_()).add_(merged.mul_((total - both).exp_()))
                total = both
            if self.sink is not None:
                both = torch.logaddexp(total, self.sinks(self.sink, heads, queries))
                merged, total = merged.mul_((total - both).exp_()), both
            output[heads, :, queries] = torch.unflatten(merged, 1, (self.G, -1))
            if merging:
                log_sums[heads, :, queries] = torch.unflatten(total, 1, (self.G, -1))
        if self.unseen is not None:
            output.masked_fill_(self.unseen, 0)
            log_sums.masked_fill_(self.unseen, torch.inf)  # so that their probabilities are 0 when computed again
        return output.view(*self.q.shape[:3], -1), log_sums if keep_log_sums else None

    def gradients(self, grad: Tensor, output: Tensor, log_sums: Tensor) -> tuple[Tensor | None, ...]:
        grads, output = self.grouped(grad), self.grouped(output)
        dQ = torch.empty(self.Q.shape, dtype=self.q.dtype, device=self.q.device)
        # Transposed: MKL multiplies by a transposed tile a third slower than by a transposed narrow matrix.
        dKt, dVt = (torch.zeros(x.mT.shape, dtype=self.sums, device=x.device) for x in (self.K, self.V))
        space, space_dS = self.space(), self.space()
        weights = [] if self.bias is None else list(self.bias.parameters())
        wanted = [x for x in weights if x.requires_grad]
        of_weights = [torch.zeros_like(x) for x in wanted]
        of_sinks = torch.zeros(self.Q.shape[:2], dtype=self.sums, device=self.Q.device)
        for heads, queries in self.rows():
            Q, g = _rows(self.Q, heads, queries) * self.scale, _rows(grads, heads, queries)
            total = _rows(log_sums, heads, queries)
            # The mean of dP under P.
            mean = (g * _rows(output, heads, queries)).sum(-1, keepdim=True, dtype=self.sums)
            if self.sink is not None:  # the sink's value is 0: its weight times the mean of dP is its whole gradient
                kept = (self.sinks(self.sink, heads, queries) - total).exp_().mul_(mean)
                of_sinks[heads] -= torch.unflatten(kept, 1, (self.G, -1)).sum((2, 3))
            dq = torch.zeros(Q.shape, dtype=self.sums, device=Q.device)
            for keys in self.keys(queries):
                P = self.logits(Q, heads, queries, keys, space).sub_(total).exp_()
                dVt[heads, :, keys] += _product(g.mT, P)
                dS = _product(g, self.V[heads, keys].mT, space_dS).sub_(mean).mul_(P)
                dKt[heads, :, keys] += _product(Q.mT, dS)
                dq += _product(dS, self.K[heads, keys])
                if wanted and self.bias is not None:
                    with torch.enable_grad():
                        tile = self.added(self.bias, heads, queries, keys)
                    for summed, part in zip(
                        of_weights, torch.autograd.grad(tile, wanted, dS.view(tile.shape)), strict=True
                    ):
                        summed += part
            dQ[heads, :, queries] = torch.unflatten(dq.mul_(self.scale), 1, (self.G, -1))
        dk, dv = (sums.mT.reshape(x.shape).to(x.dtype) for sums, x in ((dKt, self.k), (dVt, self.v)))
        found = iter(of_weights)
        learned = [next(found) if x.requires_grad else None for x in weights]
        if self.sink is not None:
            learned.append(of_sinks.view(self.q.shape[:2]).sum(0).to(self.sink.logit.dtype))
        return dQ.view_as(self.q), dk, dv, *learned


def _rows(x: Tensor, heads: slice, queries: slice) -> Tensor:
    """Some queries in all heads that share keys, ``(h, G·n, ·)`` of x ``(B·K, G, N, ·)``; a view for G = 1."""
    return x[heads, :, queries].flatten(1, 2)


def _flat(x: Tensor) -> Tensor:
    """x ``(B, K, ...)`` as ``(B·K, ...)``; in float32 on a CPU, whose products would return half precision."""
    x = x.flatten(0, 1)
    return x.float() if x.dtype.itemsize == 2 and not x.is_cuda else x


def _product(a: Tensor, b: Tensor, space: Tensor | None = None) -> Tensor:
    """a·b batch by batch, in ``space`` if given; float32 also if one of the two is half precision."""
    half = next((x.dtype for x in (a, b) if x.dtype.itemsize == 2), None)
    if half is not None:
        return torch.bmm(a.to(half), b.to(half), out_dtype=torch.float32)
    if space is None:
        return torch.bmm(a, b)
    shape = (a.shape[0], a.shape[1], b.shape[2])
    return torch.bmm(a, b, out=space[: math.prod(shape)].view(shape))
