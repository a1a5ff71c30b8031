"""Attention among tokens that a locality-sensitive hash puts side by side."""

from __future__ import annotations

import math
from itertools import product
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import normalize

from attnbench.catalogue.attention.selection.reformer.chunks import APART, SELF, HashedSoftmax, RoundPlan
from attnbench.catalogue.engines.decoding.kv_cache import Cache
from attnbench.catalogue.engines.gathered.largest import argmax
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import accumulator
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, No, Traits, register
from attnbench.errors import Unsupported

_COLUMNS = 64  # most columns of one rotation; more buckets than 2 · 64 come from pairs of hashes
_PADDING = 2 * _COLUMNS**2 * 2  # sorts behind every bucket


class ReformerState(NamedTuple):
    """The state of decoding: all tokens, and the latest tokens of every bucket in every round."""

    cache: Cache
    latest: Tensor
    """``(B, H, rounds, buckets · (chunk + 1))``: a ring of positions for each bucket."""
    fill: Tensor
    """``(B, H, rounds, buckets)``: number of tokens that went into each ring."""

    @property
    def overwrites(self) -> tuple[str, ...]:
        return ("latest",)


_LATEST = (
    "a token sees the latest tokens before it with its own hash; the paper's sees those before it in two chunks, "
    "whose borders later tokens move"
)


