"""Laws about cost: bytes that decoding keeps of a token, and memory and time as powers of n against those claimed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import cast

import torch

from attnbench.contract.capabilities import Decoding
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.errors import UsageError
from attnbench.laws.laws import Case, Measured, NothingClaimed, law
from attnbench.measure.allocator import freed_memory_kept
from attnbench.measure.memory import peak_tensor_bytes, state_bytes
from attnbench.measure.statistics import FEWEST
from attnbench.measure.stopwatch import WallClock
from attnbench.measure.time import Disturbed, TimingRules, measure_time, summarise

SPARE = 0.05
"""Most that parts of lower order may add to the claimed power."""

SPARE_TIME = 0.35
"""The same for time, which caches and tiles bend."""


SHORT = 120
"""Tokens of the shortest text, which many sizes of blocks divide; the others are twice and four times as long."""


@law("cache", applies=lambda case: case.causal and bool(case.traits.decode), gates=False)
def cache(case: Case) -> Iterator[Measured]:
    """Decoding keeps as many bytes of each token as are stated, and no more."""
    if case.traits.emulated:
        raise NothingClaimed(f"what it keeps is not what it stands for: {case.traits.emulated}")
    try:
        held = [_held(case, SHORT * times) for times in (1, 2, 4)]
    except UsageError as limit:  # a setting may be for a few tokens only
        raise NothingClaimed(str(limit)) from None
    # The bytes held at any length, and those each doubling adds, as a state for each power of two, are nobody's share.
    of_token = (held[2] - 2 * held[1] + held[0]) / SHORT
    shape = replace(case.shape, batch=1, seq_len=4 * SHORT)
    stated = case.variant.cached_bytes(case.spec, shape, case.dtype.itemsize)
    what = f"a state holds {of_token:.4g} bytes more for each token; {stated or 'none'} are stated"
    yield Measured(max(0.0, of_token - (stated or 0)), 0, what)
    if hasattr(case.variant.make, "cached_bytes"):  # its own, and no bound for all; a part of a byte is rounded up
        yield Measured(max(0.0, (stated or 0) - of_token), 1, what)


def _held(case: Case, n: int) -> int:
    shape = replace(case.shape, batch=1, seq_len=n)
    with torch.no_grad():
        return state_bytes(cast(Decoding, case.module(shape)).begin(*case.draw(shape)))


def _with_defaults(case: Case) -> Case:
    # Tiles of the small settings would make thousands of steps; the defaults are what people run.
    return replace(case, spec=Spec(case.variant.name))


@law("memory", few_shapes=True, applies=lambda case: case.first, gates=False)
def memory(case: Case) -> Iterator[Measured]:
    """Memory grows with the claimed power of n; heads that share keys do not copy them."""
    case, power = _with_defaults(case), case.variant.memory_exponent
    if power is None:
        raise NothingClaimed("nothing is claimed about memory: see memory_exponent of @register.")
    claimed = max(1.0, power)  # the output alone grows linearly
    short = 256 if claimed > 1.5 else 1024
    for training in (False, True):
        with one_thread():  # each thread has tiles of its own
            few, many = (_peak(case, Shape(1, 1, n, 8, causal=case.causal), training) for n in (short, 4 * short))
        power = math.log(max(1, many) / max(1, few), 4)  # an alias takes no memory
        what = "training" if training else "a forward pass"
        yield Measured(
            power,
            claimed + SPARE,
            f"the memory of {what} grows as n^{power:.2f} from {short} on; n^{claimed:g} is claimed",
        )
    if case.operator and case.traits.shares == "by itself":
        own, shared = (Shape(1, 4, short, 32, causal=case.causal, kv_heads=K) for K in (4, 1))
        with one_thread():
            times = max(1, _peak(case, shared, False)) / max(1, _peak(case, own, False))
        yield Measured(
            times, 1 + SPARE, f"a forward pass takes {times:.2f} times the memory where 4 heads share one of keys"
        )


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread of torch's: several spend processor time on waiting for each other, the more the busier it is."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _peak(case: Case, shape: Shape, training: bool) -> int:
    module, inputs = (
        case.module(shape, dtype=case.common_dtype),
        case.draw(shape, dtype=case.common_dtype, grad=training),
    )

    def call() -> None:
        out = module(*inputs)
        if training:
            out.sum().backward()

    with nullcontext() if training else torch.inference_mode():
        if case.traits.compiled:
            call()  # the compiler's own memory is not the variant's
        peak = peak_tensor_bytes(call)
    assert peak is not None  # the CPU's profiler always answers
    return peak


@law("time", applies=lambda case: case.first and not case.causal, needs_time=True)
def time_(case: Case) -> Iterator[Measured]:
    """Time grows with the power of n that is claimed, or less."""
    case, claimed = _with_defaults(case), case.variant.time_exponent
    if claimed is None:
        raise NothingClaimed("nothing is claimed about time: see cost and time_exponent of @register.")
    short = 128 if claimed > 2 else 256 if claimed > 1.2 else 2048
    with one_thread(), freed_memory_kept():  # else only the longer call might pay for page faults
        few, many = (_least_seconds(case, n) for n in (short, 4 * short))
    power = math.log(many / few, 4)
    yield Measured(
        power,
        claimed + SPARE_TIME,
        f"time grows as n^{power:.2f} from {short} to {4 * short}; n^{claimed:g} is claimed",
    )


def _least_seconds(case: Case, n: int) -> float:
    """Least CPU seconds of several calls of this thread.

    Raises NothingClaimed if it waited for a core in nearly all: others have emptied its caches meanwhile.
    """
    shape = Shape(1, 1, n, 32)
    module, inputs = case.module(shape, dtype=case.common_dtype), case.draw(shape, dtype=case.common_dtype)
    rules = TimingRules(min_time=0.1, max_time=0.1, min_samples=FEWEST, max_samples=20, warmup_time=0, width=math.inf)
    with torch.inference_mode():
        timing = measure_time(lambda: module(*inputs), rules, stopwatch=WallClock(time.thread_time_ns))
    try:
        return summarise([timing.samples]).minimum
    except Disturbed as why:
        raise NothingClaimed(f"it could not be asked, since the machine is busy: {why}") from None
