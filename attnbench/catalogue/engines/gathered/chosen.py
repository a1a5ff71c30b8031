"""Softmax over the blocks of keys that each query has chosen, gathered for some queries at a time.

On a CPU large blocks are not gathered: each one meets all queries that chose it in matrix products.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from attnbench.catalogue.engines.gathered.largest import largest
from attnbench.catalogue.engines.precision import accumulator
from attnbench.catalogue.engines.tiling import budget
from attnbench.contract.compiled import foreseen

_LAST = torch.iinfo(torch.int32).max
_LARGE = 16
"""Fewest keys of a block that meets its queries where it is."""
_NEVER = -2139095041
"""The bits of -∞ in float32 as an integer in the same order."""


def best(scores: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest of scores ``(..., M)``: ``(..., min(count, M))``, int32, in any order.

    A score of -∞ becomes -1. Scores are compared in float32, and of equal ones the later is taken: a ReLU makes many
    scores 0, and the choice must not depend on the rest of the computation.
    """
    M = scores.shape[-1]
    bits = (scores.float() + 0.0).view(torch.int32)  # -0 becomes 0
    bits = bits ^ (bits >> 31).bitwise_and_(_LAST)  # integers in the order of their floats
    ranks = (bits.long() << 32) + torch.arange(M, device=scores.device)
    kept, where = largest(ranks.flatten(0, -2), min(count, M))
    return torch.unflatten(torch.where(kept >> 32 == _NEVER, -1, where).to(torch.int32), 0, scores.shape[:-1])


