"""Every setting that a shipped suite times holds its laws, with the threads that a run has: ``run`` would refuse it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from attnbench.cell import UNTOUCHED
from attnbench.run.plan import Options, make_plan
from attnbench.spec import Spec
from attnbench.testing import first_fault, setting_of

SUITES = sorted(path.stem for path in (Path(__file__).parents[2] / "suites").glob("*.yaml"))


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
@pytest.mark.parametrize("part", range(8))
def test_every_setting_of_a_shipped_suite_holds_its_laws(part: int) -> None:
    faults = {}
    for label, causal in sorted(settings())[part::8]:
        case = setting_of(settings()[label, causal], causal=causal)
        if not case.traits.compiled:
            _, fault = first_fault(case, lambda done, of: None)
            faults |= {} if fault is None else {(label, causal): fault.fault}
    assert faults == {}
