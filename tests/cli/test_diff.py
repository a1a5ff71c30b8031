"""``attnbench diff``: the table of gate, and an exit code that says nothing of what changed."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from attnbench.cli.app import main
from attnbench.errors import Exit
from tests.answers.fixture_runs import Row, environment, write_run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs, of which the second takes 1.3 times as long at one length."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    write_run(tmp_path / "a", [Row(n=n) for n in (64, 128, 256)])
    write_run(tmp_path / "b", [Row(), Row(n=128, seconds=1.3e-3), Row(n=256)], seed=1)
    write_run(tmp_path / "elsewhere", [Row()], about=environment(cores=64))
    return tmp_path


@pytest.mark.usefixtures("runs")
def test_what_is_slower_is_shown_with_its_ratio_and_the_code_is_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "a", "b"]) == Exit.OK
    told = capsys.readouterr()
    head, columns, row, joint, between, unchanged, together = told.out.splitlines()
    assert head == "b against a"
    assert columns.split() == ["cell", "old", "new", "ratio", "interval", "verdict"]
    assert row.split()[:2] == ["softmax", "n=128"]
    assert row.split()[-1] == "slower"
    assert float(row.split()[6]) == pytest.approx(1.3, rel=0.03)
    assert joint == "1 of 3 comparisons slower; joint 95 % at each end of an interval"
    assert between == "too few older runs: how runs differ is unknown, intervals 2% wider at each end"
    assert unchanged == "unchanged: time 2, memory 3, status 3"
    assert together.startswith("all cells together: 1.0")
    assert max(map(len, told.out.splitlines())) <= 80
    assert told.err == ""


@pytest.mark.usefixtures("runs")
def test_the_other_way_round_it_is_faster(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "b", "a", "--format", "json"]) == Exit.OK
    data = json.loads(capsys.readouterr().out)
    assert data["counts"] == {"faster": 1, "same": 8}
    assert main(["diff", "a", "b", "--above", "1.5", "-k", "n128", "--on", "time"]) == Exit.OK
    assert "unchanged: time 1\n" in capsys.readouterr().out


@pytest.mark.usefixtures("runs")
def test_nothing_fails_in_any_format(capsys: pytest.CaptureFixture[str]) -> None:
    def told(*words: str, form: str) -> str:
        assert main(["diff", *words, "--format", form]) == Exit.OK
        return capsys.readouterr().out

    assert told("a", "b", form="markdown").startswith("### attnbench: differs: 1 slower\n")
    assert told("b", "a", form="markdown").startswith("### attnbench: differs: 1 faster\n")
    assert told("a", "b", "-k", "n64", form="markdown").startswith("### attnbench: nothing differs beyond doubt\n")
    data = json.loads(told("a", "b", form="json"))
    assert (data["gate"], data["exit"], data["summary"]) == (None, 0, "differs: 1 slower")
    (suite,) = ElementTree.fromstring(told("a", "b", form="junit"))
    assert (suite.get("name"), suite.get("failures")) == ("attnbench diff", "0")
    (said,) = [found.text or "" for found in suite.iter("system-out")]
    assert said.startswith("slower: 1.3")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("diff a", "diff needs two runs; for example: attnbench diff OLD NEW"),
        ("diff", "diff needs two runs; for example: attnbench diff OLD NEW"),
        ("diff a a", "a is given twice; give each run once"),
        ("diff a nowhere", "nowhere: no such folder; give a folder written by attnbench run"),
        ("diff a elsewhere", "elsewhere and a differ in cores: 64 and 2: measure both on one machine"),
        *(
            (f"diff a b {option} {value}", f"{option} must be a ratio from 1 to 1000000, such as 1.05, not '{value}'; ")
            for option in ("--above", "--memory-above", "--error-above")
            for value in ("nan", "inf", "0.5")
        ),
        ("diff a b --on speed", "--on 'speed': must be time, memory, error, score or status"),
    ],
)
def test_bad_input_is_one_line(runs: Path, command: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == Exit.USAGE
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"error: {said}")
    assert told.err.count("\n") == 1
