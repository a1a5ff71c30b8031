"""Gated slot attention, token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.engines.recurrent.slots import slot_attention


def drawn(n: int = 23) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, n, 4, dtype=torch.float64) for _ in range(3))
    return q, k, v, -torch.rand(2, n, 5, dtype=torch.float64)


def by_hand(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    keys = values = torch.zeros(2, log_decay.shape[2], 4, dtype=q.dtype)
    rows = []
    for t in range(q.shape[1]):
        kept = 2 ** log_decay[:, t, :, None]
        keys, values = (kept * old + (1 - kept) * new[:, t, None] for old, new in ((keys, k), (values, v)))
        rows.append((torch.softmax(q[:, t, None] @ keys.mT, -1) @ values)[:, 0])
    return torch.stack(rows, 1)


@pytest.mark.parametrize("chunk", [1, 2, 8, 64])
@pytest.mark.parametrize("n", [1, 3, 16, 23, 70])
def test_equals_the_recurrence(chunk: int, n: int) -> None:
    inputs = drawn(n)
    torch.testing.assert_close(slot_attention(*inputs, chunk=chunk), by_hand(*inputs), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("strength", [20.0, 1e4])
def test_the_strongest_decays_neither_overflow_nor_lose_digits(strength: float) -> None:
    q, k, v, log_decay = drawn(70)
    log_decay = torch.where(torch.rand_like(log_decay) < 0.3, strength * log_decay, 0.0)
    inputs = [x.float() for x in (q, k, v, log_decay)]
    exact = by_hand(*(x.double() for x in inputs))
    torch.testing.assert_close(slot_attention(*inputs, chunk=32).double(), exact, rtol=1e-4, atol=1e-5)
