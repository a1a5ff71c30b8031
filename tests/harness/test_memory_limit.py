"""Limits of memory as a user meets them: in a fresh process, under the limits of a cluster."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attnbench.errors import UsageError
from attnbench.harness.wire.process import LEAST_MEMORY, memory_limit
from attnbench.units import parse_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory has no limit")

CELLS = "{variant: [mean-value, softmax], seq_len: 64, heads: 1, head_dim: 8}"


def attnbench(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """The command in a shell that runs ``before`` first."""
    command = ["sh", "-c", f'{before}\nexec "$@"', "sh", sys.executable, "-m", "attnbench", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def run(tmp_path: Path, *arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    suite = tmp_path / "s.yaml"
    suite.write_text(f"name: s\nsweeps: [{{name: w, measure: [time, memory], matrix: {CELLS}}}]\n")
    common = ["run", str(suite), "--quick", "--unchecked", "--device", "cpu", "--threads", "1"]
    common += ["--out", str(tmp_path / "out")]
    return attnbench(*common, *arguments, before=before)


@pytest.mark.parametrize(
    "option", [pytest.param("-v", id="hard"), pytest.param("-S -v", id="soft", marks=pytest.mark.slow)]
)
def test_under_ulimit_a_run_measures_and_shows_what_that_leaves_and_what_needs_more_is_out_of_memory(
    tmp_path: Path, option: str
) -> None:
    ended = run(tmp_path, "--set", "seq_len=64,16384", before=f"ulimit {option} 1600000")
    assert (ended.returncode, ended.stderr.count("Traceback")) == (0, 0), ended.stderr
    shown = re.search(r"memory limit (.*)", ended.stdout)
    assert shown
    assert LEAST_MEMORY < parse_bytes(shown[1]) < 1_600_000 * 1024
    (folder,) = (tmp_path / "out" / "s").iterdir()
    rows = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    assert {(row["variant"], row["seq_len"]): row["status"] for row in rows} == {
        ("mean-value", 64): "ok",
        ("softmax", 64): "ok",
        ("mean-value", 16384): "ok",
        ("softmax", 16384): "oom",
    }
    left = json.loads((folder / "environment.json").read_text())["memory_limit_bytes"]
    assert left == pytest.approx(parse_bytes(shown[1]), rel=0.2)  # the two processes differ a little in size


@pytest.mark.parametrize("command", ["run", pytest.param("compare", marks=pytest.mark.slow)])
def test_less_memory_than_torch_itself_needs_is_refused_in_one_line(tmp_path: Path, command: str) -> None:
    compare = ["compare", "softmax", "linear", "--n", "8", "--device", "cpu"]
    for options, before, said in (
        (["--memory-limit", "1MiB"], "", "memory limit 1.00 MiB"),
        ([], "ulimit -v 850000", "ulimit -v leaves"),
    ):
        if command == "run":
            ended = run(tmp_path, *options, before=before)
        else:
            ended = attnbench(*compare, *options, before=before)
        (line,) = ended.stderr.splitlines()
        assert (ended.returncode, ended.stdout, line.startswith(f"error: {said}")) == (2, "", True), line
        assert "torch itself needs 256 MiB" in line
    assert not list(tmp_path.glob("out/s/*"))


@pytest.mark.parametrize(
    "command",
    [["list"], pytest.param(["compare", "softmax", "linear", "--n", "8"], marks=pytest.mark.slow)],
    ids=lambda c: c[0],
)
def test_a_ulimit_under_which_torch_cannot_be_loaded_is_one_line(command: list[str]) -> None:
    ended = attnbench(*command, before="ulimit -v 500000")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "error: ulimit -v of 488 MiB is too little to load torch; raise it to 2 GiB or more\n"


@pytest.mark.parametrize("size", [150_000, pytest.param(300_000, marks=pytest.mark.slow)])
def test_no_library_ends_python_for_want_of_address_space(size: int) -> None:
    ended = attnbench("run", "quick", before=f"ulimit -v {size}")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: ulimit -v of ")
    assert ended.stderr.endswith(" is too little to load torch; raise it to 2 GiB or more\n")


@pytest.mark.slow
def test_the_least_memory_is_enough_for_what_torch_takes_in_its_first_calls(tmp_path: Path) -> None:
    suite = tmp_path / "s.yaml"
    passes = [f"{{name: {name}, pass: {name}, matrix: {CELLS}}}" for name in ("forward", "training")]
    error = "{name: error, measure: [error], matrix: {variant: [performer, bigbird], seq_len: 64, head_dim: 8}}"
    suite.write_text(f"name: s\nsweeps: [{', '.join(passes)}, {error}]\n")
    common = ["run", str(suite), "--quick", "--unchecked", "--device", "cpu", "--out", str(tmp_path / "out")]
    ended = attnbench(*common, "--threads", "2", "--memory-limit", "256MiB")
    (records,) = (tmp_path / "out").glob("s/*/records.jsonl")
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    last = {row["cell_id"]: row for row in rows}  # a row is written again where the machine is measured again
    assert [row["reason"] for row in last.values()] == [""] * 6, ended.stderr


def test_a_limit_on_another_device_is_left_to_its_allocator() -> None:
    assert memory_limit("cuda", 2**20) == 2**20
    assert memory_limit("mps") is None
    with pytest.raises(UsageError):
        memory_limit("cpu", LEAST_MEMORY - 1)
