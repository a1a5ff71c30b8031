"""No run holds the name of a user's home, and no value of a variable that is not one of the list."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnbench.contract.plugins.discovery import provenance
from attnbench.errors import Exit
from attnbench.measure.machine import variables
from attnbench.text import one_line

PLUGIN = """
import sys, torch
from attnbench.errors import Unsupported
class Mine(torch.nn.Module):
    calls = 0
    def forward(self, x):
        self.calls += 1
        if self.calls > 1:
            print("I am in", __file__, file=sys.stderr)
            raise ValueError("I am in " + __file__ + " with PASSWORD=sesame-open at http://me:sesame@host/")
        return x
"""
"""A module that raises at its first call is unsupported; one that raises later has failed, and what it said is kept."""
SUITE = """
name: s
description: d
rounds: 1
sweeps: [{name: a, level: layer, matrix: {variant: Mine, seq_len: 128, heads: 2, head_dim: 8}}]
"""


def test_reasons_names_of_files_and_variables_are_without_a_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "mine.py"
    file.write_text("")
    assert one_line(f"no {file}") == "no ~/mine.py"
    named = provenance([str(file)])
    assert "mine.py" in named
    assert not any(tmp_path.name in name for name in named)
    secret = dict.fromkeys(("PYTORCH_API_TOKEN", "TORCH_HUB_TOKEN", "MKL_LICENSE_KEY", "OMP_PASSWORD"), "secret")
    assert variables({**secret, "LD_PRELOAD": f"{file}", "MKL_CBWR": "AVX"}) == {
        "LD_PRELOAD": "~/mine.py",
        "MKL_CBWR": "AVX",
    }


def test_what_a_run_a_report_and_env_write_holds_no_home_and_no_secret(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    (tmp_path / "s.yaml").write_text(SUITE)
    secret = {"PYTORCH_API_TOKEN": "sesame", "MKL_SECRET": "sesame", "LD_PRELOAD_PASSWORD": "sesame"}
    there = {**os.environ, **secret, "HOME": str(tmp_path), "TMPDIR": "/tmp"}

    def done(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "attnbench", *words]
        return subprocess.run(command, cwd=tmp_path, env=there, capture_output=True, text=True, check=False)

    file = f"{tmp_path}/mine.py:Mine"
    ran = done("run", f"{tmp_path}/s.yaml", "--plugin", file, "--out", f"{tmp_path}/out", "--unchecked")
    assert ran.returncode == Exit.FAILED, ran.stderr
    (folder,) = (tmp_path / "out/s").glob("*-cpu")
    assert "~/mine.py" in (folder / "records.jsonl").read_text()
    assert list(json.loads((folder / "environment.json").read_text())["plugins"]) == ["mine.py"]
    reported, told = done("report", str(folder), "--out", str(tmp_path / "r.html")), done("env", "--json")
    assert (reported.returncode, told.returncode) == (Exit.OK, Exit.OK), reported.stderr
    written = {file.name: file.read_text() for file in folder.iterdir() if file.is_file()}
    written |= {"report": (tmp_path / "r.html").read_text(), "env": told.stdout}
    assert "failures.jsonl" in written
    for name, text in written.items():
        assert str(tmp_path) not in text, name
        assert "sesame" not in text, name
