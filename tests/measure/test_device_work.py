"""The work of a device, from the kernels that a made-up profiler saw."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attnbench.measure.device_work import DeviceKernel, device_work


def seen(kernels: list[DeviceKernel]) -> Callable[[Callable[[], object]], list[DeviceKernel]]:
    def look(call: Callable[[], object]) -> list[DeviceKernel]:
        call()
        return kernels

    return look


def test_the_work_of_a_call_is_that_of_its_kernels_without_the_flush_before_it() -> None:
    log = list[str]()
    kernels = [DeviceKernel(10, "fill", 900), DeviceKernel(20, "product", 30), DeviceKernel(30, "fill", 5)]
    kernels += [DeviceKernel(40, "fill", 901), DeviceKernel(50, "product", 32), DeviceKernel(60, "fill", 7)]
    work = device_work(lambda: log.append("call"), lambda: log.append("flush"), 0.2, look=seen(kernels[::-1]))
    assert log == ["flush", "call"] * 2
    assert work is not None
    assert work.seconds == pytest.approx((30 + 5 + 32 + 7) / 2 / 1e9)
    assert work.kernels == 2


@pytest.mark.parametrize(("seconds", "calls"), [(1e-6, 5), (0.24, 2), (9.0, 1)])
def test_a_long_call_is_looked_at_once_and_a_short_one_five_times(seconds: float, calls: int) -> None:
    log = list[str]()
    device_work(lambda: log.append("call"), lambda: None, seconds, look=seen([]))
    assert log == ["call"] * calls


def test_a_call_that_returns_its_input_has_the_device_do_nothing() -> None:
    work = device_work(lambda: None, lambda: None, 1.0, look=seen([DeviceKernel(0, "fill", 900)]))
    assert work == (0, 0)


def test_nothing_is_said_where_the_driver_lets_nobody_look() -> None:
    assert device_work(lambda: None, lambda: None, 1.0, look=seen([])) is None

    def refused(call: Callable[[], object]) -> list[DeviceKernel]:
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    assert device_work(lambda: None, lambda: None, 1.0, look=refused) is None


@pytest.mark.cuda
def test_the_kernels_of_a_gpu_are_counted_and_take_as_long_as_they_should() -> None:
    x, flushed = torch.ones(2**26, device="cuda"), torch.empty(2**28, dtype=torch.uint8, device="cuda")
    work = device_work(lambda: x + 1 - 1, flushed.zero_, 1e-3)
    assert work is not None
    assert work.kernels == 2
    moved = 4 * x.nbytes
    assert 1e11 < moved / work.seconds < 1e13
