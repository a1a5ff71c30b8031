"""AFT with a bias for every pair of positions, of which only some rows exist at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnbench.attention.aft.sums import EMPTY, Bias, Sums, Weighed, blocks, join, power_of_two, triangles

_ROWS = 128
"""Rows taken at a time."""


def full(
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    columns: Tensor | None,
    bias: Bias,
    padded: Tensor | None = None,
    *,
    causal: bool,
) -> Tensor:
    """Means of every row over all keys, or those up to its own, with a bias for each pair: O(n²) time, O(n) memory.

    Args:
        k, v: ``(..., 1, n, X)``.
        rows, columns: w is ``rows @ columnsᵀ``, ``(n, F)`` each; if ``columns`` is None, w is ``rows``, ``(n, n)``.
        bias: the same w.
        padded: ``(..., 1, 1, n)`` bool, True where there is no key; None if all are there.
    """
    n = k.shape[-2]
    length = min(_ROWS, power_of_two(n))
    inside = triangles(blocks(k, length, EMPTY), blocks(v, length, 0.0), bias) if causal else None
    keys: tuple[Tensor, Tensor] = (k, v) if causal else Weighed.of(k, v)
    means = []
    # split, not slices: the gradient of each slice would be as large as the whole.
    for block, part in enumerate(torch.split(rows, length)):
        own = inside and Sums(*(x[..., block, : part.shape[0], :] for x in inside))
        if own and not block:
            means.append(own.mean)
            continue
        seen = [x[..., : block * length, :] for x in keys] if own else keys
        if torch.is_grad_enabled():  # w of these rows is computed again, not kept
            arguments = (part, columns, padded, own, *seen)
            means.append(checkpoint(_rows_of_full, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            means.append(_rows_of_full(part, columns, padded, own, *seen))
    return torch.cat(means, -2)


def _rows_of_full(
    rows: Tensor, columns: Tensor | None, padded: Tensor | None, own: Sums | None, *keys: Tensor
) -> Tensor:
    weighed = Weighed.of(*keys) if own else Weighed(*keys)
    n = weighed.both.shape[-2]
    w = rows[:, :n] if columns is None else rows @ columns[:n].mT
    sums = weighed.read(w if padded is None else w.masked_fill(padded[..., :n], -torch.inf))
    return join(own, sums).mean if own else sums.mean
