"""A suite over two nodes of a real Ray cluster, of which one is killed in the middle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from attnbench.measure.status import Status
from attnbench.results.audit import audit
from attnbench.results.store import RECORDS, RunFolder
from tests.harness.many.nodes import nodes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("ray.cluster_utils", reason="needs Ray: make .venv/installed-all")

SUITE = """\
name: s
sweeps: [{name: w, measure: time, matrix: {variant: [softmax, linear, local, identity], seq_len: [16, 32, 64, 128]}}]
"""


def command(folder: Path, address: str) -> list[str]:
    options = ["--device", "cpu", "--threads", "1", "--rounds", "2", "--min-time", "0.2", "--out", str(folder / "out")]
    return [sys.executable, "-m", "attnbench", "run", str(folder / "s.yaml"), "--on", f"ray:{address}", *options]


def stored(folder: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in folder.glob(f"out/s/*/{RECORDS}"))


@pytest.mark.timeout(600)
def test_a_node_that_is_killed_in_mid_run_costs_no_row_and_the_same_command_finds_all_measured(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(SUITE)
    with nodes(2) as there:
        words = command(tmp_path, there.address)
        with (tmp_path / "said.txt").open("w") as said, (tmp_path / "rows.json").open("w") as printed:
            asked = [*words, "--json"]
            running = subprocess.Popen(asked, stdout=printed, stderr=said, cwd=tmp_path, env=dict(os.environ))
            until = time.monotonic() + 300
            while stored(tmp_path) < 6 and running.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
            there.kill()
            code = running.wait(300)
        text = (tmp_path / "said.txt").read_text()
        assert code == 0, text
        assert "was lost:" in text, text
        assert len(json.loads((tmp_path / "rows.json").read_text())) == 16  # and no word of Ray's
        (path,) = (tmp_path / "out" / "s").iterdir()
        folder = RunFolder(path)
        rows = folder.in_order()
        assert sorted((row.label, row.seq_len) for row in rows) == sorted(
            (name, n) for name in ("softmax", "linear", "local", "identity") for n in (16, 32, 64, 128)
        )
        assert {(row.status, row.time_rounds) for row in rows} == {(Status.OK, 2)}
        assert {row.host for row in rows} == {one["host"] for one in folder.environment["machines"]}
        assert audit(path).findings == []
        before = (path / RECORDS).read_bytes()
        again = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=300, env=dict(os.environ))
        assert again.returncode == 0, again.stderr
        assert "16 of 16 cells have rows" in again.stderr
        assert (path / RECORDS).read_bytes() == before
