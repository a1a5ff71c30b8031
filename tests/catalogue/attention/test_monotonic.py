from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.selection.monotonic import Monotonic
from attnbench.contract.problem.reference import masked_attention
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import built, close

N = 21


def make(shape: Shape, **options: object) -> Monotonic:
    return built(Monotonic, "monotonic", shape, **options).double()


def inputs(M: int = N) -> list[Tensor]:
    return [torch.randn(1, 2, n, 4, dtype=torch.float64) for n in (N, M, M)]


def test_a_narrow_window_around_the_diagonal_returns_the_values() -> None:
    module, (q, k, v) = make(Shape(1, 2, N, 4), centre="diagonal", sigma=0.01), inputs()
    close(module(q, k, v), v)


def test_a_wide_window_weighs_all_keys_alike_or_by_content() -> None:
    (q, k, v), shape = inputs(), Shape(1, 2, N, 4, causal=True)
    causal = torch.ones(N, N, dtype=torch.bool).tril()
    means = masked_attention(0 * q, k, v, causal)
    torch.testing.assert_close(make(shape, sigma=1e6)(q, k, v), means, rtol=1e-8, atol=1e-8)
    softmax = masked_attention(q, k, v, causal)
    torch.testing.assert_close(make(shape, sigma=1e6, content=True)(q, k, v), softmax, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("M", "real"), [(N, N), (13, 13), (N, 8)])
def test_the_middle_of_the_real_keys_is_the_centre_where_the_network_says_zero(M: int, real: int) -> None:
    module, (q, k, v) = make(Shape(1, 2, N, 4, kv_len=M), sigma=0.5), inputs(M)
    with torch.no_grad():
        module.u.zero_()
    j = torch.arange(real, dtype=torch.float64)
    weights = (-2 * (j - real / 2).square()).softmax(0)
    out = module(q, k, v, key_mask=(torch.arange(M) < real)[None])
    close(out, (weights @ v[:, :, :real])[:, :, None].expand_as(out))


def test_a_causal_centre_lies_among_the_keys_that_the_query_may_see() -> None:
    module, (q, k, _) = make(Shape(1, 2, N, 4, causal=True), sigma=0.3), inputs()
    with torch.no_grad():
        module.u.fill_(1e6)  # to one end or the other
    positions = torch.arange(N, dtype=torch.float64)[:, None].expand(1, 2, -1, 4)
    seen = module(q, k, positions)[..., 0].round()
    own = torch.arange(N, dtype=torch.float64).expand_as(seen)
    assert bool(((seen == own) | (seen == 0)).all())
    assert (seen == own)[..., 1:].any()
    assert (seen == 0)[..., 1:].any()


def test_every_head_predicts_with_its_own_network() -> None:
    module, (q, k, v) = make(Shape(1, 2, N, 4)), inputs()
    q, k, v = (x[:, :1].expand(-1, 2, -1, -1) for x in (q, k, v))
    out = module(q, k, v).detach()
    assert float((out[:, 0] - out[:, 1]).abs().max()) > 1e-3


def test_nothing_is_learned_for_the_diagonal() -> None:
    assert list(make(Shape(1, 2, N, 4), centre="diagonal").parameters()) == []
