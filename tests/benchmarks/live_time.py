"""Sleeps of a known time, to the bounds that an idle machine keeps. See `make selfcheck`."""

from __future__ import annotations

import time

import pytest

from attnbench.measure.statistics import median
from attnbench.measure.time import TimingRules, measure_time


def slept(sleep: float, rules: TimingRules) -> float:
    """The median of the samples of a sleep, none of which is shorter."""
    seconds = [sample.seconds for sample in measure_time(lambda: time.sleep(sleep), rules).samples]
    least, middle = min(seconds), median(seconds)
    print(f"\nsleep of {sleep * 1e3:.0f} ms: {least * 1e3:.3f} at least, {middle * 1e3:.3f} in the median")
    assert least >= sleep
    return middle


@pytest.mark.parametrize("sleep", [0.02, 0.05, 0.25])
def test_a_sleep_takes_its_time_and_at_most_two_per_cent_or_half_a_millisecond_more(sleep: float) -> None:
    assert slept(sleep, TimingRules(min_time=1.0, min_samples=20)) <= max(1.02 * sleep, sleep + 5e-4)
