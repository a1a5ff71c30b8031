"""Softmax attention with few keys or few queries; the weights pass through a CPU's cache one tile at a time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnbench.catalogue.engines.precision import softmax_and_log_sum
from attnbench.catalogue.engines.tiling import budget, large_steps, short_examples, threads, within

FEW = 256
"""Keys or queries up to which separate products and a softmax per tile beat a fused kernel."""

_Heads = tuple[int, slice]
"""An example and some of its heads."""
_Piece = tuple[int, slice, slice]
"""An example, some of its heads, and some of their tokens."""


def attend_to_few_keys(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, keep: bool = False) -> Tensor:
    """softmax(q kᵀ / √D) v, fast for at most :data:`FEW` keys.

    Args:
        q: ``(B, H, N, D)``; k: ``(B, H, R, D)``; v: ``(B, H, R, Dv)``.
        mask: True for a key that takes part, ``(B, 1, 1, R)``; None: all do.
        keep: keep the weights, R per query, for the backward pass, which saves a seventh of a training step.

    Returns:
        ``(B, H, N, Dv)``.
    """
    if mask is not None or not _tiled(q, k.shape[2]):
        return scaled_dot_product_attention(q, k, v, attn_mask=mask)
    joined = _joined(q, k, v) if short_examples(q) else (q, k, v)
    out: Tensor = _FewKeys.apply(*joined, keep)  # type: ignore[no-untyped-call]  # untyped in torch
    return out.view(*q.shape[:3], v.shape[3])


def attend_from_few_queries(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q kᵀ / √D) v, fast for at most :data:`FEW` queries.

    q ``(B, H, R, D)``, k ``(B, H, M, D)``, v ``(B, H, M, Dv)``, mask ``(B, 1, 1, M)`` of the keys that take part ->
    ``(B, H, R, Dv)``.
    """
    if mask is not None or not _tiled(k, q.shape[2]):
        return scaled_dot_product_attention(q, k, v, attn_mask=mask)
    joined = _joined(q, k, v) if short_examples(k) else (q, k, v)
    out: Tensor = _FewQueries.apply(*joined)  # type: ignore[no-untyped-call]  # untyped in torch
    return out.view(*q.shape[:3], v.shape[3])


