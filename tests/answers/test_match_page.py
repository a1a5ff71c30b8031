"""What docs/match.md shows is what the command prints of a committed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnbench.cli.app import main

HERE = Path(__file__).parents[2]


def test_the_printed_match_is_that_of_the_committed_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *expected = (HERE / "docs/printed/match.txt").read_text(encoding="utf-8").splitlines()
    assert command.startswith("$ attnbench match --from results/reference/")
    monkeypatch.chdir(HERE)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(command.split()[2:]) == 0
    told = capsys.readouterr()
    assert [line.rstrip() for line in told.out.splitlines()] == expected
    assert told.err == ""


@pytest.mark.slow
def test_the_printed_search_finds_the_same_settings_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *expected = (HERE / "docs/printed/match-error.txt").read_text(encoding="utf-8").splitlines()
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*command.split()[2:], "--min-time", "0.01", "--device", "cpu"]) == 0
    told = capsys.readouterr().out.splitlines()
    found = [line for line in expected if " reaches error 0.3: " in line]
    assert len(found) == 3
    assert [line for line in told if " reaches error 0.3: " in line] == found
