"""Causal linear attention: each query reads the sums of φ(k) vᵀ over the keys up to its own.

A chunk of c tokens reads what came before from the running sums, and its own keys from a c x c triangle, so that the
work is O(n) and no sum per token exists. Log weights are taken relative to the largest one *up to each token*: a later
key, however large, can neither underflow an earlier row nor change it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnbench.attention.feature_tiles import (
    FeatureMap,
    KeySums,
    Tiles,
    head_groups,
    row_blocks,
    unweighted,
    weigh,
)
from attnbench.attention.precision import accumulator

SEGMENT = 8
"""Chunks between two sums that are kept for the backward pass; those in between are computed again."""


def attend_causally(
    q: Tensor, k: Tensor, v: Tensor, features: FeatureMap, *, key_mask: Tensor | None = None, chunk: int | None = None
) -> Tensor:
    """Linear attention in which query i sees the keys j <= i.

    Args:
        q, k: ``(B, H, N, D)``; v: ``(B, H, N, E)``.
        features: the feature map φ.
        key_mask: ``(B, N)`` bool, True where a key is real.
        chunk: c; None for what is fast. Has no effect on the result but rounding.

    Returns:
        ``(B, H, N, E)`` in q's dtype. A query that sees no key gives 0.
    """
    if chunk is None:
        chunk = 256 if q.device.type != "cpu" else 128 if features.width <= 128 else 64
    chunk = min(chunk, q.shape[2])
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    attend = _AttendCausally.apply
    out: Tensor = attend(q, k, v, key_mask, features, chunk, differentiable)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


class _Triangle:
    """Weights of the pairs of one chunk, relative to the largest log weight each query has seen."""

    def __init__(self, log_weight: Tensor | None, before: KeySums, tokens: int) -> None:
        self.pairs: Tensor | None = None
        if log_weight is None:
            self.seen = torch.zeros_like(before.top)
            return
        seen, at = log_weight[..., 0].cummax(1)
        self.own = (seen[..., None] > before.top, at[..., None])  # whether, and where, the chunk holds the largest
        self.seen = torch.maximum(seen[..., None], before.top)
        future = log_weight.new_full((tokens, tokens), float("-inf")).triu_(1)
        self.pairs = (log_weight.transpose(1, 2) - self.seen).add_(future).exp2_()  # (G, c, c), 0 for j > i
        self.carry = (before.top - self.seen).exp2_()  # what the sums so far count for in each row, (G, c, 1)

    def weigh_(self, scores: Tensor) -> Tensor:
        """Scores ``(G, c, c)`` of the chunk's own pairs, future ones set to 0."""
        return scores.tril_() if self.pairs is None else scores.mul_(self.pairs)

    def carry_(self, rows: Tensor) -> Tensor:
        """Rows ``(G, c, ·)`` read from the sums so far."""
        return rows if self.pairs is None else rows.mul_(self.carry)

    def decay_(self, d_sums: Tensor) -> Tensor:
        """Gradient of the sums after the chunk, as one of the sums before it."""
        return d_sums if self.pairs is None else d_sums.mul_(self.carry[:, -1:])


