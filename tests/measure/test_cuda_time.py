"""Device time, against a kernel that does nothing for a number of clock cycles."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attnbench.measure.cuda_events import CudaEvents
from attnbench.measure.statistics import median
from attnbench.measure.time import TimingRules, measure_time

MILLION = 1_000_000
pytestmark = pytest.mark.cuda


def sleeping(cycles: int) -> Callable[[], None]:
    return lambda: torch.cuda._sleep(cycles)


def seconds(call: Callable[[], None]) -> float:
    timing = measure_time(call, TimingRules(min_time=0.1), stopwatch=CudaEvents("cuda"))
    return median([sample.seconds for sample in timing.samples])


@pytest.mark.parametrize("cycles", [2 * MILLION, 20 * MILLION])
def test_twice_the_cycles_take_twice_the_time(cycles: int) -> None:
    assert seconds(sleeping(2 * cycles)) / seconds(sleeping(cycles)) == pytest.approx(2, rel=0.025)


def test_work_on_another_stream_is_not_captured() -> None:
    other = torch.cuda.Stream()
    alone = sleeping(40 * MILLION)  # beside which it does not count that one call starts two kernels

    def both() -> None:
        with torch.cuda.stream(other):
            torch.cuda._sleep(400 * MILLION)
        alone()

    watch = CudaEvents("cuda")
    watch.time(both, 1)
    assert watch.time(both, 1)[0] == pytest.approx(seconds(alone), rel=0.025)
