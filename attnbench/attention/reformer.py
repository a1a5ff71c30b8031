"""Attention among the tokens that a locality-sensitive hash puts side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench.shape import Shape
from attnbench.variant import No, Traits, register

_COLUMNS = 64  # of one rotation; more buckets than 2 · 64 come from pairs of hashes
_PADDING = 2 * _COLUMNS**2 * 2  # sorts behind every bucket
_SELF = -1e5  # finite: a token with no other target attends to itself
_FAR = 1e25


@dataclass(frozen=True)
class _Plan:
    """Who may see whom: i sees j in a round where 0 <= place_i - place_j <= 2·reach."""

    tokens: int
    """T = B·H·N; token T stands for an empty slot."""
    row: int
    """N, the tokens of one head."""
    chunk: int
    chunks: int
    """Chunks of one head."""
    back: int
    """Chunks looked back: 1, or 0 where there is only one."""
    order: Tensor
    """``(rounds, back·chunk + B·H·chunks·chunk)``: the token in each slot."""
    place: Tensor
    """``(rounds, T + 1)`` int32, even."""
    reach: int
    hidden: Tensor | None
    """``(T + 1)``: large where there is no key; None where every slot holds one."""
    same_bucket: bool
    distinct: bool
    causal: bool

    @property
    def skip(self) -> int:
        """Slots of a tile before its first query."""
        return self.back * self.chunk

    def tiles(self) -> list[tuple[int, int, int]]:
        """(round, first chunk, last chunk + 1), so that the weights of one tile stay in cache."""
        weights = 1 << (18 if self.order.device.type == "cpu" else 24)
        step = max(1, weights // (self.chunk * (self.chunk + self.skip)))
        total = self.tokens // self.row * self.chunks
        return [(r, a, min(a + step, total)) for r in range(len(self.order)) for a in range(0, total, step)]

    def windows(self, slots: Tensor) -> Tensor:
        """Own and previous chunk of every chunk, overlapping, without a copy: ``(g, (1 + back)·chunk, D)``."""
        width, chunk = slots.shape[1], self.chunk
        chunks = len(slots) // chunk - self.back
        return slots.as_strided((chunks, chunk * (1 + self.back), width), (chunk * width, width, 1))

    def mask(self, logits: Tensor, r: int, first: int, slots: Tensor) -> None:
        """Push every pair that does not count in round ``r`` out of reach; arithmetic, as comparisons are slower."""

        def apart(table: Tensor) -> Tensor:
            values = table.unsqueeze(1)
            return values[self.skip :].view(len(logits), self.chunk, 1) - self.windows(values).transpose(1, 2)

        if self.same_bucket:
            outside = apart(self.place[r, slots]).sub_(self.reach).abs_().sub_(self.reach).clamp_(min=0)
            logits.sub_(outside.to(logits.dtype), alpha=_FAR)
        elif self.causal:
            logits.add_(apart((slots % self.row).int()).clamp_(max=0).to(logits.dtype), alpha=_FAR)
        if self.distinct and r:
            nearest = apart(self.place[0, slots]).sub_(self.reach).abs_()
            for earlier in self.place[1:r]:
                torch.minimum(nearest, apart(earlier[slots]).sub_(self.reach).abs_(), out=nearest)
            logits.add_(nearest.sub_(self.reach + 1).clamp_(max=0).to(logits.dtype), alpha=_FAR)
        if self.hidden is not None:
            logits.sub_(self.windows(self.hidden[slots].to(logits.dtype).unsqueeze(1)).transpose(1, 2))
        if self.back:
            logits[-first % self.chunks :: self.chunks, :, : self.chunk] = -_FAR
        if r == 0 or not self.distinct:
            logits[:, :, self.skip :].diagonal(dim1=1, dim2=2).fill_(_SELF)


class _Attend(torch.autograd.Function):
    """All rounds, tile by tile; the backward pass computes the weights again, scaled by the saved log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, v: Tensor, plan: _Plan) -> Tensor:
        dtype = torch.promote_types(q.dtype, torch.float32)
        norm = torch.linalg.vector_norm(q, dim=-1, dtype=dtype)
        inverse = torch.where(norm > 0, 1 / norm, 0)
        # The row behind the last is written by empty slots and never read.
        out = q.new_empty((plan.tokens + 1, v.shape[1]), dtype=dtype)
        lse = q.new_empty(plan.tokens + 1, dtype=dtype)
        for r, a, b in plan.tiles():
            slots, _, _, values, weights, here = _tile(q, v, inverse, plan, r, a, b)
            part = torch.bmm(weights, plan.windows(values)).view(-1, v.shape[1])
            own = slots[plan.skip :]
            if r:
                before = lse[own]
                both = torch.logaddexp(before, here)
                part.mul_((here - both).exp_().unsqueeze(1))
                part.addcmul_(out.index_select(0, own), (before - both).exp_().unsqueeze(1))
                here = both
            out.index_copy_(0, own, part)
            lse.index_copy_(0, own, here)
        lse[plan.tokens] = _FAR  # an empty slot weighs nothing
        result = out[: plan.tokens].to(q.dtype)
        ctx.save_for_backward(q, v, inverse, lse, result)
        ctx.plan = plan
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        q, v, inverse, lse, result = ctx.saved_tensors
        plan: _Plan = ctx.plan
        dot = torch.linalg.vecdot(grad.to(lse.dtype), result.to(lse.dtype))
        dq = q.new_zeros((plan.tokens + 1, q.shape[1]), dtype=lse.dtype)
        dv = q.new_zeros((plan.tokens + 1, v.shape[1]), dtype=lse.dtype)

        def to_slots(windows: Tensor) -> Tensor:
            summed = windows.new_zeros((len(windows) + plan.back) * plan.chunk, windows.shape[2])
            summed[plan.skip :] = windows[:, plan.skip :].reshape(-1, windows.shape[2])
            if plan.back:
                summed[: -plan.skip] += windows[:, : plan.skip].reshape(-1, windows.shape[2])
            return summed

        for r, a, b in plan.tiles():
            slots, queries, keys, values, weights, here = _tile(q, v, inverse, plan, r, a, b)
            source = slots.clamp(max=plan.tokens - 1)
            share = (here - lse[slots[plan.skip :]]).exp_().unsqueeze(1)
            dout = grad.index_select(0, source[plan.skip :]).to(lse.dtype).mul_(share).view(b - a, plan.chunk, -1)
            dvalues = to_slots(torch.bmm(weights.transpose(1, 2), dout))
            dlogits = torch.bmm(dout, plan.windows(values).transpose(1, 2))
            dlogits.sub_((dot[source[plan.skip :]].unsqueeze(1) * share).view(b - a, -1, 1)).mul_(weights)
            dlogits[:, :, plan.skip :].diagonal(dim1=1, dim2=2).zero_()
            dkeys = to_slots(torch.bmm(dlogits.transpose(1, 2), queries))
            dkeys.addcmul_(keys, torch.linalg.vecdot(keys, dkeys).unsqueeze(1), value=-1)
            dkeys.mul_(inverse[source].unsqueeze(1))
            dkeys[plan.skip :] += torch.bmm(dlogits, plan.windows(keys)).view(-1, q.shape[1])
            # A token has one slot per tile, so that copying the sum back is adding.
            dq.index_copy_(0, slots, dkeys.add_(dq.index_select(0, slots)))
            dv.index_copy_(0, slots, dvalues.add_(dv.index_select(0, slots)))
        return dq[: plan.tokens].to(q.dtype), dv[: plan.tokens].to(v.dtype), None


