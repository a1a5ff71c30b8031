"""Commands whose output nobody takes: a full disk, a closed descriptor, a reader that leaves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import forks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")

LOST = {">/dev/full": "No space left on device", ">&-": "it is closed"}
SUITE = "name: s\nsweeps: [{name: w, matrix: {variant: [mean-value, linear], seq_len: 8, heads: 1, head_dim: 4}}]\n"
RUN = ["run", "s.yaml", "--quick", "--device", "cpu", "--threads", "1", "--unchecked"]
COMPARE = ["compare", "mean-value", "linear", "--n", "8", "--heads", "1", "--device", "cpu", "--threads", "1"]
COMPARE += ["--min-time", "0.01", "--unchecked"]
CHECK = ["check", "mean-value", "--law", "any length", "--threads", "1"]


def redirect(to: str) -> None:
    """What a shell does before it starts a program."""
    for stream, sign, where in re.findall(r"(\d?)([<>])(\S+)", to):
        number = int(stream or ("0" if sign == "<" else "1"))
        if where == "&-":
            os.close(number)
        else:
            os.dup2(int(where[1:]) if where.startswith("&") else os.open(where, os.O_WRONLY), number)


def attnbench(folder: Path, *arguments: str, to: str) -> subprocess.CompletedProcess[str]:
    """The command, its output sent ``to`` somewhere."""
    command = [sys.executable, "-m", "attnbench", *arguments]
    with forks():
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, preexec_fn=lambda: redirect(to))
    return said_well(ended)


def said_well(ended: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert "Traceback" not in ended.stderr
    assert "Exception ignored" not in ended.stderr
    return ended


def rows(folder: Path) -> list[str]:
    (records,) = (folder / "results").glob("s/*/records.jsonl")
    assert (records.parent / "results.csv").read_text().count("\n") == 3
    return [json.loads(line)["status"] for line in records.read_text().splitlines()]


@pytest.mark.parametrize("to", [*LOST, "2>/dev/full", "2>&-", ">/dev/full 2>&1", "<&- >&- 2>&-"])
def test_a_run_stores_every_row_whatever_becomes_of_its_output(tmp_path: Path, to: str) -> None:
    (tmp_path / "s.yaml").write_text(SUITE)
    ended = attnbench(tmp_path, *RUN, to=to)
    assert ended.returncode == 0
    assert rows(tmp_path) == ["ok", "ok"]
    if to in LOST:
        last = ended.stderr.splitlines()[-1]
        assert last == f"warning: cannot write to stdout: {LOST[to]}; what is on disk is whole"


@pytest.mark.independent
@pytest.mark.parametrize("to", LOST)
@pytest.mark.parametrize(
    "command",
    [
        ["list", "suites"],
        ["list", "inputs", "--json"],
        ["show", "linear"],
        ["--version"],
        ["--help"],
        ["env"],
        CHECK,
        COMPARE,
    ],
    ids=lambda command: command[0],
)
def test_output_that_was_the_point_and_is_lost_is_exit_code_74_and_one_line(
    tmp_path: Path, command: list[str], to: str
) -> None:
    ended = attnbench(tmp_path, *command, to=to)
    assert ended.returncode == 74
    assert ended.stderr.splitlines()[-1] == f"error: cannot write to stdout: {LOST[to]}"


def test_figures_are_drawn_whatever_becomes_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(SUITE)
    attnbench(tmp_path, *RUN, to="2>&-")
    for to in LOST:
        out = tmp_path / to.strip(">/&")
        ended = attnbench(
            tmp_path, "plot", "results", "--figure", "scaling", "--out", str(out), "--format", "svg", to=to
        )
        assert ended.returncode == 0
        assert list(out.iterdir())


@pytest.mark.independent
@pytest.mark.parametrize("to", ["2>/dev/full", "2>&-"])
@pytest.mark.parametrize(("command", "code"), [(["list", "suites"], 0), (["show", "nonesuch"], 2)])
def test_a_lost_stderr_changes_neither_output_nor_exit_code(
    tmp_path: Path, command: list[str], code: int, to: str
) -> None:
    ended, usual = (attnbench(tmp_path, *command, to=way) for way in (to, ""))
    assert (ended.returncode, ended.stdout) == (usual.returncode, usual.stdout)
    assert ended.returncode == code


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    """In a new process, which flushes its streams once more at its end."""
    reads, writes = os.pipe()
    os.close(reads)  # before anything is said: how much a pipe holds after its reader has gone differs
    for command in (["list", "suites", "--json"], ["--help"]):
        started = [sys.executable, "-m", "attnbench", *command]
        ended = said_well(subprocess.run(started, cwd=tmp_path, stdout=writes, stderr=subprocess.PIPE, text=True))
        assert (ended.returncode, ended.stderr) == (0, "")
    os.close(writes)


def test_what_is_printed_never_goes_into_a_file_that_took_the_number_of_a_closed_stdout(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(SUITE)
    attnbench(tmp_path, *RUN, to=">&- 2>&-")
    for path in (tmp_path / "results").rglob("*.jsonl"):
        assert [line for line in path.read_text().splitlines() if not line.startswith("{")] == []
