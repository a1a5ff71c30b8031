"""Attention of chunks of queries, each to its own keys and to a sample that all of them share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attnbench.attention.matrix_tiles import fitting, tiles
from attnbench.attention.precision import accumulator


class Attend(torch.autograd.Function):
    """Chunks of queries to their block of keys and to the sample, in one softmax; backward computes weights again.

    q ``(G, C, r, D)`` with G = B·H heads of C chunks; k, v ``(G, C, c, D)``; the sample ``(G, S, D)``; bias
    ``(G, C, c + S)``.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sk: Tensor, sv: Tensor, bias: Tensor) -> Tensor:
        out = torch.empty_like(q)
        for tile in _tiles(q, bias.shape[2]):
            _, _, values, weights = _tile((q, k, v, sk, sv, bias), tile)
            part = out[tile]
            part.copy_(torch.bmm(weights, values).view(part.shape))
        ctx.save_for_backward(q, k, v, sk, sv, bias, out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sk, sv, _, out = ctx.saved_tensors
        c, D = k.shape[2:]
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        dsk, dsv = (torch.zeros(x.shape, dtype=accumulator(q.dtype), device=q.device) for x in (sk, sv))
        for tile in _tiles(q, c + sk.shape[1]):
            queries, keys, values, weights = _tile(ctx.saved_tensors[:6], tile)
            dout = grad[tile].to(keys.dtype).reshape(queries.shape)
            dot = torch.linalg.vecdot(dout, out[tile].to(keys.dtype).reshape(queries.shape)).unsqueeze(-1)
            dvalues = torch.bmm(weights.mT, dout)
            dlogits = torch.bmm(dout, values.mT).sub_(dot).mul_(weights)
            dq[tile] = torch.bmm(dlogits, keys).mul_(D**-0.5).view(dq[tile].shape).to(dq.dtype)
            for dx, ds, dboth in ((dk, dsk, torch.bmm(dlogits.mT, queries)), (dv, dsv, dvalues)):
                dboth = dboth.view(*dx[tile].shape[:2], -1, D)
                dx[tile] = dboth[:, :, :c].to(dx.dtype)
                ds[tile[0]] += dboth[:, :, c:].sum(1)
        return dq, dk, dv, dsk.to(sk.dtype), dsv.to(sv.dtype), None


def _tiles(q: Tensor, width: int) -> Iterator[tuple[slice, slice]]:
    """Heads and chunks whose weights stay in cache: several whole heads, or a part of one."""
    G, C, r, _ = q.shape
    return ((heads, slice(a, b)) for heads, a, b in tiles(G, C, r * width, fitting(q.device)))


def _tile(tensors: tuple[Tensor, ...], tile: tuple[slice, slice]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scaled queries ``(g, r, D)``, keys and values ``(g, c + S, D)``, and weights ``(g, r, c + S)``."""
    q, k, v, sk, sv, bias = tensors
    dtype, D = accumulator(q.dtype), q.shape[3]

    def join(own: Tensor, sample: Tensor) -> Tensor:
        shared = sample[tile[0]].unsqueeze(1).expand(-1, own[tile].shape[1], -1, -1)
        return torch.cat([own[tile], shared], 2).to(dtype).flatten(0, 1)

    queries = (q[tile].to(dtype) * D**-0.5).flatten(0, 1)
    keys, values = join(k, sk), join(v, sv)
    weights = torch.baddbmm(bias[tile].reshape(len(keys), 1, -1), queries, keys.mT)
    return queries, keys, values, torch.softmax(weights, -1, out=weights)
