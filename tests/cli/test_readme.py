"""Every code block of the documentation does what it shows, as a reader would try it: verbatim.

All of it runs in forks of this process; what README.md shows in Python runs in a fresh one too. Commands that measure
for minutes are given options that make them small; nothing else about them is changed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from attnbench.errors import Exit
from attnbench.figures.pictures import PICTURES
from attnbench.harness import forecast as estimate
from attnbench.measure import flops
from tests.answers.fixture_runs import copy_with
from tests.committed import copy_of
from tests.docs.making import BLOCKS, Block

ROOT = Path(__file__).parents[2]

SMALLER = {
    "run": ["-k", "identity", "--set", "seq_len=64", "--quick", "--device", "cpu"],
    "run precision": ["-k", "linear", "--set", "seq_len=64", "--quick", "--device", "cpu"],
    "compare": ["--n", "64..128", "--min-time", "0.01", "--device", "cpu", "--unchecked"],
    "match": ["--n", "64", "--heads", "2", "--draws", "2", "--min-time", "0.01", "--device", "cpu", "--unchecked"],
    "best": ["--n", "64", "--min-time", "0.01", "--device", "cpu", "--unchecked"],
    "check": ["--law", "causality", "--threads", "1"],
    "score": ["--steps", "2", "--seeds", "1", "--rates", "0.01", "--layers", "1", "--heads", "1", "--device", "cpu"],
    "swap": ["--length", "32", "--windows", "6", "--steps", "0,1", "--layers", "all", "--device", "cpu"],
    "capture": ["--length", "32", "--windows", "1", "--device", "cpu"],
    "history": ["good"],
    "plot": ["--figure", "scaling", "--format", "svg"],
    **{f"plot {picture}": [] for picture in PICTURES},
    "plot features": ["--n", "64"],
}
"""What a command is given besides its own arguments; the last of two options wins."""

ELSEWHERE_TRIED = {
    "softmax@.venv-old": "it stands for another environment; tests/harness/test_beside.py makes one",
    ".venv-old": "it stands for another environment; tests/harness/test_beside.py makes one",
    "merge": "it needs shards of a suite; tests/results/test_merge.py makes and merges them",
    "submit": "it needs a run whose laws held; tests/answers/test_board.py hands some in",
    "board": "it needs such runs; tests/answers/test_board.py makes boards of them",
    "--run": "it measures whole suites; tests/answers/test_claims.py measures a small one",
    "ray": "it needs a cluster; tests/harness/many makes one",
    "file": "it stands for a file of the reader's; tests/catalogue/inputs has some",
    "tests/laws/modules.py": "its exit code is 1, as tests/cli/test_check_module.py asks",
    "tests.benchmarks.packages": "it asks packages that no test installs, and rewrites a table of docs/data",
    "model.py": "it stands for a file of the reader's; tests/laws has some",
}
"""Words of commands that need what is not here -> what tries them."""

STANDS_FOR = {
    "SUITE": "quick",
    "NAME": "softmax",
    "RUN": "results",
    "FILE": "f.svg",
    "EXPRESSION": "softmax",
    "all": "softmax",
    "document:300+212": "document:30+34",  # at the length that all commands get here
    "NEW": "results",
    "OLD": "good",
    "results/lra-merged": "results",
    "results/reference/claims-cpu": str(ROOT / "results/reference/claims-cpu"),
}
"""What a reader would put in the place of a word."""

ELSEWHERE = re.compile(
    r"output 0 sees the tokens|source: https|duckdb -c |export RAY_|docker build |100 cells, two rounds|"
    r"\d+ runs of the same programs"
)
"""Blocks that other tests try: the faults that tests/laws sees caught, a query (test_recipes.py), and Ray's."""


SHELL = [(block.label, command) for block in BLOCKS for command in block.commands]
LONG = re.compile(
    r"attnbench (match .*--score|match topk local|run score|plot pattern$|plot (features|density) --|best)|"
    r"attnbench compare \w+ flex"
)
"""They take seconds each, and others of their kind are tried."""
SCRIPTS = [block for block in BLOCKS if block.language == "python"]
SUITES = [block for block in BLOCKS if block.language == "yaml"]


def is_slow(place: int, command: str) -> bool:
    """Whether it takes long, or stands on a page before as well."""
    return bool(LONG.match(command)) or command in [before for _, before in SHELL[:place]]


