from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.reference.noise import Noise
from attnbench.contract.problem.reference import exact_attention, relative_error
from attnbench.contract.problem.shape import Shape
from attnbench.errors import Unsupported
from tests.catalogue.attention.small import CAUSAL, SHAPE, built


def make(shape: Shape, draw: str = "rows", samples: int = 7, seed: int = 0) -> Noise:
    return built(Noise, "noise", shape, seed=seed, draw=draw, samples=samples)


def qkv(M: int = 23) -> list[Tensor]:
    return [torch.randn(2, 3, n, 4, dtype=torch.float64) for n in (23, M, M)]


def test_an_output_is_the_mean_of_the_values_that_were_drawn() -> None:
    module, (q, k, v) = make(CAUSAL), qkv()
    out = module(q, k, v)
    row = (q[1, 2, 9] @ k[1, 2, :10].mT / 2).softmax(0).cumsum(0)
    drawn = [int((row <= u).sum()) for u in module._noise().tolist()]
    torch.testing.assert_close(out[1, 2, 9], v[1, 2, drawn].mean(0))


@pytest.mark.parametrize("draw", ["rows", "keys"])
def test_many_samples_come_close_to_softmax_attention(draw: str) -> None:
    inputs = qkv()
    exact = exact_attention(*inputs)
    few, many = (relative_error(make(SHAPE, draw, samples)(*inputs), exact) for samples in (100, 40_000))
    assert many < 0.05
    assert many < few / 4


@pytest.mark.parametrize("draw", ["rows", "keys"])
def test_padding_is_never_drawn(draw: str) -> None:
    module, (q, k, v) = make(SHAPE, draw, 50), qkv()
    mask = torch.arange(23) % 5 != torch.tensor([[0], [3]])
    marked = torch.where(mask[:, None, :, None], v, 1e6)
    assert torch.equal(module(q, k, marked, key_mask=mask), module(q, k, v, key_mask=mask))
    assert float(module(q, k, v, key_mask=mask).abs().max()) < 10


def test_the_same_keys_for_all_queries_give_softmax_over_these_keys() -> None:
    module, (q, k, v) = make(SHAPE, "keys"), qkv(40)
    picked = (module._noise() * 40).long()
    torch.testing.assert_close(module(q, k, v), exact_attention(q, k[:, :, picked], v[:, :, picked]))
    with pytest.raises(Unsupported, match="one draw of keys serves all queries"):
        make(CAUSAL, "keys")


def test_a_draw_does_not_depend_on_the_dtype_and_a_choice_has_no_gradient() -> None:
    module, (q, k, v) = make(SHAPE, samples=64), [x.float() for x in qkv()]
    half = [x.bfloat16() for x in (q, k, v)]
    wide = module(*(x.double() for x in half))
    torch.testing.assert_close(module.bfloat16()(*half).double(), wide, rtol=2**-8, atol=1e-2)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    grads = torch.autograd.grad(module(*leaves).sum(), leaves, allow_unused=True)
    assert grads[:2] == (None, None)
    torch.testing.assert_close(grads[2].sum(2), torch.full((2, 3, 4), 23.0, dtype=torch.float64))


def test_the_noise_lies_between_zero_and_one_and_is_drawn_from_the_seed() -> None:
    u = make(SHAPE, samples=1000)._noise()
    assert bool(((u > 0) & (u < 1)).all())
    assert float(u.mean()) == pytest.approx(0.5, abs=0.05)
    assert not torch.equal(u, make(SHAPE, samples=1000, seed=1)._noise())
