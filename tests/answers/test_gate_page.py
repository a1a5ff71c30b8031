"""What docs/gate.md shows is what the command prints."""

from __future__ import annotations

import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from attnbench.answers.gate.decide import GateQuestion, decide
from attnbench.answers.gate.decision_table import to_json, to_junit
from attnbench.answers.gate.verdict import VERDICTS, Tolerance
from attnbench.cli.app import main
from attnbench.errors import Exit
from attnbench.results.measurements import load
from tests.answers.fixture_runs import Row, copy_with, write_run

HERE = Path(__file__).parents[2]


def test_the_printed_gate_is_that_of_the_committed_run_with_one_variant_slowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = HERE / "results/reference/lra-cpu"
    copy_with(reference, tmp_path / "NEW", "performer", 1.3)
    shutil.copytree(reference, tmp_path / "OLD", ignore=shutil.ignore_patterns("plots"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["gate", "NEW", "--against", "OLD"]) == Exit.FAILED
    told = capsys.readouterr()
    printed = [line.rstrip() for line in told.out.splitlines()] + told.err.splitlines()
    expected = (HERE / "docs/printed/gate.txt").read_text(encoding="utf-8").splitlines()
    assert ["$ attnbench gate NEW --against OLD", *printed] == expected


def test_the_page_names_every_verdict_and_the_limits_as_they_are() -> None:
    page = (HERE / "docs/gate.md").read_text(encoding="utf-8")
    section = page.partition("## How a verdict is made")[2].partition("\n## ")[0]
    for verdict in VERDICTS:
        words = {"worse": "more memory", "better": "more memory, less memory"}.get(verdict, verdict)
        assert f"| {words}" in section, verdict
    limits = Tolerance()
    assert all(f"{limit:g}" in section for limit in (limits.time, limits.memory, limits.error))
    assert GateQuestion().missing == "warn"


def test_the_page_names_every_key_of_the_json_and_every_kind_of_property(tmp_path: Path) -> None:
    old, new = (load(write_run(tmp_path / name, [Row()], seed=len(name))) for name in ("old", "newer"))
    found = decide(new, [old], GateQuestion())
    section = (HERE / "docs/gate.md").read_text(encoding="utf-8").partition("## In continuous integration")[2]
    assert all(f"`{key}`" in section for key in to_json(found))
    kinds = {str(one.get("name")).partition(".")[0] for one in ElementTree.fromstring(to_junit(found)).iter("property")}
    assert kinds == {"summary", "head", "exit", "count", "limit", "judged"}
    assert all(f"`{kind}`" in section or f"`{kind}." in section for kind in kinds)
