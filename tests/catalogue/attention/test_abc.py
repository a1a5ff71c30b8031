"""Slots that are means of the tokens so far."""

from __future__ import annotations

import pytest
import torch

from attnbench.catalogue.attention.recurrence.abc import ABC
from attnbench.contract.problem.reference import exact_attention
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import CAUSAL


def test_slots_that_take_one_token_each_give_softmax_attention_to_these() -> None:
    shape = Shape(batch=1, heads=1, seq_len=4, head_dim=4)
    module, x = ABC(shape, slots=4).double(), torch.randn(1, 4, 4, dtype=torch.float64)
    # Slot m chooses token m alone: s is a large multiple of the unit matrix.
    with torch.no_grad():
        module.control.weight.copy_(1e6 * torch.linalg.inv(x[0]).T)
    q, k, v = (part[:, None] for part in module.qkv(x).chunk(3, 2))
    torch.testing.assert_close(module(x), module.out(exact_attention(q, k, v)[:, 0]), rtol=1e-9, atol=1e-9)


def test_equal_weights_make_every_slot_the_running_mean() -> None:
    module, x = ABC(CAUSAL, slots=5).double(), torch.randn(2, 23, 12, dtype=torch.float64)
    torch.nn.init.zeros_(module.control.weight)
    v = module.qkv(x)[..., 24:]
    expected = module.out(v.cumsum(1) / torch.arange(1, 24)[:, None])
    torch.testing.assert_close(module(x), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("strength", [1e2, 1e5])
def test_the_largest_weights_neither_overflow_nor_lose_digits(strength: float) -> None:
    module, x = ABC(CAUSAL, slots=5), torch.randn(2, 23, 12)
    with torch.no_grad():
        module.control.weight.mul_(strength)
    found = module(x)
    torch.testing.assert_close(found.double(), module.double().dense(x.double()), rtol=1e-3, atol=1e-3)