def _tile(q: Tensor, v: Tensor, inverse: Tensor, plan: _Plan, r: int, a: int, b: int) -> tuple[Tensor, ...]:
    """Slots, queries, unit keys, values, weights and log-sum-exp of the chunks a to b of round r."""
    slots = plan.order[r, a * plan.chunk : (b + plan.back) * plan.chunk]
    source = slots.clamp(max=plan.tokens - 1)
    x = q.index_select(0, source).to(inverse.dtype)
    keys = x * inverse[source].unsqueeze(1)
    values = v.index_select(0, source).to(inverse.dtype)
    queries = x[plan.skip :].view(b - a, plan.chunk, -1)
    weights = torch.bmm(queries, plan.windows(keys).transpose(1, 2))
    plan.mask(weights, r, a, slots)
    top = weights.amax(-1)
    torch.softmax(weights, -1, out=weights)
    lse = top.sub_(weights.amax(-1).log_()).view(-1)  # the largest weight is 1 / sum
    return slots, queries, keys, values, weights, lse


@register(
    "reformer",
    family="learned pattern",
    source="Kitaev et al. 2020, arXiv:2001.04451",
    formula="oᵢ = Σ_{j∈Pᵢ} softmax_j(qᵢ·q_j/‖q_j‖) v_j, Pᵢ = ∪ᵣ {j : chunkᵣ(i) − chunkᵣ(j) ∈ {0, 1}}, sorted by LSH",
    cost="O(r·n·c·d + r·n·log n)",
    time_exponent=1.0,
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        causal=True,
        cross=No("queries and keys are the same vectors, so there is no second sequence"),
        key_padding=True,
        stochastic=True,
    ),
    settings=("chunk=4,rounds=2", "chunk=4,rounds=2,correction=false"),
)
class Reformer(nn.Module):
    """LSH attention: queries are the keys, sorted by hash, chunk by chunk.

    Kitaev et al. 2020, section 2, equations 2-6. Keys are the normalised queries (``k`` is not read), logits q·k̂
    without a further scale; an error against softmax of q, k, v is therefore only a distance. Each of ``rounds``
    hashes argmax([xR; -xR]) sorts the tokens by (bucket, position); chunks of ``chunk`` tokens attend to themselves
    and to the chunk before. A token attends to itself only where it has no other target.

    ``correction`` counts a pair that several rounds see once (the paper's N_ij; here the pair is dropped in all rounds
    but the first, which gives the same sum), so that the result is exactly one softmax over the union of the pairs
    seen. Without it, as in the authors' code, a pair seen twice weighs twice.

    ``members`` says which pairs a round sees. ``chunk``: everything in both chunks (section 2, "LSH attention"), by
    position where causal. Later tokens get no weight, but they move the borders between chunks, so that outputs do
    depend on them a little. ``bucket``: only pairs with equal hash (equation 4), and where causal the latest ``chunk``
    of these before the query, which no later token changes. ``auto``: ``bucket`` where causal, else ``chunk``.

    ``buckets`` beyond 128 are pairs of two hashes, as one rotation with n / chunk columns would cost n². By default
    their number follows the number of real tokens, and padding is sorted behind every chunk, so that a padded sequence
    gives what the shorter one gives; padded positions give 0.

    Differs from the authors' code: rotations are drawn once and shared by the heads; the first chunk does not look
    back to the last; any N (the last chunk is filled up with empty slots).

    Shapes: q, k, v ``(B, H, N, D)`` -> ``(B, H, N, D)``; ``key_mask`` ``(B, N)``.
    """

    rotations: Tensor

    def __init__(
        self,
        shape: Shape,
        *,
        rounds: Annotated[int, Field(ge=1, le=64, description="hash rounds")] = 4,
        chunk: Annotated[int, Field(ge=1, le=32768, description="tokens per chunk after sorting")] = 64,
        buckets: Annotated[
            int | None, Field(ge=2, le=16384, multiple_of=2, description="hash buckets; none: n / chunk, made even")
        ] = None,
        members: Annotated[
            Literal["auto", "chunk", "bucket"],
            Field(description="pairs of a round: two chunks, or equal hash only; auto: bucket where causal"),
        ] = "auto",
        correction: Annotated[bool, Field(description="count pairs that several rounds see once")] = True,
    ) -> None:
        super().__init__()
        self.causal, self.chunk, self.rounds, self.buckets = shape.causal, chunk, rounds, buckets
        self.same_bucket = members == "bucket" or (members == "auto" and shape.causal)
        self.correction = correction
        self.register_buffer("rotations", torch.randn(shape.D, 2, rounds, _COLUMNS))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        B, H, N, D = q.shape
        flat = q.reshape(-1, D)
        real = None if key_mask is None else key_mask.unsqueeze(1).expand(B, H, N)
        with torch.no_grad():
            plan = self._plan(flat, N, real)
        out: Tensor = _Attend.apply(flat, v.reshape(-1, v.shape[-1]), plan)  # type: ignore[no-untyped-call] # torch
        out = out.view(B, H, N, -1)
        return out if real is None else out.masked_fill(~real.unsqueeze(-1), 0)

    def hashes(self, q: Tensor, real: Tensor | None = None) -> Tensor:
        """Bucket of every token in every round.

        Args:
            q: ``(..., N, D)``.
            real: ``(..., N)`` bool, True where a token is no padding.

        Returns:
            ``(rounds, ..., N)`` int64; padding gets a number above every bucket.
        """
        N, D = q.shape[-2:]
        dtype = torch.promote_types(q.dtype, torch.float32)
        half = max(1, (N + self.chunk) // (2 * self.chunk)) if self.buckets is None else self.buckets // 2
        hashes, columns, limits = 1 + (half > _COLUMNS), min(half, _COLUMNS), None
        if real is not None and self.buckets is None:
            halves = ((real.sum(-1) + self.chunk) // (2 * self.chunk)).clamp(min=1)
            pair = (halves / 2).sqrt().ceil().long().clamp(max=_COLUMNS)
            limits = torch.stack([halves, torch.zeros_like(halves)], -1)[..., :hashes]
            limits = torch.where(halves.unsqueeze(-1) > _COLUMNS, pair.unsqueeze(-1), limits)
            limits = limits.repeat_interleave(N, 0).view(-1, hashes, 1, 1)
        elif hashes == 2:
            columns = min(math.ceil(math.sqrt(half / 2)), _COLUMNS)
        rotations = self.rotations[:, :hashes, :, :columns].to(dtype).reshape(D, -1)
        x, parts = q.reshape(-1, D), []
        for start in range(0, len(x), 2048):
            rotated = (x[start : start + 2048].to(dtype) @ rotations).view(-1, hashes, self.rounds, columns)
            size = rotated.abs()
            if limits is not None:
                limit = limits[start : start + 2048]
                size.masked_fill_(torch.arange(columns, device=q.device) >= limit, -1)
            axis = size.argmax(-1, keepdim=True)
            code = (axis + columns * (rotated.gather(-1, axis) < 0)).squeeze(-1)
            if limits is not None:
                code *= limit.squeeze(-1) > 0
            parts.append(code[:, 0] * (2 * columns) ** (hashes - 1) + (code[:, 1] if hashes == 2 else 0))
        found = torch.cat(parts).t().reshape(self.rounds, *q.shape[:-1])
        return found if real is None else found.masked_fill(~real, _PADDING)

    def _plan(self, q: Tensor, N: int, real: Tensor | None) -> _Plan:
        T, C = len(q), min(self.chunk, N)
        rows, chunks = T // N, -(-N // C)
        back, empty = int(chunks > 1), chunks * C - N
        found = self.hashes(q.view(rows, N, -1), None if real is None else real.reshape(rows, N))
        order = q.new_full((self.rounds, (back + rows * chunks) * C), T, dtype=torch.long)
        place = q.new_zeros((self.rounds, T + 1), dtype=torch.int32)
        slot = torch.arange(N, device=q.device).repeat(rows)
        row = torch.arange(rows, device=q.device).unsqueeze(1) * (_PADDING + 1)
        for r in range(self.rounds):
            # One flat sort, which is several times faster than one per row; stable, so by position within a bucket.
            buckets, tokens = torch.sort((found[r] + row).view(-1), stable=True)
            order[r, back * C :].view(rows, chunks * C)[:, :N] = tokens.view(rows, N)
            at = slot if self.same_bucket and self.causal else slot // C
            if self.same_bucket:
                # Puts other buckets out of reach: the next one is at least the factor away.
                at = at + (buckets % (_PADDING + 1)) * (C + 1 if self.causal else 2)
            place[r].index_copy_(0, tokens, 2 * at.int())
        hidden = None
        if empty or real is not None:
            hidden = q.new_full((T + 1,), _FAR, dtype=torch.float32)
            hidden[:T] = 0 if real is None else _FAR * ~real.reshape(-1)
        reach = C if self.same_bucket and self.causal else 1
        return _Plan(T, N, C, chunks, back, order, place, reach, hidden, self.same_bucket, self.correction, self.causal)
