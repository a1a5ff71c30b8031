"""Every setting that a shipped suite times holds its laws, with the threads that a run has: ``run`` would refuse it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnbench.contract.spec import Spec, parse_spec
from attnbench.harness.plan import Options, make_plan
from attnbench.laws import LAWS, first_fault, setting_of
from attnbench.suite.cell import UNTOUCHED

SUITES = sorted(path.stem for path in (Path(__file__).parents[2] / "suites").glob("*.yaml") if path.stem != "peers")


def settings() -> dict[tuple[str, bool], Spec]:
    """Variant with its options, and causal or not -> its spec."""
    plans = (make_plan(name, Options("cpu")) for name in SUITES)
    cells = (cell for plan in plans for cell in plan.cells if cell.variant.name != UNTOUCHED)
    return {(cell.variant.label, cell.shape.causal): cell.variant for cell in cells}


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("label", ["gated-delta", "gated-delta-2", "comba", "kda", "rwkv7"])
def test_a_formula_does_not_depend_on_the_threads_that_solve_its_system(label: str) -> None:
    """MKL's LU factorisation of 200 rows and more fails with two threads on some processors.

    Of the laws that gate a run only the formula meets a system of so many rows, at the longer of its two lengths.
    """
    case = replace(setting_of(parse_spec(label), causal=True), length=257)
    assert [finding.fault for finding in LAWS["formula"].examine(case) if not finding.held] == []


@pytest.mark.usefixtures("two_threads")
def test_rounding_in_blocks_does_not_depend_on_the_threads() -> None:
    case = setting_of(parse_spec("quantised-cache"), causal=False)
    assert [finding.fault for finding in LAWS["rounding in blocks"].examine(case) if not finding.held] == []


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("part", range(8))
def test_every_setting_of_a_shipped_suite_holds_its_laws(part: int) -> None:
    faults = {}
    for label, causal in sorted(settings())[part::8]:
        case = setting_of(settings()[label, causal], causal=causal)
        if not case.traits.compiled:
            _, fault = first_fault(case, lambda done, of: None)
            faults |= {} if fault is None else {(label, causal): fault.fault}
    assert faults == {}
