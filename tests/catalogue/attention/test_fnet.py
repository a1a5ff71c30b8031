from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.synthetic.fnet import FNet
from attnbench.catalogue.build import build
from attnbench.contract.problem.shape import Shape
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


def test_padding_is_cut_out_wherever_it_stands() -> None:
    x, module = tokens(12, 6), make(12, 6)
    mask = torch.rand(2, 12) < 0.6
    out = module(x, key_mask=mask)
    for b in range(2):
        close(out[b, mask[b]], torch.fft.fft2(x[b, mask[b]]).real)
    assert not out[~mask].any()
    assert not module(x, key_mask=torch.zeros(2, 12, dtype=torch.bool)).any()


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
