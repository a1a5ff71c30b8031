"""Rows that are faster than the machine: its limits are measured again, and what cannot be is an error."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

from attnbench.contract.plugins.discovery import load
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.harness.inside import execute as visits
from attnbench.harness.inside.execute import corrected, faster_than_possible
from attnbench.harness.outside.isolation import Worker
from attnbench.harness.plan import Options, make_plan
from attnbench.harness.runner import execute
from attnbench.measure.limits import Limits
from attnbench.measure.machine import noise_warning
from attnbench.measure.status import Status
from attnbench.results.record import Record
from attnbench.suite.cell import Cell
from tests.instant import Listening

SPARSE = """
import torch
from attnbench import register


@register("sparse-matrix", family="reference", source="-", formula="-", cost="-")
class SparseMatrix(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.weights = torch.eye(shape.N).to_sparse()

    def forward(self, q, k, v, *, key_mask=None):
        return torch.sparse.mm(self.weights, v[0, 0])[None, None]
"""


def cell(variant: str) -> Cell:
    return Cell("s", "w", parse_spec(variant), Shape(heads=1, seq_len=256, head_dim=32))


def row(variant: str, *, flops: int | None, seconds: float, moved: int = 0) -> Record:
    sizes = {"matmul_flops": flops, "time_median_s": seconds, "moved_bytes": moved, "started_at": "2026"}
    return Record.of(cell(variant), Status.OK, **sizes)


def test_a_row_below_better_limits_is_corrected_and_stays() -> None:
    old = row("softmax", flops=100, seconds=1.0)
    new = corrected(old, cell("softmax"), Limits(matmul_rate=200.0))
    assert (new.status, new.peak_fraction, new.floor_s, new.warnings) == (Status.OK, 0.5, 0.5, "")
    assert old.peak_fraction is None


def test_bytes_beyond_the_rate_of_memory_are_no_error() -> None:
    new = corrected(row("softmax", flops=100, seconds=1.0, moved=10**6), cell("softmax"), Limits(1e9, None, [(1, 1.0)]))
    assert (new.status, new.peak_fraction, new.warnings) == (Status.OK, 1e6, "")


def test_an_honest_row_beyond_limits_that_are_still_too_low_stays_and_says_so() -> None:
    flops = 4 * 256 * 256 * 32
    new = corrected(row("softmax", flops=flops, seconds=1.0), cell("softmax"), Limits(matmul_rate=flops / 2))
    assert (new.status, new.peak_fraction) == (Status.OK, 2.0)
    assert new.warnings == "2 of the limits of this machine, which were measured twice"


def test_what_computes_more_than_the_machine_can_is_an_error_without_numbers() -> None:
    old = row("identity", flops=10**15, seconds=1e-6)
    new = corrected(old, cell("identity"), Limits(matmul_rate=1e9))
    assert (new.status, new.time_median_s, new.started_at) == (Status.ERROR, None, "2026")
    assert new.reason.startswith("faster than this machine can compute it: ")


def test_a_row_that_was_too_fast_is_an_error_though_its_calls_take_their_time_when_they_are_asked_again() -> None:
    flops = 4 * 256 * 256 * 32
    old = row("softmax", flops=flops, seconds=1e-9)
    new = corrected(old, cell("softmax"), Limits(matmul_rate=1e9))
    assert (new.status, new.time_median_s) == (Status.ERROR, None)
    assert new.reason.startswith("faster than this machine can compute it: ")


def test_nobody_is_accused_of_products_of_sparse_matrices(tmp_path: Path) -> None:
    plugin = tmp_path / "sparse.py"
    plugin.write_text(SPARSE)
    load(str(plugin))
    assert faster_than_possible(cell("sparse-matrix"), 10**15, 1.0) is None
    assert faster_than_possible(cell("identity"), 10**15, 1.0) is not None


def test_on_a_busy_machine_nobody_is_accused_where_no_product_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "matmul_rate", lambda device, dtype: 0.0)
    assert faster_than_possible(cell("identity"), 10**15, 1.0) is None


def test_a_row_is_held_to_the_fastest_products_of_any_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "matmul_rate", lambda device, dtype: 100.0 if dtype is torch.bfloat16 else 10.0)
    assert faster_than_possible(cell("identity"), 399, 1.0) is None
    assert faster_than_possible(cell("identity"), 500, 1.0) == 5.0


@pytest.mark.usefixtures("forked_workers")
def test_a_run_whose_limits_were_measured_on_a_busy_machine_measures_them_again(tmp_path: Path) -> None:
    suite = tmp_path / "s.yaml"
    suite.write_text(
        "name: s\nmin_time: 0.02\nrounds: 1\n"
        "sweeps: [{name: w, matrix: {variant: [softmax, mean-value], seq_len: 256, heads: 2, head_dim: 32}}]\n"
    )
    watcher = Listening()

    class Busy(Worker):
        """What it says of the machine at first is a thousandth of the truth."""

        def _set_up(self) -> dict[str, object]:
            known, self.state = self.state, {}
            state = known or super()._set_up()
            if not known:
                slow = {dtype: rate / 1000 for dtype, rate in state["matmul_rate"].items()}
                self.stop()
                self.state = {**state, "matmul_rate": slow}
                state = super()._set_up()
            return state

    plan = make_plan(suite, Options("cpu", out=tmp_path / "out", threads=1))
    folder, records = execute(plan, watcher, Busy(plan.settings))
    environment = json.loads((folder.path / "environment.json").read_text())
    for record in records:
        assert record.status is Status.OK
        assert record.matmul_flops is not None
        assert record.time_median_s is not None
    (softmax,) = (record for record in records if record.variant == "softmax")
    assert softmax.peak_fraction is not None
    assert softmax.peak_fraction < 50
    rate = environment["matmul_rate"]["float32"]
    assert softmax.peak_fraction >= (softmax.matmul_flops or 0) / (softmax.time_median_s or 0) / rate * 0.999
    assert "1 row was faster than the limits of the machine, so these are measured again" in watcher.warnings
    with (folder.path / "results.csv").open(newline="") as file:
        table = {one["variant"]: one for one in csv.DictReader(file)}
    assert float(table["softmax"]["peak_fraction"]) == pytest.approx(softmax.peak_fraction)
    stored = [json.loads(line)["variant"] for line in (folder.path / "records.jsonl").read_text().splitlines()]
    assert sorted(stored) == ["mean-value", "mean-value", "softmax", "softmax"]


def test_a_noise_floor_that_could_not_be_measured_is_said() -> None:
    assert "noise unknown" in (noise_warning(None, None) or "")
