"""An index that ranks keys by a few small products, and its lesson, taken from attention's own weights."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnbench.catalogue.engines.decoding.kv_cache import Cache
from attnbench.catalogue.engines.precision import accumulator, hidden
from attnbench.catalogue.engines.tiling import budget, recomputed, row_blocks

_LESSON_ROWS = 64
"""Fewest queries in a lesson: gradients of all index keys are added up for each."""


class Index(NamedTuple):
    """A ranking of keys: key j has Σ_i w_ti·relu(a_ti·b_j) for query t, or Σ_i a_ti·b_j if ``plain``."""

    a: Tensor
    b: Tensor
    w: Tensor | None
    """``(B, N, I)``; None: 1."""
    plain: bool = False

    def scores(self, examples: slice, rows: slice, last: int) -> Tensor:
        a, b = self.a[examples, rows], self.b[examples, :last]
        products = torch.unflatten(torch.matmul(a.flatten(1, 2), b.mT), 1, a.shape[1:3])
        products = products if self.plain else products.relu_()
        if self.w is None:
            return products.sum(2)
        return torch.matmul(self.w[examples, rows][:, :, None], products)[:, :, 0]


class Ranked(NamedTuple):
    """A cache of keys and values, and of the index's keys."""

    cache: Cache
    ranking: Cache
    """Its values have no width; without an index, neither have its keys."""


class _Taught(torch.autograd.Function):
    """Identity, but a loss gets the gradient 1 in the backward pass, whatever gradient the tensor gets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones((), dtype=ctx.dtype, device=grad.device)


def taught(x: Tensor, loss: Tensor) -> Tensor:
    """x unchanged; in its backward pass the loss gets the gradient 1."""
    out: Tensor = _Taught.apply(x, loss)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


def lesson(index: Index, chosen: Tensor, q: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor:
    """The loss of an index: its cross entropy with the heads' mean weights over the kept keys, over real queries.

    Attention learns nothing from it: q and k are detached.

    Args:
        index: of N queries and M keys.
        chosen: ``(B, N, T)``, the keys that each query keeps; below 0 for none.
        q: ``(B, H, N, D)``; k: ``(B, K, M, D)``.
        key_mask: ``(B, N)`` bool, True for a real token.
    """
    w = torch.ones_like(index.a[..., 0]) if index.w is None else index.w
    q, k = q.detach(), k.detach()
    (B, K, _, D), T = k.shape, max(1, chosen.shape[2])
    most = max(_LESSON_ROWS, budget("gathered.listed", q.device) // (B * K * T * D))
    total = index.b.new_zeros(())
    sizes = [block.stop - block.start for block in row_blocks(q.shape[2], most)]
    cut = [torch.split(x, sizes, 1) for x in (q.transpose(1, 2), index.a, w, chosen)]
    masks = [None] * len(sizes) if key_mask is None else torch.split(key_mask, sizes, 1)
    for *rows, real in zip(*cut, masks, strict=True):
        each = partial(_surprise, k, index.b, plain=index.plain)
        total = total + recomputed(each, *rows, real)
    count = B * q.shape[2] if key_mask is None else key_mask.sum()
    return total / count


def _surprise(
    k: Tensor, b: Tensor, q: Tensor, a: Tensor, w: Tensor, chosen: Tensor, real: Tensor | None, *, plain: bool
) -> Tensor:
    """-Σ p log softmax(index) over the keys that some queries keep, p the mean of the heads' weights.

    Args:
        k: ``(B, K, M, D)``; b: ``(B, M, d)``.
        q: ``(B, n, H, D)``; a: ``(B, n, I, d)``; w: ``(B, n, I)``; chosen: ``(B, n, T)``, below 0 for none.
        real: ``(B, n)``, the queries that count.
    """
    K, dtype, seen = k.shape[1], b.dtype, chosen >= 0
    at = chosen.long().clamp(min=0).flatten(1)
    with torch.no_grad():
        keys = k.gather(2, at[:, None, :, None].expand(-1, K, -1, k.shape[3])).to(dtype)
        keys = torch.unflatten(keys, 2, chosen.shape[1:])
        rows = torch.unflatten(q.to(dtype) * q.shape[-1] ** -0.5, 2, (K, -1))
        logits = torch.einsum("bnkgd,bkntd->bkgnt", rows, keys).masked_fill(~seen[:, None, None], -torch.inf)
        p = logits.softmax(-1).nan_to_num(0.0).mean((1, 2))
    own = torch.unflatten(b.gather(1, at[..., None].expand(-1, -1, b.shape[2])), 1, chosen.shape[1:])
    products = torch.matmul(a, own.mT)
    scores = torch.matmul(w[:, :, None], products if plain else products.relu())[:, :, 0]
    each = -(p * scores.masked_fill(~seen, hidden(dtype)).log_softmax(-1)).sum(-1)
    return each.sum() if real is None else (each * real).sum()


def probabilities(q: Tensor, k: Tensor, unseen: Tensor, groups: int = 1) -> Tensor:
    """The softmax of each row, summed over the heads of each of ``groups`` groups: ``(B, groups, n, m)``.

    q is ``(B, H, n, D)``, k ``(B, K, m, D)``, ``unseen`` ``(1 or B, n, m)`` bool.
    """
    dtype, K = accumulator(q.dtype), k.shape[1]
    rows = torch.unflatten(q.to(dtype) * q.shape[-1] ** -0.5, 1, (K, -1))
    logits = torch.matmul(rows.flatten(2, 3), k.to(dtype).mT)
    logits = torch.unflatten(logits, 2, rows.shape[2:4]).masked_fill(unseen[:, None, None], hidden(dtype))
    return torch.unflatten(logits.softmax(-1).sum(2), 1, (groups, -1)).sum(2)
