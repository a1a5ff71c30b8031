from __future__ import annotations

import pytest
import torch

from attnbench.catalogue.attention.synthetic.fnet import FNet
from attnbench.contract.problem.shape import Shape
from attnbench.measure.memory import peak_tensor_bytes
from tests.catalogue.attention.small import built, close, draw

SIZES = [(1, 1), (1, 8), (2, 3), (12, 5), (23, 8), (29, 7), (64, 16)]


def make(N: int, C: int) -> FNet:
    return built(FNet, "fnet", Shape(2, 1, N, C))


@pytest.mark.parametrize(("N", "C"), SIZES)
def test_is_the_real_part_of_a_transform_over_both_axes(N: int, C: int) -> None:
    x = draw(2, N, C)
    close(make(N, C)(x), torch.fft.fft(torch.fft.fft(x, dim=2), dim=1).real)


def test_padding_is_cut_out_wherever_it_stands() -> None:
    x, module = draw(2, 12, 6), make(12, 6)
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
