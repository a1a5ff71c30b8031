from __future__ import annotations

import itertools

import pytest
import torch

from attnbench.catalogue.attention.exact.quantised import ROUNDING, e2m1, e4m3, grouped_e2m1, scaled

F64 = torch.float64
FEW = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
each_dtype = pytest.mark.parametrize("dtype", ROUNDING)


def test_e2m1_takes_the_nearest_and_between_two_the_one_whose_fraction_is_even() -> None:
    for below, above in itertools.pairwise(range(8)):
        low, high = FEW[below], FEW[above]
        points = torch.tensor([low, low + 0.49 * (high - low), low + 0.51 * (high - low), (low + high) / 2], dtype=F64)
        expected = torch.tensor([low, low, high, FEW[below if below % 2 == 0 else above]], dtype=F64)
        assert torch.equal(e2m1(points), expected)
        assert torch.equal(e2m1(-points), -expected)
    assert e2m1(torch.tensor([7.5, -100.0])).tolist() == [6, -6]


@pytest.mark.parametrize("source", [torch.float32, F64])
def test_e4m3_is_torch_s_own_and_keeps_its_own_numbers(source: torch.dtype) -> None:
    """All 256 codes but NaN come back as they are, and what lies between two of them goes to the nearer one."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(source)
    codes = codes[codes.isfinite()].unique()
    assert codes.max() == 448
    assert torch.equal(e4m3(codes), codes)
    lower, upper = codes[:-1], codes[1:]
    assert torch.equal(e4m3(lower + 0.4 * (upper - lower)), lower)
    assert torch.equal(e4m3(lower + 0.6 * (upper - lower)), upper)


def test_sixteen_neighbours_share_a_scale_that_e4m3_can_say() -> None:
    x = torch.randn(5, 40, dtype=F64).mul(2).exp()
    found = grouped_e2m1(x)
    for row, coarse in zip(x, found, strict=True):
        for start in (0, 16, 32):
            part = row[start : start + 16]
            scale = (part.max() / 6).to(torch.float8_e4m3fn).double()
            for number, rounded in zip(part, coarse[start : start + 16], strict=True):
                assert rounded / scale in FEW
                nearest = min(abs(float(number / scale) - few) for few in FEW)
                assert abs(float((number - rounded) / scale)) == pytest.approx(nearest, abs=1e-12)


@each_dtype
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_a_scale_makes_any_magnitude_alike(dtype: str, size: float) -> None:
    x = torch.randn(3, 50, 16, dtype=F64)
    torch.testing.assert_close(scaled(x * size, (1, 2), dtype), scaled(x, (1, 2), dtype) * size, rtol=1e-9, atol=0)


@each_dtype
def test_zeros_stay_zeros_and_the_largest_keeps_its_size(dtype: str) -> None:
    assert not scaled(torch.zeros(2, 3, 4), (1, 2), dtype).any()
    x = torch.randn(3, 50, 16, dtype=F64)
    found = scaled(x, (1, 2), dtype)
    torch.testing.assert_close(found.abs().amax((1, 2)), x.abs().amax((1, 2)), rtol=1e-9, atol=0)


def test_fewer_bits_cost_more() -> None:
    x = torch.randn(8, 64, 64, dtype=F64)
    errors = [float((scaled(x, (2,), dtype) - x).norm() / x.norm()) for dtype in ("int8", "float8_e4m3", "float4_e2m1")]
    assert errors[0] < errors[1] < errors[2]
    assert 0.005 < errors[0] < 0.01
    assert 0.02 < errors[1] < 0.03
    assert 0.08 < errors[2] < 0.12
