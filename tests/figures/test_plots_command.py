"""``attnbench plot`` as a user meets it: in a fresh process, on the committed runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.forked import forks

REFERENCE = Path(__file__).parents[2] / "results" / "reference"


def plot(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "attnbench", "plot", *map(str, arguments)]
    with forks():
        return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd, check=False)


def test_what_does_not_apply_is_told_in_one_line_and_no_file_is_written_for_it(tmp_path: Path) -> None:
    done = plot(REFERENCE / "lra-cpu", "--format", "svg", "--out", tmp_path / "out", cwd=tmp_path)
    assert done.returncode == 0
    assert {path.stem for path in (tmp_path / "out").iterdir()} == {"tradeoff", "scaling", "error", "share"}
    (line,) = [line for line in (done.stdout + done.stderr).splitlines() if "not drawn" in line]
    assert "peers (needs a variant beside a public package)" in line
    assert "map (needs errors at two sizes and two logit_std)" in line


def test_two_runs_are_drawn_together_in_one_set_of_figures(tmp_path: Path) -> None:
    runs = [REFERENCE / "long-cpu", REFERENCE / "long-cpu-again" / "results.csv"]
    done = plot(*runs, "--level", "layer", "--format", "svg", "--title", "Twice", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in sorted((tmp_path / "plots").iterdir())] == ["scaling.svg", "scaling.txt"]
    svg = (tmp_path / "plots" / "scaling.svg").read_text()
    for name in ("gla (long-cpu)", "gla (long-cpu-again)", ">Twice<", ">64k<", ">1M<"):
        assert name in svg
    assert ">65536<" not in svg


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "bfloat16"], "no rows with dtype bfloat16; there are: float32"),
        (["--causal"], "no rows with causal true; there are: false"),
        (["--sweep", "sped"], "no rows with sweep sped; there are: error, oracles, speed"),
        (["--head-dim", "128"], "no rows with head_dim 128; there are: 64"),
        (
            ["--level", "model", "--pass", "forward"],
            "no rows with pass forward among those with level model; there are: training",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_filter_that_leaves_no_rows_is_one_line_with_the_values_that_exist(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = plot(REFERENCE / "lra-cpu", *arguments, "--out", tmp_path / "out", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"error: {message}"]
    assert not (tmp_path / "out").exists()


def test_rows_of_one_dtype_or_sweep_keep_the_errors_that_belong_to_their_speeds(tmp_path: Path) -> None:
    done = plot(
        REFERENCE / "lra-cpu", "--sweep", "speed", "--no-causal", "--format", "svg", "--out", "out", cwd=tmp_path
    )
    assert done.returncode == 0
    assert {path.stem for path in (tmp_path / "out").iterdir()} == {"tradeoff", "scaling", "share"}
    assert "inputs listops" in (tmp_path / "out" / "tradeoff.svg").read_text()


def test_where_every_cell_failed_nothing_is_written_and_the_reason_is_the_error(tmp_path: Path) -> None:
    rows = pd.read_csv(REFERENCE / "lra-cpu" / "results.csv.xz", keep_default_na=False).query("level == 'model'")
    numbers = [name for name in rows if name.startswith(("time_", "peak_"))]
    rows = rows.assign(status="oom", reason="needs 9 GiB", **dict.fromkeys(numbers, ""))
    rows.to_csv(tmp_path / "failed.csv", index=False)
    done = plot("failed.csv", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: nothing to draw: oom: ")
    assert not (tmp_path / "plots").exists()
