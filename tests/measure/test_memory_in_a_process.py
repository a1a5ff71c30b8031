"""The memory of a cell is its own: neither what ran before it nor what started its process counts."""

from __future__ import annotations

import sys
from dataclasses import asdict

import pytest

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.harness.outside.isolation import Settings, Worker
from attnbench.measure.time import TimingRules
from attnbench.results.record import Record
from attnbench.suite.cell import Cell

MIB = 2**20
SCORES = {n: n * n * 4 for n in (4608, 9216)}


def measure(worker: Worker, n: int) -> Record:
    cell = Cell("s", "w", Spec("softmax"), Shape(heads=1, seq_len=n, head_dim=16), measure=("memory",))
    request = {"cell": cell.to_json(), "rules": asdict(TimingRules()), "round": 0, "earlier": [], "previous": None}
    request |= {"do": "attnbench.harness.wire.protocol.VisitCell", "unchecked": False}
    return Record.from_json(worker.ask(request, timeout=60)["record"])


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_small_cell_after_a_big_one_and_under_a_large_parent_takes_what_it_takes_alone() -> None:
    ballast = bytearray(b"x" * (400 * MIB))
    with Worker(Settings(process="as-shipped", rates=False)) as worker:
        alone, big, after = measure(worker, 4608), measure(worker, 9216), measure(worker, 4608)
        state = worker.start()
        worker.stop()
        again = worker.start()
    assert len(ballast) == 400 * MIB
    for record, n in ((alone, 4608), (big, 9216), (after, 4608)):
        assert record.peak_bytes == SCORES[n] + n * 16 * 4  # scores, which become the weights, and output
        assert record.peak_rss_bytes == pytest.approx(record.peak_bytes, rel=0.01)
    # What every worker finds out about its machine before the first cell.
    assert 0 < state["timer_cost_s"] < 1e-4
    assert state["noise_floor"] > 0
    # And it is not asked twice.
    assert {**again, "process_notes": state["process_notes"]} == state
