from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.synthetic.xca import XCA
from attnbench.catalogue.build import build
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import built, close


def make(shape: Shape, temperature: float | None = None) -> XCA:
    module = built(XCA, "xca", shape)
    with torch.no_grad():
        if temperature is None:
            module.temperature.copy_(torch.randn_like(module.temperature))
        else:
            module.temperature.fill_(temperature)
    return module.double()


def inputs(*size: int) -> list[Tensor]:
    return [torch.randn(size, dtype=torch.float64) for _ in range(3)]


def test_equals_the_formula() -> None:
    module, (q, k, v) = make(Shape(2, 3, 13, 5)), inputs(2, 3, 13, 5)
    out = module(q, k, v)
    q, k = (x / x.square().sum(2, keepdim=True).sqrt() for x in (q, k))
    weights = (torch.einsum("bhnc,bhne->bhce", q, k) * module.temperature).exp()
    close(out, torch.einsum("bhce,bhne->bhnc", weights / weights.sum(-1, keepdim=True), v))


def test_a_high_temperature_picks_the_key_channel_that_equals_the_query_channel() -> None:
    module, (q, _, v) = make(Shape(1, 1, 40, 4), 1e4), inputs(1, 1, 40, 4)
    order = torch.tensor([2, 0, 3, 1])
    close(module(q[..., order], q, v), v[..., order])


def test_a_channel_that_is_zero_everywhere_does_no_harm() -> None:
    module, (q, k, v) = make(Shape(1, 1, 5, 3)), inputs(1, 1, 5, 3)
    q[..., 1], k[..., 2] = 0, 0
    q.requires_grad_()
    out = module(q, k, v)
    out.sum().backward()
    close(out[..., 1], v.mean(-1))
    assert q.grad is not None
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_does_not_overflow_where_the_channels_are_alike(dtype: torch.dtype) -> None:
    x = torch.full((1, 1, 2048, 4), 30.0, dtype=dtype)  # 30 · 30 · 2048 is beyond float16
    module = make(Shape(1, 1, 2048, 4), 1.0).to(dtype)
    torch.testing.assert_close(module(x, x, x), x)


def test_every_head_has_a_temperature_of_one_at_first_and_weights_of_a_channel_sum_to_one() -> None:
    module = build("xca", Shape(1, 3, 9, 4)).double()
    assert torch.equal(module.temperature.detach().flatten(), torch.ones(3, dtype=torch.float64))
    q, k, v = inputs(1, 3, 9, 4)
    same = v[..., :1].expand_as(v)  # all channels alike, so that their average is each of them
    close(module(q, k, same), same)
