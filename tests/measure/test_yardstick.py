"""The work that is timed beside the samples, on a machine whose speed is made up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from attnbench.measure import yardstick as module
from attnbench.measure.standstill import Moment
from attnbench.measure.yardstick import MOST, SHARE, Reading, Yardstick

PRODUCT, EXPONENTIALS, SMALL = 4.0, 2.0, 0.125
"""Milliseconds of each at full speed: a go takes 6 and 2 ms."""


class Machine:
    """Its clock goes on only while it computes. In its n-th go from 0 it is so many times slower."""

    def __init__(self) -> None:
        self.now, self.goes, self.slower = 0.0, 0, dict[int, float]()

    def clock(self) -> float:
        return self.now

    def works(self, milliseconds: float) -> None:
        self.now += milliseconds / 1e3 * self.slower.get(self.goes - 1, 1.0)

    def mm(self, a: Tensor, b: Tensor, *, out: Tensor) -> None:
        small = a.shape == b.shape
        self.goes += not small
        self.works(SMALL if small else PRODUCT)

    def exp(self, x: Tensor, *, out: Tensor) -> None:
        self.works(EXPONENTIALS)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # else the first product is a square as well
    monkeypatch.setattr(module, "perf_counter", machine.clock)
    monkeypatch.setattr(module, "mm", machine.mm)
    monkeypatch.setattr(module, "exp", machine.exp)
    return machine


def test_a_reading_is_the_time_of_products_and_exponentials_and_that_of_sixteen_small_calls(machine: Machine) -> None:
    reading = Yardstick().read(0.0)
    assert reading == Reading(products=pytest.approx(6e-3), calls=pytest.approx(16 * 0.125e-3))


def test_a_yardstick_is_tried_once_before_it_is_read(machine: Machine) -> None:
    Yardstick()
    assert machine.goes == 1


@pytest.mark.parametrize(
    ("goes", "since"),
    [(1, 0.0), (1, 8e-3), (1, 1.4 * 8e-3 / SHARE), (2, 2 * 8e-3 / SHARE), (3, 3.4 * 8e-3 / SHARE), (MOST, 1e3)],
)
def test_a_reading_takes_its_share_of_the_time_since_the_last_but_one_go_at_least_and_eight_at_most(
    goes: int, since: float, machine: Machine
) -> None:
    yardstick = Yardstick()
    yardstick.read(since)
    assert machine.goes - 1 == goes


def test_a_reading_is_the_mean_of_its_goes(machine: Machine) -> None:
    yardstick = Yardstick()
    machine.slower = {1: 3.0, 2: 2.0, 3: 4.0}
    assert yardstick.read(3 * 8e-3 / SHARE) == pytest.approx((3 * 6e-3, 3 * 2e-3))


def test_how_many_goes_there_are_is_told_by_the_quickest_until_then(machine: Machine) -> None:
    machine.slower = {0: 5.0, 1: 2.0, 2: 4.0, 3: 4.0}
    yardstick, goes = Yardstick(), []
    for _ in range(3):
        before = machine.goes
        yardstick.read(10 * 8e-3 / SHARE)
        goes.append(machine.goes - before)
    assert goes == [2, 5, MOST]  # by a go that took five times as long, then twice, then as long as at full speed


@pytest.fixture
def _odd_defaults() -> Iterator[None]:
    """Somebody wants all tensors in float64 on another device."""
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_odd_defaults")
def test_the_work_grows_with_the_threads_and_stays_on_the_cpu_in_float32_whatever_defaults_are_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[Tensor, ...]] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(module, "mm", lambda a, b, *, out: seen.append((a, b, torch.mm(a, b, out=out))))
    monkeypatch.setattr(module, "exp", lambda x, *, out: seen.append((x, torch.exp(x, out=out))))
    yardstick = Yardstick()
    seen.clear()
    yardstick.read(0.0)
    yardstick.read(0.0)
    product = [(3 * 192, 192), (192, 192), (3 * 192, 192)]
    go = [product, [(3 * 2**15,)] * 2, *[[(32, 32)] * 3] * 16]
    assert [[tuple(one.shape) for one in used] for used in seen] == go * 2
    assert len({used[-1].data_ptr() for used in seen}) == 3  # results have their place; no memory is asked for
    tensors = [one for used in seen for one in used]
    assert {(one.dtype, one.device.type, one.requires_grad) for one in tensors} == {(torch.float32, "cpu", False)}
    for given in (one for *used, _ in seen for one in used):
        assert (given.min(), given.max()) == (-1, 1)  # no result is too large or too small for a float


@pytest.fixture
def waiting(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The goes, from 0, in which threads wait for a core."""
    goes: set[int] = set()
    monkeypatch.setattr(Moment, "delay_until", lambda start, end: 1.0 if machine.goes - 1 in goes else 0.0)
    return goes


def test_a_go_whose_threads_waited_for_a_core_is_taken_again(machine: Machine, waiting: set[int]) -> None:
    yardstick = Yardstick()
    machine.slower = {1: 13.0, 3: 50.0}
    waiting.update(machine.slower)
    assert yardstick.read(0.008 * 2 / SHARE) == pytest.approx((0.006, 0.002))
    assert machine.goes == 1 + 4


def test_if_threads_wait_in_all_goes_the_reading_before_stands(machine: Machine, waiting: set[int]) -> None:
    yardstick = Yardstick()
    machine.slower = dict.fromkeys(range(1, 99), 13.0)
    waiting.update(machine.slower)
    assert yardstick.read(0.0) == pytest.approx((0.006, 0.002))
    assert machine.goes == 1 + 1 + MOST


def test_if_threads_have_waited_since_the_beginning_the_quickest_go_stands(machine: Machine, waiting: set[int]) -> None:
    machine.slower = {**dict.fromkeys(range(99), 13.0), 4: 2.0}
    waiting.update(machine.slower)
    assert Yardstick().read(0.0) == pytest.approx((0.012, 0.004))
