"""An input file that cannot be read ends the command before anything is measured or made."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


def missing(path: Path) -> str:
    return "No such file or directory"


def folder(path: Path) -> str:
    path.mkdir()
    return "Is a directory"


def pipe(path: Path) -> str:
    os.mkfifo(path)
    return "not a file"


def text(path: Path) -> str:
    path.write_text("not safetensors")
    return "not a readable safetensors file"


@pytest.mark.independent
@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("make", [missing, folder, pipe, text])
@pytest.mark.parametrize("command", ["run", "compare"])
def test_an_input_file_that_cannot_be_read_is_one_line_and_nothing_is_made(
    tmp_path: Path, make: Callable[[Path], str], command: str
) -> None:
    said = make(tmp_path / "qkv.safetensors")
    before = sorted(tmp_path.iterdir())
    suite = tmp_path.with_suffix(".yaml")
    suite.write_text("name: s\nsweeps: [{name: w, measure: error, matrix: {variant: softmax, seq_len: 8}}]\n")
    source = "file:path=qkv.safetensors"
    arguments = {
        "run": ["run", str(suite), "--set", f"inputs={source}"],
        "compare": ["compare", "softmax", "linear", "--n", "8", "--inputs", source],
    }[command]
    done = subprocess.run(
        [sys.executable, "-m", "attnbench", *arguments, "--device", "cpu"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"error: {source}: {said}")
    assert done.stderr.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.independent
@pytest.mark.skipif(sys.platform != "linux", reason="/dev/zero")
@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize(
    "command",
    [
        ["run", "{}.yaml"],
        ["list", "--plugin", "{}.py"],
        ["plot", "{}.csv"],
        ["plot", "folder"],
        ["report", "{}.csv"],
        ["report", "results.csv", "--check", "{}.csv"],
        ["compare", "softmax", "linear", "--n", "8", "--inputs", "file:path={}.safetensors"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_a_pipe_or_a_device_in_the_place_of_a_file_is_refused_at_once(
    tmp_path: Path, command: list[str], kind: str
) -> None:
    (tmp_path / "folder" / "run").mkdir(parents=True)
    for name in ("it.yaml", "it.py", "it.csv", "it.safetensors", "folder/run/results.csv"):
        path = tmp_path / name
        os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    command = [sys.executable, "-m", "attnbench", *(word.format("it") for word in command)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
