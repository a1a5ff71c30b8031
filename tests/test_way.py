"""The way of a cell from YAML to figure, as docs/internals/architecture.md tells it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

import attnbench

PACKAGE = Path(attnbench.__file__).parent
PAGE = PACKAGE.parent / "docs" / "internals" / "architecture.md"
SUITE = """
name: one
sweeps:
  - name: speed
    matrix: {variant: performer, seq_len: 64, heads: 2, head_dim: 8}
"""


@pytest.fixture
def calls(tmp_path: Path) -> Iterator[Path]:
    """A file with a line for each call of a function of the package, in this process and its forks."""
    log = tmp_path / "calls"
    log.touch()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename in watched:
            with log.open("a", encoding="utf-8") as file:
                file.write(f"{code.co_filename}:{code.co_qualname}\n")

    watched = {str(PACKAGE / file) for file, _ in _told()}
    threading.setprofile(note)
    sys.setprofile(note)
    yield log
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]  # the way to end it


def _told() -> list[tuple[str, str]]:
    return re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.usefixtures("forks")
def test_a_cell_goes_through_the_files_of_the_page_in_its_order(tmp_path: Path, calls: Path) -> None:
    (tmp_path / "one.yaml").write_text(SUITE, encoding="utf-8")
    for arguments in ("run one.yaml --device cpu --min-time 0.01", "plot results/one --figure tradeoff"):
        command = [sys.executable, "-m", "attnbench", *arguments.split()]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    made = iter(calls.read_text(encoding="utf-8").splitlines())
    missing = [f"{file}: {name}" for file, name in _told() if f"{PACKAGE / file}:{name}" not in made]
    assert not missing


def test_the_way_has_fifteen_files_at_most() -> None:
    files = [file for file, _ in _told()]
    assert len(set(files)) == len(files) <= 15
    assert files[0] == "cli/run.py"
    assert files[-1] == "figures/tradeoff.py"
