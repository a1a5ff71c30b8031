"""`make selfcheck` is run by hand, for more than an hour. Here each of its files does the same with small counts.

Plug-ins load, laws hold and comparisons give numbers; how large these are is asked there alone.
"""

from __future__ import annotations

import runpy
import sys
import time
from itertools import islice
from pathlib import Path

import pytest
import torch

from attnbench.catalogue.engines import products
from attnbench.catalogue.engines.products import is_onednn
from attnbench.contract.plugins.discovery import load
from attnbench.contract.variant import VARIANTS
from attnbench.measure.time import TimingRules
from tests.benchmarks import (
    live_bare,
    live_beside,
    live_busy,
    live_compare,
    live_contamination,
    live_damage,
    live_error_rates,
    live_null,
    live_steps,
    live_suite,
    live_time,
    live_tool,
)

LIVE = sorted(Path(__file__).with_name("benchmarks").glob("live_*.py"))
SHORT = TimingRules(min_time=0.01, max_time=1.0, warmup_time=0.0)


@pytest.mark.parametrize("file", LIVE, ids=lambda file: file.stem)
def test_each_file_of_selfcheck_has_tests_and_a_form_here(file: Path) -> None:
    assert any(name.startswith("test_") for name in runpy.run_path(str(file)))
    assert f"tests.benchmarks.{file.stem}" in {getattr(one, "__name__", "") for one in globals().values()}


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize(
    "name", [live_bare.NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in live_bare.NAMES[1:])]
)
def test_a_variant_is_compared_with_its_bare_products(name: str) -> None:
    assert live_bare.beside_its_products(name, 256, SHORT, threads=1).pairs > 0


def test_bare_products_go_to_the_library_of_each_and_exponentials_stay_finite() -> None:
    """Windows have a library of their own; infinities take three times as long: both made `local` beat its products."""
    load(live_bare.PLUGIN)
    bare = sys.modules[VARIANTS.get("bare").make.__module__]
    libraries: list[bool] = []

    def product() -> None:
        libraries.append(is_onednn())

    a, x = torch.zeros(1, 2, 2), torch.zeros(4)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        in_turn = [bare._with_its_library(product)]
        with products._DefaultLibrary():
            in_turn.append(bare._with_its_library(product))
        for call in in_turn:
            call()
    finally:
        torch.set_float32_matmul_precision(before)
    with bare._Recorder() as recorder:
        torch.bmm(a, a)
        x.exp_()
    assert libraries == [True, False]
    for call in recorder.calls * 6:
        call()
    assert all(memory.isfinite().all() for memory in recorder._memory.values())


@pytest.mark.usefixtures("forks")
def test_variants_are_compared_while_the_cores_are_busy() -> None:
    with live_busy.busy_loops(1):
        found = live_busy.measured("softmax", "linear", 1, (16, 32), SHORT)
    rows = found.rows["softmax", "linear"]
    assert [row.n for row in rows] == [16, 32]
    assert all(row.a.time and row.b.time for row in rows)
    assert live_busy.widest(rows) > 0


def test_equal_environments_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_beside, "LENGTHS", (32,))
    assert live_beside.of_compare(1, SHORT.min_time).tables == 1


@pytest.mark.usefixtures("forks")
def test_known_work_is_compared_with_more_of_it() -> None:
    (ratio,) = live_compare.ratios("known-work:steps=40", "known-work:steps=20", 1, rules=SHORT)
    assert ratio.estimate > 1


def test_a_trace_is_left_and_told_and_reaches_no_witness(tmp_path: Path) -> None:
    live_contamination.left(tmp_path, [next(iter(live_contamination.CASES))])


def test_a_run_is_damaged() -> None:
    live_damage.damaged(1)


def test_tables_of_identical_programs_are_simulated() -> None:
    machine, difference = live_null.CASES[0]
    found = live_null.rates(machine, difference, 3)
    assert found.processes >= 3
    assert (difference, found.found) == (0, 0)


def test_wrong_intervals_are_counted() -> None:
    first, second = islice(live_error_rates.error_rates.rates(40), 2)
    assert first.what == second.what == "interval of a row misses"
    assert first.setting != second.setting
    assert first.found < first.of / 2


@pytest.mark.parametrize("name", live_steps.BARE)
def test_a_step_gives_what_its_bare_arithmetic_gives(name: str) -> None:
    assert live_steps.beside_its_arithmetic(name, pairs=1) > 0


@pytest.mark.usefixtures("forks")
def test_a_suite_is_run_twice_and_its_intervals_compared(tmp_path: Path) -> None:
    assert 0 <= live_suite.agreement(tmp_path, select="linear and n512", min_time=0.02, rounds=2) <= 1


def test_a_sleep_is_measured() -> None:
    assert live_time.slept(0.001, TimingRules(min_time=0.01, min_samples=2)) < 1


def test_processes_are_timed_and_accounted_for(tmp_path: Path) -> None:
    assert live_tool.seconds([sys.executable, "-c", "pass"]) > 0
    began = time.time()
    start, took, lines = live_tool.accounts(tmp_path / "run", "-k", "operators/identity", "--quick")
    assert began <= start < lines[0][0] < start + took
    assert lines[-1][1] > 0
    assert lines[-1][2] > 0


def test_a_large_suite_is_planned() -> None:
    assert live_tool.planned(1)[0] == 2000


def test_four_hundred_rows_are_drawn(tmp_path: Path) -> None:
    assert live_tool.drawn(tmp_path / "few", 1) > 0
