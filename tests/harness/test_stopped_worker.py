"""The process that measures is stopped in the midst of a cell, as by a debugger or a laptop's lid."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from attnbench.contract.plugins.discovery import load
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.harness.outside.isolation import Settings, Worker
from attnbench.measure.time import TimingRules
from attnbench.results.record import Record
from attnbench.suite.cell import Cell

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no such signal on Windows")

SLOW = """
import os, time
from pathlib import Path
import torch
from attnbench import register


@register("slow", family="reference", source="-", formula="-", cost="-")
class Slow(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()

    def forward(self, q, k, v, *, key_mask=None):
        with Path(os.environ["CALLS_MADE"]).open("a") as file:
            file.write(f"{os.getpid()}\\n")
        end = time.thread_time() + 0.2
        while time.thread_time() < end:
            pass
        return v + 0
"""


def stop_for_a_while(calls: Path, at_call: int) -> None:
    while not calls.exists() or len(calls.read_text().split()) < at_call:
        time.sleep(0.02)
    pid = int(calls.read_text().split()[-1])
    time.sleep(0.05)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1.5)
    os.kill(pid, signal.SIGCONT)


@pytest.mark.usefixtures("forks")
def test_calls_in_a_worker_that_is_stopped_for_far_longer_take_what_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, plugin = tmp_path / "calls", tmp_path / "slow.py"
    plugin.write_text(SLOW)
    monkeypatch.setenv("CALLS_MADE", str(calls))
    load(str(plugin))
    cell = Cell("s", "w", Spec("slow"), Shape(seq_len=8), measure=("time",))
    request = {
        "do": "attnbench.harness.wire.protocol.VisitCell",
        "cell": json.loads(json.dumps(cell.to_json())),
        "rules": asdict(TimingRules(min_time=0.4, max_time=0.8, warmup_calls=1)),
        "round": 0,
        "earlier": [],
        "previous": None,
        "unchecked": False,
    }
    at_call = 4  # after the first look, the first call and a sample
    stopper = threading.Thread(target=stop_for_a_while, args=(calls, at_call), daemon=True)
    with Worker(Settings(plugins=(str(plugin),), rates=False)) as worker:
        stopper.start()
        answer = worker.ask(request, 120)
    stopper.join()
    record = Record.from_json(answer["record"])
    samples = answer["samples"]["samples"]
    assert [bool(sample.get("stopped")) for sample in samples].count(True) == 1
    assert record.time_ci_high_s is None  # one visit has no interval
    assert record.time_median_s is not None
    assert record.time_median_s < 3 * (record.time_min_s or 0)
    assert record.time_median_s <= max(sample["seconds"] for sample in samples if not sample.get("stopped"))
    assert "1 of 7 samples left out: the process was stopped meanwhile" in record.warnings
