"""Sleeps of a known time, to the bounds that an idle machine keeps. See `make selfcheck`."""

from __future__ import annotations

import time

import pytest

from attnbench.measure.statistics import median
from attnbench.measure.time import TimingRules, measure_time


@pytest.mark.parametrize("sleep", [0.02, 0.05, 0.25])
def test_a_sleep_takes_its_time_and_at_most_two_per_cent_or_half_a_millisecond_more(sleep: float) -> None:
    timing = measure_time(lambda: time.sleep(sleep), TimingRules(min_time=1.0, min_samples=20))
    seconds = [sample.seconds for sample in timing.samples]
    print(
        f"\nsleep of {sleep * 1e3:.0f} ms: {min(seconds) * 1e3:.3f} at least, {median(seconds) * 1e3:.3f} in the median"
    )
    assert min(seconds) >= sleep
    assert median(seconds) <= max(1.02 * sleep, sleep + 5e-4)