class _AttendCausally(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        features: FeatureMap,
        chunk: int,
        differentiable: bool,
    ) -> Tensor:
        (B, H, N, _), E = q.shape, v.shape[-1]
        out = q.new_empty(B, H, N, E)
        divisors = q.new_empty(B, H, N, 1, dtype=accumulator(q.dtype))
        segments = -(-N // (SEGMENT * chunk)) if differentiable else 0
        kept = KeySums.empty(q, E, features, segments, B, H)
        largest_at = q.new_zeros(B, H, N if features.offset else 0, 1, dtype=torch.long)
        groups = head_groups(q, chunk * features.width)
        for group in groups:
            tiles = Tiles(features, group, chunk, q, count=2)
            sums = KeySums.empty(q, E, features, tiles.pairs)
            at = torch.zeros_like(sums.top, dtype=torch.long)
            for index, block in enumerate(row_blocks(N, chunk)):
                if segments and index % SEGMENT == 0:
                    kept.at(index // SEGMENT).of(group).copy_(sums)
                x, phi_q = tiles.queries(q, block)
                _, values, phi_k, log_weight = tiles.keys(k, v, key_mask, block, 1)
                triangle = _Triangle(log_weight, sums, x.shape[1])
                scores = triangle.weigh_(torch.bmm(phi_q, phi_k.transpose(1, 2)))
                numerator, denominator = (triangle.carry_(part) for part in sums.read(phi_q))
                numerator = torch.baddbmm(numerator, scores, values)
                denominator = denominator + scores.sum(-1, keepdim=True)
                if features.offset:
                    plain = unweighted(values, log_weight).cumsum(1).add_(sums.plain)
                    plain.mul_(features.offset * phi_q.sum(-1, keepdim=True))
                    numerator += plain[..., :-1]
                    denominator += plain[..., -1:]
                    found = torch.where(triangle.own[0], triangle.own[1] + block.start, at)
                    tiles.put(largest_at, block, found)
                    at = found[:, -1:]
                tiles.divide(numerator, denominator, triangle.seen, out, divisors, block)
                sums.add_(values, phi_k, log_weight, features.offset)
        ctx.save_for_backward(q, k, v, key_mask, out, divisors, largest_at, *kept)
        ctx.features, ctx.chunk, ctx.groups = features, chunk, groups
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, key_mask, out, divisors, largest_at, *kept = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        features: FeatureMap = ctx.features
        blocks = row_blocks(q.shape[2], ctx.chunk)
        for group in ctx.groups:
            tiles = Tiles(features, group, ctx.chunk, q, count=4)
            after = KeySums.empty(q, v.shape[-1], features, tiles.pairs)  # gradients of the sums, last chunk first
            d_sums, d_plain = after.weighted, after.plain
            d_weights = q.new_zeros(tiles.pairs, q.shape[2], 1, dtype=tiles.dtype) if features.offset else None
            for segment in reversed(range(-(-len(blocks) // SEGMENT))):
                part = blocks[segment * SEGMENT : (segment + 1) * SEGMENT]
                before = [KeySums(*kept).at(segment).of(group)]
                for block in part[:-1]:
                    _, values, phi_k, log_weight = tiles.keys(k, v, key_mask, block)
                    before.append(before[-1].clone())
                    before[-1].add_(values, phi_k, log_weight, features.offset)
                for block, sums in zip(reversed(part), reversed(before), strict=True):
                    x_q, phi_q = tiles.queries(q, block)
                    x_k, values, phi_k, log_weight = tiles.keys(k, v, key_mask, block, 1)
                    triangle = _Triangle(log_weight, sums, x_q.shape[1])
                    upper = tiles.quotient_grad(grad, out, divisors, block)
                    # The chunk's own pairs.
                    scores = triangle.weigh_(torch.bmm(phi_q, phi_k.transpose(1, 2)))
                    d_values = torch.bmm(scores.transpose(1, 2), upper[..., :-1])
                    torch.baddbmm(upper[..., -1:], upper[..., :-1], values.transpose(1, 2), out=scores)
                    d_scores = triangle.weigh_(scores)
                    d_phi_q = torch.bmm(d_scores, phi_k, out=tiles.blank(x_q.shape[1], 2))
                    d_phi_k = torch.bmm(d_scores.transpose(1, 2), phi_q, out=tiles.blank(x_q.shape[1], 3))
                    if d_weights is not None:
                        plain = unweighted(values, log_weight)
                        total = plain.cumsum(1).add_(sums.plain)
                        d_phi_q += features.offset * torch.linalg.vecdot(upper, total)[..., None]
                        d_total = upper * (features.offset * phi_q.sum(-1, keepdim=True))
                        d_suffix = d_total.flip(1).cumsum(1).flip(1).add_(d_plain)
                        d_values.addcmul_(d_suffix[..., :-1], plain[..., -1:])
                        d_plain.copy_(d_suffix[:, :1])
                        d_largest = torch.linalg.vecdot(d_total, total)[..., None]
                        d_weights.scatter_add_(1, largest_at[(*group, block)].flatten(0, 1), d_largest)
                    # Its keys, as later queries read them, and its queries, reading earlier keys.
                    weighted = weigh(values, log_weight, triangle.seen[:, -1:])
                    d_values.addcmul_(torch.bmm(phi_k, d_sums.transpose(1, 2))[..., :-1], weighted[..., -1:])
                    d_phi_k.baddbmm_(weighted, d_sums)
                    upper = triangle.carry_(upper)
                    d_phi_q.baddbmm_(upper, sums.weighted)
                    triangle.decay_(d_sums).baddbmm_(upper.transpose(1, 2), phi_q)
                    tiles.put(dq, block, features.queries_grad(x_q, phi_q, d_phi_q))
                    d_weight = None if d_weights is None else d_weights[:, block]
                    tiles.put(dk, block, features.keys_grad(x_k, phi_k, d_phi_k, d_weight))
                    tiles.put(dv, block, d_values)
        return dq, dk, dv, None, None, None, None
