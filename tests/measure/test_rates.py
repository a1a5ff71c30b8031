"""Rates are work over the time of the quickest call; here the work is counted, and the time is made up."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnbench.measure import limits
from attnbench.measure.stopwatch import WallClock
from attnbench.measure.time import REST, Sample

SECONDS = 0.5


class Ops(TorchDispatchMode):
    """Notes what is computed, and the shape of what it is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in (torch.ops.aten.transpose.int, torch.ops.aten.detach.default):
            self.seen.append((str(func).removeprefix("aten.").lstrip("_"), tuple(out.shape)))
        return out


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, list[tuple[str, tuple[int, ...]]]]]:
    """Device, rounds and operations of whatever is timed; the n-th of them takes n times half a second."""
    found: list[tuple[str, int, list[tuple[str, tuple[int, ...]]]]] = []

    def best(device: str, rounds: int, call: Callable[[], object]) -> float:
        with Ops() as ops:
            call()
        found.append((device, rounds, ops.seen))
        return SECONDS * len(found)

    monkeypatch.setattr(limits, "_best", best)
    return found


def test_products_are_two_operations_for_each_of_n_cubed(timed: list[Any]) -> None:
    assert limits.matmul_rate("cpu", torch.float32, size=48, rounds=7) == 2 * 48**3 / SECONDS
    assert timed == [("cpu", 7, [("mm.out", (48, 48))])]


def test_windows_are_the_two_products_of_attention(timed: list[Any]) -> None:
    assert limits.windows_rate(rounds=3) == 2 * 2 * 32 * 64 * 320 * 64 / SECONDS
    assert timed == [("cpu", 3, [("bmm.out", (32, 64, 320)), ("bmm.out", (32, 64, 64))])]


def test_exponentials_are_those_of_the_quickest_of_three_kinds(timed: list[Any]) -> None:
    assert limits.exp_rate("cpu", torch.bfloat16, size=3) == 3 * 512 / SECONDS
    assert [(device, rounds) for device, rounds, _ in timed] == [("cpu", 20)] * 3
    kinds = [seen.partition(".") for _, _, ((seen, _),) in timed]
    assert [kind for kind, *_ in kinds] == ["exp", "exp2", "softmax"]
    assert all(how.endswith("out") for *_, how in kinds)  # no memory is asked for meanwhile
    assert {shape for _, _, ((_, shape),) in timed} == {(3, 512)}
    timed.clear()
    assert limits.exp_rate("cpu", torch.float32) == 256 * 512 / SECONDS


