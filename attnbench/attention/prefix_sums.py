"""Causal linear attention: each query reads the sums of φ(k) vᵀ over the keys up to its own.

A chunk of c tokens reads what came before from the running sums, and its own keys from a c x c triangle, so that the
work is O(n) and no sum per token exists. The chunks of a block are worked on at once; only the sums run from one to the
next. Log weights are taken relative to the largest one *up to each token*: a later key, however large, can neither
underflow an earlier row nor change it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnbench.attention.chunk_sums import Chunks
from attnbench.attention.feature_tiles import (
    FeatureMap,
    Tiles,
    head_groups,
    row_blocks,
)
from attnbench.attention.precision import accumulator
from attnbench.attention.running_sums import KeySums, real, weigh, weigh_ones

BLOCK = 512
"""Tokens of a block, between two sums that are kept for the backward pass; those in between are computed again."""

TILES = 2
"""So many tiles of the features of a block together have the size of the limit: those of queries and of keys."""


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
        # Pairs within a chunk cost more the longer it is, sums between chunks the more features there are.
        chunk = 256 if q.device.type != "cpu" else 32 if features.width <= 512 else 64
    chunk = min(chunk, q.shape[2])
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    attend = _AttendCausally.apply
    out: Tensor = attend(q, k, v, key_mask, features, chunk, differentiable)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


def _blocks(length: int, chunk: int) -> list[slice]:
    """Whole chunks, some at a time, and what is left, which is one shorter chunk."""
    whole = length - length % chunk
    rest = [slice(whole, length)] if whole < length else []
    return row_blocks(whole, _rows(chunk)) + rest


def _rows(chunk: int) -> int:
    return max(1, BLOCK // chunk) * chunk


def _room(sums: KeySums, chunk: int) -> Tensor:
    count, *size = sums.of_values.shape
    return sums.of_values.new_empty(count * (_rows(chunk) // chunk) + 1, *size)


class _Constant:
    """A constant feature in a block: each real key has 1 of it, each query its share.

    Args:
        sums: before the block.
        phi_q: ``(Gm, c, F)``.
        values: ``(Gm, c, E)``.
        real: 1 at the real keys, 0 at the padded ones, ``(Gm, c, 1)``; None if all are.
    """

    def __init__(self, offset: float, sums: KeySums, phi_q: Tensor, values: Tensor, real: Tensor | None) -> None:
        self.share = offset * phi_q.sum(-1, keepdim=True)  # of a query, (Gm, c, 1)
        self.real = real
        size = values.new_full((len(values), 1, 1), values.shape[1]) if real is None else real.sum(1, keepdim=True)
        own = torch.cat([weigh_ones(real, values), size], -1)
        met = torch.cat([sums.plain, own.view(len(sums.plain), -1, own.shape[2])], 1).cumsum(1)
        self.before = met[:, :-1].reshape(own.shape)  # of (v, 1) before each chunk, (Gm, 1, E + 1)
        self.after = met[:, -1:].clone()  # the block

    def of_pairs(self, pairs: Tensor) -> Tensor:
        """``(Gm, c, c)`` with 0 in the place of padded keys and of future ones, in place."""
        return (pairs if self.real is None else pairs.mul_(self.real.mT)).tril_()


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
        blocks = _blocks(N, chunk)
        kept: list[Tensor] = []
        largest_at = q.new_zeros(B, H, N if features.offset else 0, 1, dtype=torch.long)
        groups = head_groups(q, TILES * _rows(chunk) * features.width)
        for group in groups:
            tiles = Tiles(features, group, _rows(chunk), q, count=2)
            sums = KeySums.empty(q, E, features, tiles.pairs)
            room = _room(sums, chunk)
            at = torch.zeros_like(sums.top, dtype=torch.long)
            for block in blocks:
                if differentiable:
                    kept += sums.clone()
                _, phi_q = tiles.queries(q, block)
                _, values, phi_k, log_weight = tiles.keys(k, v, key_mask, block, 1)
                chunks = Chunks(log_weight, sums.top, max(1, phi_q.shape[1] // chunk), room)
                of_chunks, phi_q, phi_k = chunks.split(values), chunks.split(phi_q), chunks.split(phi_k)
                of_values, of_ones, after = chunks.sums_before(sums, of_chunks, phi_k, by_feature=True)
                numerator = chunks.carry(torch.bmm(phi_q, of_values.mT))
                scores = chunks.weigh_(torch.bmm(phi_q, phi_k.mT))
                constant = None
                if log_weight is not None and features.offset:
                    some = None if key_mask is None else chunks.split(real(log_weight))
                    constant = _Constant(features.offset, sums, phi_q, of_chunks, some)
                    constant.of_pairs(scores.add_(constant.share))
                    after = after._replace(plain=constant.after)
                    if differentiable:
                        found = torch.where(chunks.own[0], chunks.own[1] + block.start, at)
                        tiles.put(largest_at, block, found)
                        at = found[:, -1:]
                numerator.baddbmm_(scores, of_chunks)
                denominator = chunks.carry(phi_q.mul_(of_ones).sum(-1, keepdim=True))
                denominator += scores.sum(-1, keepdim=True)
                if constant is not None:
                    numerator.addcmul_(constant.share, constant.before[..., :-1])
                    denominator.addcmul_(constant.share, constant.before[..., -1:])
                sums = after
                tiles.divide(numerator, denominator, None if key_mask is None else chunks.seen, out, divisors, block)
        ctx.save_for_backward(q, k, v, key_mask, divisors, largest_at, *kept)
        ctx.features, ctx.chunk, ctx.groups = features, chunk, groups
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, key_mask, divisors, largest_at, *kept = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        features: FeatureMap = ctx.features
        blocks = _blocks(q.shape[2], ctx.chunk)
        steps = [KeySums(*kept[at : at + 4]) for at in range(0, len(kept), 4)]
        for group in reversed(ctx.groups):
            tiles = Tiles(features, group, _rows(ctx.chunk), q, count=4)
            d_sums = KeySums.empty(q, v.shape[-1], features, tiles.pairs)  # of all but the top; last block first
            room = _room(d_sums, ctx.chunk)
            d_weights = q.new_zeros(tiles.pairs, q.shape[2] if features.offset else 0, 1, dtype=tiles.dtype)
            for block in reversed(blocks):
                sums = steps.pop()
                x_q, phi_q = tiles.queries(q, block)
                x_k, values, phi_k, log_weight = tiles.keys(k, v, key_mask, block, 1)
                chunks = Chunks(log_weight, sums.top, max(1, x_q.shape[1] // ctx.chunk), room)
                of_chunks, phi_q, phi_k = chunks.split(values), chunks.split(phi_q), chunks.split(phi_k)
                of_values, of_ones, _ = chunks.sums_before(sums, of_chunks, phi_k, by_feature=False)
                above = chunks.split(tiles.numerator_grad(grad, divisors, block))
                # Numerators times their gradients, from what is there: the output need not be kept.
                scores = chunks.weigh_(torch.bmm(phi_q, phi_k.mT))
                constant = None
                if log_weight is not None and features.offset:
                    some = None if key_mask is None else chunks.split(real(log_weight))
                    constant = _Constant(features.offset, sums, phi_q, of_chunks, some)
                    constant.of_pairs(scores.add_(constant.share))
                d_scores = torch.bmm(above, of_chunks.mT)
                above_sums = chunks.carry(above)
                d_phi_q = torch.bmm(above_sums, of_values, out=chunks.split(tiles.blank(x_q.shape[1], 2)))
                below = torch.linalg.vecdot(scores, d_scores).add_(torch.linalg.vecdot(phi_q, d_phi_q))[..., None]
                if constant is not None:
                    earlier = torch.linalg.vecdot(above, constant.before[..., :-1])[..., None]
                    below.addcmul_(constant.share, earlier)
                below.div_(chunks.split(tiles.cut(divisors, block))).neg_()
                below_sums = chunks.carry(below)
                # The chunks' own pairs.
                d_scores.add_(below)
                d_share = None if constant is None else constant.of_pairs(d_scores.clone()).sum(-1, keepdim=True)
                chunks.weigh_(d_scores)
                d_values = torch.bmm(scores.mT, above)
                d_phi_k = torch.bmm(d_scores.mT, phi_q, out=chunks.split(tiles.blank(x_q.shape[1], 3)))
                # Their queries reading earlier keys, and their keys as later queries read them.
                d_phi_q.addcmul_(below_sums, of_ones).baddbmm_(d_scores, phi_k)
                d_of_values, all_values = chunks.run(d_sums.of_values, above_sums.mT, phi_q, back=True)
                d_of_ones, all_ones = chunks.run_ones(d_sums.of_ones, torch.bmm(below_sums.mT, phi_q), back=True)
                d_sums = d_sums._replace(of_values=all_values, of_ones=all_ones)
                d_phi_k.baddbmm_(weigh(of_chunks, chunks.weight), d_of_values)
                if chunks.weight is None:
                    d_phi_k.add_(d_of_ones)
                    d_values.baddbmm_(phi_k, d_of_values.mT)
                else:
                    d_phi_k.addcmul_(chunks.weight, d_of_ones)
                    d_values.addcmul_(torch.bmm(phi_k, d_of_values.mT), chunks.weight)
                if constant is not None and d_share is not None:
                    upper = torch.cat([above, below], -1)
                    d_share += torch.linalg.vecdot(upper, constant.before)[..., None]
                    d_phi_q.add_(d_share, alpha=features.offset)
                    own = torch.bmm(constant.share.mT, upper).view(tiles.pairs, -1, upper.shape[2])
                    met = torch.cat([own, d_sums.plain], 1).flip(1).cumsum(1).flip(1)
                    d_plain = met[:, 1:, :-1].reshape(len(upper), 1, -1)
                    d_values.add_(d_plain if constant.real is None else constant.real * d_plain)
                    d_sums = d_sums._replace(plain=met[:, :1])
                    d_largest = d_share.mul_(constant.share).view(tiles.pairs, -1, 1)
                    d_weights.scatter_add_(1, largest_at[(*group, block)].flatten(0, 1), d_largest)
                d_weight = d_weights[:, block] if features.offset else None
                phi_q, d_phi_q, phi_k, d_phi_k = (
                    x.view(tiles.pairs, x_q.shape[1], -1) for x in (phi_q, d_phi_q, phi_k, d_phi_k)
                )
                tiles.put(dq, block, features.queries_grad(x_q, phi_q, d_phi_q))
                tiles.put(dk, block, features.keys_grad(x_k, phi_k, d_phi_k, d_weight))
                tiles.put(dv, block, d_values)
        return dq, dk, dv, None, None, None, None