@register(
    "reformer",
    family="learned pattern",
    source="Kitaev et al. 2020, arXiv:2001.04451, equations 2-6",
    formula="oᵢ = Σ_{j∈Pᵢ} softmax_j(xᵢ·xⱼ/‖xⱼ‖) vⱼ, Pᵢ = ∪ᵣ {j : chunkᵣ(i) - chunkᵣ(j) ∈ {0, 1}}, sorted by LSH",
    cost="O(r·n·(c·d + log n))",
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        cross=No("queries and keys are the same vectors, so there is no second sequence"),
        stochastic=True,
        decode=True,
        bias=No("positions enter through embeddings before the layer; the paper's operator has no bias"),
        knob=Knob("rounds", step=1),
        given=(("causal=true", {"own_form": _LATEST}), ("causal=true,members=chunk", {"own_form": ""})),
    ),
    settings=("chunk=4,rounds=2", "chunk=4,rounds=2,correction=false", "chunk=4,buckets=4,members=bucket"),
)
class Reformer(nn.Module):
    """LSH attention: queries are the keys, sorted by hash, chunk by chunk.

    Kitaev et al. 2020, section 2, equations 2-6. One vector x of each token is its query and, normalised, its key:
    here k, and q is not read. Logits are xᵢ·xⱼ/‖xⱼ‖ without a further scale, as in the authors' code; an error against
    softmax of q, k, v is therefore only a distance. A round sorts the tokens by (bucket, position), where the bucket is
    the hash argmax([xR; -xR]). It cuts them into chunks, which attend to themselves and to the chunk before. A token
    attends to itself only if it has no other key. On a CPU this implementation finds the argmax by a maximum and a
    comparison, in half the time that torch's takes.

    With ``correction=true`` a pair that several rounds see counts once (the paper's N_ij; here the pair is dropped in
    all rounds but the first, which gives the same sum), so that the result is exactly one softmax over the union of the
    pairs seen. Without it, as in the authors' code, a pair seen twice weighs twice.

    ``members=chunk``: a round sees everything in both chunks (section 2, "LSH attention"), if causal up to the query's
    position. Later tokens get no weight, but they move the borders between chunks, so that outputs do depend on them a
    little. ``members=bucket``: only pairs with equal hash (equation 4); if causal, the latest of these before the
    query, as many as a chunk has, which no later token changes. ``members=auto`` is ``bucket`` if causal, else
    ``chunk``.

    More than 128 ``buckets`` are pairs of two hashes, since one rotation with n / chunk columns would cost n². By
    default their number follows the number of real tokens, and padding is sorted behind every chunk, so that a padded
    sequence gives the output of the shorter one; padded positions give 0.

    Decoding needs ``members=bucket``, whose pairs no later token changes. It keeps all keys and values, and rings of
    the latest positions in each bucket. A token costs O(rounds·chunk·D) however many came before, plus a copy of one
    counter for each bucket. There are as many buckets as ``forward`` makes for ``shape.N`` tokens.

    Differs from the authors' code: rotations are drawn once and shared by the heads; the first chunk does not look
    back to the last; any N (the last chunk is filled up with empty slots); by default n / chunk buckets, where the
    paper has twice as many.

    q, k, v ``(B, H, N, D)`` -> ``(B, H, N, D)``; ``key_mask`` ``(B, N)``.

    Raises:
        Unsupported: in ``begin``, ``members=chunk``, where later tokens move the borders of the chunks.
    """

    rotations: Tensor

    def __init__(
        self,
        shape: Shape,
        *,
        rounds: Annotated[int, Field(ge=1, le=64, description="hash rounds")] = 4,
        chunk: Annotated[int, Field(ge=1, le=32768, description="tokens per chunk after sorting")] = 64,
        buckets: Annotated[
            int | None, Field(ge=2, le=16384, multiple_of=2, description="hash buckets, even; none: n / chunk")
        ] = None,
        members: Annotated[
            Literal["auto", "chunk", "bucket"],
            Field(description="pairs of a round: two chunks, or equal hash only; auto: bucket where causal"),
        ] = "auto",
        correction: Annotated[bool, Field(description="a pair that several rounds see counts once")] = True,
    ) -> None:
        super().__init__()
        self.causal, self.chunk, self.rounds, self.buckets = shape.causal, chunk, rounds, buckets
        self.length = shape.N
        self.same_bucket = members == "bucket" or (members == "auto" and shape.causal)
        self.correction = correction
        self.register_buffer("rotations", torch.randn(shape.D, 2, rounds, _COLUMNS))

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """One softmax over the pairs seen, with an N × N matrix of their counts; head by head over real tokens."""
        out = torch.zeros_like(v)
        for b, h in product(range(k.shape[0]), range(k.shape[1])):
            real = torch.arange(k.shape[2], device=k.device) if key_mask is None else key_mask[b].nonzero()[:, 0]
            x, n = k[b, h, real], len(real)
            if n == 0:
                continue
            position = torch.arange(n, device=k.device)
            before = position[:, None] >= position if self.causal else torch.ones_like(position[:, None] == position)
            times = torch.zeros(n, n, dtype=x.dtype, device=k.device)
            half = max(1, (n + self.chunk) // (2 * self.chunk)) if self.buckets is None else self.buckets // 2
            columns = half if half <= _COLUMNS else min(math.ceil(math.sqrt(half / 2)), _COLUMNS)
            for r in range(self.rounds):
                rotated = [x @ R[:, :columns].to(x.dtype) for R in self.rotations[:, :, r].unbind(1)]
                first, second = (torch.cat([xR, -xR], -1).argmax(-1) for xR in rotated)
                bucket = first if half <= _COLUMNS else first * 2 * columns + second
                slot = (bucket * n + position).argsort().argsort()
                near = (slot // self.chunk)[:, None] - slot // self.chunk
                seen = (near == 0) | (near == 1)
                if self.same_bucket:
                    near = slot[:, None] - slot
                    seen = (near >= 0) & (near <= self.chunk) if self.causal else seen
                    seen = seen & (bucket[:, None] == bucket)
                times += seen & before
            logits = (x @ normalize(x, dim=-1).mT).masked_fill(position[:, None] == position, SELF)
            logits += (times.clamp(max=1) if self.correction else times).log()
            out[b, h, real] = logits.softmax(-1) @ v[b, h, real]
        return out

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        B, H, N, D = k.shape
        flat = k.reshape(-1, D)
        real = None if key_mask is None else key_mask.unsqueeze(1).expand(B, H, N)
        with torch.no_grad():
            plan = self._plan(flat, N, real)
        out: Tensor = HashedSoftmax.apply(flat, v.reshape(-1, v.shape[-1]), plan)  # type: ignore[no-untyped-call] # torch
        out = out.view(B, H, N, -1)
        return out if real is None else out.masked_fill(~real.unsqueeze(-1), 0)

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> ReformerState:
        if not self.same_bucket:
            raise Unsupported("decode: with members=chunk later tokens move the borders between chunks")
        B, H, n, _ = k.shape
        hashes, columns = _sizes(self.length, self.chunk, self.buckets)
        buckets, ring = (2 * columns) ** hashes, self.chunk + 1
        code = self.hashes(k, length=self.length).permute(1, 2, 0, 3)
        count = code.new_zeros((B, H, self.rounds, buckets)).scatter_add_(3, code, torch.ones_like(code))
        code, order = code.sort(dim=3, stable=True)
        ends = count.cumsum(3).gather(3, code)
        rank = torch.arange(n, device=k.device) - (ends - count.gather(3, code))
        kept = rank >= count.gather(3, code) - ring
        # One extra column, for tokens that newer ones replace.
        place = torch.where(kept, code * ring + rank % ring, buckets * ring)
        latest = code.new_zeros((B, H, self.rounds, buckets * ring + 1)).scatter_(3, place, order)
        return ReformerState(Cache.of(k, v, self.length), latest, count)

    def step(self, state: ReformerState, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ReformerState]:
        cache, ring, dtype = state.cache.append(k, v), self.chunk + 1, accumulator(k.dtype)
        now = state.cache.length
        code = self.hashes(k, length=self.length).permute(1, 2, 0, 3)
        before = state.fill.gather(3, code)
        latest = state.latest.scatter_(3, code * ring + before % ring, now)
        slots = torch.arange(ring, device=k.device)
        found = latest.gather(3, code * ring + slots)
        # An empty slot stands for the token itself, which has no weight beside any other.
        found = found.masked_fill(slots > before, now).flatten(2).sort(-1).values
        keys, values = (
            x.gather(2, found.unsqueeze(-1).expand(-1, -1, -1, x.shape[3])).to(dtype) for x in (cache.k, cache.v)
        )
        logits = torch.matmul(k.to(dtype), normalize(keys, dim=-1).mT).squeeze(2)
        logits = logits.masked_fill(found == now, SELF)
        if self.correction:
            again = found[..., 1:] == found[..., :-1]
            logits[..., 1:].masked_fill_(again, -APART)
        out = torch.matmul(logits.softmax(-1).unsqueeze(2), values)
        count = state.fill.scatter_add(3, code, torch.ones_like(code))
        return out.to(v.dtype), ReformerState(cache, latest, count)

    def hashes(self, x: Tensor, real: Tensor | None = None, *, length: int | None = None) -> Tensor:
        """The bucket of every token in every round, ``(rounds, ..., N)`` int64; padding gets a number above all.

        Args:
            x: ``(..., N, D)``.
            real: ``(..., N)`` bool, True for a real token.
            length: number of tokens that decides the number of buckets; None: that of ``x``.
        """
        N, D = x.shape[-2:]
        dtype = accumulator(x.dtype)
        hashes, columns = _sizes(N if length is None else length, self.chunk, self.buckets)
        limits = None
        if real is not None and self.buckets is None:
            halves = ((real.sum(-1) + self.chunk) // (2 * self.chunk)).clamp(min=1)
            pair = (halves / 2).sqrt().ceil().long().clamp(max=_COLUMNS)
            limits = torch.stack([halves, torch.zeros_like(halves)], -1)[..., :hashes]
            limits = torch.where(halves.unsqueeze(-1) > _COLUMNS, pair.unsqueeze(-1), limits)
            limits = limits.repeat_interleave(N, 0).view(-1, hashes, 1, 1)
            columns = _COLUMNS if hashes == 2 else columns
        rotations = self.rotations[:, :hashes, :, :columns].to(dtype).reshape(D, -1)
        flat, parts = x.reshape(-1, D), [torch.empty(0, self.rounds, dtype=torch.long, device=x.device)]
        for start in range(0, len(flat), 2048):
            rotated = (flat[start : start + 2048].to(dtype) @ rotations).view(-1, hashes, self.rounds, columns)
            size = rotated.abs()
            if limits is not None:
                limit = limits[start : start + 2048]
                size.masked_fill_(torch.arange(columns, device=x.device) >= limit, -1)
            axis = argmax(size)
            code = (axis + columns * (rotated.gather(-1, axis) < 0)).squeeze(-1)
            if limits is not None:
                code *= limit.squeeze(-1) > 0
            parts.append(code[:, 0] * (2 * columns) ** (hashes - 1) + (code[:, 1] if hashes == 2 else 0))
        found = torch.cat(parts).t().reshape(self.rounds, *x.shape[:-1])
        return found if real is None else found.masked_fill(~real, _PADDING)

    def _plan(self, x: Tensor, N: int, real: Tensor | None) -> RoundPlan:
        T, C = len(x), min(self.chunk, N)
        rows, chunks = T // N, -(-N // C)
        back, empty = int(chunks > 1), chunks * C - N
        found = self.hashes(x.view(rows, N, -1), None if real is None else real.reshape(rows, N))
        order = x.new_full((self.rounds, (back + rows * chunks) * C), T, dtype=torch.long)
        place = x.new_zeros((self.rounds, T + 1), dtype=torch.int32)
        slot = torch.arange(N, device=x.device).repeat(rows)
        row = torch.arange(rows, device=x.device).unsqueeze(1) * (_PADDING + 1)
        for r in range(self.rounds):
            # One flat sort is several times faster than one per row; it is stable, so by position within a bucket.
            buckets, tokens = torch.sort((found[r] + row).view(-1), stable=True)
            order[r, back * C :].view(rows, chunks * C)[:, :N] = tokens.view(rows, N)
            at = slot if self.same_bucket and self.causal else slot // C
            if self.same_bucket:
                # Puts other buckets out of reach: the next one is at least this factor away.
                at = at + (buckets % (_PADDING + 1)) * (C + 1 if self.causal else 2)
            place[r].index_copy_(0, tokens, 2 * at.int())
        hidden = None
        if empty or real is not None:
            hidden = x.new_full((T + 1,), APART, dtype=torch.float32)
            hidden[:T] = 0 if real is None else APART * ~real.reshape(-1)
        reach = C if self.same_bucket and self.causal else 1
        return RoundPlan(
            T, N, C, chunks, back, order, place, reach, hidden, self.same_bucket, self.correction, self.causal
        )

    @staticmethod
    def cached_bytes(
        shape: Shape, width: int, *, chunk: int, rounds: int, buckets: int | None = None, **_: object
    ) -> int:
        """A token's key and value, and its part of the buckets' places and counts, 8 bytes each, rounded up."""
        hashes, columns = _sizes(shape.M, chunk, buckets)
        places = 0 if buckets else rounds * (2 * columns) ** hashes * (chunk + 2)
        return shape.K * (shape.D + shape.E) * width - (-8 * shape.H * places // shape.M)


def _sizes(N: int, chunk: int, buckets: int | None) -> tuple[int, int]:
    """Numbers of hashes in one code at length N, and of columns in the rotation of each."""
    half = max(1, (N + chunk) // (2 * chunk)) if buckets is None else buckets // 2
    return (1, half) if half <= _COLUMNS else (2, min(math.ceil(math.sqrt(half / 2)), _COLUMNS))
