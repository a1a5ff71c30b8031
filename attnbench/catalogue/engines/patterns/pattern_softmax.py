"""Softmax attention over a pattern of blocks: the arithmetic that all fixed-pattern variants share.

Scores exist for one tile at a time, forward and backward; the backward pass computes them again from q and k, so that
only q, k and v are saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.patterns.keys import Window
from attnbench.catalogue.engines.patterns.tiles import Heads, Tile, batches, minus_infinity
from attnbench.catalogue.engines.precision import accumulator
from attnbench.catalogue.engines.tiling import budget, large_steps, short_examples, tile_scores
from attnbench.contract.problem.position_bias import PositionBias
from attnbench.contract.problem.sink import Sink


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Iterable[Tile],
    *,
    key_mask: Tensor | None = None,
    labelled: Tensor | None = None,
    position_bias: PositionBias | None = None,
    sink: Sink | None = None,
) -> Tensor:
    """Softmax attention over the pairs that ``tiles`` lists, scaled by D^-1/2.

    Args:
        q: ``(B, H, N, D)``; k: ``(B, H, M, D)``; v: ``(B, H, M, E)``; any strides and floating dtype.
        tiles: every row of q is in exactly one tile, and sees every key at most once.
        key_mask: ``(B, M)`` bool, True for a real key.
        labelled: ``(B, H, N, labels)``, each row's addition to the scores of its pairs with a label, unscaled.
        position_bias: added to the scores; may have more heads than q.
        sink: a logit of each head without a key; may have more heads than q.

    Returns:
        ``(B, H, N, E)`` in q's dtype, accumulated in float32, or float64 for float64. Rows that see no key give 0.
    """
    k, v = emptied(key_mask, k, v)
    bias = None if key_mask is None else minus_infinity(~key_mask, q)[:, None, :, None].expand(-1, q.shape[1], -1, -1)
    flat = [x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v)]
    # As one example, so that one step may hold heads of several.
    if large_steps(q) or short_examples(q) or all(x.is_contiguous() for x in flat):
        flat = [x.contiguous().view(1, -1, *x.shape[2:]) for x in flat]
        bias = None if bias is None else bias.reshape(1, -1, *bias.shape[2:])
        labelled = None if labelled is None else labelled.reshape(1, -1, *labelled.shape[2:])
    line = None
    if position_bias is not None:
        n = max(q.shape[2], k.shape[2])
        line = position_bias.along(torch.arange(1 - n, n, device=q.device), accumulator(q.dtype))[: q.shape[1]]
    logit = None if sink is None else sink.logit.to(accumulator(q.dtype))[: q.shape[1]]
    out: Tensor = _BlockSparse.apply(*flat, bias, labelled, line, logit, tuple(tiles))  # type: ignore[no-untyped-call]  # torch leaves it so
    return out.view(*q.shape[:3], v.shape[3])


def _like(x: Tensor, dtype: torch.dtype, width: int | None = None) -> Tensor:
    (B, H, n), d = x.shape[:3], width or x.shape[3]
    if x.stride(1) < x.stride(2):
        return torch.empty(B, n, H, d, dtype=dtype, device=x.device).transpose(1, 2)
    return torch.empty(B, H, n, d, dtype=dtype, device=x.device)


def _head_batches(q: Tensor, tile: Tile) -> Iterator[Heads]:
    # Few rows with many keys have few scores, but gradients for all of those keys.
    held = tile.scores // tile.rows.size * max(tile.rows.size, q.shape[-1])
    count = max(1, tile_scores(q) // held)
    if not large_steps(q) and (tile.by_head or tile.rows.count > 1):
        # Several blocks of several heads do not merge into one batch without a copy of their keys.
        copied = tile.scores // tile.rows.size * q.shape[-1]
        count = min(count, max(1, budget("patterns.copied_keys", q.device) // copied)) if q.is_contiguous() else 1
    for b in range(q.shape[0]):
        for first, heads in batches(0, q.shape[1], count):
            yield b, slice(first, first + heads)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


_Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _seen(tile: Tile, y: Tensor, heads: Heads) -> list[Tensor]:
    return [keys.of(y, heads, tile.rows, accumulator(y.dtype)) for keys in tile.keys]


def _scores(tile: Tile, x: Tensor, seen: list[Tensor]) -> Tensor:
    """Inner products of rows ``(heads, blocks, rows, d)`` with all their keys, ``(heads, blocks, rows, keys)``."""
    return _joined([keys.dot(x, own) for keys, own in zip(tile.keys, seen, strict=True)])


def _weights(
    tile: Tile, heads: Heads, inputs: _Inputs, seen: list[Tensor], room: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scaled query rows ``(heads, blocks, rows, d)``, in ``room`` if given, and softmax weights ``(..., keys)``."""
    q, _, _, bias, labelled, line, sink = inputs
    accumulate = accumulator(q.dtype)
    x = torch.mul(tile.rows.of(q, heads, accumulate), q.shape[-1] ** -0.5, out=room)
    p = _scores(tile, x, seen)
    for keys, columns in tile.columns():
        for first, mask in keys.masks:
            first += columns.start
            p.narrow(-1, first, mask.shape[-1]).add_(mask)
    if labelled is not None:
        rows = tile.rows.of(labelled, heads, accumulate)
        for columns, label in tile.labels:
            chosen = rows[..., label, None] if isinstance(label, int) else rows.gather(-1, _repeated(label, rows))
            p[..., columns].add_(chosen)
    if line is not None:
        own, at = line[_numbers(line, heads)], _distances(tile, heads, line)
        p.add_(own.gather(1, at.expand(len(own), -1, -1, -1).flatten(1)).view(-1, *at.shape[1:]))
    if bias is None:
        return x, _softmax(p, sink, heads)
    one = torch.ones_like(x[..., :1])  # its inner product with the bias is the bias of each row's own keys
    p.add_(_scores(tile, one, _seen(tile, bias, heads)))
    blind = p.amax(-1, keepdim=True) == float("-inf")
    return x, _softmax(p, sink, heads).masked_fill_(blind, 0.0)


