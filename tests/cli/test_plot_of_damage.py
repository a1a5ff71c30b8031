"""``attnbench plot`` draws what a run stored and nothing else, and says where a file beside it was changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from attnbench.cli.app import main
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.errors import Exit
from attnbench.measure.status import Status
from attnbench.results.record import Record
from attnbench.results.store import ENVIRONMENT, RECORDS, SUITE, TABLE, RunFolder
from attnbench.suite.cell import Cell

pytestmark = pytest.mark.usefixtures("forks")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of one variant at four lengths."""
    made = RunFolder.create(tmp_path / "20261120T080000Z-cpu", environment={"threads": 1}, suite_text="name: s\n")
    rows = []
    for n in (64, 128, 256, 512):
        seconds = n / 1e6
        columns = {"time_median_s": seconds, "time_rounds": 1, "threads": 1}
        row = Record.of(Cell("s", "w", Spec("softmax"), Shape(seq_len=n)), Status.OK, **columns)
        samples = [{"seconds": seconds, "calls": 1}]
        made.add(row, {"cell_id": row.cell_id, "round": 0, "samples": samples})
        rows.append(row)
    made.write_csv(rows)
    return made.path


def plot(folder: Path) -> tuple[int, list[str]]:
    """The exit code, and the lines on stderr."""
    command = [sys.executable, "-m", "attnbench", "plot", str(folder), "--figure", "scaling", "--format", "svg"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    return done.returncode, done.stderr.splitlines()


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def test_a_table_edited_by_hand_is_told_in_one_line_and_what_was_stored_is_drawn(folder: Path) -> None:
    assert plot(folder) == (0, [])
    drawn = sorted((folder / "plots").iterdir())
    pictures = [file.read_bytes() for file in drawn]
    change(folder / TABLE, "0.000128", "0.000012")
    code, said = plot(folder)
    assert code == 0
    assert said == [f"warning: {folder / TABLE}:3: not what the run stored; the rows of {RECORDS} are used"]
    assert [file.read_bytes() for file in drawn] == pictures


def test_an_edited_row_is_exit_code_65_with_its_line_and_an_edited_suite_a_warning(folder: Path) -> None:
    change(folder / SUITE, "s", "z")
    code, said = plot(folder)
    assert (code, len(said)) == (0, 1)
    assert said[0].startswith(f"warning: {folder / SUITE}")
    change(folder / RECORDS, "0.000256", "0.000255")
    code, said = plot(folder)
    assert (code, len(said)) == (65, 1)
    assert said[0].startswith(f"error: {folder / RECORDS}:3: this line was changed")


@pytest.mark.parametrize(
    "command",
    ["plot RUN", "report RUN", "export RUN --format markdown", "match softmax --from RUN --error 0.1", "claims RUN"],
)
def test_every_command_ends_with_65_at_an_edited_environment(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder / ENVIRONMENT, '"threads": 1', '"threads": 2')
    before = sorted(folder.iterdir())
    assert main([str(folder) if word == "RUN" else word for word in command.split()]) == Exit.CORRUPT
    said = capsys.readouterr()
    changed = "it was changed after the run; restore it or start with --fresh"
    assert said.err.splitlines() == [f"error: {folder / ENVIRONMENT}: {changed}"]
    assert said.out == ""
    assert sorted(folder.iterdir()) == before, "nothing was written"


def test_a_table_on_its_own_is_drawn(folder: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    (folder / TABLE).rename(alone / TABLE)
    assert plot(alone) == (0, [])
