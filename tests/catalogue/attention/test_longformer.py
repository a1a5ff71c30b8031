from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.pattern import longformer
from attnbench.catalogue.build import build
from attnbench.contract.problem.reference import exact_attention, masked_attention
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.patterns import draw, is_softmax_under
from tests.pairwise import pairwise


def union(n: int, window: int, tokens: int, dilation: int) -> Tensor:
    i, j = torch.arange(n)[:, None], torch.arange(n)
    near = ((i - j).abs() <= window * dilation) & ((i - j) % dilation == 0)
    return near | (i < tokens) | (j < tokens)


@pytest.mark.parametrize(
    ("n", "window", "tokens", "dilation"), pairwise([1, 5, 97, 200], [1, 2, 30, 500], [0, 1, 3, 70, 1000], [1, 2, 3])
)
def test_one_softmax_over_window_and_global_tokens_counts_each_key_once(
    n: int, window: int, tokens: int, dilation: int
) -> None:
    f = build(f"longformer:window={window},global_tokens={tokens},dilation={dilation}", Shape(2, 2, n, 4))
    is_softmax_under(f, union(n, window, tokens, dilation), n)


def own(n: int, tokens: int, **options: int) -> longformer.Longformer:
    f = build("longformer:projections=own", Shape(2, 2, n, 4), global_tokens=tokens, **options).double()
    assert isinstance(f, longformer.Longformer)
    return f


def test_projections_of_its_own_start_as_the_identity() -> None:
    q, k, v = draw(50)
    tied = build("longformer:window=3,global_tokens=2", Shape(2, 2, 50, 4))
    torch.testing.assert_close(own(50, 2, window=3)(q, k, v), tied(q, k, v), rtol=0, atol=1e-12)


def test_global_projections_serve_the_global_rows_and_no_others() -> None:
    q, k, v = draw(40)
    f = own(40, 3, window=2)
    assert f.maps is not None
    map_q, map_k, map_v = (torch.nn.init.normal_(m) for m in f.maps)
    out = f(q, k, v)
    rows = exact_attention(q[:, :, :3] @ map_q, k @ map_k, v @ map_v)
    torch.testing.assert_close(out[:, :, :3], rows, rtol=0, atol=1e-12)
    others = masked_attention(q, k, v, union(40, 2, 3, 1))[:, :, 3:]
    torch.testing.assert_close(out[:, :, 3:], others, rtol=0, atol=1e-12)


def test_tied_projections_have_no_parameters_and_own_ones_three_maps_per_head() -> None:
    shape = Shape(1, 3, 16, 5)
    assert not list(build("longformer", shape).parameters())
    assert [tuple(p.shape) for p in build("longformer:projections=own", shape).parameters()] == [(3, 5, 5)] * 3
