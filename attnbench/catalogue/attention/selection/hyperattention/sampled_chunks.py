"""Attention of chunks of queries, each to keys of its own and to a sample that all chunks share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attnbench.catalogue.engines.precision import accumulator
from attnbench.catalogue.engines.tiling import budget, tiles

Tile = tuple[slice, slice]
"""Heads and chunks."""


class ChunkSoftmax(torch.autograd.Function):
    """Chunks of queries to their block of keys and to the sample, in one softmax; backward computes weights again.

    q ``(T, D)``, k and v ``(U, D)`` are the rows of all G heads. asked ``(G, C, r)`` are the queries of each of C
    chunks, each row once, and T for none; own ``(G, C, c)`` the keys of a chunk; sampled ``(G, S)`` the keys of all
    chunks. bias is ``(G, C, c + S)``.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, asked: Tensor, own: Tensor, sampled: Tensor, bias: Tensor
    ) -> Tensor:
        # The row behind the last is written for missing queries, and never read.
        out = q.new_empty(len(q) + 1, v.shape[1])
        for tile in _tiles(asked, bias.shape[2]):
            rows, _, _, _, values, weights = _tile((q, k, v, asked, own, sampled, bias), tile)
            out.index_copy_(0, rows, torch.bmm(weights, values).flatten(0, 1).to(out.dtype))
        ctx.save_for_backward(q, k, v, asked, own, sampled, bias, out)
        return out[: len(q)]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, asked, own, _, bias, out = ctx.saved_tensors
        c, D = own.shape[2], q.shape[1]
        dq, dots = torch.zeros_like(out), torch.zeros(len(out), dtype=bias.dtype, device=q.device)
        dots[:-1] = torch.linalg.vecdot(grad.to(bias.dtype), out[:-1].to(bias.dtype))
        dk, dv = (torch.zeros_like(x, dtype=accumulator(x.dtype)) for x in (k, v))
        for tile in _tiles(asked, bias.shape[2]):
            rows, seen, queries, keys, values, weights = _tile(ctx.saved_tensors[:7], tile)
            dout = _rows(grad, rows.clamp(max=len(q) - 1), queries)
            dout.masked_fill_((rows == len(q)).view(*dout.shape[:2], 1), 0)
            dot = dots[rows].view(*dout.shape[:2], 1)
            dvalues = torch.bmm(weights.mT, dout)
            dlogits = torch.bmm(dout, values.mT).sub_(dot).mul_(weights)
            dq.index_copy_(0, rows, torch.bmm(dlogits, keys).mul_(D**-0.5).flatten(0, 1).to(dq.dtype))
            for dx, dboth in ((dk, torch.bmm(dlogits.mT, queries)), (dv, dvalues)):
                add = dx.index_add_
                add(0, seen[:, :, :c].flatten(), dboth[:, :c].flatten(0, 1))
                # All chunks of a head have the same sample.
                shared = torch.unflatten(dboth, 0, seen.shape[:2])[:, :, c:].sum(1)
                add(0, seen[:, 0, c:].flatten(), shared.flatten(0, 1))
        return dq[: len(q)], dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def _tiles(asked: Tensor, width: int) -> Iterator[Tile]:
    """Heads and chunks whose weights stay in cache: several whole heads, or part of one."""
    G, C, r = asked.shape
    most = budget("hyperattention.weights", asked.device)
    return ((heads, slice(a, b)) for heads, a, b in tiles(G, C, r * width, most))


def _rows(x: Tensor, which: Tensor, like: Tensor) -> Tensor:
    return x.index_select(0, which).to(like.dtype).view(len(like), -1, x.shape[1])


def _tile(tensors: tuple[Tensor, ...], tile: Tile) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A tile's inputs and weights.

    Returns:
        Rows of q ``(g·r)``, rows of k ``(heads, chunks, c + S)``, scaled queries ``(g, r, D)``, keys and values
        ``(g, c + S, D)``, and weights ``(g, r, c + S)``.
    """
    q, k, v, asked, own, sampled, bias = tensors
    bias = bias[tile].flatten(0, 1).unsqueeze(1)
    rows, own = asked[tile].flatten(), own[tile]
    seen = torch.cat([own, sampled[tile[0]].unsqueeze(1).expand(-1, own.shape[1], -1)], 2)
    queries = _rows(q, rows.clamp(max=len(q) - 1), bias).mul_(q.shape[1] ** -0.5)
    queries.masked_fill_(
        (rows == len(q)).view(*queries.shape[:2], 1), 0.0
    )  # the last row may hold NaN, and 0·NaN is it
    keys, values = (_rows(x, seen.flatten(), queries) for x in (k, v))
    weights = torch.baddbmm(bias, queries, keys.mT)
    return rows, seen, queries, keys, values, torch.softmax(weights, -1, out=weights)
