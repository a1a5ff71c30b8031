"""What makes a process slower is seen between two cells, whatever it is, and a busy machine is not."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import thread_time
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnbench.harness.inside.canary import Canary


class Mode(TorchDispatchMode):
    """Notes every call of torch and the shapes that it was given."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.last = str(function), [tuple(one.shape) for one in args if isinstance(one, Tensor)]
        return function(*args, **(kwargs or {}))


@contextmanager
def traced(start: Callable[[], object], stop: Callable[[], object]) -> Iterator[None]:
    start()
    try:
        yield
    finally:
        stop()


@pytest.mark.parametrize(
    ("left", "slower"),
    [
        (traced(tracemalloc.start, tracemalloc.stop), "objects of Python"),
        (traced(lambda: sys.setprofile(lambda *_: None), lambda: sys.setprofile(None)), "calls of Python"),
        (Mode(), "operations of torch"),
    ],
)
def test_what_a_cell_leaves_at_work_is_seen_by_what_it_costs(left: Any, slower: str) -> None:
    canary = Canary()
    with left:
        said = canary.slowed()
    assert said.startswith("made ")
    assert f"{slower} " in said
    assert canary.slowed() == ""


def test_a_busy_machine_is_no_slower_process() -> None:
    canary = Canary()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        assert [canary.slowed() for _ in range(10)] == [""] * 10
    finally:
        for one in busy:
            one.kill()
            one.wait()


def test_a_look_takes_milliseconds() -> None:
    canary, began = Canary(), thread_time()
    for _ in range(20):
        canary.slowed()
    assert (thread_time() - began) / 20 < 0.01
