"""One block of causal linear attention, forward and backward: see :mod:`attnbench.engines.linear.causal`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnbench.engines.linear.causal_chunks import Chunks
from attnbench.engines.linear.feature_map import FeatureMap, Tiles
from attnbench.engines.linear.key_sums import KeySums, real, weigh, weigh_ones
from attnbench.engines.tiling import row_blocks, within

BLOCK = 512
"""Tokens in a block. Sums are kept for the backward pass once per block; those in between are computed again."""


class _Constant:
    """A constant feature in a block: each real key has 1 of it, each query its share.

    Args:
        sums: those before the block.
        phi_q: ``(Gm, c, F)``.
        values: ``(Gm, c, E)``.
        real: 1 at the real keys, 0 at the padded ones, ``(Gm, c, 1)``; None if all are.
    """

    def __init__(self, offset: float, sums: KeySums, phi_q: Tensor, values: Tensor, real: Tensor | None) -> None:
        self.share = offset * phi_q.sum(-1, keepdim=True)  # each query's, (Gm, c, 1)
        self.real = real
        size = values.new_full((len(values), 1, 1), values.shape[1]) if real is None else real.sum(1, keepdim=True)
        own = torch.cat([weigh_ones(real, values), size], -1)
        met = torch.cat([sums.plain, own.view(len(sums.plain), -1, own.shape[2])], 1).cumsum(1)
        self.before = met[:, :-1].reshape(own.shape)  # sum of (v, 1) before each chunk, (Gm, 1, E + 1)
        self.after = met[:, -1:].clone()  # the same after the block

    def of_pairs(self, pairs: Tensor) -> Tensor:
        """Set ``pairs`` ``(Gm, c, c)`` to 0, in place, for padded keys and for future ones."""
        return (pairs if self.real is None else pairs.mul_(self.real.mT)).tril_()


class Call(NamedTuple):
    """What all blocks of a call have in common."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    features: FeatureMap
    chunk: int
    divisors: Tensor
    """``(B, H, N, 1)``, what each numerator was divided by."""
    largest_at: Tensor
    """``(B, H, N, 1)``, the key with the largest log weight so far; for a map with an offset."""

    @property
    def rows(self) -> int:
        """Tokens in a block."""
        return max(1, BLOCK // self.chunk) * self.chunk

    def blocks(self) -> list[slice]:
        """Blocks of whole chunks, and what is left as a block of one shorter chunk."""
        length = self.q.shape[2]
        whole = length - length % self.chunk
        rest = [slice(whole, length)] if whole < length else []
        return row_blocks(whole, self.rows) + rest

    def room(self, sums: KeySums) -> Tensor:
        """Memory for the sums of all chunks of a block."""
        count, *size = sums.of_values.shape
        return sums.of_values.new_empty(count * (self.rows // self.chunk) + 1, *size)


# One function per block, so that nothing of a block outlives it.
def attend_block(
    call: Call, tiles: Tiles, block: slice, room: Tensor, sums: KeySums, largest: Tensor | None, out: Tensor
) -> tuple[KeySums, Tensor | None]:
    """The sums after the block and the key with the largest log weight so far, from those before the block."""
    q, k, v, key_mask, features, chunk, divisors, largest_at = call
    _, phi_q = tiles.queries(q, block)
    _, values, phi_k, log_weight = tiles.keys(k, v, key_mask, block, 1)
    chunks = Chunks(log_weight, sums.top, max(1, phi_q.shape[1] // chunk), room)
    of_chunks, phi_q, phi_k = chunks.split(values), chunks.split(phi_q), chunks.split(phi_k)
    of_values, of_ones, after = chunks.sums_before(sums, of_chunks, phi_k, by_feature=True)
    scores = chunks.weigh_(torch.bmm(phi_q, phi_k.mT))
    # The features of the keys are no longer needed: their memory is free.
    free = within(phi_k, of_chunks.shape) if of_chunks.numel() <= phi_k.numel() else None
    numerator = chunks.carry_(torch.bmm(phi_q, of_values.mT, out=free))
    constant = None
    if log_weight is not None and features.offset:
        some = None if key_mask is None else chunks.split(real(log_weight))
        constant = _Constant(features.offset, sums, phi_q, of_chunks, some)
        constant.of_pairs(scores.add_(constant.share))
        after = after._replace(plain=constant.after)
        if largest is not None:
            found = torch.where(chunks.own[0], chunks.own[1] + block.start, largest)
            tiles.put(largest_at, block, found)
            largest = found[:, -1:].clone()
    numerator.baddbmm_(scores, of_chunks)
    denominator = chunks.carry_(phi_q.mul_(of_ones).sum(-1, keepdim=True))
    denominator += scores.sum(-1, keepdim=True)
    if constant is not None:
        numerator.addcmul_(constant.share, constant.before[..., :-1])
        denominator.addcmul_(constant.share, constant.before[..., -1:])
    tiles.divide(numerator, denominator, None if key_mask is None else chunks.seen, out, divisors, block)
    return after, largest


def differentiate_block(
    call: Call,
    tiles: Tiles,
    block: slice,
    room: Tensor,
    sums: KeySums,
    d_sums: KeySums,
    d_weights: Tensor,
    grad: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> KeySums:
    """The gradients of the sums before the block from those of the sums after it."""
    q, k, v, key_mask, features, chunk, divisors, largest_at = call
    x_q, phi_q = tiles.queries(q, block)
    x_k, values, phi_k, log_weight = tiles.keys(k, v, key_mask, block, 1)
    chunks = Chunks(log_weight, sums.top, max(1, x_q.shape[1] // chunk), room)
    of_chunks, phi_q, phi_k = chunks.split(values), chunks.split(phi_q), chunks.split(phi_k)
    of_values, of_ones, _ = chunks.sums_before(sums, of_chunks, phi_k, by_feature=False)
    above = chunks.split(tiles.numerator_grad(grad, divisors, block))
    # Numerators times their gradients, from what is at hand: the output need not be kept.
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
    # Pairs within the chunks.
    d_scores.add_(below)
    d_share = None if constant is None else constant.of_pairs(d_scores.clone()).sum(-1, keepdim=True)
    chunks.weigh_(d_scores)
    d_values = torch.bmm(scores.mT, above)
    d_phi_k = torch.bmm(d_scores.mT, phi_q, out=chunks.split(tiles.blank(x_q.shape[1], 3)))
    # Their queries as they read earlier keys, and their keys as later queries read them.
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
        d_weights.scatter_add_(1, largest_at[(*tiles.group, block)].flatten(0, 1), d_largest)
    d_weight = d_weights[:, block] if features.offset else None
    phi_q, d_phi_q, phi_k, d_phi_k = (x.view(tiles.pairs, x_q.shape[1], -1) for x in (phi_q, d_phi_q, phi_k, d_phi_k))
    tiles.put(dq, block, features.queries_grad(x_q, phi_q, d_phi_q))
    tiles.put(dk, block, features.keys_grad(x_k, phi_k, d_phi_k, d_weight))
    tiles.put(dv, block, d_values)
    return d_sums
