"""The recipes for clusters of Ray say what the command needs, as far as a machine without a cluster can tell."""

from __future__ import annotations

import json
import os
import subprocess
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import yaml

from attnbench.harness.many import ray
from attnbench.harness.many.ray import parse_on
from tests.docs.shellcheck import needs_shellcheck, shellcheck

RECIPES = Path(__file__).parents[2] / "docs" / "recipes"
SLURM, KUBERAY = RECIPES / "ray-slurm.sh", RECIPES / "ray-job.yaml"


def told(folder: Path, *arguments: str, **variables: str) -> list[str]:
    """Ray's niceness, then the words that the recipe gives ``srun`` on two machines."""
    stand_ins = {"srun": 'printf "%s\\n" "$RAY_worker_niceness" "$@"', "scontrol": 'printf "%s\\n" first second'}
    for name, does in stand_ins.items():
        (folder / name).write_text(f"#!/bin/sh\n{does}\n")
        (folder / name).chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if name not in ("SUITE", "OUT")}
    job = {"SLURM_JOB_NODELIST": "first,second", "SLURM_JOB_NUM_NODES": "2"}
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    words = ["bash", str(SLURM), *arguments]
    done = subprocess.run(
        words, env={**inherited, **job, **variables, "PATH": path}, capture_output=True, text=True, timeout=60
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.splitlines()


def test_a_slurm_job_makes_each_of_its_machines_a_node_and_runs_the_command_once(tmp_path: Path) -> None:
    niceness, *words = told(tmp_path, "--rounds", "5", SUITE="lra")
    assert niceness == "0"
    at = words.index("--")
    assert words[:at] == [
        *("ray", "symmetric-run", "--address", "first:6379", "--min-nodes", "2"),
        *("--resources", '{"machine": 1}'),
    ]
    assert words[at + 1 :] == ["attnbench", "run", "lra", "--on", "ray:auto", "--out", "results", "--rounds", "5"]
    with pytest.raises(RuntimeError, match="say which suite"):
        told(tmp_path)


def test_a_ray_job_has_whole_machines_and_a_head_that_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "find_spec", lambda name: ModuleSpec(name, None, origin="ray/__init__.py"))
    spec = yaml.safe_load(KUBERAY.read_text())["spec"]
    words = spec["entrypoint"].split()
    assert words[:2] == ["attnbench", "run"]
    assert parse_on(words[words.index("--on") + 1]) == "auto"
    cluster = spec["rayClusterSpec"]
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    (group,) = cluster["workerGroupSpecs"]
    assert json.loads(json.loads(group["rayStartParams"]["resources"])) == {"machine": 1}
    (container,) = group["template"]["spec"]["containers"]
    assert {"name": "RAY_worker_niceness", "value": "0"} in container["env"]
    assert container["resources"]["requests"] == container["resources"]["limits"]
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert head["volumeMounts"][0]["mountPath"] == words[words.index("--out") + 1]


@needs_shellcheck
def test_the_script_has_no_fault_that_shellcheck_knows() -> None:
    shellcheck(SLURM)