def _softmax(p: Tensor, sink: Tensor | None, heads: Heads) -> Tensor:
    """In-place softmax of scores, with the logits ``(H,)`` of sinks if there are any."""
    if sink is None:
        return torch.softmax(p, -1, out=p)
    top = p.amax(-1, keepdim=True)
    torch.softmax(p, -1, out=p)
    # The largest weight is exp(top - L), which gives L = log Σ exp(l).
    log_sums = top - p.amax(-1, keepdim=True).log()
    return p.mul_(torch.sigmoid(log_sums - sink[_numbers(sink, heads), None, None, None]))


def _numbers(line: Tensor, heads: Heads) -> Tensor:
    return torch.arange(heads[1].start, heads[1].stop, device=line.device) % len(line)


def _distances(tile: Tile, heads: Heads, line: Tensor) -> Tensor:
    """Indices in ``line`` of each pair's number, ``(heads or 1, blocks or 1, rows, keys)``."""
    rows, middle = tile.rows.positions(line.device)[:, :, None], line.shape[1] // 2
    parts = [keys.positions(tile.rows, heads, line.device) - rows + middle for keys in tile.keys]
    # All blocks are alike if those of queries and those of keys are the same step apart.
    step = (tile.rows.step, tile.rows.stride)
    if all(isinstance(keys, Window) and (keys.blocks.step, keys.blocks.stride) == step for keys in tile.keys):
        parts = [part[:, :1] for part in parts]
    most = max(len(part) for part in parts)
    return _joined([part.expand(most, -1, -1, -1) for part in parts])


def _repeated(label: Tensor, rows: Tensor) -> Tensor:
    return label.expand(*rows.shape[:2], *label.shape)


def _by_label(tile: Tile, ds: Tensor, like: Tensor) -> Tensor:
    """Sums of ds over the pairs of each label, ``(heads, blocks, rows, labels)``."""
    sums = ds.new_zeros(*ds.shape[:3], like.shape[-1])
    for columns, label in tile.labels:
        if isinstance(label, int):
            sums[..., label].add_(ds[..., columns].sum(-1))
        else:
            sums.scatter_add_(-1, _repeated(label, sums), ds[..., columns])
    return sums


def _mixed(tile: Tile, p: Tensor, seen: list[Tensor], out: Tensor | None = None) -> Tensor:
    if len(seen) == 1:
        return tile.keys[0].mix(p, seen[0], out)
    parts = [keys.mix(p[..., columns], own, None) for (keys, columns), own in zip(tile.columns(), seen, strict=True)]
    for part in parts[1:]:
        parts[0].add_(part)
    return parts[0] if out is None else out.copy_(parts[0])


