"""The mixtures of all blocks: balanced scores, and attention to a mixture and a query's own block."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from attnbench.catalogue.engines.precision import hidden
from attnbench.catalogue.engines.tiling import budget, tiles
from attnbench.errors import Unsupported

_KEPT = 5 / 2
"""Most weights kept for the backward pass, as a multiple of q's entries: saves time for memory that stays linear."""


class Balance(torch.autograd.Function):
    """Sinkhorn normalisation of exp(x); keeps only the potentials, so that no iteration is stored."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, iterations: int, causal: bool) -> Tensor:
        rows, steps = x.new_zeros((*x.shape[:-1], 1)), []
        for _ in range(iterations):
            y = x - rows
            columns = y.logcumsumexp(-2) if causal else y.logsumexp(-2, keepdim=True)
            # If nothing is allowed the potential is free; 0 keeps the entry forbidden.
            columns.masked_fill_(columns < hidden(x.dtype) / 2, 0)
            before, rows = rows, (x - columns).logsumexp(-1, keepdim=True)
            rows.masked_fill_(rows < hidden(x.dtype) / 2, 0)
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
            if ctx.causal:  # in logarithms and by sign, since the factors may be far apart
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


def learned_scores(net: nn.ParameterDict, mean: Tensor, n: int) -> Tensor:
    """Scores ``(B, H, rows, n)`` of blocks with mean keys ``(B, H, rows, D)`` against the first n blocks."""
    W, w, U = (net[name].to(mean.dtype) for name in ("W", "w", "U"))
    if n > U.shape[-1]:
        raise Unsupported(f"sort=learned knows {U.shape[-1]} blocks and the sequence has {n}")
    scores: Tensor = (mean @ W + w).relu() @ U[..., :n]
    return scores


class SortedSoftmax(torch.autograd.Function):
    """Softmax over own and sorted block; the backward pass computes again the weights that were not kept.

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
        out = torch.empty(q.shape, dtype=sort.dtype, device=q.device)
        keys_room, values_room, weights_room = _rooms(q, sort.dtype)
        G, n, b, D = q.shape
        most = int(_KEPT * G * n * D / (2 * b)) if any(ctx.needs_input_grad) else 0
        kept = weights_room.new_empty((min(G * n, most), b, 2 * b))
        for heads, pieces in _pieces(q):
            keys = _beside(k[heads], sort[heads], log_mass, heads, keys_room)
            values = _beside(v[heads], sort[heads], log_mass, heads, values_room)
            for blocks in pieces:
                room = _kept(kept, q, heads, blocks)
                room = weights_room if room is None else room
                weights = _weights(q, keys, log_mass, real, causal, (heads, blocks), room)
                torch.bmm(weights, _batch(values[:, blocks]), out=_batch(out[heads, blocks]))
        ctx.save_for_backward(q, k, v, sort, log_mass, real, kept)
        ctx.causal = causal
        return out.to(q.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sort, log_mass, real, kept = ctx.saved_tensors
        b = q.shape[2]
        dq, dk, dv = (torch.empty(x.shape, dtype=sort.dtype, device=x.device) for x in (q, k, v))
        dsort, dmass = torch.zeros_like(sort), None if log_mass is None else torch.empty_like(log_mass)
        keys_room, values_room, weights_room = _rooms(q, sort.dtype)
        dlogits_room = torch.empty_like(weights_room)
        for heads, pieces in _pieces(q):
            keys = _beside(k[heads], sort[heads], log_mass, heads, keys_room)
            values = _beside(v[heads], sort[heads], log_mass, heads, values_room)
            mixed = [None if dmass is None else x[:, :, b:].clone() for x in (keys, values)]
            for blocks in pieces:
                weights = _kept(kept, q, heads, blocks)
                if weights is None:
                    weights = _weights(q, keys, log_mass, real, ctx.causal, (heads, blocks), weights_room)
                dout = _batch(grad[heads, blocks]).to(sort.dtype)
                dlogits = torch.bmm(dout, _batch(values[:, blocks]).mT, out=dlogits_room[: len(weights)])
                torch.ops.aten._softmax_backward_data.out(dlogits, weights, -1, weights.dtype, grad_input=dlogits)
                # From here on, gradients take the place of the keys and values of these blocks.
                torch.bmm(weights.mT, dout, out=_batch(values[:, blocks]))
                if dmass is not None:
                    dmass[heads, blocks] = dlogits[:, :, b:].sum(1).view(dmass[heads, blocks].shape)
                _product(dlogits, _batch(keys[:, blocks]), _batch(dq[heads, blocks]))
                _product(dlogits.mT, _batch(q[heads, blocks]).to(sort.dtype), _batch(keys[:, blocks]))
            for x, dx, djoined, before in ((k, dk, keys, mixed[0]), (v, dv, values, mixed[1])):
                own, moved = djoined[:, :, :b], djoined[:, :, b:]
                if dmass is not None:
                    assert log_mass is not None
                    dmass[heads] -= torch.linalg.vecdot(moved, before)
                    moved.mul_(inverse_mass(log_mass[heads]))
                moved = moved.flatten(2)
                torch.bmm(sort[heads].mT, moved, out=dx[heads].flatten(2))
                dx[heads] += own
                dsort[heads] += torch.bmm(moved, x[heads].flatten(2).mT.to(sort.dtype))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsort, dmass, None, None


def _pieces(q: Tensor) -> Iterator[tuple[slice, Iterator[slice]]]:
    """Heads whose blocks are mixed at once, and their blocks in pieces with weights that stay in cache."""
    G, n, b, _ = q.shape
    for heads, pieces in groupby(tiles(G, n, 2 * b * b, budget("sinkhorn.weights", q.device)), itemgetter(0)):
        yield heads, (slice(first, stop) for _, first, stop in pieces)


def _rooms(q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Memory that all pieces use for keys and values ``(heads, n, 2b, D)`` and weights ``(blocks, b, 2b)``."""
    n, b, D = q.shape[1:]
    heads, first, stop = next(tiles(len(q), n, 2 * b * b, budget("sinkhorn.weights", q.device)))
    g = heads.stop - heads.start
    keys, values = (torch.empty((g, n, 2 * b, D), dtype=dtype, device=q.device) for _ in range(2))
    return keys, values, torch.empty((g * (stop - first), b, 2 * b), dtype=dtype, device=q.device)


def _kept(kept: Tensor, q: Tensor, heads: slice, blocks: slice) -> Tensor | None:
    first = heads.start * q.shape[1] + blocks.start
    stop = first + (heads.stop - heads.start) * (blocks.stop - blocks.start)
    return kept[first:stop] if stop <= len(kept) else None


def _batch(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[2:])


def _product(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.baddbmm(out, a, b, beta=0, alpha=b.shape[-1] ** -0.5, out=out)


def inverse_mass(log_mass: Tensor) -> Tensor:
    """1 / mass, with one more axis at the end; without mass, a finite number for a sum that is 0."""
    return log_mass.clamp(min=-80).neg().exp().unsqueeze(-1)


def _beside(x: Tensor, sort: Tensor, log_mass: Tensor | None, heads: slice, room: Tensor) -> Tensor:
    """Each block of x ``(g, n, b, D)`` joined with its mixture, ``(g, n, 2b, D)``; sort ``(g, n, n)``."""
    g, n, b, D = x.shape
    joined = room[:g]
    own, mixed = joined.view(g, n, 2, b * D).unbind(2)
    own.copy_(x.flatten(2))
    torch.bmm(sort, x.flatten(2).to(sort.dtype), out=mixed)
    if log_mass is not None:
        joined[:, :, b:].mul_(inverse_mass(log_mass[heads]))
    return joined


def _weights(
    q: Tensor,
    keys: Tensor,
    log_mass: Tensor | None,
    real: Tensor | None,
    causal: bool,
    part: tuple[slice, slice],
    room: Tensor,
) -> Tensor:
    """The weights ``(g, b, 2b)`` of a part's heads and blocks, in ``room``; keys are ``(heads, n, 2b, D)``."""
    (heads, blocks), (b, D) = part, q.shape[2:]
    queries = _batch(q[heads, blocks]).to(keys.dtype)
    weights = room[: len(queries)]
    torch.baddbmm(weights, queries, _batch(keys[:, blocks]).mT, beta=0, alpha=D**-0.5, out=weights)
    if causal:
        weights[:, :, :b] += torch.full((b, b), hidden(keys.dtype), dtype=keys.dtype, device=q.device).triu_(1)
    if real is not None and log_mass is not None:
        weights[:, :, :b].masked_fill_(~real[heads, blocks].reshape(-1, 1, b), hidden(keys.dtype))
        weights[:, :, b:] += log_mass[heads, blocks].reshape(-1, 1, b)
    elif causal and blocks.start == 0:
        weights.view(len(keys), -1, b, 2 * b)[:, 0, :, b:] = hidden(keys.dtype)  # nothing is before the first block
    return torch.softmax(weights, -1, out=weights)
