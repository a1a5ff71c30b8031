"""Rows and ``attnbench compare`` while other programs have the cores."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.harness.inside.execute import _add_time, run_cell
from attnbench.harness.wire.protocol import VisitCell
from attnbench.measure.limits import Limits
from attnbench.measure.standstill import Moment
from attnbench.measure.status import Status
from attnbench.measure.time import Sample, TimingRules
from attnbench.results.record import Record
from attnbench.suite.cell import Cell

SLOW = """
import time
from torch import nn
from attnbench import register

for name in ("own-slow", "own-slower"):
    @register(name, family="reference", source="-", formula="-", cost="-")
    class Slow(nn.Module):
        def __init__(self, shape):
            super().__init__()

        def forward(self, q, k, v, *, key_mask=None):
            time.sleep(30)
            return v
"""


@pytest.mark.skipif(sys.platform != "linux", reason="nobody tells the load")
@pytest.mark.usefixtures("forks")
def test_a_busy_machine_is_told_also_where_no_variant_came_to_its_turns(tmp_path: Path) -> None:
    own = tmp_path / "slow.py"
    own.write_text(SLOW)
    command = [
        sys.executable,
        "-m",
        "attnbench",
        "compare",
        "own-slow",
        "own-slower",
        "--n",
        "16",
        "--timeout",
        "1",
        "--unchecked",
    ]
    loops = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(os.cpu_count() or 1)]
    try:
        done = subprocess.run([*command, "--plugin", str(own)], capture_output=True, text=True, timeout=200)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    assert done.returncode == 1
    assert "the machine is busy" in " ".join(done.stderr.split())


@pytest.mark.parametrize("quick", [False, True])
def test_a_round_without_a_core_gives_memory_error_and_samples_but_no_time_and_the_next_round_gives_it(
    quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = TimingRules(min_time=0.02, warmup_time=0.01, rounds=2, quick=quick)
    shape = Shape(heads=1, seq_len=16, head_dim=4)
    cell = Cell("s", "w", Spec("softmax"), shape, measure=("time", "memory", "error"))
    monkeypatch.setattr("attnbench.measure.time.LONGEST_WAIT", 0.01)
    monkeypatch.setattr(Moment, "delay_until", lambda start, end: 1.0)
    record, samples = run_cell(VisitCell(cell, rules))
    assert samples is not None
    assert (record.status, record.time_median_s, record.time_rounds) == (Status.DISTURBED, None, 1)
    assert record.peak_bytes
    assert record.rel_error is not None
    assert re.match(r"its threads waited for a core in (\d+) of \1 samples, for [0-9.e+]+ s in ", record.reason)
    assert {one["waited"] for one in samples["samples"]} == {1.0}
    monkeypatch.setattr(Moment, "delay_until", lambda start, end: 0.0)
    later, more = run_cell(VisitCell(cell, rules, 1, [samples["samples"]], record))
    assert (later.status, later.reason, later.time_rounds) == (Status.OK, "", 2)
    assert later.time_median_s
    assert later.peak_bytes == record.peak_bytes
    assert more is not None
    assert later.time_samples == len(more["samples"])  # and none of the round before


def test_warnings_of_samples_are_those_of_all_rounds_and_others_stay() -> None:
    cell = Cell("s", "w", Spec("softmax"), Shape(heads=1, seq_len=16, head_dim=4))
    record = Record.of(cell, Status.OK, first_call_s=1.0, warnings="its numbers change from call to call")
    clean, waited = [Sample(1.0, 1, waited=0.0)] * 6, [Sample(9.0, 1, waited=5.0)] * 2
    _add_time(record, cell, [clean + waited], Limits())
    assert record.warnings == (
        "its numbers change from call to call; 2 of 8 samples disturbed by other processes (left out); close them"
    )
    _add_time(record, cell, [clean + waited, clean + waited], Limits())
    assert record.warnings == (
        "its numbers change from call to call; 4 of 16 samples disturbed by other processes (left out); close them"
    )