def test_a_softmax_is_one_of_rows_of_512(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[torch.Tensor] = []
    softmax = torch.softmax
    monkeypatch.setattr(torch, "softmax", lambda *given, out: found.append(softmax(*given, out=out)))
    limits.exp_rate("cpu", torch.float32, size=4)
    assert torch.equal(found[-1], torch.full((4, 512), 1 / 512))


def test_copies_move_half_of_their_bytes_there_and_half_back(timed: list[Any]) -> None:
    rates = limits.copy_rates("cpu", sizes=[1000, 1 << 25])
    assert rates == [(1000, 1000 / SECONDS), (1 << 25, (1 << 25) / (3 * SECONDS))]  # the third call is the second copy
    assert timed == [
        ("cpu", 20, [("copy_.default", (125,))]),  # of four bytes each, read and written
        ("cpu", 20, [("dot.default", ())]),
        ("cpu", 5, [("copy_.default", (1 << 22,))]),
        ("cpu", 5, [("dot.default", ())]),
    ]
    timed.clear()
    assert [size for size, _ in limits.copy_rates("cpu")] == [1 << 18, 1 << 21, 1 << 24, 1 << 27]


def test_the_quickest_call_counts_but_for_the_first_and_the_device_is_waited_for_on_both_sides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    ends = iter([1.0, 3.0, 2.0, 5.0])  # seconds of each call
    monkeypatch.setattr(limits, "synchronise", lambda device: log.append(f"wait for {device}"))

    def clock() -> int:
        log.append("clock")
        return 0 if log.count("clock") % 2 else round(next(ends) * 1e9)

    monkeypatch.setattr(limits, "WallClock", partial(WallClock, clock))
    assert limits._best("cuda:1", 3, lambda: log.append("call")) == 2.0
    assert log == ["wait for cuda:1", "clock", "call", "wait for cuda:1", "clock"] * 4


@pytest.mark.parametrize(
    ("clean", "found", "rested"), [([1, 3, 4], 5.0, 1), ([4], 2.0, 7), ([0], math.inf, 8), ([9], math.inf, 8)]
)
def test_calls_whose_threads_waited_for_a_core_tell_no_rate(
    clean: list[int], found: float, rested: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call is a warm-up; after eight more, four times as many as are wanted, it gives up."""
    seconds = [1.0, 5.0, 1.0, 9.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    calls = iter([Sample(one, 1, waited=0.0 if i in clean else one) for i, one in enumerate(seconds)])
    rests: list[float] = []
    monkeypatch.setattr(limits, "sleep", rests.append)
    monkeypatch.setattr(limits, "Sampler", lambda *_: SimpleNamespace(take=lambda _: next(calls)))
    assert limits._best("cpu", 2, lambda: None) == found
    assert rests == [REST] * rested


def test_a_product_is_smaller_on_a_processor_that_is_slow_with_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def product(device: str, dtype: torch.dtype, n: int, rounds: int) -> float:
        asked.append((n, rounds))
        return 2 * n**3 / 1e9

    monkeypatch.setattr(limits, "_product", product)
    assert limits.matmul_rate("cpu", torch.bfloat16) == pytest.approx(1e9)
    assert asked == 2 * [(384, 1), (192, 1), (768, 5)], "float32's rate counts too, if it is higher"


def test_each_kind_of_device_is_waited_for_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    for device in ("cpu", "cuda:1", "mps", "cuda"):
        limits.synchronise(device)
    assert waited == ["cuda:1", "mps", "cuda"]


def test_products_of_fewer_digits_than_float32_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_rng_state()
    assert limits.is_true_float32()
    assert torch.equal(torch.get_rng_state(), before)  # nobody else's numbers change
    whole = torch.Tensor.__matmul__

    def shortened(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype == torch.float64 or a.dim() < 2:  # as on hardware, where products of matrices alone are cut
            return whole(a, b)
        return whole(a.half().float(), b.half().float())  # ten bits, as TF32 has

    monkeypatch.setattr(torch.Tensor, "__matmul__", shortened)
    assert not limits.is_true_float32()


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is made on a device of CUDA, where there is none: its size, device and dtype."""
    made: list[tuple[Any, ...]] = []

    def make(*size: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        made.append((size, device, dtype))
        return torch.empty(size, device="meta", dtype=dtype)

    for name in ("randn", "zeros"):
        monkeypatch.setattr(torch, name, make)
    return made


def test_on_a_gpu_products_and_exponentials_are_larger_and_have_the_dtype_that_is_asked_for(
    timed: list[Any], on_cuda: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.dtype] = []
    monkeypatch.setattr(torch, "mm", lambda a, b, *, out: seen.extend((a.dtype, b.dtype, out.dtype)))
    assert limits.matmul_rate("cuda:1", torch.bfloat16) == 2 * 8192**3 / SECONDS
    assert seen == [torch.bfloat16] * 3
    assert limits.exp_rate("cuda:1", torch.float16) == 2**17 * 512 / (2 * SECONDS)
    assert [one[:2] for one in timed] == [("cuda:1", 5), *[("cuda:1", 20)] * 3]
    assert on_cuda == [((8192, 8192), "cuda:1", torch.float32), ((2**17, 512), "cuda:1", torch.float16)]


def test_on_a_gpu_one_copy_is_far_larger_than_any_cache(timed: list[Any], on_cuda: list[Any]) -> None:
    assert limits.copy_rates("cuda:1") == [(2**30, 2**30 / SECONDS)]
    assert timed == [("cuda:1", 5, [("copy_.default", (2**27,))]), ("cuda:1", 5, [("dot.default", ())])]
    assert on_cuda == [((2**27,), "cuda:1", torch.float32)]


def test_windows_of_320_keys_begin_64_keys_apart_in_the_same_memory(
    timed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(torch, "bmm", lambda a, b, *, out: seen.extend((a, b)))
    limits.windows_rate()
    assert timed[0][1] == 5
    x, keys, scores, values = seen
    assert [tuple(one.shape) for one in seen] == [(32, 64, 64), (32, 64, 320), (32, 64, 320), (32, 320, 64)]
    assert keys.mT.stride() == values.stride() == (64 * 64, 64, 1)
    assert torch.equal(keys.mT[1:, :256], keys.mT[:-1, 64:])
    assert keys.untyped_storage().nbytes() == (31 * 64 + 320) * 64 * 4
    assert x.dtype == scores.dtype == torch.float32
