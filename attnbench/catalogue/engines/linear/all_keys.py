"""Linear attention over all keys: φ(k) vᵀ is summed once, and every query reads the sum.

out_i = φ(q_i)ᵀ S / φ(q_i)ᵀ z with S = Σ_j φ(k_j) v_jᵀ and z = Σ_j φ(k_j). The backward pass computes the features again
instead of keeping them, so that memory beyond inputs, output and gradients does not grow with the sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnbench.catalogue.engines.linear.feature_map import FeatureMap, Tiles
from attnbench.catalogue.engines.linear.key_sums import KeySums, relative, weigh
from attnbench.catalogue.engines.precision import accumulator
from attnbench.catalogue.engines.products import writes_gaps
from attnbench.catalogue.engines.tiling import budget, head_groups, place, row_blocks


def attend_all(
    q: Tensor, k: Tensor, v: Tensor, features: FeatureMap, *, key_mask: Tensor | None = None, rows: int | None = None
) -> Tensor:
    """Linear attention in which every query sees every key.

    Args:
        q: ``(B, H, N, D)``; k: ``(B, H, M, D)``; v: ``(B, H, M, E)``.
        rows: tokens taken at a time; None for a cache's worth. It changes nothing in the result but rounding.

    Returns:
        ``(B, H, N, E)`` in q's dtype. A query that sees no key gives 0.
    """
    attend = _AttendAll.apply
    out: Tensor = attend(q, k, v, key_mask, features, rows)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


def _rows(q: Tensor, numbers: int) -> int:
    """Rows in a tile of all heads, with ``numbers`` features, values and outputs each; enough to outweigh a call."""
    most = 2 * budget("linear.features", q.device) // (q.shape[0] * q.shape[1] * numbers)
    return max(512 if numbers < 320 else 256, most // 64 * 64)


def add_keys(
    sums: KeySums, tiles: Tiles, k: Tensor, v: Tensor, key_mask: Tensor | None, rows: int, spare: Tensor | None = None
) -> None:
    """Add all keys of a group to its sums, ``rows`` at a time; ``spare`` as in :func:`weigh`."""
    for block in row_blocks(k.shape[2], rows):
        _, values, phi, log_weight = tiles.keys(k, v, key_mask, block)
        sums.add_(values, phi, log_weight, spare)


class _AttendAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, features: FeatureMap, rows: int | None
    ) -> Tensor:
        (B, H, N, _), E = q.shape, v.shape[-1]
        out, divisors = q.new_empty(B, H, N, E), q.new_empty(B, H, N, 1, dtype=accumulator(q.dtype))
        every = KeySums.empty(q, E, features, B, H)
        at_once = writes_gaps()
        numbers = features.width + (E if at_once else 2 * E)
        rows = min(rows or _rows(q, numbers), max(N, k.shape[2]))
        groups = head_groups(q, rows * numbers // 2)
        for group in groups:
            tiles, sums = features.tiles(group, rows, q), every.of(group)
            # The output's memory is free until its first query is answered.
            spare = place(out, group) if rows <= N else None
            add_keys(sums, tiles, k, v, key_mask, rows, spare)
            top = None if key_mask is None else sums.top
            tiles.at(sums.top)
            for block in row_blocks(N, rows):
                _, phi = tiles.queries(q, block)
                into = place(out, group, block) if at_once else None
                tiles.divide(*sums.read(phi, into), top, out, divisors, block, in_place=into is not None)
        ctx.save_for_backward(q, k, v, key_mask, divisors, *every)
        ctx.features, ctx.rows, ctx.groups = features, rows, groups
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, key_mask, divisors, *every = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        features: FeatureMap = ctx.features
        for group in ctx.groups:
            tiles = features.tiles(group, ctx.rows, q, count=2)
            sums = KeySums(*every).of(group)
            tiles.at(sums.top)
            of_values, d_of_ones = sums.of_values.contiguous(), torch.zeros_like(sums.of_ones)
            d_of_values = torch.zeros_like(of_values)
            for block in row_blocks(q.shape[2], ctx.rows):
                x, phi = tiles.queries(q, block)
                above = tiles.cut(grad, block) / tiles.cut(divisors, block)
                d_phi = tiles.product(above, of_values, 1)
                # Numerator times its gradient, from numbers at hand: the output need not be kept.
                below = torch.linalg.vecdot(phi, d_phi)[..., None].div_(tiles.cut(divisors, block)).neg_()
                d_phi.addcmul_(below, sums.of_ones)
                d_of_values.baddbmm_(above.mT, phi)
                d_of_ones.baddbmm_(below.mT, phi)
                tiles.put(dq, block, features.queries_grad(x, phi, d_phi))
            d_columns = d_of_values.mT.contiguous()
            for block in row_blocks(k.shape[2], ctx.rows):
                x, values, phi, log_weight = tiles.keys(k, v, key_mask, block)
                weight = None
                if log_weight is not None:
                    phi, weight = relative(phi, log_weight, sums.top)
                d_phi = tiles.product(weigh(values, weight), d_of_values, 1)
                d_values = torch.bmm(phi, d_columns)
                if weight is None:
                    d_phi.add_(d_of_ones)
                else:
                    d_phi.addcmul_(weight, d_of_ones)
                    d_values.mul_(weight)
                tiles.put(dv, block, d_values)
                tiles.put(dk, block, features.keys_grad(x, phi, d_phi))
        return dq, dk, dv, None, None, None
