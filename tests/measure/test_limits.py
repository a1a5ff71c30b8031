"""What the machine can do, and how close to it a cell comes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.harness.inside.execute import run_cell
from attnbench.harness.wire.protocol import VisitCell
from attnbench.measure import limits, machine
from attnbench.measure.limits import Limits, copy_rates, exp_rate, faster_of, matmul_rate, windows_rate
from attnbench.measure.machine import OtherLoad, noise_warning
from attnbench.measure.time import TimingRules
from attnbench.results.record import Record
from attnbench.suite.cell import Cell, Pass

RATES = [(1000, 50.0), (4000, 10.0)]


def test_the_higher_rate_of_both_times_counts() -> None:
    busy = {
        "matmul_rate": {"float32": 1.0, "bfloat16": 6.0},
        "exp_rate": {"float32": 5.0},
        "copy_rates": [[10, 2.0], [20, 9.0], [30, 1.0]],
    }
    quiet = {"matmul_rate": {"float32": 3.0}, "exp_rate": {"float32": 4.0}, "copy_rates": [[10, 7.0], [20, 8.0]]}
    assert faster_of(busy, quiet) == {
        "matmul_rate": {"float32": 3.0, "bfloat16": 6.0},  # what was measured once stays
        "exp_rate": {"float32": 5.0},
        "copy_rates": [[10, 7.0], [20, 9.0], [30, 1.0]],
    }


def test_a_cell_is_held_against_the_copy_that_moves_as_much_or_less() -> None:
    limits = Limits(copy_rates=RATES)
    assert [limits.memory_rate(moved) for moved in (1, 1000, 3999, 4000, 10**9)] == [50, 50, 50, 10, 10]
    assert Limits().memory_rate(1000) is None


@pytest.mark.parametrize(
    ("flops", "moved", "matmul", "wanted"),
    [
        (200, 1000, 1000.0, 10.0),  # 20 s of copying in 2 s of time; 0.2 s of products
        (200_000, 1000, 1000.0, 100.0),
        (200, 0, 1000.0, 0.1),
        (200, 1000, None, 10.0),
        (None, 1000, 1000.0, 10.0),
        (200, 0, None, None),
    ],
)
def test_the_fraction_is_the_larger_of_products_and_memory(
    flops: int | None, moved: int, matmul: float | None, wanted: float | None
) -> None:
    got = Limits(matmul, copy_rates=RATES).peak_fraction(2.0, flops=flops, moved=moved)
    assert got == (None if wanted is None else pytest.approx(wanted))


@pytest.mark.parametrize(
    ("flops", "exponentials", "moved", "wanted"),
    [
        (3000, 200, 50, 3 + 2),  # one after the other, while a second of copying goes on
        (3000, None, 50, 3),
        (None, 200, None, 2),
        (100, 1, 4000, 400),
        (None, None, None, None),
    ],
)
def test_the_floor_is_products_and_then_exponentials_or_memory(
    flops: int | None, exponentials: int | None, moved: int | None, wanted: float | None
) -> None:
    limits = Limits(1000.0, 100.0, RATES)
    assert limits.floor(flops=flops, exponentials=exponentials, moved=moved or 0) == wanted
    assert Limits().floor(flops=flops, exponentials=exponentials, moved=moved or 0) is None


def record(variant: str, pass_: Pass = "forward", **limits: Any) -> Record:
    cell = Cell("s", "w", parse_spec(variant), Shape(batch=2, heads=4, seq_len=64, head_dim=8), pass_=pass_)
    return run_cell(VisitCell(cell, TimingRules(quick=True)), limits=Limits(**limits))[0]


TOKENS = 2 * 4 * 64 * 8 * 4
"""Bytes of q, and of k, v and the output."""


@pytest.mark.parametrize(
    ("variant", "pass_", "moved"),
    [
        ("softmax", "forward", 4 * TOKENS),  # q, k, v and the output
        ("mean-value", "forward", TOKENS + TOKENS // 64),  # v, and one row in the place of all
        ("softmax", "backward", 7 * TOKENS + 2 * 4 * 64 * 64 * 4),  # q, k, v, four gradients and the kept weights
        ("softmax", "decode", 2 * TOKENS + 4 * TOKENS // 64),  # keys and values kept, one token and its output
        (
            "linformer:rank=4,sharing=headwise",
            "forward",
            4 * TOKENS + 2 * 4 * 64 * 4,
        ),  # two projections of 64 tokens to 4
    ],
)
def test_what_a_call_must_move_is_counted_once(variant: str, pass_: Pass, moved: int) -> None:
    got = record(variant, pass_, copy_rates=[(1, 1e9)])
    assert got.time_median_s is not None
    assert got.bytes_per_s == pytest.approx(
        moved / got.time_median_s, rel=1e-4
    )  # beside single numbers, such as a factor
    assert got.peak_fraction == pytest.approx(got.bytes_per_s / 1e9)


def test_what_hands_its_input_back_moves_nothing() -> None:
    got = record("identity", copy_rates=[(1, 1e9)])
    assert (got.peak_bytes, got.bytes_per_s, got.peak_fraction, got.floor_s) == (0, None, None, None)


def test_rows_of_before_have_the_fraction_of_products_alone() -> None:
    new = ("bytes_per_s", "exponentials", "floor_s")
    old = {key: value for key, value in record("softmax").to_json().items() if key not in new}
    assert [getattr(Record.from_json(old), key) for key in new] == [None] * 3


def test_the_rates_of_this_machine_are_possible_ones() -> None:
    rates = copy_rates("cpu", sizes=[1 << 16, 1 << 20])
    assert [size for size, _ in rates] == [1 << 16, 1 << 20]
    assert all(1e8 < rate < 1e13 for _, rate in rates)
    assert 1e8 < matmul_rate("cpu", torch.float32, size=64) < 1e15
    assert 1e8 < windows_rate(rounds=2) < 1e15
    assert 1e7 < exp_rate("cpu", torch.float32, size=8) < 1e12


def test_a_narrow_dtype_without_instructions_is_held_to_products_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {torch.bfloat16: 1e9, torch.float32: 1e11, torch.float64: 1e8}
    monkeypatch.setattr(limits, "_product", lambda device, dtype, n, rounds: 2 * n**3 / rates[dtype])
    assert matmul_rate("cpu", torch.bfloat16) == pytest.approx(1e11)
    assert matmul_rate("cpu", torch.float64) == pytest.approx(1e8)
    rates[torch.bfloat16] = 2e11
    assert matmul_rate("cpu", torch.bfloat16) == pytest.approx(2e11)


def test_the_rate_of_exponentials_is_that_of_the_quickest_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for name in ("exp", "exp2", "softmax"):
        monkeypatch.setattr(torch, name, lambda *_, name=name, **__: asked.append(name))
    took = {"exp": 3.0, "exp2": 1.0, "softmax": 2.0}

    def best(device: str, rounds: int, call: Callable[[], object]) -> float:
        call()
        return took[asked[-1]]

    monkeypatch.setattr(limits, "_best", best)
    assert exp_rate("cpu", torch.float32, size=8) == 8 * 512 / 1.0


@pytest.mark.parametrize(
    ("noise", "others", "words"),
    [
        (None, 1.0, "noise unknown: too few pairs of undisturbed samples; close other programs or raise --min-time"),
        (0.02, 1.0, None),
        (0.12, 1.1, "noise 12%: other programs use 1.1 cores; close them or raise --min-time"),
        (0.12, 0.1, "noise 12% with no other program at work: a core changes its speed; raise --min-time"),
        (0.12, None, "noise 12%: close other programs or raise --min-time"),
    ],
)
def test_the_warning_of_noise_names_who_makes_it_and_what_to_do(
    noise: float | None, others: float | None, words: str | None
) -> None:
    assert noise_warning(noise, others) == words


def test_the_cores_that_others_use_are_those_busy_less_ones_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ticks = machine.os.sysconf("SC_CLK_TCK")
    lines = iter(
        [f"cpu {10 * ticks} 0 0 500 0 0 0 0 0 0\ncpu0 1", f"cpu {12 * ticks} {ticks} 0 900 0 0 0 {ticks} 0 0\n"]
    )
    seconds, own = iter([100.0, 102.0]), iter([1.0, 2.0])
    monkeypatch.setattr(machine, "text_of", lambda path: next(lines))
    monkeypatch.setattr(machine.time, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(machine, "_own_seconds", lambda: next(own))
    assert OtherLoad().cores() == pytest.approx((2 + 1 + 1 - 1) / 2)


@pytest.mark.parametrize(("ticks", "said"), [(0, False), (30, False), (90, True), (200, True)])
def test_a_run_that_begins_is_warned_of_who_works_now_and_not_of_who_has_ended(
    ticks: int, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cores, one second in hundredths; whatever ran in the minute before left a load average of 100."""
    busy, seconds = iter([5000, 5000 + ticks]), iter([100.0, 101.0])
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (100.0, 100.0, 100.0))
    monkeypatch.setattr(machine.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(machine, "text_of", lambda path: f"cpu {next(busy)} 0 0 500 0 0 0 0 0 0\n")
    monkeypatch.setattr(machine, "_own_seconds", lambda: 7.0)
    monkeypatch.setattr(machine, "available_cores", lambda: 2)
    monkeypatch.setattr(machine.time, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(machine, "LOOK", 0.0)
    words = f"other programs use {ticks / 100:.1f} of 2 cores as the run begins: close them or expect wide intervals"
    assert machine.load_warning() == (words if said else None)


def test_where_the_kernel_does_not_tell_nobody_is_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "text_of", lambda path: "")
    assert OtherLoad().cores() is None
    assert machine.load_warning() is None
