"""How fast this machine can multiply matrices and move memory: the ceilings that ``peak_fraction`` refers to."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch


def matmul_rate(device: str, dtype: torch.dtype, *, size: int | None = None, rounds: int = 5) -> float:
    """FLOPs per second of the best of ``rounds`` square products; the first one only warms up."""
    n = size or (8192 if device.startswith("cuda") else 1536)
    a = torch.randn(n, n, device=device).to(dtype)
    out = torch.empty_like(a)
    return 2 * n**3 / _best(device, rounds, lambda: torch.mm(a, a, out=out))


CopyRate = tuple[int, float]
"""Bytes read and written together, and how many of them a second."""


def copy_rates(device: str, *, sizes: Sequence[int] | None = None) -> list[CopyRate]:
    """How fast copies of several sizes move bytes, smallest first: what fits into a cache moves faster.

    On CUDA one size, far beyond the cache, which is flushed before every sample there.

    Args:
        sizes: bytes moved, which is twice the size of what is copied.
    """
    sizes = sizes or ([1 << 30] if device.startswith("cuda") else [1 << power for power in range(18, 28, 3)])
    source = torch.zeros(max(sizes) // 2, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    rates = []
    for moved in sizes:
        one, other = source[: moved // 2], target[: moved // 2]
        rates.append((moved, moved / _best(device, 20 if moved < 1 << 25 else 5, lambda: other.copy_(one))))  # noqa: B023  # called at once
    return rates


def memory_rate(moved: int, rates: Sequence[CopyRate]) -> float | None:
    """Bytes per second of the largest copy that moves no more than ``moved`` bytes; None where nothing was measured."""
    smaller = [rate for size, rate in rates if size <= moved]
    return smaller[-1] if smaller else (rates[0][1] if rates else None)


def peak_fraction(
    seconds: float, *, flops: int | None, moved: int, matmul_rate: float | None, rates: Sequence[CopyRate]
) -> float | None:
    """How close to this machine's limit: the larger of FLOPs and of bytes over what it could do in that time.

    Above 1 for what does not touch all of its bytes: an output that is an input.
    """
    shares = []
    if flops and matmul_rate:
        shares.append(flops / seconds / matmul_rate)
    rate = memory_rate(moved, rates)
    if moved and rate:
        shares.append(moved / seconds / rate)
    return max(shares, default=None)


def _best(device: str, rounds: int, call: Callable[[], object]) -> float:
    """Seconds of the quickest of ``rounds`` calls, after one that only warms up."""
    best = float("inf")
    for attempt in range(rounds + 1):
        _synchronise(device)
        start = time.perf_counter()
        call()
        _synchronise(device)
        if attempt:
            best = min(best, time.perf_counter() - start)
    return best


def _synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    elif device == "mps":
        torch.mps.synchronize()


def is_true_float32(device: str = "cpu") -> bool:
    """Whether float32 products carry float32's precision: one product against float64."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(512, 512, generator=generator)
    exact = a.double() @ a.double()
    got = (a.to(device) @ a.to(device)).cpu().double()
    return bool((got - exact).norm() / exact.norm() < 2e-6)
