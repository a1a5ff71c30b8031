"""A report beside an older run says what ``attnbench diff`` says."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnbench.answers.gate.decide import GateQuestion, decide
from attnbench.answers.report.against import read_against
from attnbench.answers.report.html_page import make_page
from attnbench.answers.report.provenance import folders_of, read_sources
from attnbench.answers.report.table_rows import times
from attnbench.errors import ResultsError, UsageError
from attnbench.measure.status import Status
from attnbench.results.measurements import load
from tests.answers.fixture_runs import Row, copy_with, environment, write_run
from tests.answers.report.reading import Read

ROWS = [Row(variant, n) for variant in ("softmax", "linear") for n in (64, 128)]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return write_run(tmp_path / "old", ROWS)


def report(new: Path, old: Path) -> Read:
    rows = read_sources([new], warn=pytest.fail)
    return Read(make_page(rows, against=read_against(folders_of(rows), old)))


def test_each_row_has_its_ratio_with_an_interval_and_the_verdict_of_diff(old: Path, tmp_path: Path) -> None:
    new = copy_with(old, tmp_path / "new", "linear", 1.5)
    found = report(new, old)
    rows = {(row["label"], int(row["n"])): row for row in found.rows}
    for one in decide(load(new), [load(old)], GateQuestion(measures=("time",))).findings:
        row = rows[one.pair.shown.label, one.pair.shown.seq_len]
        assert row["verdict"] == one.verdict == ("slower" if row["label"] == "linear" else "same")
        assert row["change"] == f"{times(one.ratio)}×"
        assert row["change small"] == f"{times(one.low)} to {times(one.high)}"
    assert "Against old" in found.text
    assert "(median of 4)" in found.text
    assert "2 of 4 comparisons slower; joint 95 %" in found.text
    assert "linear n=128" in found.text
    assert "softmax n=128" not in found.text


def test_what_broke_and_what_is_missing_is_told(old: Path, tmp_path: Path) -> None:
    rows = [Row("softmax", 64), Row("softmax", 128, status=Status.OOM, reason="too much"), Row("linear", 64)]
    found = report(write_run(tmp_path / "new", rows), old)
    assert [row["verdict"] for row in found.rows if row["status"] == "oom"] == ["broken"]
    assert "1 broken" in found.text
    assert "1 missing" in found.text


def test_an_edited_table_of_the_older_run_is_told(old: Path, tmp_path: Path) -> None:
    new, table = copy_with(old, tmp_path / "new", "linear", 1.5), old / "results.csv"
    table.write_text(table.read_text().replace("softmax", "softmin", 1))
    said: list[str] = []
    assert read_against({"": new}, old, said.append)
    assert said == [f"{table}:2: not what the run stored; the rows of records.jsonl are used"]


def test_runs_that_may_not_be_compared_are_refused_in_one_line(old: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", ROWS, about=environment(threads=2))
    with pytest.raises(UsageError, match="differ in threads: 2 and 1: their times have no common axis"):
        read_against({"": other}, old)
    with pytest.raises(UsageError, match="given twice"):
        read_against({"": old}, old)
    with pytest.raises(UsageError, match="compares one run with an older one, and 2 are named"):
        read_against({"a": old, "b": other}, old)
    with pytest.raises(ResultsError, match="no such folder"):
        read_against({"": old}, tmp_path / "none")
