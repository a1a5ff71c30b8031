"""Memory that a variant takes where its peak does not look is counted, or said in its row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS, Traits, register
from attnbench.harness.inside.execute import run_cell
from attnbench.harness.wire.protocol import VisitCell
from attnbench.measure.memory import UNSURE
from attnbench.measure.status import Status
from attnbench.measure.time import TimingRules
from attnbench.results.record import Record
from attnbench.suite.cell import Cell


class Keeps(nn.Module):
    """Makes its matrix in the first call, and has it in the others."""

    matrix: Tensor | None

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.matrix = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        if self.matrix is None:
            self.matrix = torch.ones(q.shape[2], q.shape[2])
        return self.matrix @ v


class Numpy(nn.Module):
    """Takes memory that torch does not see."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        taken = np.ones(2 * UNSURE, dtype=np.uint8)
        return v + float(taken[0])


class Answers(nn.Module):
    """Computes, and answers, in little memory that torch does not see."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        taken = np.ones(UNSURE // 4, dtype=np.uint8)
        return torch.from_numpy(v.numpy() + np.float32(taken[0]))


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VARIANTS, "_entries", dict(VARIANTS._filled()))
    for made in (Keeps, Numpy, Answers):
        name = f"own-{made.__name__.lower()}"
        register(name, family="reference", source="-", formula="-", cost="-", traits=Traits(target="other"))(made)


def measured(variant: str) -> Record:
    cell = Cell("s", "w", parse_spec(variant), Shape(heads=1, seq_len=512, head_dim=4), measure=("memory",))
    record, _ = run_cell(VisitCell(cell, TimingRules(quick=True)))
    assert record.status is Status.OK, record.reason
    return record


def test_a_matrix_that_is_kept_for_later_calls_is_part_of_the_peak() -> None:
    record = measured("own-keeps")
    assert record.peak_bytes is not None
    assert 4 * 512 * 512 <= record.peak_bytes < 4 * 512 * 512 + 4 * 4 * 512 * 4
    assert record.warnings == "keeps 1.00 MiB from its first call on, which its peak includes"


def test_memory_that_torch_does_not_know_of_is_said() -> None:
    assert "and torch knows of" in measured("own-numpy").warnings
    assert "and torch knows of 0 B" in measured("own-answers").warnings
    assert measured("softmax").warnings == ""