class _FewKeys(torch.autograd.Function):
    """Pieces of the queries against all keys; the backward pass computes the weights again unless they are kept."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, keep: bool) -> Tensor:
        out = _like(q, v.shape[3])
        kept = q.new_empty((*q.shape[:3], k.shape[2])) if keep and any(ctx.needs_input_grad) else None
        columns = _columns(_scaled(k))
        (room,) = _rooms(q, k.shape[2], 1)
        for _, head, piece in _pieces(q, k.shape[2]):
            weights = _weights(q[piece], columns[head], room if kept is None else kept[piece].view(-1))
            _multiply(weights, v[head], out[piece])
        ctx.save_for_backward(q, k, v, kept)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, kept = ctx.saved_tensors
        dq, dk, dv = _like(q, q.shape[3]), torch.zeros_like(k), torch.zeros_like(v)
        keys = _scaled(k)
        columns, of_values = _columns(keys), _columns(v)
        room, another = _rooms(q, k.shape[2], 2)
        for _, head, piece in _pieces(q, k.shape[2]):
            weights = _weights(q[piece], columns[head], room) if kept is None else kept[piece]
            _multiply(weights.mT, grad[piece], dv[head], beta=1)
            dlogits = _multiply(grad[piece], of_values[head], within(another, weights.shape))
            torch.ops.aten._softmax_backward_data.out(dlogits, weights, -1, weights.dtype, grad_input=dlogits)
            _multiply(dlogits, keys[head], dq[piece])
            _multiply(dlogits.mT, q[piece], dk[head], beta=1)
        return dq, _scaled(dk), dv, None


class _FewQueries(torch.autograd.Function):
    """All queries against pieces of the keys; the pieces' outputs are weighted by their shares of the whole sum."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pieces = list(_pieces(k, q.shape[2]))
        count = pieces[-1][0] + 1
        parts = v.new_empty((count, *q.shape[:3], v.shape[3]))
        log_sums = v.new_zeros((count, *q.shape[:3], 1))
        queries = _scaled(q)
        (room,) = _rooms(k, q.shape[2], 1)
        for i, head, piece in pieces:
            log_sum = log_sums[i][head] if count > 1 else None
            _multiply(_weights(queries[head], _dense(k[piece]).mT, room, log_sum), v[piece], parts[i][head])
        shares = log_sums.softmax(0)
        out = parts.mul_(shares).sum(0)
        ctx.save_for_backward(q, k, v, shares, out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, shares, out = ctx.saved_tensors
        queries = _scaled(q)
        dq, dk, dv = torch.zeros_like(q), _like(k, k.shape[3]), _like(v, v.shape[3])
        room, another = _rooms(k, q.shape[2], 2)
        dots = torch.linalg.vecdot(grad, out).unsqueeze(3)
        for i, head, piece in _pieces(k, q.shape[2]):
            keys, share = _dense(k[piece]), shares[i][head]
            weights = _weights(queries[head], keys.mT, room)
            dout = grad[head] * share
            _multiply(weights.mT, dout, dv[piece])
            dlogits = _multiply(dout, _dense(v[piece]).mT, within(another, weights.shape))
            dlogits.sub_(dots[head] * share).mul_(weights)
            _multiply(dlogits, keys, dq[head], beta=1)
            _multiply(dlogits.mT, queries[head], dk[piece])
        return _scaled(dq), dk, dv


def _joined(*inputs: Tensor) -> list[Tensor]:
    """Each ``(B, H, ...)`` as ``(1, B · H, ...)``, so that a piece may hold heads of several examples."""
    return [x.flatten(0, 1)[None] for x in inputs]


def _tiled(x: Tensor, few: int) -> bool:
    if torch.compiler.is_compiling():  # it cannot trace a product into strided memory
        return False
    return not large_steps(x) and x.dtype in (torch.float32, torch.float64) and x.shape[2] > 0 and 0 < few <= FEW


def _sizes(x: Tensor, few: int) -> tuple[int, int]:
    """Tokens and heads in a piece of x ``(B, H, n, D)`` with weights for ``few`` others that stay in cache.

    Several heads have to be copied, and are taken only as far as they fill the cache of one core.
    """
    most = budget("low_rank.weights", x.device)
    tokens = min(x.shape[2], max(1, most // few))
    return tokens, min(x.shape[1], max(1, most // threads() // (few * tokens)))


def _pieces(x: Tensor, few: int) -> Iterator[tuple[int, _Heads, _Piece]]:
    tokens, heads = _sizes(x, few)
    for i, b, h in product(range(-(-x.shape[2] // tokens)), range(x.shape[0]), range(0, x.shape[1], heads)):
        some = slice(h, h + heads)
        yield i, (b, some), (b, some, slice(i * tokens, (i + 1) * tokens))


def _rooms(x: Tensor, few: int, count: int) -> Tensor:
    tokens, heads = _sizes(x, few)
    return x.new_empty((count, heads * tokens * few))


def _scaled(x: Tensor) -> Tensor:
    """x ``(B, H, R, D)`` / √D: scaling the few rows costs less than scaling the logits."""
    scale: float = x.shape[3] ** -0.5
    return x * scale


def _columns(x: Tensor) -> Tensor:
    """A copy ``(B, H, D, R)`` of x ``(B, H, R, D)``: oneDNN takes up to a quarter longer if it has to transpose."""
    return x.mT.contiguous()


def _multiply(a: Tensor, b: Tensor, out: Tensor, *, beta: float = 0.0) -> Tensor:
    """a b + beta·out, head by head, in ``out``."""
    if len(a) == 1:  # a product of many heads would copy a strided one
        torch.addmm(out[0], a[0], b[0], beta=beta, out=out[0])
    else:
        torch.baddbmm(out, a, b, beta=beta, out=out)
    return out


def _dense(x: Tensor) -> Tensor:
    """x, copied if it is several strided heads: a product with their transposes would make a slower copy."""
    return x if len(x) == 1 else x.contiguous()


def _weights(queries: Tensor, columns: Tensor, room: Tensor, log_sum: Tensor | None = None) -> Tensor:
    """Softmax of queries · columns, in ``room``; ``log_sum`` receives the logarithms of the sums of exponentials."""
    logits = within(room, (len(queries), queries.shape[1], columns.shape[2]))
    _multiply(queries, columns, logits)
    if log_sum is None:
        return torch.softmax(logits, -1, out=logits)
    weights, found = softmax_and_log_sum(logits)
    log_sum.copy_(found)
    return weights


def _like(x: Tensor, columns: int) -> Tensor:
    return torch.empty_like(x) if columns == x.shape[3] else x.new_empty((*x.shape[:3], columns))
