"""Softmax over slots with keys and values that fade, chunk by chunk: two scans with a softmax between."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from attnbench.catalogue.engines.precision import LOG2E
from attnbench.catalogue.engines.recurrent.decayed_sums import states_before
from attnbench.catalogue.engines.recurrent.fading import faded_by_channel, faded_values
from attnbench.catalogue.engines.recurrent.stretches import rows_in_turn, stretches

Count = Annotated[int, Field(ge=1, description="keys and values that a head keeps")]
"""The option of what attends to slots."""


def written_share(log_decay: Tensor) -> Tensor:
    """1 - α, with all its digits for α near 1."""
    return -torch.expm1(log_decay / LOG2E)


def slot_attention(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, chunk: int) -> Tensor:
    """o_t = V_tᵀ softmax(K_t q_t) over the slots that the tokens up to t have filled.

    q, k: ``(G, N, D)``; v: ``(G, N, E)``; ``log_decay``: log2(α) <= 0, ``(G, N, slots)``; ``chunk``: a power of two.
    """
    N = q.shape[1]
    while chunk >= 2 * N:
        chunk //= 2
    return rows_in_turn(_stretch, stretches(chunk, q, k, v, log_decay), N)[0]


def _stretch(state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """Chunks ``(G, chunks, c, ·)`` in a row after slots with the state ``(G, slots, D + E)``."""
    written = written_share(log_decay)
    near, begun, until = faded_values(q @ k.mT, written, log_decay)
    past, state = states_before((written * until).mT @ torch.cat([k, v], -1), begun[:, :, -1:].mT, state)
    keys, values = torch.split(past, [k.shape[-1], v.shape[-1]], -1)
    weights = torch.softmax(near + (q @ keys.mT) * begun, -1)
    ((shares,),), _, _ = faded_by_channel([weights], [written], log_decay)
    return (shares @ v + (weights * begun) @ values).flatten(1, 2), state
