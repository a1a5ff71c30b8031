"""``attnbench run FOLDER`` repeats a run from what its folder holds, in a fresh process and from elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnbench.cli.app import main
from attnbench.harness.plan import Options, make_plan
from attnbench.harness.repeat import arguments_of, command_of
from attnbench.results.audit import audit
from attnbench.results.store import RunFolder
from attnbench.suite.shard import parse_shard

PLUGIN = """
from pathlib import Path
from torch import nn
from attnbench import register
from scale_beside import SCALE
WEIGHT = float(Path(__file__).with_name("weight.txt").read_text())

@register("mine", family="reference", source="-", formula="-", cost="-")
class Mine(nn.Module):
    def __init__(self, shape):
        super().__init__()

    def forward(self, q, k, v, *, key_mask=None):
        return v * SCALE * WEIGHT
"""
SUITE = "name: s\nsweeps: [{name: w, measure: [time], matrix: {variant: [mine, identity], seq_len: [8, 16]}}]\n"


def attnbench(folder: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "attnbench", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("forks")
def test_a_run_is_repeated_from_its_folder_alone(tmp_path: Path) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    for name, text in {"mine.py": PLUGIN, "scale_beside.py": "SCALE = 1", "weight.txt": "1", "s.yaml": SUITE}.items():
        (here / name).write_text(text)
        os.utime(here / name, (1, 1))
    how = ("--device", "cpu", "--threads", "1", "--quick", "--unchecked", "-k", "mine", "--set", "seq_len=8,32")
    attnbench(here, "run", "s.yaml", "--plugin", "mine.py", *how)
    (run,) = (here / "results" / "s").iterdir()
    run.rename(elsewhere / "kept")
    for name in ("mine.py", "scale_beside.py", "weight.txt", "s.yaml"):
        (here / name).unlink()
    attnbench(elsewhere, "run", "kept", "--set", "heads=2")
    (again,) = (elsewhere / "results" / "s").iterdir()
    rows = RunFolder(again).records().values()
    assert [(row.label, row.seq_len, row.heads, str(row.status)) for row in rows] == [
        ("mine", 8, 2, "ok"),
        ("mine", 32, 2, "ok"),
    ]
    assert {file.name for file in (again / "sources/0").iterdir()} == {"mine.py", "scale_beside.py", "weight.txt"}
    assert audit(again).findings == []
    for copy in (again / "sources/0").iterdir():
        whole = copy.read_bytes()
        copy.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        assert audit(again).findings == [f"{copy}: not as the run used it"]
        copy.write_bytes(whole)
    attnbench(elsewhere, "run", "kept", "--set", "heads=2")  # which goes on with the same run
    assert list((elsewhere / "results" / "s").iterdir()) == [again]


def test_a_command_says_what_was_not_usual_and_no_folder_of_its_user(tmp_path: Path) -> None:
    own = tmp_path / "my plug-in.py"
    own.write_text("")
    options = Options(
        "cpu", select="softmax", shard=parse_shard("1/2"), plugins=(f"{own}:Mine:dim=4", "package.mod"), threads=2
    )
    command = command_of(make_plan("quick", options))
    assert command == (
        "attnbench run suite.yaml --device cpu --threads 2 -k softmax --shard 1/2 --plugin "
        "'sources/0/my plug-in.py:Mine:dim=4' --plugin package.mod"
    )
    folder = RunFolder.create(tmp_path / "run", environment={"command": command}, suite_text="name: quick\n")
    assert arguments_of(folder.path)[0] == str(folder.path / "suite.yaml")
    assert f"{folder.path}/sources/0/my plug-in.py:Mine:dim=4" in arguments_of(folder.path)
    assert arguments_of(tmp_path) == []


def test_a_run_that_is_too_old_to_be_repeated_says_what_to_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder.create(tmp_path / "run", environment={}, suite_text="name: quick\n")
    assert main(["run", str(folder.path)]) == 2
    said = f"an older attnbench did not keep its command; give {folder.path / 'suite.yaml'} and its options"
    assert capsys.readouterr().err == f"error: {folder.path}: {said}\n"
