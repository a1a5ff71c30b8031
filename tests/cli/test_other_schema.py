"""A run of a newer attnbench is not damaged: every command that reads runs says in one line which schema it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnbench.cli.app import main
from attnbench.errors import Exit
from tests.answers.fixture_runs import Row, write_run

COMMANDS = [
    "gate newer --against old",
    "gate old --against newer",
    "diff old newer",
    "merge old newer --out m",
    "report newer --out r.html",
    "report old --against newer --out r.html",
    "match --from newer --memory 1GiB",
    "export newer --format markdown --out e.md",
    "claims newer",
    "plot newer",
    "verify newer",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_newer_schema_is_one_line_that_says_what_to_use_and_nothing_is_written(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "old", [Row()])
    write_run(tmp_path / "newer", [Row(columns={"schema_version": 9})], seed=1)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert main(command.split()) == Exit.USAGE
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "error: newer: schema_version 9, this attnbench reads 1 to 3; use the attnbench that wrote it\n"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
