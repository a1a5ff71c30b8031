"""Groups of heads that share what is read and written with: one B and one C for several heads of values."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from attnbench.engines.recurrent.decayed_sums import decayed_attention
from attnbench.engines.recurrent.stretches import by_heads
from attnbench.errors import Unsupported

KeyGroups = Annotated[int, Field(ge=1, description="groups of heads, each with a B and a C of its own; divides them")]
"""The option of layers whose heads share B and C."""


def divided(heads: int, groups: int, name: str) -> None:
    """Refuse groups that are not all as large.

    Raises:
        Unsupported
    """
    if heads % groups:
        raise Unsupported(f"{name}: {heads} heads do not fall into groups={groups} of one size")


def attended_in_groups(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, causal: bool, chunk: int) -> Tensor:
    """:func:`decayed_attention` of every head, ``(B, H, N, E)``; head h reads q and k of group h // (H / groups).

    The groups take turns, so that q and k are views for each head, and are never repeated.

    Args:
        q, k: ``(B, groups, N, D)``; v: ``(B, H, N, E)``.
        log_decay: ``(B, H, N)``.
    """
    groups, heads = q.shape[1], v.shape[1] // q.shape[1]
    compute = partial(decayed_attention, causal=causal, chunk=chunk)
    shared = zip(torch.split(q, 1, 1), torch.split(k, 1, 1), strict=True)
    own = zip(torch.split(v, heads, 1), torch.split(log_decay, heads, 1), strict=True)
    read = [
        by_heads(compute, *(x.expand(-1, heads, -1, -1) for x in both), *rest)
        for both, rest in zip(shared, own, strict=True)
    ]
    return read[0] if groups == 1 else torch.cat(read, 1)


def in_groups(x: Tensor, groups: int) -> Tensor:
    """``(B, N, groups · D)`` as ``(B, groups, N, D)``, a view."""
    return x[:, None] if groups == 1 else torch.unflatten(x, -1, (groups, -1)).transpose(1, 2)


def of_heads(x: Tensor, heads: int) -> Tensor:
    """``(B, groups, n, D)`` as ``(B, heads, n, D)``: a view of one group, else a copy, for one token or a state."""
    if x.shape[1] == 1:
        return x.expand(-1, heads, -1, -1)
    return x[:, :, None].expand(-1, -1, heads // x.shape[1], -1, -1).flatten(1, 2)
