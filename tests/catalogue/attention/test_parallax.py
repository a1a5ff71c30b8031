"""Parallax: a covariance taken off softmax attention."""

from __future__ import annotations

import pytest
import torch

from attnbench.catalogue.attention.pairwise.parallax import Parallax
from attnbench.contract.problem.reference import exact_attention
from attnbench.contract.problem.shape import Shape

SHAPE = Shape(batch=2, heads=3, seq_len=150, head_dim=4)
CAUSAL = Shape(batch=2, heads=3, seq_len=150, head_dim=4, causal=True)
both = pytest.mark.parametrize("shape", [SHAPE, CAUSAL], ids=["all", "causal"])


def drawn() -> list[torch.Tensor]:
    return [torch.randn(2, 3, 150, 4, dtype=torch.float64) for _ in range(3)]


@both
def test_without_a_second_query_it_is_softmax_attention(shape: Shape) -> None:
    module, inputs = Parallax(shape).double(), drawn()
    torch.nn.init.zeros_(module.W)
    torch.testing.assert_close(module(*inputs), exact_attention(*inputs, causal=shape.causal), rtol=1e-10, atol=1e-12)


@both
def test_it_is_the_slope_of_softmax_attention_where_logits_lose_what_the_second_query_finds(shape: Shape) -> None:
    module, (q, k, v) = Parallax(shape).double(), drawn()
    step, softmax = 1e-5, exact_attention(q, k, v, causal=shape.causal)
    # q·k/√D - t r·k has the slope -Cov(r·k, v) at t = 0.
    turned = [exact_attention(q - t * 2 * q @ module.W.detach(), k, v, causal=shape.causal) for t in (step, -step)]
    slope = (turned[0] - turned[1]) / (2 * step)
    torch.testing.assert_close(module(q, k, v), softmax + slope, rtol=1e-6, atol=1e-8)
