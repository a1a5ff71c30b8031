"""Calls that take turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from attnbench.harness.inside import pairs
from attnbench.measure.stopwatch import Stopwatch
from attnbench.measure.time import Sample


def takes(watch: Stopwatch, calls: Sequence[Callable[[], Any]], batch: int = 1) -> list[Callable[[], Sample]]:
    """What takes a sample of each call, as :func:`attnbench.harness.inside.pairs.take_turns` wants it."""
    return [partial(pairs.Sampler(watch, call).take, batch) for call in calls]
