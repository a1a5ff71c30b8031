"""A plug-in that puts other clocks in the place of Python's and torch's changes no time."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bare import in_bare_process

PLUGIN = """
import time
import torch
import resource
from attnbench import register

thread_time = time.thread_time
time.perf_counter_ns = time.monotonic_ns = time.thread_time_ns = lambda: 1
time.perf_counter = time.monotonic = time.thread_time = time.process_time = lambda: 1e-9
time.clock_gettime = lambda clock: 1e-9
resource.getrusage = None
torch.cuda.Event = torch.cuda.synchronize = None


@register("five-milliseconds", family="reference", source="-", formula="-", cost="-")
class Five(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()

    def forward(self, q, k, v, *, key_mask=None):
        end = thread_time() + 5e-3
        while thread_time() < end:
            pass
        return v + 0
"""


@pytest.mark.usefixtures("forks")
def test_a_plug_in_that_stops_the_clocks_takes_the_time_that_it_takes(tmp_path: Path) -> None:
    plugin, suite = tmp_path / "clocks.py", tmp_path / "s.yaml"
    plugin.write_text(PLUGIN)
    suite.write_text(
        "name: s\nmin_time: 0.05\nrounds: 1\n"
        "sweeps: [{name: w, matrix: {variant: five-milliseconds, seq_len: 8, heads: 2, head_dim: 8}}]\n"
    )
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "attnbench",
        "run",
        str(suite),
        "--unchecked",
        "--plugin",
        str(plugin),
        "--out",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    (table,) = out.rglob("results.csv")
    with table.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["status"] == "ok", (row["reason"], done.stderr)
    assert 5e-3 <= float(row["time_min_s"]) <= float(row["time_median_s"]) < 0.1


def test_what_measures_is_bound_when_it_is_imported() -> None:
    code = (
        "import torch, time\n"
        "from attnbench.measure import cuda_events, limits, standstill, stopwatch\n"
        "mine = cuda_events.Event, cuda_events.synchronize, limits.sleep, standstill._clock\n"
        "torch.cuda.Event = torch.cuda.synchronize = time.perf_counter = time.perf_counter_ns = None\n"
        "assert None not in (cuda_events.Event, cuda_events.synchronize, limits.sleep, standstill._clock)\n"
        "assert stopwatch.WallClock().time(lambda: sum(range(10000)), 1)[0] > 0\n"
    )
    done = in_bare_process(code)
    assert done.returncode == 0, done.stderr
