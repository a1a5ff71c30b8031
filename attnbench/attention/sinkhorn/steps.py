"""Sorted blocks one query at a time: a row of the balanced sort matrix whenever a block begins."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnbench.engines.decoding.kv_cache import Cache


class Sorted(NamedTuple):
    """What is known after some tokens; the last of them belong to a block that may still be open."""

    cache: Cache
    """Every token: what is mixed anew when a block begins, and the open block."""
    total: Tensor
    """``(B, H, 1, D)``: sum over all tokens of the vectors, queries or keys, whose means are scored."""
    columns: Tensor
    """``(B, H, iterations, n)``: log of the sum of each of the n columns over all rows so far, in each iteration."""
    keys: Tensor
    """``(B, H, b, D)``: the mixture beside the open block; no rows beside the first."""
    values: Tensor


def balanced_row(scores: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """The next row of S, and the column sums that include it.

    Column sums of a causal S run only over rows so far, and so do those in each iteration: a new row changes no
    earlier one.

    Args:
        scores: ``(B, H, 1, n)`` of the new block with all n before it, n >= 1.
        columns: ``(B, H, iterations, n - 1)``, logarithms.

    Returns:
        ``(B, H, 1, n)`` and ``(B, H, iterations, n)``.
    """
    columns = pad(columns, (0, 1), value=-torch.inf)
    balanced, sums = scores, []
    for before in torch.split(columns, 1, 2):
        sums.append(torch.logaddexp(before, balanced))
        share = scores - sums[-1]
        row = share.logsumexp(-1, keepdim=True)
        balanced = scores - row
    return (share - row).exp(), torch.cat(sums, 2)
