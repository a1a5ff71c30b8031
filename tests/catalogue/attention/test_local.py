from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.pattern import local
from attnbench.catalogue.build import build
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.patterns import draw, is_softmax_under
from tests.pairwise import pairwise

assert local.Local


def implied(spec: str, n: int, causal: bool = False) -> Tensor:
    """The attention matrix (n, n) of one head, by V = I."""
    q, k, _ = draw(n, 1, 1, n)
    return build(spec, Shape(1, 1, n, n, causal=causal))(q, k, torch.eye(n, dtype=torch.float64)[None, None])[0, 0]


def check(spec: str, n: int, allowed: Tensor, causal: bool) -> None:
    is_softmax_under(build(spec, Shape(2, 2, n, 4, causal=causal)), allowed, n)


@pytest.mark.parametrize(
    ("n", "window", "causal"), pairwise([1, 5, 64, 97, 200, 331], [1, 3, 10, 64, 70, 1000], [False, True])
)
def test_the_window_is_w_tokens_on_each_side_or_w_before_in_causal_form(n: int, window: int, causal: bool) -> None:
    distance = torch.arange(n)[:, None] - torch.arange(n)
    allowed = (distance >= 0) & (distance <= window) if causal else distance.abs() <= window
    check(f"local:window={window}", n, allowed, causal)


@pytest.mark.parametrize(
    ("n", "block", "look_around", "causal"), pairwise([1, 65, 200], [1, 7, 20, 64, 100, 500], [0, 1, 2], [False, True])
)
def test_block_local_attention_sees_contiguous_blocks(n: int, block: int, look_around: int, causal: bool) -> None:
    i = torch.arange(n)
    allowed = (i[:, None] // block - i // block).abs() <= look_around
    if causal:
        allowed = allowed & (i <= i[:, None])
    check(f"local:block={block},look_around={look_around}", n, allowed, causal)


def test_the_default_window_has_257_keys_or_129_causal() -> None:
    assert (implied("local", 400) > 0)[200].sum() == 257
    assert (implied("local", 400, causal=True) > 0)[200].sum() == 129


@pytest.mark.parametrize(
    ("n", "window", "dilation", "causal"), pairwise([1, 5, 97], [1, 2, 30], [2, 3, 50], [False, True])
)
def test_a_dilated_window_takes_every_dth_token(n: int, window: int, dilation: int, causal: bool) -> None:
    steps = torch.arange(-window, window + 1) * dilation
    target = torch.arange(n)[:, None] + steps[steps <= 0 if causal else slice(None)]
    allowed = (torch.arange(n) == target[:, :, None]).any(1)
    check(f"local:window={window},dilation={dilation}", n, allowed, causal)
