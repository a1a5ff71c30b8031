from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.pattern.streaming import Streaming
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.patterns import draw, is_softmax_under
from tests.catalogue.attention.small import built, close
from tests.pairwise import pairwise


def make(shape: Shape, window: int, sinks: int, *, rotary: bool = False) -> Streaming:
    return built(Streaming, "streaming", shape, window=window, sinks=sinks, rotary=rotary).double()


def turned(x: Tensor, place: int) -> Tensor:
    """x ``(D,)`` with channels c and c + D/2 as complex numbers, turned by place·10000^(-2c/D)."""
    D = len(x)
    z = torch.complex(x[: D // 2], x[D // 2 :])
    angle = place * 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    z = z * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag))


def cache_by_cache(q: Tensor, k: Tensor, v: Tensor, window: int, sinks: int, rotary: bool) -> Tensor:
    """Every token puts itself at the end of a list, the list loses what is too old, and places count in the list."""
    out = torch.zeros_like(v)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            kept: list[int] = []
            for i in range(q.shape[2]):
                kept.append(i)
                if len(kept) > sinks + window:
                    del kept[sinks]
                keys = [turned(k[b, h, j], at) if rotary else k[b, h, j] for at, j in enumerate(kept)]
                query = turned(q[b, h, i], len(kept) - 1) if rotary else q[b, h, i]
                weights = (torch.stack(keys) @ query / q.shape[3] ** 0.5).softmax(0)
                out[b, h, i] = weights @ v[b, h, kept]
    return out


@pytest.mark.parametrize(
    ("n", "window", "sinks", "rotary"),
    pairwise([1, 2, 23, 70, 131], [1, 3, 8, 40], [0, 1, 4, 9], [False, True]),
)
def test_whole_sequences_get_what_a_cache_gives_token_by_token(n: int, window: int, sinks: int, rotary: bool) -> None:
    q, k, v = (x.detach() for x in draw(n))
    module = make(Shape(2, 2, n, 4, causal=True), window, sinks, rotary=rotary)
    expected = cache_by_cache(q, k, v, window, sinks, rotary)
    close(module(q, k, v), expected)
    close(module.dense(q, k, v), expected)


@pytest.mark.parametrize(
    ("n", "window", "sinks", "causal"), pairwise([1, 5, 64, 97, 200], [1, 3, 64, 70, 300], [0, 2, 70], [False, True])
)
def test_a_token_sees_the_first_tokens_and_its_window(n: int, window: int, sinks: int, causal: bool) -> None:
    i, j = torch.arange(n)[:, None], torch.arange(n)
    allowed = (j < sinks) | ((i - j).abs() < window)
    allowed = allowed & (j <= i) if causal else allowed
    is_softmax_under(make(Shape(2, 2, n, 4, causal=causal), window, sinks), allowed, n)
