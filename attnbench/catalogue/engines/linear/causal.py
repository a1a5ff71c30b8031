"""Causal linear attention: each query reads the sums of φ(k) vᵀ over the keys up to its own.

A chunk of c tokens reads the tokens before it from the running sums, and its own keys from a c x c triangle: the work
is O(n), and no sum per token exists. The chunks of a block are computed at once; only the sums pass from one to the
next.

With chunks of 32 and heads of 64, a token and head take 12,288 multiplications forward and 43,008 with the backward
pass, which computes the sums again instead of keeping twice the bytes of v. Products run at the rate of large ones.
They are two fifths of the time; the rest is passes over memory and the start of each call. Code whose queries see whole
earlier buckets alone forms no pairs: it takes 24,576 and computes something else.

Log weights are taken relative to the largest one *up to each token*: a later key, however large, can neither make an
earlier row underflow nor change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnbench.catalogue.engines.linear.feature_map import FeatureMap, Tiles
from attnbench.catalogue.engines.linear.key_sums import KeySums, weigh, weigh_ones
from attnbench.catalogue.engines.precision import accumulator
from attnbench.catalogue.engines.tiling import Group, budget, head_groups, large_steps, learned, row_blocks, within

SHORT, LONG = 512, 2048
"""Rows of a block, and of one of few or narrow heads, in which the start of each call costs more than its work."""


class CausalCall(NamedTuple):
    """The facts that all blocks of a call share."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    features: FeatureMap
    chunk: int
    divisors: Tensor
    """``(B, H, N, 1)``, the denominators."""

    @property
    def rows(self) -> int:
        """Rows of a block: whole chunks. A long one is at most an eighth of the tokens, which bounds its memory."""
        batch, heads, length, _ = self.q.shape
        few = budget("linear.features", self.q.device) // (2 * batch * heads * self.features.width)
        rows = min(max(SHORT, min(LONG, few, length // 8)), length)
        return max(1, rows // self.chunk) * self.chunk

    def blocks(self) -> list[slice]:
        """Blocks of whole chunks, and the rest as a block of one shorter chunk."""
        length = self.q.shape[2]
        whole = length - length % self.chunk
        rest = [slice(whole, length)] if whole < length else []
        return row_blocks(whole, self.rows) + rest

    def room(self, sums: KeySums) -> Tensor:
        count, *size = sums.of_values.shape
        return sums.of_values.new_empty(count * (self.rows // self.chunk) + 1, *size)


class Gradients(NamedTuple):
    """The gradient of the output, and room for those of the inputs."""

    out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


# One function per block, so that nothing of a block outlives it.
def attend_block(call: CausalCall, tiles: Tiles, block: slice, room: Tensor, sums: KeySums, out: Tensor) -> KeySums:
    """Fill in the output of the block; returns the sums after it."""
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
    call: CausalCall, tiles: Tiles, block: slice, room: Tensor, sums: KeySums, d_sums: KeySums, gradients: Gradients
) -> KeySums:
    """Fill in the block's gradients; returns the gradients of the sums before it."""
    q, k, v, key_mask, features, chunk, divisors = call
    x_q, phi_q = tiles.queries(q, block)
    x_k, values, phi_k, log_weight = tiles.keys(k, v, key_mask, block, 1)
    chunks = Chunks(log_weight, sums.top, max(1, x_q.shape[1] // chunk), room)
    of_chunks, phi_q, phi_k = chunks.split(values), chunks.split(phi_q), chunks.split(phi_k)
    of_values, of_ones, _ = chunks.sums_before(sums, of_chunks, phi_k, by_feature=False)
    above = chunks.split(tiles.cut(gradients.out, block) / tiles.cut(divisors, block))
    # Numerators times their gradients, from numbers at hand: the output need not be kept.
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


class Chunks:
    """Weights of the keys in the m chunks of a block, relative to the largest log weight each query has seen.

    Args:
        log_weight: ``(G, R, 1)`` or None.
        top: the largest log weight before the block, ``(G, 1, 1)``.
        count: m.
        room: memory for the sums of the chunks, ``(Gm + 1, E, F)`` or more, reused by all blocks to stay in the cache.
    """

    def __init__(self, log_weight: Tensor | None, top: Tensor, count: int, room: Tensor) -> None:
        self.count, self.room = count, room
        self.seen = self.weight = self.decays = None
        if log_weight is None:
            return
        self.seen = torch.maximum(log_weight.cummax(1).values, top)  # (G, R, 1)
        tops = torch.cat([top, torch.unflatten(self.seen, 1, (count, -1))[:, :, -1]], 1)
        self.decays = (tops.mT - tops).exp2_().tril_()  # decay of sums between two chunks, (G, m + 1, m + 1)
        before, after = (x.reshape(-1, 1, 1) for x in (tops[:, :-1], tops[:, 1:]))
        own, rows = self.split(log_weight), self.split(self.seen)
        self.weight = (own - after).exp2_()  # weight of a key in the sums after its chunk, (Gm, c, 1)
        future = rows.new_full((rows.shape[1], rows.shape[1]), float("-inf")).triu_(1)
        self.pairs = (own.mT - rows).add_(future).exp2_()  # (Gm, c, c), 0 for j > i
        self.carried = (before - rows).exp2_()  # the weight of the sums so far in each row, (Gm, c, 1)

    def split(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0] * self.count, -1, x.shape[2]).contiguous()

    def weigh_(self, scores: Tensor) -> Tensor:
        """Weigh the scores ``(Gm, c, c)`` of each chunk's own pairs, in place; future ones become 0."""
        return scores.tril_() if self.weight is None else scores.mul_(self.pairs)

    def carry(self, rows: Tensor) -> Tensor:
        return rows if self.weight is None else rows * self.carried

    def carry_(self, rows: Tensor) -> Tensor:
        return rows if self.weight is None else rows.mul_(self.carried)

    def sums_before(
        self, sums: KeySums, values: Tensor, phi: Tensor, *, by_feature: bool
    ) -> tuple[Tensor, Tensor, KeySums]:
        """The sums before each chunk, ``(Gm, E, F)`` and ``(Gm, 1, F)``, and the sums after the block.

        ``by_feature`` lays the first out in memory as ``(Gm, F, E)``, which suits products with features.
        """
        values = weigh(values, self.weight)
        if by_feature:
            of_values, all_values = (x.mT for x in self.run(sums.of_values.mT, phi.mT, values))
        else:
            of_values, all_values = self.run(sums.of_values, values.mT, phi)
        of_ones, all_ones = self.run_ones(sums.of_ones, weigh_ones(self.weight, phi))
        top = sums.top if self.seen is None else self.seen[:, -1:]
        return of_values, of_ones, KeySums(all_values, all_ones, top)

    def run(self, total: Tensor, left: Tensor, right: Tensor, *, back: bool = False) -> tuple[Tensor, Tensor]:
        """Sums before each chunk, ``(Gm, E, F)``, and after the last; with ``back``, for gradients, the other way.

        The former overwrite those of the call before.

        Args:
            total: ``(G, E, F)``, the sum before the first chunk; with ``back``, after the last.
            left, right: ``(Gm, E, c)`` and ``(Gm, c, F)``; a chunk adds their product. Or all with E and F exchanged.
        """
        # A chunk's addition is written in the place of the next chunk, where the sum will be.
        room = self.room[: left.shape[0] + 1].view(-1, *total.shape[1:])
        added, met = (room[:-1], room[1:]) if back else (room[1:], room[:-1])
        torch.bmm(left, right, out=added)
        end = added[0 if back else self.count - 1 :: self.count].clone()
        at = met.view(-1, self.count, *total.shape[1:]).unbind(1)
        decays: Sequence[Tensor | None] = (None,) * self.count
        if self.decays is not None:
            decays = self.decays.diagonal(-1, 1, 2)[..., None, None].unbind(1)
        if back:
            at, decays = at[::-1], decays[::-1]
        at[0].copy_(total)
        for here, there, decay in zip(at, (*at[1:], end), decays, strict=True):
            if decay is None:
                there.add_(here)
            else:
                there.addcmul_(here, decay)
        return met, end

    def run_ones(self, total: Tensor, added: Tensor, *, back: bool = False) -> tuple[Tensor, Tensor]:
        """Like :meth:`run`, for sums ``(Gm, 1, F)``: the number of calls decides their time."""
        own = added.view(total.shape[0], self.count, -1)
        parts = torch.cat([own, total] if back else [total, own], 1)
        if self.decays is not None:
            sums = torch.bmm(self.decays.mT if back else self.decays, parts)
        else:
            sums = parts.flip(1).cumsum(1).flip(1) if back else parts.cumsum(1)
        met, end = (sums[:, 1:], sums[:, :1]) if back else (sums[:, :-1], sums[:, -1:])
        return met.reshape(added.shape), end


def attend_causally(
    q: Tensor, k: Tensor, v: Tensor, features: FeatureMap, *, key_mask: Tensor | None = None, chunk: int | None = None
) -> Tensor:
    """Linear attention in which query i sees the keys j <= i.

    Args:
        q, k: ``(B, H, N, D)``; v: ``(B, H, N, E)``.
        chunk: c; None for a fast one. It changes nothing in the result but rounding.

    Returns:
        ``(B, H, N, E)`` in q's dtype. A query that sees no key gives 0.
    """
    if chunk is None:
        # Pairs within chunks cost more the longer the chunks are, sums between chunks the more features there are.
        chunk = 256 if large_steps(q) else 32 if features.width < 256 else 64
    chunk = min(chunk, q.shape[2])
    attend = _AttendCausally.apply
    out: Tensor = attend(q, k, v, key_mask, features, chunk, learned(q, k, v))  # type: ignore[no-untyped-call]  # untyped in torch
    return out


def _attend_group(call: CausalCall, group: Group, out: Tensor, *, differentiable: bool) -> list[Tensor]:
    """Fill in the group's share of the output; if ``differentiable``, return three sums before each block."""
    kept: list[Tensor] = []
    tiles = Tiles(call.features, group, call.rows, call.q, count=2)
    sums = KeySums.empty(call.q, call.v.shape[-1], call.features, tiles.pairs)
    room = call.room(sums)
    for block in call.blocks():
        if differentiable:
            kept += [each.clone() for each in sums]
        sums = attend_block(call, tiles, block, room, sums, out)
    return kept


def _differentiate_group(call: CausalCall, group: Group, kept: list[Tensor], gradients: Gradients) -> None:
    """Fill in the group's share of the gradients; consumes the list of :func:`_attend_group` from its end."""
    tiles = Tiles(call.features, group, call.rows, call.q, count=4)
    # Gradients, but for top; last block first.
    d_sums = KeySums.empty(call.q, call.v.shape[-1], call.features, tiles.pairs)
    room = call.room(d_sums)
    for block in reversed(call.blocks()):
        sums = KeySums(*kept[-3:])
        del kept[-3:]
        d_sums = differentiate_block(call, tiles, block, room, sums, d_sums, gradients)


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
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        divisors = q.new_empty(*q.shape[:3], 1, dtype=accumulator(q.dtype))
        call = CausalCall(q, k, v, key_mask, features, chunk, divisors)
        kept: list[Tensor] = []
        groups = head_groups(q, call.rows * features.width)
        for group in groups:
            kept += _attend_group(call, group, out, differentiable=differentiable)
        ctx.save_for_backward(q, k, v, key_mask, divisors, *kept)
        ctx.features, ctx.chunk, ctx.groups = features, chunk, groups
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, key_mask, divisors, *kept = ctx.saved_tensors
        own = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        gradients = Gradients(grad, *own)
        call = CausalCall(q, k, v, key_mask, ctx.features, ctx.chunk, divisors)
        for group in reversed(ctx.groups):
            _differentiate_group(call, group, kept, gradients)
        return *gradients[1:], None, None, None, None
