"""The shares that a choice of pairs keeps: of the exact softmax weight, and of all visible pairs.

If a row's kept weights sum to m, and ô and ō are the averages of the values over the keys that are kept and over the
others, then the exact output is m·ô + (1 - m)·ō, and o - ô = (1 - m)(ō - ô). So a row is off by at most twice 1 - m
times the longest value, whatever is chosen: an error beyond that is a fault of the arithmetic, not of the choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnbench.contract.capabilities import Selection
from attnbench.contract.problem.reference import of_query_heads
from attnbench.contract.problem.visible import Visible

LOGITS = 2**22
"""Logits that are in memory at once, 32 MiB in float64."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """Both as shares; 1 if a choice leaves nothing out."""

    mass: float
    """Mean over the queries that see a key."""
    pairs: float


def kept(
    selection: Selection,
    q: Tensor,
    k: Tensor,
    *,
    causal: bool | Visible = False,
    key_mask: Tensor | None = None,
    queries: Tensor | None = None,
) -> Coverage:
    """A selection's shares of the softmax weights of q ``(B, H, N, D)`` and k ``(B, K, M, D)``, in float64.

    Args:
        causal: query i sees the keys up to its place; or which keys each query sees.
        key_mask: ``(B, M)`` bool, True where a key is real.
        queries: ``(B, N)`` bool, the queries that count; all if None.
    """
    k = of_query_heads(k.double(), q.shape[1])
    (B, H, N, D), M = q.shape, k.shape[2]
    seen = causal if isinstance(causal, Visible) else Visible(causal)
    mass, rows, pairs, every = 0.0, 0, 0, 0
    step = max(1, LOGITS // (B * H * M))
    for start in range(0, N, step):
        part = slice(start, min(start + step, N))
        visible = seen.pairs(part, slice(0, M), M, q.device).expand(B, 1, -1, -1)
        if key_mask is not None:
            visible = visible & key_mask[:, None, None]
        if queries is not None:
            visible = visible & queries[:, None, part, None]
        chosen = (selection.pairs(part).to(q.device) & visible).expand(B, H, -1, -1)
        logits = (q[:, :, part].double() * D**-0.5) @ k.mT
        weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
        mass += float(weights.masked_fill(~chosen, 0.0).sum())
        rows += H * int(visible.any(-1).sum())
        pairs += int(chosen.sum())
        every += H * int(visible.sum())
    return Coverage(mass / max(1, rows), pairs / max(1, every))