def _room(rows: Tensor) -> Tensor | None:
    """A result's rows, if products can read them and write to them; else None."""
    written = rows.dtype == accumulator(rows.dtype) and rows.is_contiguous() and not torch.compiler.is_compiling()
    return rows if written else None


# One function per tile, so that nothing of a tile outlives it.
def _attend_tile(tile: Tile, heads: Heads, inputs: _Inputs, out: Tensor) -> None:
    q, k, v, *_ = inputs
    rows = tile.rows.of(out, heads)
    room = _room(rows)
    p = _weights(tile, heads, inputs, _seen(tile, k, heads), room if q.shape[3] == v.shape[3] else None)[1]
    sums = _mixed(tile, p, _seen(tile, v, heads), room)
    if room is None:
        rows.copy_(sums)


def _differentiate_tile(
    tile: Tile,
    heads: Heads,
    inputs: _Inputs,
    grad: Tensor,
    outputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None],
) -> None:
    q, k, v, *_ = inputs
    dq, dk, dv, d_labelled, d_line, d_sink = outputs
    seen = _seen(tile, k, heads)
    rows = tile.rows.of(dq, heads)
    x, p = _weights(tile, heads, inputs, seen, _room(rows))
    g = tile.rows.of(grad, heads, x.dtype).contiguous()
    for keys, columns in tile.columns():
        keys.spread(p[..., columns], g, dv, heads)
    ds = _scores(tile, g, _seen(tile, v, heads))
    if d_sink is not None:  # the sink's value is 0: its weight times the mean of ds is its whole gradient
        cost = (1 - p.sum(-1)).mul_(torch.linalg.vecdot(p, ds))
        d_sink.index_add_(0, _numbers(d_sink, heads), cost.sum((1, 2)), alpha=-1)
    torch.ops.aten._softmax_backward_data.out(ds, p, -1, p.dtype, grad_input=ds)
    for keys, columns in tile.columns():
        keys.spread(ds[..., columns], x, dk, heads)
    torch.mul(_mixed(tile, ds, seen), q.shape[-1] ** -0.5, out=rows)
    if d_labelled is not None:
        tile.rows.of(d_labelled, heads).copy_(_by_label(tile, ds, d_labelled))
    if d_line is not None:
        at = _distances(tile, heads, d_line)
        alike = ds if at.shape[1] == ds.shape[1] else ds.sum(1, keepdim=True)
        by_distance = d_line.new_zeros(len(ds), d_line.shape[1])
        by_distance.scatter_add_(1, at.expand_as(alike).flatten(1), alike.flatten(1))
        d_line.index_add_(0, _numbers(d_line, heads), by_distance)


class _BlockSparse(torch.autograd.Function):
    """q, k, v ``(B, H, n, ·)``, tokens contiguous; bias ``(B, H, n, 1)`` and labelled ``(B, H, n, labels)`` or None.

    line is ``(H, 2n - 1)``, added at the distances 1 - n .. n - 1, or None; sink is ``(H,)`` or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        labelled: Tensor | None,
        line: Tensor | None,
        sink: Tensor | None,
        tiles: tuple[Tile, ...],
    ) -> Tensor:
        inputs = q, k, v, bias, labelled, line, sink
        ctx.save_for_backward(*inputs)
        ctx.tiles = tiles
        out = _like(q, q.dtype, v.shape[3])
        for tile in tiles:
            for heads in _head_batches(q, tile):
                _attend_tile(tile, heads, inputs, out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _, labelled, line, sink = ctx.saved_tensors
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        accumulate = accumulator(q.dtype)
        dq, dk, dv = _like(q, q.dtype), _like(k, accumulate).zero_(), _like(v, accumulate).zero_()
        d_labelled = torch.empty_like(labelled) if ctx.needs_input_grad[4] else None
        d_line = torch.zeros_like(line) if ctx.needs_input_grad[5] else None
        d_sink = torch.zeros_like(sink) if ctx.needs_input_grad[6] else None
        outputs = dq, dk, dv, d_labelled, d_line, d_sink
        for tile in ctx.tiles:
            for heads in _head_batches(q, tile):
                _differentiate_tile(tile, heads, ctx.saved_tensors, grad, outputs)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, d_labelled, d_line, d_sink, None
