from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.synthetic.fnet import FNet
from attnbench.catalogue.build import build
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import VARIANTS
from attnbench.measure.memory import peak_tensor_bytes

SIZES = [(1, 1), (1, 8), (2, 3), (12, 5), (23, 8), (29, 7), (64, 16)]


def make(N: int, C: int) -> FNet:
    module = build("fnet", Shape(2, 1, N, C))
    assert isinstance(module, FNet)
    return module


def tokens(N: int, C: int) -> Tensor:
    return torch.randn(2, N, C, dtype=torch.float64)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("N", "C"), SIZES)
def test_is_the_real_part_of_a_transform_over_both_axes(N: int, C: int) -> None:
    x = tokens(N, C)
    close(make(N, C)(x), torch.fft.fft(torch.fft.fft(x, dim=2), dim=1).real)


@pytest.mark.parametrize(("N", "C"), SIZES)
def test_cosines_and_sines_give_the_same(N: int, C: int) -> None:
    x = tokens(N, C)
    close(make(N, C)(x), make(N, C).dense(x))


def test_padding_is_cut_out_wherever_it_stands() -> None:
    x, module = tokens(12, 6), make(12, 6)
    mask = torch.rand(2, 12) < 0.6
    out = module(x, key_mask=mask)
    for b in range(2):
        close(out[b, mask[b]], torch.fft.fft2(x[b, mask[b]]).real)
    assert not out[~mask].any()
    assert not module(x, key_mask=torch.zeros(2, 12, dtype=torch.bool)).any()


def test_taking_the_real_part_twice_is_another_operator() -> None:
    x = tokens(12, 8)
    twice = torch.fft.fft(torch.fft.fft(x, dim=2).real, dim=1).real
    assert (make(12, 8)(x) - twice).abs().max() > 1


@pytest.mark.parametrize(("N", "C"), SIZES)
def test_applied_twice_it_adds_the_input_read_backwards_in_both_axes(N: int, C: int) -> None:
    x, module = tokens(N, C), make(N, C)
    back = x.flip(1, 2).roll((1, 1), (1, 2))
    close(module(module(x)), N * C / 2 * (x + back), 1e-9)


@pytest.mark.parametrize(("N", "C"), SIZES)
def test_it_is_its_own_transpose(N: int, C: int) -> None:
    module, x, y = make(N, C), tokens(N, C), tokens(N, C)
    close((module(x) * y).sum(), (x * module(y)).sum(), 1e-9)


def test_gradients_are_those_of_the_plain_transform() -> None:
    x, weight = tokens(9, 6).requires_grad_(), tokens(9, 6)
    (make(9, 6)(x) * weight).sum().backward()
    y = x.detach().clone().requires_grad_()
    (torch.fft.fft2(y).real * weight).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    close(x.grad, y.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_only_at_the_end(dtype: torch.dtype) -> None:
    x = torch.randn(2, 29, 12).to(dtype)
    expected = torch.fft.fft2(x.double()).real.to(dtype)
    torch.testing.assert_close(make(29, 12)(x), expected, rtol=torch.finfo(dtype).eps, atol=1e-2)


def test_nothing_is_kept_for_the_backward_pass() -> None:
    module, x = make(256, 32), torch.randn(2, 256, 32, requires_grad=True)

    def training() -> None:
        module(x).sum().backward()

    forward, both = peak_tensor_bytes(lambda: module(x)), peak_tensor_bytes(training)
    assert forward is not None
    assert both is not None
    assert both <= forward + 1.1 * x.nbytes


def test_every_capability_that_it_lacks_has_a_reason() -> None:
    traits = VARIANTS.get("fnet").traits
    assert not any((traits.causal, traits.cross, traits.decode))
    assert not list(make(4, 4).parameters())


def test_entries_grow_with_the_root_of_tokens_and_channels() -> None:
    x = torch.randn(2, 60, 32, dtype=torch.float64)
    assert float(make(60, 32)(x).std()) == pytest.approx((60 * 32 / 2) ** 0.5, rel=0.05)