def attend_to_chosen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    *,
    size: int = 1,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Σ_j softmax_j(q_i·k_j/√D) v_j over the keys j in the blocks that query i has chosen.

    Neither the pairs nor the gathered keys of more than a tile of queries exist at a time, forward or backward.

    Args:
        q: ``(B, H, N, D)``.
        k: ``(B, K, M, D)``; v: ``(B, K, M, E)``. Head h of q reads head h // (H / K) of both. Finite at padded keys.
        chosen: ``(B, S, N, n)``, numbers of blocks, distinct in a row; below 0: none. K / S neighbouring heads of keys,
            and all heads of queries that read them, share one choice.
        size: keys in a block; the last block may have fewer.
        causal: a query sees the keys up to its own place alone.

    Returns:
        ``(B, H, N, E)`` in v's dtype. A query without a key gives 0.
    """
    (B, H), (K, M), S = q.shape[:2], k.shape[1:3], chosen.shape[1]
    dtype = accumulator(q.dtype)
    rows = torch.unflatten(q.to(dtype), 1, (S, K // S, H // K)).permute(0, 1, 4, 2, 3, 5).flatten(0, 1).contiguous()
    more = -M % size
    whole = (pad(x, (0, 0, 0, more)) if more else x for x in (k.to(dtype), v.to(dtype)))  # pad copies in any case
    blocks = (torch.unflatten(x, 2, (-1, size)) for x in whole)
    keys, values = (torch.unflatten(x, 1, (S, -1)).permute(0, 1, 3, 4, 2, 5) for x in blocks)
    real = torch.ones(1, M, dtype=torch.bool, device=k.device) if key_mask is None else key_mask
    how = _ChosenCall(pad(real, (0, more)), S, causal)
    flat = (x.flatten(0, 1).contiguous() for x in (keys, values, chosen))
    # Which queries meet a block is known from numbers alone, which neither a plan nor a compiler has.
    numbers = q.device.type == "cpu" and not foreseen(q) and not torch.compiler.is_compiling()
    way = _AttendBlocks if numbers and size >= _LARGE else _ChosenSoftmax
    out: Tensor = way.apply(how, rows, *flat)  # type: ignore[no-untyped-call]  # untyped in torch
    return torch.unflatten(out, 0, (B, S)).permute(0, 1, 3, 4, 2, 5).flatten(1, 3).to(v.dtype)


def answer_from_chosen(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, size: int = 1) -> Tensor:
    """:func:`attend_to_chosen` for one query ``(B, H, 1, D)`` at the last of all keys."""
    (K, M), S = k.shape[1:3], chosen.shape[1]
    tokens = _tokens(chosen[:, :, 0], size)
    seen = ((tokens >= 0) & (tokens < M)).repeat_interleave(K // S, 1)
    at = tokens.clamp(0, M - 1).repeat_interleave(K // S, 1)[..., None]
    keys, values = (x.gather(2, at.expand(-1, -1, -1, x.shape[3])) for x in (k, v))
    rows = torch.unflatten(q[:, :, 0], 1, (K, -1)) * q.shape[3] ** -0.5
    logits = torch.matmul(rows, keys.mT).to(accumulator(q.dtype)).masked_fill(~seen[:, :, None], -torch.inf)
    return torch.matmul(logits.softmax(-1).to(v.dtype), values).flatten(1, 2)[:, :, None]


def _tokens(chosen: Tensor, size: int) -> Tensor:
    """The keys in blocks ``(..., n)``, ``(..., n · size)``; below 0 for no block."""
    if size == 1:
        return chosen.long()
    inside = torch.arange(size, device=chosen.device)
    return torch.where(chosen[..., None] < 0, -1, chosen.long()[..., None] * size + inside).flatten(-2)


class _ChosenCall(NamedTuple):
    real: Tensor
    shares: int
    causal: bool


class _ChosenTile(NamedTuple):
    """Some queries of one example and some heads that share their choices: Z = B·S such units in all."""

    z: int
    rows: slice
    blocks: Tensor
    seen: Tensor

    def gathered(self, x: Tensor) -> Tensor:
        return x[self.z][self.blocks].flatten(1, 2)

    def weights(self, q: Tensor, keys: Tensor) -> Tensor:
        rows = q[self.z, self.rows] * q.shape[-1] ** -0.5
        logits = torch.einsum("nhgd,nthd->nhgt", rows, keys).masked_fill_(~self.seen[:, None, None], -torch.inf)
        return logits.softmax(-1).masked_fill_(~self.seen.any(-1)[:, None, None, None], 0.0)

    def scatter(self, total: Tensor, parts: Tensor) -> None:
        of_blocks = torch.unflatten(parts, 1, (self.blocks.shape[1], -1)).flatten(0, 1)
        total[self.z].index_add_(0, self.blocks.flatten(), of_blocks)


def _tiles(how: _ChosenCall, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor) -> Iterator[_ChosenTile]:
    Z, N, size = q.shape[0], q.shape[1], k.shape[2]
    width = size * k.shape[3] * max(k.shape[4], v.shape[4])
    most = max(1, budget("gathered.listed", q.device) // (chosen.shape[2] * width))
    for z in range(Z):
        real = how.real[z // how.shares % len(how.real)]
        for start in range(0, N, most):
            rows = slice(start, min(start + most, N))
            blocks = chosen[z, rows].long()
            tokens = _tokens(blocks, size)
            seen = (tokens >= 0) & real[tokens.clamp(min=0)]
            if how.causal:
                seen &= tokens <= torch.arange(rows.start, rows.stop, device=q.device)[:, None]
            yield _ChosenTile(z, rows, blocks.clamp(min=0), seen)


class _ChosenSoftmax(torch.autograd.Function):
    """q ``(Z, N, heads, G, D)``, k and v ``(Z, blocks, size, heads, ·)``, chosen ``(Z, N, n)``, all that is saved."""

    @staticmethod
    def forward(ctx: Any, how: _ChosenCall, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor) -> Tensor:
        out = q.new_empty(*q.shape[:4], v.shape[4])
        for tile in _tiles(how, q, k, v, chosen):
            weights = tile.weights(q, tile.gathered(k))
            out[tile.z, tile.rows] = torch.einsum("nhgt,nthe->nhge", weights, tile.gathered(v))
        ctx.save_for_backward(q, k, v, chosen)
        ctx.how = how
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, chosen = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for tile in _tiles(ctx.how, q, k, v, chosen):
            above, keys = grad[tile.z, tile.rows], tile.gathered(k)
            weights = tile.weights(q, keys)
            d_weights = torch.einsum("nhge,nthe->nhgt", above, tile.gathered(v))
            d_logits = (d_weights - (d_weights * weights).sum(-1, keepdim=True)) * weights * q.shape[-1] ** -0.5
            dq[tile.z, tile.rows] = torch.einsum("nhgt,nthd->nhgd", d_logits, keys)
            tile.scatter(dk, torch.einsum("nhgt,nhgd->nthd", d_logits, q[tile.z, tile.rows]))
            tile.scatter(dv, torch.einsum("nhgt,nhge->nthe", weights, above))
        return None, dq, dk, dv, None


class _Meeting(NamedTuple):
    """A block of keys and some queries that chose it, in one of the Z units."""

    z: int
    block: int
    rows: Tensor
    hidden: Tensor | None

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        logits = torch.einsum("nhgd,thd->nhgt", q[self.z, self.rows] * q.shape[-1] ** -0.5, k[self.z, self.block])
        return logits if self.hidden is None else logits.masked_fill_(self.hidden[..., None, None, :], -torch.inf)


def _meetings(how: _ChosenCall, q: Tensor, k: Tensor, chosen: Tensor) -> Iterator[_Meeting]:
    Z, blocks, size = k.shape[:3]
    most = max(1, budget("gathered.listed", q.device) // (size * q.shape[2] * q.shape[3]))
    real = torch.unflatten(how.real, 1, (blocks, size))
    for z in range(Z):
        order = chosen[z].flatten().argsort(stable=True)
        counts = torch.bincount(chosen[z].flatten() + 1, minlength=blocks + 1).tolist()
        for block, every in enumerate(torch.split(order // chosen.shape[2], counts)[1:]):
            shown = real[z // how.shares % len(real), block]
            for rows in torch.split(every, most) if len(every) else ():
                hidden = None if shown.all() else ~shown
                if how.causal and rows[0] < (block + 1) * size - 1:
                    later = torch.arange(block * size, (block + 1) * size) > rows[:, None]
                    hidden = later if hidden is None else later | hidden
                yield _Meeting(z, block, rows, hidden)


class _AttendBlocks(torch.autograd.Function):
    """As :class:`_ChosenSoftmax`: the softmax of a query goes on from one of its blocks to the next."""

    @staticmethod
    def forward(ctx: Any, how: _ChosenCall, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor) -> Tensor:
        out, total = q.new_zeros(*q.shape[:4], v.shape[4]), q.new_zeros(q.shape[:4])
        most = torch.full_like(total, torch.finfo(q.dtype).min)
        for one in _meetings(how, q, k, chosen):
            logits, at = one.logits(q, k), (one.z, one.rows)
            largest = torch.maximum(most[at], logits.amax(-1))
            weights, less = (logits - largest[..., None]).exp_(), (most[at] - largest).exp_()
            most[at], total[at] = largest, total[at] * less + weights.sum(-1)
            out[at] = out[at] * less[..., None] + torch.einsum("nhgt,the->nhge", weights, v[one.z, one.block])
        out /= total.masked_fill(total == 0, 1.0)[..., None]
        ctx.save_for_backward(q, k, v, chosen, out, (most + total.log()).masked_fill(total == 0, torch.inf))
        ctx.how = how
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, chosen, out, log_total = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        kept = (grad * out).sum(-1, keepdim=True)
        for one in _meetings(ctx.how, q, k, chosen):
            at, here = (one.z, one.rows), (one.z, one.block)
            weights, above = (one.logits(q, k) - log_total[at][..., None]).exp_(), grad[at]
            d_logits = (
                (torch.einsum("nhge,the->nhgt", above, v[here]) - kept[at]).mul_(weights).mul_(q.shape[-1] ** -0.5)
            )
            dq[at] += torch.einsum("nhgt,thd->nhgd", d_logits, k[here])
            dk[here] += torch.einsum("nhgt,nhgd->thd", d_logits, q[at])
            dv[here] += torch.einsum("nhgt,nhge->the", weights, above)
        return None, dq, dk, dv, None
