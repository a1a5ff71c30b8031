"""Each command and each piece of Python in the pages works as a reader meets it: in a process and an own folder.

``tests/cli/test_readme.py`` tries the same commands made small; here they are run as they are typed, in their order.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from attnbench.cli.app import _command  # as `attnbench` reads a command line, without doing what it says
from attnbench.cli.usage import COMMANDS
from tests.committed import copy_of
from tests.docs.making import BLOCKS, FENCE, HERE, PAGES, RUNS, Block, blocks

INLINE = re.compile(r"`attnbench ([^`]+)`")

LONG = re.compile(
    r"compare (?!gated-mean)|best |"
    r"score |run (?!.*--dry-run)|match |swap |check tests/|claims .*--run|report results/lra$"
)
"""Commands that measure or train for more than half a minute: they are run with the slow tests."""
ELSEWHERE = {
    "--shard": "three machines",
    "merge ": "three machines",
    " OLD": "two runs of one machine",
    "history ": "many runs of one machine",
    "submit ": "a run whose laws held",
    "board ": "runs whose laws held",
    "verify RUN": "a damaged run",
    "many-machines.md": "a cluster",
    "gpu.md": "a GPU",
}
"""Commands that need more than a machine, by a part of the line or the page: only their words are read."""
NEEDS = {"--parquet": "pyarrow", "import wandb": "wandb", "import mlflow": "mlflow"}
"""What some blocks need, which the page says."""


def typed(block: Block) -> list[str]:
    """The words after ``attnbench`` of each of its commands, without a comment."""
    return [line[10:].partition(" #")[0].strip() for line in block.commands if line.startswith("attnbench ")]


TYPED = sorted({(block.page, line) for block in BLOCKS for line in typed(block)})
SAID = sorted(
    {
        (page, " ".join(line.split()))
        for page in PAGES
        for line in INLINE.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
        if line.split()[0] in COMMANDS
    }
)


def only_read(page: Path, line: str) -> bool:
    return any(part in f"{page.name} {line}" for part in ELSEWHERE)


def runs(page: Path, long: bool) -> list[str]:
    """The commands of a page in their order, short or long."""
    lines = [line for block in blocks(page) for line in typed(block) if not only_read(page, line)]
    return [line for line in lines if bool(LONG.match(line)) == long]


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[Path], Path]:
    """The folder of a reader of ``page``: the files that the page gives, a model of their own, and a run called lra."""

    def made(page: Path) -> Path:
        for block in blocks(page):
            if block.file:
                (tmp_path / block.file).write_text(block.text.replace("…", "10"), encoding="utf-8")
        if not (tmp_path / "mine.yaml").exists():
            shutil.copy(HERE / "suites/quick.yaml", tmp_path / "mine.yaml")
        modules = (HERE / "tests/laws/modules.py").read_text(encoding="utf-8")
        (tmp_path / "model.py").write_text(modules + BLOCK, encoding="utf-8")
        (tmp_path / "tests").symlink_to(HERE / "tests")
        copy_of("lra-cpu", tmp_path / "results/lra")
        shutil.copytree(RUNS / "claims-cpu", tmp_path / "results/reference/claims-cpu")
        if "qkv.safetensors" in page.read_text(encoding="utf-8"):
            run(tmp_path, *ATTNBENCH, "capture", "listops", "--windows", "1", "--out", "qkv.safetensors")
        return tmp_path

    return made


BLOCK = """

class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]
"""
ATTNBENCH = (sys.executable, "-m", "attnbench")


def run(folder: Path, *words: str) -> str:
    """What a command printed.

    Raises:
        AssertionError: It failed; the message is what it printed.
    """
    plain = {name: value for name, value in os.environ.items() if name not in ("ATTNBENCH_PLUGINS", "TRITON_INTERPRET")}
    path = os.pathsep.join([str(HERE), plain.get("PYTHONPATH", "")])
    plain |= {"PYTHONPATH": path, "ATTNBENCH_PLUGINS": ""}
    done = subprocess.run(words, cwd=folder, env=plain, capture_output=True, text=True, timeout=900)
    answered = (0, 1) if "check" in words else (0,)  # 1: a module is not what it says it is
    assert done.returncode in answered, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def follow(folder: Path, lines: list[str]) -> None:
    for line in lines:
        for option, package in NEEDS.items():
            if option in line:
                pytest.importorskip(package)
        words, _, file = line.partition(" > ")
        printed = run(folder, *ATTNBENCH, *shlex.split(words))
        if file:
            (folder / file).write_text(printed, encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "long"),
    [
        pytest.param(page, long, id=f"{page.relative_to(HERE)}{'-long' * long}")
        for page in PAGES
        for long in (False, True)
        if runs(page, long)
    ],
)
def test_the_commands_of_a_page_work(page: Path, long: bool, folder: Callable[[Path], Path]) -> None:
    follow(folder(page), runs(page, long))


def read(line: str) -> None:
    """Read a command line as attnbench does, and do nothing.

    Raises:
        Exception: No such command, option or value.
    """
    name, *words = shlex.split(line.partition(" > ")[0])
    _command(name).make_context(name, words)


@pytest.mark.parametrize(("page", "line"), [*TYPED, *SAID])
def test_a_command_of_a_page_is_one(page: Path, line: str) -> None:
    assert line.split()[0] in COMMANDS
    if " " in line:  # a name alone speaks of the command
        read(line)


def test_a_command_that_is_none_is_found() -> None:
    with pytest.raises(Exception, match="--no-such"):
        read("compare softmax sdpa --no-such 1")


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if any(block.language == "python" for block in blocks(page))])
def test_the_python_of_a_page_works(page: Path, folder: Callable[[Path], Path]) -> None:
    """Blocks that are a file were written as that file."""
    made = folder(page)
    for block in blocks(page):
        if block.language == "python" and not block.file:
            for need, package in NEEDS.items():
                if need in block.text:
                    pytest.importorskip(package)
            (made / "block.py").write_text(block.text, encoding="utf-8")
            run(made, sys.executable, "block.py")


def test_nothing_is_kept_from_running_for_no_reason() -> None:
    """Each line of the lists above still speaks of a line of a page."""
    lines = [f"{page.name} {line}" for page, line in TYPED] + [block.text for block in BLOCKS]
    assert [part for part in (*ELSEWHERE, *NEEDS) if not any(part in line for line in lines)] == []
