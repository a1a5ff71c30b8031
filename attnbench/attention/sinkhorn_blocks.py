"""What a block mixed from all blocks takes: balanced scores, and attention to it beside the own block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attnbench.attention.matrix_tiles import fitting, tiles

FAR = 1e30


class Balance(torch.autograd.Function):
    """Sinkhorn normalisation of exp(x); keeps only the potentials, so that no iteration is stored."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, iterations: int, causal: bool) -> Tensor:
        rows, steps = x.new_zeros((*x.shape[:-1], 1)), []
        for _ in range(iterations):
            y = x - rows
            columns = y.logcumsumexp(-2) if causal else y.logsumexp(-2, keepdim=True)
            # Where nothing is allowed the potential is free; 0 keeps the entry forbidden.
            columns.masked_fill_(columns < -FAR / 2, 0)
            before, rows = rows, (x - columns).logsumexp(-1, keepdim=True)
            rows.masked_fill_(rows < -FAR / 2, 0)
            steps += [before, columns, rows]
        balanced = (x - columns - rows).exp_()
        ctx.save_for_backward(x, balanced, *steps)
        ctx.causal = causal
        return balanced

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, balanced, *steps = ctx.saved_tensors
        dx = grad * balanced
        drows = -dx.sum(-1, keepdim=True)
        dcolumns = -dx if ctx.causal else -dx.sum(-2, keepdim=True)
        while steps:
            rows, columns, before = steps.pop(), steps.pop(), steps.pop()
            part = (x - columns - rows).exp_().mul_(drows)
            dcolumns = dcolumns - (part if ctx.causal else part.sum(-2, keepdim=True))
            dx += part
            if ctx.causal:  # in logarithms and by sign, as the factors may be far apart
                tiny = torch.finfo(x.dtype).tiny
                later = (dcolumns.clamp(min=tiny).log() - columns, (-dcolumns).clamp(min=tiny).log() - columns)
                up, down = ((x - before + t.flip(-2).logcumsumexp(-2).flip(-2)).exp_() for t in later)
                part = up - down
            else:
                part = (x - before - columns).exp_().mul_(dcolumns)
            dx += part
            drows = -part.sum(-1, keepdim=True)
            dcolumns = torch.zeros_like(dcolumns)
        return dx, None, None


class Attend(torch.autograd.Function):
    """Softmax over own and sorted block, tile by tile; the backward pass computes the weights again.

    q, k, v ``(G, n, b, D)`` with G = B·H heads of n blocks; sort ``(G, n, n)``; log_mass and real ``(G, n, b)``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sort: Tensor,
        log_mass: Tensor | None,
        real: Tensor | None,
        causal: bool,
    ) -> Tensor:
        out = torch.empty_like(q)
        for heads, blocks in _tiles(q):
            _, _, values, weights = _tile((q, k, v, sort, log_mass, real), causal, heads, blocks)
            part = out[heads, blocks]
            part.copy_(torch.bmm(weights, values).view(part.shape))
        ctx.save_for_backward(q, k, v, sort, log_mass, real, out)
        ctx.causal = causal
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sort, log_mass, _, out = ctx.saved_tensors
        n, b, D = q.shape[1:]
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros(x.shape, dtype=sort.dtype, device=x.device) for x in (k, v))
        dsort, dmass = torch.zeros_like(sort), None if log_mass is None else torch.empty_like(log_mass)
        for heads, blocks in _tiles(q):
            queries, keys, values, weights = _tile(ctx.saved_tensors[:6], ctx.causal, heads, blocks)
            dout = grad[heads, blocks].reshape(-1, b, D).to(sort.dtype)
            dot = torch.linalg.vecdot(dout, out[heads, blocks].reshape(-1, b, D).to(sort.dtype)).unsqueeze(-1)
            dvalues = torch.bmm(weights.mT, dout)
            dlogits = torch.bmm(dout, values.mT).sub_(dot).mul_(weights)
            if dmass is not None:
                dmass[heads, blocks] = dlogits[:, :, b:].sum(1).view(dmass[heads, blocks].shape)
            dlogits.mul_(D**-0.5)
            dq[heads, blocks] = torch.bmm(dlogits, keys).view(dq[heads, blocks].shape).to(dq.dtype)
            dkeys = torch.bmm(dlogits.mT, queries)
            mixing = sort[heads, blocks]
            for x, dx, joined, djoined in ((k, dk, keys, dkeys), (v, dv, values, dvalues)):
                own, moved = djoined.view(len(mixing), -1, 2, b, D).unbind(2)
                if dmass is not None:
                    assert log_mass is not None
                    dmass[heads, blocks] -= torch.linalg.vecdot(moved, joined.view(len(mixing), -1, 2, b, D)[:, :, 1])
                    moved = moved * inverse_mass(log_mass[heads, blocks])
                flat = moved.reshape(len(mixing), -1, b * D)
                dx[heads].view(-1, n, b * D).baddbmm_(mixing.mT, flat)
                dx[heads, blocks] += own
                dsort[heads, blocks] += torch.bmm(flat, x[heads].flatten(2).mT.to(sort.dtype))
        return dq, dk.to(k.dtype), dv.to(v.dtype), dsort, dmass, None, None


def _tiles(q: Tensor) -> Iterator[tuple[slice, slice]]:
    """Heads and blocks whose weights stay in cache: several whole heads, or a part of one."""
    G, n, b, _ = q.shape
    return ((heads, slice(first, stop)) for heads, first, stop in tiles(G, n, 2 * b * b, fitting(q.device)))


def inverse_mass(log_mass: Tensor) -> Tensor:
    """1 / mass, with one axis more at the end; where there is no mass, a finite number for a sum that is 0."""
    return log_mass.clamp(min=-80).neg().exp().unsqueeze(-1)


def _tile(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    causal: bool,
    heads: slice,
    blocks: slice,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries ``(g, b, D)``, own and sorted keys and values ``(g, 2b, D)``, and weights ``(g, b, 2b)``."""
    q, k, v, sort, log_mass, real = tensors
    b, D = q.shape[2:]
    mixing = sort[heads, blocks]

    def join(x: Tensor) -> Tensor:
        joined = x.new_empty((*mixing.shape[:2], 2, b * D), dtype=sort.dtype)
        joined[:, :, 0] = x[heads, blocks].flatten(2)
        torch.bmm(mixing, x[heads].flatten(2).to(sort.dtype), out=joined[:, :, 1])
        if log_mass is not None:
            joined[:, :, 1].view(*mixing.shape[:2], b, D).mul_(inverse_mass(log_mass[heads, blocks]))
        return joined.view(-1, 2 * b, D)

    queries, keys, values = q[heads, blocks].reshape(-1, b, D).to(sort.dtype), join(k), join(v)
    weights = queries.new_empty((len(queries), b, 2 * b))
    torch.baddbmm(weights, queries, keys.mT, beta=0, alpha=D**-0.5, out=weights)
    if causal:
        weights[:, :, :b] += torch.full((b, b), -FAR, dtype=sort.dtype, device=q.device).triu_(1)
    if real is not None and log_mass is not None:
        weights[:, :, :b].masked_fill_(~real[heads, blocks].reshape(-1, 1, b), -FAR)
        weights[:, :, b:] += log_mass[heads, blocks].reshape(-1, 1, b)
    elif causal and blocks.start == 0:
        weights.view(*mixing.shape[:2], b, 2 * b)[:, 0, :, b:] = -FAR  # nothing is before the first block
    return queries, keys, values, torch.softmax(weights, -1, out=weights)
