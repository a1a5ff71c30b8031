"""One softmax for each query over the keys of its chosen blocks, tile by tile, forward and backward.

Only the scores of kept pairs of blocks are computed. Those of a few tiles exist at a time; a query's blocks meet in
running sums that are scaled by its largest logit so far. The backward pass computes the scores again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from attnbench.catalogue.engines.blocks.selection import BlockSelection
from attnbench.catalogue.engines.blocks.tile_plan import BlockTile, TilePlan
from attnbench.catalogue.engines.flex.pair_pattern import FlexPattern
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import accumulator
from attnbench.contract.problem.sink import Sink


def attend(q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection, sink: Sink | None = None) -> Tensor:
    """Σ_j softmax_j(q_i·k_j/√D) v_j over the visible keys of the blocks selected for query i.

    Args:
        q: ``(B, H, N, D)``; k: ``(B, K, N, D)``; v: ``(B, K, N, E)``; head h of the queries reads head h // (H / K).
        sink: a logit of each head without a key; may have more heads than q.

    Returns:
        ``(B, H, N, E)`` in v's dtype, summed in float32 at least. A query without any visible key gives 0.
    """
    q, k, v = emptied(selection.real, q, k, v)
    B, H, N, D = q.shape
    dtype = accumulator(q.dtype)
    plan = TilePlan.of(selection, H // k.shape[1], (D, v.shape[3]), q.device)
    x = _whole(q.to(dtype) * D**-0.5, plan.units * plan.rows).view(-1, plan.rows, D)
    y, z = (_whole(one.to(dtype), plan.tokens) for one in (k, v))
    logits = None if sink is None else sink.logit.to(dtype)[:H, None].expand(B, H, plan.units * plan.rows)
    of_sink = None if logits is None else logits.reshape(-1, plan.rows)
    out: Tensor = _BlockSoftmax.apply(x, y, z, of_sink, plan)  # type: ignore[no-untyped-call]  # untyped in torch
    return out.view(B, H, -1, v.shape[3])[:, :, :N].to(v.dtype)


def attend_in_form(
    flex: FlexPattern, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection, sink: Sink | None = None
) -> Tensor:
    """:func:`attend`, or one kernel of FlexAttention; a selection of one example or head stands for all of them."""

    def own(q: Tensor) -> BlockSelection:
        B, H, N = q.shape[:3]
        return selection.of(min(B, selection.size[0]), min(H, selection.size[1]), N)

    def plain(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        return attend(q, k, v, own(q).repeated(*q.shape[:2]), sink)

    def masks(q: Tensor, key_mask: Tensor | None) -> tuple[BlockMask, None]:
        return own(q).block_mask, None

    return flex.over(plain, masks, q, k, v, key_mask=selection.real, sink=sink, same_tokens=True)


def _whole(x: Tensor, tokens: int) -> Tensor:
    return pad(x, (0, 0, 0, tokens - x.shape[2])).reshape(-1, x.shape[3])


def _fetched(tile: BlockTile, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    T = len(tile.units)
    return x.index_select(0, tile.queries).view(T, -1, x.shape[2]), _of_keys(tile, y)


def _of_keys(tile: BlockTile, y: Tensor) -> Tensor:
    blocks = y.view(-1, tile.columns, y.shape[1]).index_select(0, tile.keys)
    return blocks.view(len(tile.blocks), -1, y.shape[1])


def _logits(plan: TilePlan, tile: BlockTile, queries: Tensor, keys: Tensor) -> Tensor:
    logits = torch.bmm(queries, keys.mT)
    return logits.masked_fill_(plan.hidden(tile), -torch.inf) if tile.cut else logits


class _BlockSoftmax(torch.autograd.Function):
    """Scaled x ``(units, rows, D)``, y, z ``(tokens, D or E)``, sink ``(units, rows)`` -> ``(units, rows, E)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, z: Tensor, sink: Tensor | None, plan: TilePlan) -> Tensor:
        out, log_sums = x.new_empty(*x.shape[:2], z.shape[1]), x.new_empty(*x.shape[:2])
        for number, first, last in plan.ranges():
            mixed, log_sums[first:last] = _mixed(plan, number, (first, last), (x, y, z))
            out[first:last] = mixed
        if sink is not None:
            out.mul_(torch.sigmoid(log_sums - sink).unsqueeze(2))
            log_sums = torch.logaddexp(log_sums, sink)
        ctx.save_for_backward(x, y, z, sink, out, log_sums)
        ctx.plan = plan
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y, z, sink, out, log_sums = ctx.saved_tensors
        plan: TilePlan = ctx.plan
        dx, dy, dz = torch.empty_like(x), torch.zeros_like(y), torch.zeros_like(z)
        means = torch.linalg.vecdot(grad, out).unsqueeze(2)
        for number, first, last in plan.ranges():
            own = x.new_zeros(last - first + 1, *x.shape[1:])
            # A row that is not there, and one that sees nothing, has no weights: exp(logit - inf) = 0.
            sums = torch.cat((log_sums[first:last], torch.full_like(log_sums[:1], torch.inf)))
            for tile in plan.tiles(number):
                T, at = len(tile.units), tile.places(first, last)
                queries, keys = _fetched(tile, x, y)
                above, values = _fetched(tile, grad, z)
                weights = _logits(plan, tile, queries, keys)
                weights.sub_(sums.index_select(0, at).view(T, -1, 1)).exp_()
                _added(dz, tile, torch.bmm(weights.mT, above))
                d_logits = torch.bmm(above, values.mT).sub_(means.index_select(0, tile.queries).view(T, -1, 1))
                d_logits.mul_(weights)
                _added(dy, tile, torch.bmm(d_logits.mT, queries))
                own.index_add_(0, at, torch.bmm(d_logits, keys).view(-1, *x.shape[1:]))
            dx[first:last] = own[:-1]
        # The sink's value is 0: its weight times the mean of the gradients is all that it costs.
        d_sink = None if sink is None else (sink - log_sums).exp_().mul_(means.squeeze(2)).neg_()
        return dx, dy, dz, d_sink, None


