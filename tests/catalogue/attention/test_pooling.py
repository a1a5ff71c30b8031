from __future__ import annotations

import pytest
import torch
from torch.nn.functional import avg_pool1d

from attnbench.catalogue.attention.synthetic.pooling import Pooling
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import built, close, draw


def make(pool: int, *, causal: bool = False) -> Pooling:
    return built(Pooling, "pooling", Shape(1, 2, 32, 2, causal=causal), pool=pool)


@pytest.mark.parametrize("pool", [3, 5, 7, 13, 31, 101])
@pytest.mark.parametrize("n", [1, 2, 19, 64])
def test_is_the_average_pooling_of_the_paper_minus_the_input(pool: int, n: int) -> None:
    x = draw(2, n, 4)
    pooled = avg_pool1d(x.mT, pool, stride=1, padding=pool // 2, count_include_pad=False).mT
    close(make(pool)(x), pooled - x, 1e-12)


@pytest.mark.parametrize("pool", [2, 4, 7])
def test_causal_windows_trail(pool: int) -> None:
    x = draw(1, 20, 2)
    expected = torch.stack([x[:, max(0, t - pool + 1) : t + 1].mean(1) for t in range(20)], 1) - x
    close(make(pool, causal=True)(x), expected, 1e-12)


def test_only_real_tokens_are_counted_and_a_window_without_any_gives_zero() -> None:
    x = draw(1, 7, 2)
    mask = torch.tensor([[True, False, True, False, False, False, False]])
    out = make(3)(x, key_mask=mask)
    close(out[0, 0], torch.zeros(2, dtype=torch.float64), 1e-12)  # alone in its window
    close(out[0, 1], x[0, [0, 2]].mean(0), 1e-12)
    assert torch.equal(out[0, 4:], torch.zeros(3, 2, dtype=torch.float64))


def test_wide_windows_keep_their_digits_after_a_huge_token() -> None:
    """Differences of running sums would lose them."""
    x = torch.randn(1, 2000, 1)
    x[0, 0] = 1e8
    module = make(101, causal=True)
    torch.testing.assert_close(module(x)[:, 200:], module.dense(x.double())[:, 200:].float(), rtol=1e-5, atol=1e-5)


def test_half_precision_counts_and_sums_in_float32() -> None:
    x = torch.randn(1, 700, 2).to(torch.bfloat16)
    mask = torch.rand(1, 700) < 0.9  # some 270 real tokens to a window: bfloat16 has no odd numbers there
    module = make(301)
    expected = module.dense(x.double(), key_mask=mask).to(torch.bfloat16)
    torch.testing.assert_close(module(x, key_mask=mask)[mask], expected[mask], rtol=2**-8, atol=1e-6)
