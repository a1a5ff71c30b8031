"""Attention in chunks of tokens sorted by a hash, round by round, without a matrix of all pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnbench.catalogue.engines.precision import accumulator, softmax_and_log_sum
from attnbench.catalogue.engines.products import bmm
from attnbench.catalogue.engines.tiling import budget

SELF = -1e5
"""Logit of a token to itself; finite, so that a token with no other target attends to itself."""
APART = 1e25
"""Decrease of a logit for each position that its key is out of reach; times 10^6 positions still finite."""


@dataclass(frozen=True)
class RoundPlan:
    """The pairs of a round: i sees j if 0 <= place_i - place_j <= 2·reach."""

    tokens: int
    """T = B·H·N; token T stands for an empty slot."""
    row: int
    """N, the tokens of one head."""
    chunk: int
    chunks: int
    """Chunks of one head."""
    back: int
    """Chunks that a chunk looks back: 1, or 0 if there is only one."""
    order: Tensor
    """``(rounds, back·chunk + B·H·chunks·chunk)``: the token in each slot."""
    place: Tensor
    """``(rounds, T + 1)`` int32, even."""
    reach: int
    hidden: Tensor | None
    """``(T + 1)``: large for no key; None if every slot holds one."""
    same_bucket: bool
    distinct: bool
    causal: bool

    @property
    def skip(self) -> int:
        """Slots of a tile before its first query."""
        return self.back * self.chunk

    def tiles(self) -> list[tuple[int, int, int]]:
        weights = budget("reformer.weights", self.order.device)
        step = max(1, weights // (self.chunk * (self.chunk + self.skip)))
        total = self.tokens // self.row * self.chunks
        return [(r, a, min(a + step, total)) for r in range(len(self.order)) for a in range(0, total, step)]

    def windows(self, slots: Tensor) -> Tensor:
        """Each chunk with the one before it, overlapping, without a copy: ``(g, (1 + back)·chunk, D)``."""
        width, chunk = slots.shape[1], self.chunk
        chunks = len(slots) // chunk - self.back
        return slots.as_strided((chunks, chunk * (1 + self.back), width), (chunk * width, width, 1))

    def sources(self, slots: Tensor) -> Tensor:
        """The token that each slot of whole chunks fetches; an empty slot, never seen, the first of its chunk."""
        chunks = slots.view(-1, self.chunk)
        return torch.where(chunks < self.tokens, chunks, chunks[:, :1]).flatten().clamp(max=self.tokens - 1)

    def firsts(self, a: int) -> slice:
        """The chunks from ``a`` on that are the first of a head: before them stand tokens of another."""
        return slice(-a % self.chunks, None, self.chunks)

    def weighed(self, weights: Tensor, a: int, x: Tensor) -> Tensor:
        """Weights ``(g, chunk, (1 + back)·chunk)`` of the chunks from ``a`` on times windows of x, head by head."""
        out = bmm(weights, self.windows(x))
        if self.back:
            own = x[self.skip :].view(len(weights), self.chunk, -1)[self.firsts(a)]
            out[self.firsts(a)] = bmm(weights[self.firsts(a), :, self.chunk :], own)
        return out

    def mask(self, logits: Tensor, r: int, first: int, slots: Tensor) -> None:
        """Push every pair that does not count in round ``r`` out of reach, by arithmetic: comparisons are slower."""

        def apart(table: Tensor) -> Tensor:
            values = table.unsqueeze(1)
            return values[self.skip :].view(len(logits), self.chunk, 1) - self.windows(values).transpose(1, 2)

        if self.same_bucket:
            outside = apart(self.place[r, slots]).sub_(self.reach).abs_().sub_(self.reach).clamp_(min=0)
            logits.sub_(outside.to(logits.dtype), alpha=APART)
        elif self.causal:
            logits.add_(apart((slots % self.row).int()).clamp_(max=0).to(logits.dtype), alpha=APART)
        if self.distinct and r:
            nearest = apart(self.place[0, slots]).sub_(self.reach).abs_()
            for earlier in self.place[1:r]:
                torch.minimum(nearest, apart(earlier[slots]).sub_(self.reach).abs_(), out=nearest)
            logits.add_(nearest.sub_(self.reach + 1).clamp_(max=0).to(logits.dtype), alpha=APART)
        if self.hidden is not None:
            logits.sub_(self.windows(self.hidden[slots].to(logits.dtype).unsqueeze(1)).transpose(1, 2))
        if self.back:
            logits[self.firsts(first), :, : self.chunk] = -APART
        # SELF in one round only: sums of several logits this low lose digits.
        logits[:, :, self.skip :].diagonal(dim1=1, dim2=2).fill_(-APART if r else SELF)


class HashedSoftmax(torch.autograd.Function):
    """All rounds, tile by tile; the backward pass computes the weights again, scaled by the saved log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, v: Tensor, plan: RoundPlan) -> Tensor:
        dtype = accumulator(q.dtype)
        norm = torch.linalg.vector_norm(q, dim=-1, dtype=dtype)
        inverse = torch.where(norm > 0, 1 / norm, 0)
        # The row behind the last is written by empty slots, and never read.
        out = q.new_empty((plan.tokens + 1, v.shape[1]), dtype=dtype)
        lse = q.new_empty(plan.tokens + 1, dtype=dtype)
        for r, a, b in plan.tiles():
            slots, _, _, values, weights, here = _tile(q, v, inverse, plan, r, a, b)
            part = plan.weighed(weights, a, values).view(-1, v.shape[1])
            own = slots[plan.skip :]
            if r:
                before = lse[own]
                both = torch.logaddexp(before, here)
                part.mul_((here - both).exp_().unsqueeze(1))
                part.addcmul_(out.index_select(0, own), (before - both).exp_().unsqueeze(1))
                here = both
            out.index_copy_(0, own, part)
            lse.index_copy_(0, own, here)
        lse[plan.tokens].fill_(APART)  # an empty slot weighs nothing
        result = out[: plan.tokens].to(q.dtype)
        ctx.save_for_backward(q, v, inverse, lse, result)
        ctx.plan = plan
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        q, v, inverse, lse, result = ctx.saved_tensors
        plan: RoundPlan = ctx.plan
        dot = torch.linalg.vecdot(grad.to(lse.dtype), result.to(lse.dtype))
        dq = q.new_zeros((plan.tokens + 1, q.shape[1]), dtype=lse.dtype)
        dv = q.new_zeros((plan.tokens + 1, v.shape[1]), dtype=lse.dtype)

        def to_slots(windows: Tensor, a: int) -> Tensor:
            if plan.back:
                windows[plan.firsts(a), : plan.chunk] = 0
            summed = windows.new_zeros((len(windows) + plan.back) * plan.chunk, windows.shape[2])
            summed[plan.skip :] = windows[:, plan.skip :].reshape(-1, windows.shape[2])
            if plan.back:
                summed[: -plan.skip] += windows[:, : plan.skip].reshape(-1, windows.shape[2])
            return summed

        for r, a, b in plan.tiles():
            slots, queries, keys, values, weights, here = _tile(q, v, inverse, plan, r, a, b)
            source = plan.sources(slots)
            share = (here - lse[slots[plan.skip :]]).exp_().unsqueeze(1)
            dout = grad.index_select(0, source[plan.skip :]).to(lse.dtype).mul_(share).view(b - a, plan.chunk, -1)
            dvalues = to_slots(torch.bmm(weights.transpose(1, 2), dout), a)
            dlogits = bmm(dout, plan.windows(values).transpose(1, 2))
            dlogits.sub_((dot[source[plan.skip :]].unsqueeze(1) * share).view(b - a, -1, 1)).mul_(weights)
            dlogits[:, :, plan.skip :].diagonal(dim1=1, dim2=2).zero_()
            if plan.back:
                dlogits[plan.firsts(a), :, : plan.chunk] = 0
            dkeys = to_slots(torch.bmm(dlogits.transpose(1, 2), queries), a)
            dkeys.addcmul_(keys, torch.linalg.vecdot(keys, dkeys).unsqueeze(1), value=-1)
            dkeys.mul_(inverse[source].unsqueeze(1))
            dkeys[plan.skip :] += plan.weighed(dlogits, a, keys).view(-1, q.shape[1])
            # A token has one slot per tile, so that copying the sum back amounts to adding.
            dq.index_copy_(0, slots, dkeys.add_(dq.index_select(0, slots)))
            dv.index_copy_(0, slots, dvalues.add_(dv.index_select(0, slots)))
        return dq[: plan.tokens].to(q.dtype), dv[: plan.tokens].to(v.dtype), None


def _tile(q: Tensor, v: Tensor, inverse: Tensor, plan: RoundPlan, r: int, a: int, b: int) -> tuple[Tensor, ...]:
    slots = plan.order[r, a * plan.chunk : (b + plan.back) * plan.chunk]
    source = plan.sources(slots)
    x = q.index_select(0, source).to(inverse.dtype)
    keys = x * inverse[source].unsqueeze(1)
    values = v.index_select(0, source).to(inverse.dtype)
    queries = x[plan.skip :].view(b - a, plan.chunk, -1)
    weights = bmm(queries, plan.windows(keys).transpose(1, 2))
    plan.mask(weights, r, a, slots)
    weights, lse = softmax_and_log_sum(weights)
    return slots, queries, keys, values, weights, lse.view(-1)
