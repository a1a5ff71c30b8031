"""Causal linear attention: each query reads the sums of φ(k) vᵀ over the keys up to its own.

A chunk of c tokens reads the tokens before it from the running sums, and its own keys from a c x c triangle: the work
is O(n), and no sum per token exists. The chunks of a block are computed at once; only the sums pass from one to the
next.
Log weights are taken relative to the largest one *up to each token*: a later key, however large, can neither make an
earlier row underflow nor change it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnbench.catalogue.engines.linear.causal_block import Call, Gradients, attend_block, differentiate_block
from attnbench.catalogue.engines.linear.feature_map import FeatureMap, Tiles
from attnbench.catalogue.engines.linear.key_sums import KeySums
from attnbench.catalogue.engines.precision import accumulator
from attnbench.catalogue.engines.tiling import Group, head_groups, large_steps, learned


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


def _attend_group(call: Call, group: Group, out: Tensor, *, differentiable: bool) -> list[Tensor]:
    """Fill in the group's share of the output; if ``differentiable``, return three sums before each block."""
    kept: list[Tensor] = []
    tiles = Tiles(call.features, group, call.rows, call.q, count=2)
    sums = KeySums.empty(call.q, call.v.shape[-1], call.features, tiles.pairs)
    room = call.room(sums)
    for block in call.blocks():
        if differentiable:
            kept += sums.clone()
        sums = attend_block(call, tiles, block, room, sums, out)
    return kept


def _differentiate_group(call: Call, group: Group, kept: list[Tensor], gradients: Gradients) -> None:
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
        call = Call(q, k, v, key_mask, features, chunk, divisors)
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
        call = Call(q, k, v, key_mask, ctx.features, ctx.chunk, divisors)
        for group in reversed(ctx.groups):
            _differentiate_group(call, group, kept, gradients)
        return *gradients[1:], None, None, None, None
