"""The recipes of the documentation do what they say, as far as a machine without a cluster can tell."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml

from attnbench.suite.shard import Shard, parse_shard
from tests.answers.machines import measuring
from tests.docs.shellcheck import needs_shellcheck, shellcheck

DOCS = Path(__file__).parents[2] / "docs"
SLURM, KUBERNETES = DOCS / "recipes" / "slurm-array.sh", DOCS / "recipes" / "kubernetes-shard.sh"


def told(folder: Path, recipe: Path, *arguments: str, **variables: str) -> list[str]:
    """The words that the recipe gives attnbench."""
    stand_in = folder / "bin" / "attnbench"
    stand_in.parent.mkdir(exist_ok=True)
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stand_in.chmod(0o755)
    shell = "bash" if recipe == SLURM else "sh"
    inherited = {name: value for name, value in os.environ.items() if name not in ("SUITE", "OUT", "SHARDS")}
    path = f"{stand_in.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [shell, str(recipe), *arguments],
        cwd=folder,
        env={**inherited, "PATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.splitlines()


def shard_of(words: list[str]) -> Shard:
    return parse_shard(words[words.index("--shard") + 1])


def test_the_jobs_of_a_slurm_array_run_each_shard_once(tmp_path: Path) -> None:
    found = [
        told(tmp_path, SLURM, "--rounds", "5", SUITE="lra", SLURM_ARRAY_TASK_ID=str(i), SLURM_ARRAY_TASK_COUNT="4")
        for i in range(4)
    ]
    assert [shard_of(words) for words in found] == [Shard(i, 4) for i in range(4)]
    assert found[0] == ["run", "lra", "--out", "results", "--shard", "0/4", "--rounds", "5"]


def test_the_last_job_of_a_slurm_array_merges_what_the_others_wrote(tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / "results" / "lra" / f"20261123T08000{i}Z-cpu-{i}of3").mkdir(parents=True)
    (tmp_path / "results" / "lra" / "20261120T080000Z-cpu").mkdir()
    words = told(tmp_path, SLURM, "merge", "lra", "3")
    assert words[0] == "merge"
    assert [Path(word).name.rpartition("-")[2] for word in words[1:4]] == ["0of3", "1of3", "2of3"]
    assert words[4:] == ["--out", "results/lra-merged"]


def test_the_pods_of_an_indexed_job_run_each_shard_once(tmp_path: Path) -> None:
    found = [
        told(tmp_path, KUBERNETES, SUITE="lra", SHARDS="3", JOB_COMPLETION_INDEX=str(i), OUT="r") for i in range(3)
    ]
    assert [shard_of(words) for words in found] == [Shard(i, 3) for i in range(3)]
    assert found[2] == ["run", "lra", "--out", "r", "--shard", "2/3"]


@pytest.mark.parametrize("recipe", [SLURM, KUBERNETES], ids=["slurm", "kubernetes"])
def test_a_recipe_without_a_suite_says_so(tmp_path: Path, recipe: Path) -> None:
    with pytest.raises(RuntimeError, match="say which suite"):
        told(tmp_path, recipe, SLURM_ARRAY_TASK_ID="0", SLURM_ARRAY_TASK_COUNT="1", JOB_COMPLETION_INDEX="0")


def test_the_indexed_job_has_as_many_pods_as_shards_and_runs_the_script_beside_it() -> None:
    job = yaml.safe_load((DOCS / "recipes" / "kubernetes-job.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {one["name"]: one["value"] for one in container["env"]}
    assert job["spec"]["completionMode"] == "Indexed"
    assert str(job["spec"]["completions"]) == variables["SHARDS"]
    assert container["command"][-1] == f"/recipe/{KUBERNETES.name}"
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    assert container["resources"]["requests"] == container["resources"]["limits"]


@needs_shellcheck
@pytest.mark.parametrize("recipe", [SLURM, KUBERNETES], ids=["slurm", "kubernetes"])
def test_the_scripts_have_no_fault_that_shellcheck_knows(recipe: Path) -> None:
    shellcheck(recipe)


def test_the_line_for_duckdb_reads_the_tables_as_they_are_also_those_of_an_older_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("duckdb") is None:
        pytest.skip("needs duckdb")
    run = measuring(tmp_path, monkeypatch)(rounds=1, fails=lambda cell: cell.label == "linear/n16")
    (tmp_path / "results" / "s").mkdir(parents=True)
    run = run.rename(tmp_path / "results" / "s" / run.name)
    lacking = ["own_form", "time_rounds", "schema_version"]  # in the middle, and the last
    table = pd.read_csv(run / "results.csv").drop(columns=lacking).iloc[::-1].assign(time_median_s=5.0)
    for suite in ("before", "then"):  # in the order of their names one older table comes first, the other last
        older = tmp_path / "results" / suite / "20260101T000000Z-cpu" / "results.csv"
        older.parent.mkdir(parents=True)
        table.to_csv(older, index=False)
    monkeypatch.chdir(tmp_path)
    query = re.search(r'^duckdb -c "(.*)"$', (DOCS / "export.md").read_text(), re.MULTILINE)
    assert query is not None
    kept = [(name, n) for name in ("softmax", "linear") for n in (2, 4, 8, 16) if (name, n) != ("linear", 16)]
    told = json.loads(_asked(query[1]).stdout)
    assert sorted(map(tuple, told)) == sorted(
        [*((name, n, n / 7) for name, n in kept), *((*one, 5.0) for one in kept * 2)]
    )
    lacked = json.loads(_asked(query[1].replace("time_median_s", "time_rounds")).stdout)
    assert sorted(count is None for *_, count in lacked) == [False] * 7 + [True] * 14


def _asked(query: str) -> subprocess.CompletedProcess[str]:
    """What DuckDB answers, as JSON, in a process of its own: it is loud when it ends."""
    asked = f"import duckdb, json; print(json.dumps(duckdb.sql({query!r}).fetchall()))"
    return subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=200, check=True)