def fresh(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """``python ...`` with no plug-in but the named ones."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "COLUMNS": "80", "OMP_NUM_THREADS": "1"},
        timeout=280,
        check=False,
    )


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ``lra`` in which performer took longer: a run and its own copy are refused."""
    return copy_with(ROOT / "results/reference/lra-cpu", tmp_path_factory.mktemp("runs") / "good", "performer", 1.3)


@pytest.fixture
def folder(tmp_path: Path, older: Path) -> Path:
    """Where a reader stands who has followed the page so far: its files, a run of ``lra``, an older one."""
    for block in BLOCKS:
        if block.file:
            (tmp_path / block.file).write_text(block.text.replace("…", "10"), encoding="utf-8")
    copy_of("lra-cpu", tmp_path / "results/lra/20261120T114606Z-cpu")
    shutil.copytree(older, tmp_path / "good")
    return tmp_path


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.label)
def test_no_block_is_left_untried(block: Block) -> None:
    tried = block in SCRIPTS or block in SUITES or block.commands or block.file
    assert tried or ELSEWHERE.match(block.text), "neither Python, nor a suite, nor a command"


@pytest.mark.parametrize("block", SCRIPTS, ids=lambda block: block.label)
@pytest.mark.usefixtures("forks")
def test_python_blocks_run(block: Block, folder: Path) -> None:
    for module in ("mlflow", "wandb"):
        if f"import {module}" in block.text:
            pytest.importorskip(module, reason="no dependency of ours: the block shows how to use it")
    done = fresh(["-c", block.text], folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", SUITES, ids=lambda block: block.label)
@pytest.mark.usefixtures("forks")
def test_suites_have_a_plan(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (flops, estimate):
        monkeypatch.setattr(module, "STEPS", 10)  # what is too long to be followed is a plan as well
    name = yaml.safe_load(block.text)["name"]
    done = fresh(["-m", "attnbench", "run", f"{name}.yaml", "--dry-run"], folder)
    assert done.returncode == 0, done.stderr
    assert "nothing was run" in done.stdout


@pytest.mark.parametrize(
    ("where", "command"),
    [
        pytest.param(where, command, id=f"{where} {command}", marks=[pytest.mark.slow] * is_slow(place, command))
        for place, (where, command) in enumerate(SHELL)
    ],
)
@pytest.mark.usefixtures("forks")
def test_commands_run(where: str, command: str, folder: Path) -> None:
    program, *words = shlex.split(command, comments=True)
    if program in ("make", "pip"):
        here = ["make", "--dry-run", *words] if program == "make" else ["true"]  # pip would install into this Python
        assert subprocess.run(here, cwd=ROOT, capture_output=True, check=False).returncode == 0
        return
    for what, where_tried in ELSEWHERE_TRIED.items():
        if what in words or any(word.partition(":")[0] == what for word in words):
            pytest.skip(where_tried)
    if program == "attnbench":
        kind = words[1] if words[1:] and f"{words[0]} {words[1]}" in SMALLER else ""
        more = SMALLER.get(f"{words[0]} {kind}".strip(), []) if not any(".py:" in word for word in words) else []
        if "--from" in words:  # it measures nothing
            more = []
        if "--score" in words:
            more = ["--n", "64", "--steps", "2", "--seeds", "1", "--min-time", "0.01", "--device", "cpu"]
        words = ["-m", "attnbench", *(STANDS_FOR.get(word, word) for word in words), *more]
    done = fresh(words, folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("forks")
def test_the_first_gate_can_be_typed_as_its_page_shows_it(tmp_path: Path) -> None:
    """Measure, copy, measure again, gate. The verdict is the machine's; that the runs can be compared is ours."""
    run = ["-m", "attnbench", "run", "quick", "--rounds", "2", *SMALLER["run"]]
    assert fresh(run, tmp_path).returncode == 0
    (first,) = (tmp_path / "results/quick").glob("*-cpu")
    shutil.copytree(first, tmp_path / "good")
    assert fresh([*run, "--fresh"], tmp_path).returncode == 0
    done = fresh(["-m", "attnbench", "gate", "results/quick", "--against", "good"], tmp_path)
    assert done.returncode in (Exit.OK, Exit.FAILED), done.stderr
