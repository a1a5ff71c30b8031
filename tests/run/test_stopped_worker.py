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

from attnbench.cell import Cell
from attnbench.measure.time import TimingRules
from attnbench.plugins import load
from attnbench.record import Record
from attnbench.run.isolation import Settings, Worker
from attnbench.shape import Shape
from attnbench.spec import Spec

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no such signal on Windows")

SECOND = """
import os, time
from pathlib import Path
import torch
from attnbench import register


@register("a-second", family="reference", source="-", formula="-", cost="-")
class Second(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()

    def forward(self, q, k, v, *, key_mask=None):
        with Path(os.environ["CALLS_OF_A_SECOND"]).open("a") as file:
            file.write(f"{os.getpid()}\\n")
        end = time.thread_time() + 1
        while time.thread_time() < end:
            pass
        return v + 0
"""


def stop_for_three_seconds(calls: Path, at_call: int) -> None:
    while not calls.exists() or len(calls.read_text().split()) < at_call:
        time.sleep(0.05)
    pid = int(calls.read_text().split()[-1])
    time.sleep(0.3)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(pid, signal.SIGCONT)


@pytest.mark.usefixtures("forks")
def test_calls_of_a_second_in_a_worker_that_is_stopped_for_three_take_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, plugin = tmp_path / "calls", tmp_path / "second.py"
    plugin.write_text(SECOND)
    monkeypatch.setenv("CALLS_OF_A_SECOND", str(calls))
    load(str(plugin))
    cell = Cell("s", "w", Spec("a-second"), Shape(seq_len=8), measure=("time",))
    request = {
        "do": "cell",
        "cell": json.loads(json.dumps(cell.to_json())),
        "rules": asdict(TimingRules(min_time=1.0, max_time=2.0)),
        "round": 0,
        "earlier": [],
        "previous": None,
    }
    at_call = 4  # after the first look, the first call and a sample
    stopper = threading.Thread(target=stop_for_three_seconds, args=(calls, at_call), daemon=True)
    with Worker(Settings(plugins=(str(plugin),), rates=False)) as worker:
        stopper.start()
        answer = worker.ask(request, 120)
    stopper.join()
    record = Record.from_json(answer["record"])
    samples = answer["samples"]["samples"]
    assert [bool(sample.get("stopped")) for sample in samples].count(True) == 1
    assert record.time_ci_high_s is not None
    assert record.time_ci_high_s < 3 * (record.time_min_s or 0)
    assert record.time_ci_high_s <= max(sample["seconds"] for sample in samples if not sample.get("stopped"))
    assert "1 of 7 samples left out: the process was stopped meanwhile" in record.warnings
