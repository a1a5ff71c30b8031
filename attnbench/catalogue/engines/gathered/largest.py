"""The largest entries of rows, found faster than torch finds them on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from attnbench.contract.compiled import on_cpu

STRIDE = 4
"""Entries in a group; the first search sees only its maximum."""


def largest(x: Tensor, count: int, *, ordered: bool = False) -> tuple[Tensor, Tensor]:
    """The ``count`` largest entries of each row of x ``(rows, M)`` and their indices, both ``(rows, count)``.

    From the largest down if ``ordered``. The choice among equal entries is not defined.
    """
    rows, M = x.shape
    groups = M // STRIDE
    if groups < 2 * count:
        return _largest(x, count, ordered)
    # The largest entries are in the groups with the largest maxima.
    _, best = _largest(x[:, : groups * STRIDE].view(rows, STRIDE, groups).amax(1), count, False)
    inside = torch.arange(STRIDE, device=x.device).unsqueeze(1) * groups
    left_over = torch.arange(groups * STRIDE, M, device=x.device).expand(rows, -1)
    candidates = torch.cat([(best.unsqueeze(1) + inside).flatten(1), left_over], 1)
    kept, chosen = _largest(x.gather(1, candidates), count, ordered)
    return kept, candidates.gather(1, chosen)


def _largest(x: Tensor, count: int, ordered: bool) -> tuple[Tensor, Tensor]:
    """torch.topk, by integers on a CPU: a quarter less time."""
    whole = {torch.float32: torch.int32, torch.float64: torch.int64}.get(x.dtype)
    if not on_cpu(x.device) or whole is None:
        kept, chosen = x.topk(count, sorted=ordered)
        return kept, chosen
    # Read as integers, the bits of floats have the same order, except below 0, where they run backwards.
    bits = x.contiguous().view(whole)
    bits = bits ^ (bits >> 63 if whole == torch.int64 else bits >> 31).bitwise_and_(torch.iinfo(whole).max)
    chosen = bits.topk(count, sorted=ordered).indices
    return x.gather(1, chosen), chosen


def argmax(x: Tensor) -> Tensor:
    """Index of the largest entry of each row of x ``(..., C)``, ``(..., 1)``; the last of equal ones on a CPU.

    torch's own takes twice as long there as a maximum, a comparison, and the maximum of the indices of all hits.
    """
    if not on_cpu(x.device):
        return x.argmax(-1, keepdim=True)
    hits = torch.eq(x, x.amax(-1, keepdim=True), out=torch.empty_like(x))
    return hits.mul_(torch.arange(x.shape[-1], dtype=x.dtype)).amax(-1, keepdim=True).long()
