"""This machine's rates of products, exponentials and copies; no cell can be faster.

A rate is 0, which is unknown, if threads of the process waited for a core in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from time import sleep
from typing import Any

import torch

from attnbench.measure.stopwatch import WallClock
from attnbench.measure.time import REST, Sampler

LONGEST = 1.0
"""Most seconds of a product for a rate; most take a tenth of that."""
TRIES = 4
"""Most calls for each clean one that is wanted."""


def matmul_rate(device: str, dtype: torch.dtype, *, size: int | None = None, rounds: int = 5) -> float:
    """FLOPs per second of the best of ``rounds`` square products, after a warm-up.

    Without instructions for the dtype they are smaller, and take :data:`LONGEST` at most. Programs may then multiply in
    float32 and round: its rate counts if it is higher.
    """
    n = whole = size or (8192 if device.startswith("cuda") else 1536)
    while device == "cpu" and not size and n > 256 and 64 * _product(device, dtype, n // 4, 1) > LONGEST:
        n //= 2
    rate = 2 * n**3 / _product(device, dtype, n, rounds)
    return max(rate, matmul_rate(device, torch.float32, rounds=rounds)) if n < whole and dtype.itemsize < 4 else rate


def _product(device: str, dtype: torch.dtype, n: int, rounds: int) -> float:
    a = torch.randn(n, n, device=device).to(dtype)
    out = torch.empty_like(a)
    return _best(device, rounds, lambda: torch.mm(a, a, out=out))


def windows_rate(*, rounds: int = 5) -> float:
    """FLOPs per second of attention's two products with windows of 320 float32 keys, 64 apart, on the CPU."""
    x = torch.randn(32, 64, 64)
    keys = torch.randn(31 * 64 + 320, 64).as_strided((32, 320, 64), (64 * 64, 64, 1))
    scores, out = torch.empty(32, 64, 320), torch.empty_like(x)

    def call() -> None:
        torch.bmm(x, keys.mT, out=scores)
        torch.bmm(scores, keys, out=out)

    return 4 * scores.numel() * 64 / _best("cpu", rounds, call)


def exp_rate(device: str, dtype: torch.dtype, *, size: int | None = None) -> float:
    """Exponentials per second over cached rows of 512: the quickest of bare, to the base 2 and of a softmax."""
    rows = size or (1 << 17 if device.startswith("cuda") else 1 << 8)
    logits = torch.zeros(rows, 512, device=device, dtype=dtype)
    out = torch.empty_like(logits)
    calls = (
        lambda: torch.exp(logits, out=out),
        lambda: torch.exp2(logits, out=out),
        lambda: torch.softmax(logits, -1, out=out),
    )
    return logits.numel() / min(_best(device, 20, call) for call in calls)


IMPOSSIBLE = 1.1
"""A peak fraction above this shows that the machine was busy when its limits were measured."""

CopyRate = tuple[int, float]
"""Bytes read and written together, and how many are moved per second."""


def copy_rates(device: str, *, sizes: Sequence[int] | None = None) -> list[CopyRate]:
    """The rates of several sizes, smallest first, since a cache is faster than memory: a copy's or, if faster, a dot
    product's, which only reads.

    On CUDA there is one size, far beyond the cache: a limit need not flush it. ``sizes`` are bytes moved, twice those
    copied.
    """
    sizes = sizes or ([1 << 30] if device.startswith("cuda") else [1 << power for power in range(18, 28, 3)])
    source = torch.zeros(max(sizes) // 8, device=device)
    target = torch.zeros_like(source)
    rates = []
    for moved in sizes:
        one, other, rounds = source[: moved // 8], target[: moved // 8], 20 if moved < 1 << 25 else 5
        calls = partial(other.copy_, one), partial(torch.dot, one, other)
        rates.append((moved, moved / min(_best(device, rounds, call) for call in calls)))
    return rates


@dataclass(frozen=True, slots=True)
class Limits:
    """This machine's rates per second in one dtype; None or empty without a measurement."""

    matmul_rate: float | None = None
    """FLOPs of matrix products."""
    exp_rate: float | None = None
    """Exponentials."""
    copy_rates: Sequence[CopyRate] = ()

    def memory_rate(self, moved: int) -> float | None:
        """Bytes per second of the largest copy that moves no more than ``moved`` bytes, else of the smallest."""
        smaller = [rate for size, rate in self.copy_rates if size <= moved]
        return smaller[-1] if smaller else (self.copy_rates[0][1] if self.copy_rates else None)

    def peak_fraction(self, seconds: float, *, flops: int | None, moved: int) -> float | None:
        """The share of the machine's limit, of FLOPs or bytes if that is larger, that a call of ``seconds`` reaches."""
        return max((share / seconds for share in (self._products(flops), self._moving(moved)) if share), default=None)

    def floor(self, *, flops: int | None, exponentials: int | None, moved: int) -> float | None:
        """Least seconds of a call: its products and then its exponentials, or moving its bytes if that is more.

        Products and exponentials do not overlap: they need the same cores.
        """
        exps = exponentials / self.exp_rate if exponentials and self.exp_rate else 0.0
        return max((self._products(flops) or 0.0) + exps, self._moving(moved) or 0.0) or None

    def _products(self, flops: int | None) -> float | None:
        return flops / self.matmul_rate if flops and self.matmul_rate else None

    def _moving(self, moved: int) -> float | None:
        rate = self.memory_rate(moved)
        return moved / rate if moved and rate else None


def faster_of(first: Mapping[str, Any], again: Mapping[str, Any]) -> dict[str, Any]:
    """The higher value of each rate in two reports of the worker; the lower came from a busier machine."""
    rates: dict[str, Any] = {
        name: {dtype: max(rate, again[name].get(dtype, rate)) for dtype, rate in first[name].items()}
        for name in ("matmul_rate", "exp_rate")
    }
    moved = dict(map(tuple, again["copy_rates"]))
    return {**rates, "copy_rates": [[size, max(rate, moved.get(size, rate))] for size, rate in first["copy_rates"]]}


def _best(device: str, rounds: int, call: Callable[[], object]) -> float:
    sampler, clean = Sampler(WallClock(sync=lambda: synchronise(device)), call), list[float]()
    sampler.take(1)
    for _ in range(TRIES * rounds):
        sample = sampler.take(1)
        if sample.clean:
            clean.append(sample.seconds)
        else:
            sleep(REST)
        if len(clean) == rounds:
            break
    return min(clean, default=inf)


def synchronise(device: str) -> None:
    """Wait until a device has done its work so far; a CPU always has."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    elif device == "mps":
        torch.mps.synchronize()


def is_true_float32() -> bool:
    """True if float32 products on the CPU carry float32's precision: one product compared with float64."""
    a = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    exact = a.double() @ a.double()
    return bool(((a @ a).double() - exact).norm() / exact.norm() < 2e-6)
