"""The workflow in docs/recipes does on a machine what it says: its own shell steps, on a suite of two small cells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from attnbench.results.measurements import load
from attnbench.results.store import RunFolder
from tests.answers.fixture_runs import copy_with

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / "docs/recipes/attention-gate.yml"
SUITE = """\
name: attention
min_time: 0.01
sweeps:
- {name: w, measure: [time, memory], matrix: {variant: [softmax, linear], seq_len: 64, heads: 1, head_dim: 8}}
"""


def steps() -> dict[str, str]:
    """Name -> shell of the steps that have one."""
    (job,) = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"].values()
    return {step["name"]: step["run"] for step in job["steps"] if "run" in step}


COMMAND = f'exec {sys.executable} -m attnbench "$@"\n'
FORKING = f"""\
export PYTHONPATH={ROOT}
exec {sys.executable} -c '
import sys
import attnbench.measure.time
from attnbench.cli.app import main
from tests.forked import forks
attnbench.measure.time.WAITED = float("inf")
with forks():
    sys.exit(main(sys.argv[1:]))
' "$@"
"""
"""A process of its own as well. Those that measure for it, one for each round, are forks of it and start at once.

Samples count however busy this machine is: the subject is the workflow, and a cell without a time would end it.
"""


def in_shell(step: str, folder: Path, tool: str = "command") -> subprocess.CompletedProcess[str]:
    """A step as a runner calls it, with the workflow's own variables."""
    given: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["env"]
    path = f"{folder / tool}{os.pathsep}{os.environ['PATH']}"
    variables = {"PATH": path, "GITHUB_STEP_SUMMARY": str(folder / "summary.md"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", "-e", "-c", steps()[step]],
        cwd=folder,
        env=os.environ | given | variables,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout after the step that measures; in the run that was good, linear took twice as long."""
    folder = tmp_path_factory.mktemp("checkout")
    for name, text in (("command", COMMAND), ("forking", FORKING)):
        (folder / name).mkdir()
        tool = folder / name / "attnbench"
        tool.write_text(f"#!/bin/sh\n{text}")
        tool.chmod(0o755)
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks/attention.yaml").write_text(SUITE)
    done = in_shell("Measure", folder, "forking")
    assert done.returncode == 0, done.stderr
    (run,) = (folder / "results/attention").glob("*/")
    copy_with(run, folder / "benchmarks/baseline", "linear", 2)
    return folder


def test_a_run_that_is_no_worse_passes_and_leaves_a_summary_and_test_cases(measured: Path) -> None:
    done = in_shell("Gate", measured)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(ElementTree.parse(measured / "gate.xml").findall(".//testcase")) == 2
    (measured / "summary.md").write_text("# other steps\n")
    assert in_shell("Summary", measured).returncode == 0
    summary = (measured / "summary.md").read_text(encoding="utf-8")
    assert summary.startswith("# other steps\n### attnbench: passed")


def test_a_run_that_takes_far_longer_fails_after_more_rounds_and_the_summary_says_so(measured: Path) -> None:
    """A thousand times as long: whatever else this machine does, no interval of such short calls is as wide."""
    shutil.rmtree(measured / "benchmarks/baseline")
    (run,) = (measured / "results/attention").glob("*/")
    copy_with(run, measured / "benchmarks/baseline", "linear", 1 / 1000)
    done = in_shell("Gate", measured, "forking")
    assert done.returncode == 1
    assert "1 cell seems slower; 5 more rounds of it" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: failed: 1 slower")
    (failed,) = ElementTree.parse(measured / "gate.xml").findall(".//testcase[failure]")
    assert failed.get("name") == "linear n=64"
    (measured / "summary.md").unlink(missing_ok=True)
    assert in_shell("Summary", measured).returncode == 0
    assert "attnbench: failed: 1 slower" in (measured / "summary.md").read_text(encoding="utf-8")


def test_a_run_of_today_says_of_which_class_its_machine_is(measured: Path) -> None:
    (run,) = (measured / "results/attention").glob("*/")
    assert RunFolder(run).environment["machine_class"] == load(run).machine_class


def test_no_text_of_a_pull_request_becomes_a_command() -> None:
    assert not any("${{" in shell for shell in steps().values())