def _added(total: Tensor, tile: BlockTile, found: Tensor) -> None:
    width = total.shape[1]
    total.view(-1, tile.columns, width).index_add_(0, tile.keys, found.view(-1, tile.columns, width))


def _mixed(
    plan: TilePlan, number: int, ends: tuple[int, int], inputs: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Outputs ``(n, rows, E)`` and log sums ``(n, rows)`` of a range of blocks; 0 and ∞ for a row that sees no key."""
    x, y, z = inputs
    first, last = ends
    size = last - first + 1, plan.rows  # the last one takes queries that belong to no block
    lowest = torch.finfo(x.dtype).min
    top, total = x.new_full(size, lowest), x.new_zeros(size)
    mixed = x.new_zeros(*size, z.shape[1])
    for tile in plan.tiles(number):
        at = tile.places(first, last)
        weights = _logits(plan, tile, *_fetched(tile, x, y))
        own = weights.amax(2, keepdim=True).clamp_(min=lowest)
        weights.sub_(own).exp_()
        own = own.view(-1, plan.rows)
        new = top.scatter_reduce(0, at[:, None].expand_as(own), own, "amax")
        faded, top = top.sub_(new).exp_(), new
        own.sub_(top.index_select(0, at)).exp_()
        sums = weights.sum(2).view_as(own)
        total.mul_(faded).index_add_(0, at, sums.mul_(own))
        parts = torch.bmm(weights, _of_keys(tile, z)).view(*own.shape, -1)
        mixed.mul_(faded.unsqueeze(2)).index_add_(0, at, parts.mul_(own.unsqueeze(2)))
    total, mixed, top = total[:-1], mixed[:-1], top[:-1]
    log_sums = top.add(total.log()).masked_fill_(total == 0, torch.inf)
    return mixed.div_(total.clamp(min=1).unsqueeze(2)), log_sums  # the largest weight alone is 1
