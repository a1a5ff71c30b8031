"""One block of causal linear attention, forward and backward: see :mod:`attnbench.engines.linear.causal`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnbench.engines.linear.causal_chunks import Chunks
from attnbench.engines.linear.feature_map import FeatureMap, Tiles
from attnbench.engines.linear.key_sums import KeySums, weigh
from attnbench.engines.tiling import row_blocks, within

BLOCK = 512
"""Tokens in a block. Sums are kept for the backward pass once per block; those in between are computed again."""


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


class Gradients(NamedTuple):
    """The gradient of the output, and room for those of the inputs."""

    out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


# One function per block, so that nothing of a block outlives it.
def attend_block(call: Call, tiles: Tiles, block: slice, room: Tensor, sums: KeySums, out: Tensor) -> KeySums:
    """Fill in the output of the block; the sums after it from those before it."""
    q, k, v, key_mask, _, chunk, divisors = call
    _, phi_q = tiles.queries(q, block)
    _, values, phi_k, log_weight = tiles.keys(k, v, key_mask, block, 1)
    chunks = Chunks(log_weight, sums.top, max(1, phi_q.shape[1] // chunk), room)
    of_chunks, phi_q, phi_k = chunks.split(values), chunks.split(phi_q), chunks.split(phi_k)
    of_values, of_ones, after = chunks.sums_before(sums, of_chunks, phi_k, by_feature=True)
    scores = chunks.weigh_(torch.bmm(phi_q, phi_k.mT))
    # The features of the keys are no longer needed: their memory is free.
    free = within(phi_k, of_chunks.shape) if of_chunks.numel() <= phi_k.numel() else None
    numerator = chunks.carry_(torch.bmm(phi_q, of_values.mT, out=free))
    numerator.baddbmm_(scores, of_chunks)
    denominator = chunks.carry_(phi_q.mul_(of_ones).sum(-1, keepdim=True))
    denominator += scores.sum(-1, keepdim=True)
    tiles.divide(numerator, denominator, None if key_mask is None else chunks.seen, out, divisors, block)
    return after


def differentiate_block(
    call: Call, tiles: Tiles, block: slice, room: Tensor, sums: KeySums, d_sums: KeySums, gradients: Gradients
) -> KeySums:
    """The gradients of the sums before the block from those of the sums after it."""
    q, k, v, key_mask, features, chunk, divisors = call
    x_q, phi_q = tiles.queries(q, block)
    x_k, values, phi_k, log_weight = tiles.keys(k, v, key_mask, block, 1)
    chunks = Chunks(log_weight, sums.top, max(1, x_q.shape[1] // chunk), room)
    of_chunks, phi_q, phi_k = chunks.split(values), chunks.split(phi_q), chunks.split(phi_k)
    of_values, of_ones, _ = chunks.sums_before(sums, of_chunks, phi_k, by_feature=False)
    above = chunks.split(tiles.numerator_grad(gradients.out, divisors, block))
    # Numerators times their gradients, from what is at hand: the output need not be kept.
    scores = chunks.weigh_(torch.bmm(phi_q, phi_k.mT))
    d_scores = torch.bmm(above, of_chunks.mT)
    above_sums = chunks.carry(above)
    d_phi_q = torch.bmm(above_sums, of_values, out=chunks.split(tiles.blank(x_q.shape[1], 2)))
    below = torch.linalg.vecdot(scores, d_scores).add_(torch.linalg.vecdot(phi_q, d_phi_q))[..., None]
    below.div_(chunks.split(tiles.cut(divisors, block))).neg_()
    below_sums = chunks.carry(below)
    # Pairs within the chunks.
    d_scores.add_(below)
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
    phi_q, d_phi_q, phi_k, d_phi_k = (x.view(tiles.pairs, x_q.shape[1], -1) for x in (phi_q, d_phi_q, phi_k, d_phi_k))
    tiles.put(gradients.q, block, features.queries_grad(x_q, phi_q, d_phi_q))
    tiles.put(gradients.k, block, features.keys_grad(x_k, phi_k, d_phi_k))
    tiles.put(gradients.v, block, d_values)
    return d_sums
