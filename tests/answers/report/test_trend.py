"""Several runs of one suite on one machine have a history in their report; others have none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from attnbench.answers.report.html_page import make_page
from attnbench.answers.report.provenance import read_sources
from tests.answers.fixture_runs import Row, environment, write_run
from tests.answers.report.reading import Read


def page(*runs: Path) -> Read:
    return Read(make_page(read_sources(runs, warn=pytest.fail)))


def made(root: Path, *seconds: float, suite: str = "s", **facts: object) -> list[Path]:
    """A run a day."""
    return [
        write_run(
            root / f"202603{day:02}T120000Z-cpu",
            [Row("softmax", 64, one), Row("sdpa", 64, 1e-3)],
            seed=day,
            suite=suite,
            about=environment(**facts),
        )
        for day, one in enumerate(seconds, start=1)
    ]


def test_a_report_of_several_runs_draws_their_history_and_lists_what_changed(tmp_path: Path) -> None:
    found = page(*made(tmp_path, *[1e-3] * 7, *[1.4e-3] * 3))
    assert "Over the runs of s" in found.text
    assert "time in 10 runs, 2026-03-01 to 2026-03-10" in found.text
    assert "1 of 2 cells changed; joint 95 % over all cells and runs" in found.text
    assert "2026-03-08 slower 1.4" in found.text
    assert "1 change of time in 10 runs" in found.text, "the title of the figure"


def test_one_run_other_suites_and_other_machines_have_no_history(tmp_path: Path) -> None:
    (one, other) = made(tmp_path / "a", 1e-3, 1e-3)
    assert "Over the runs" in page(one, other).text
    assert "Over the runs" not in page(one).text
    assert "Over the runs" not in page(one, *made(tmp_path / "b", 1e-3, suite="t")).text
    assert "Over the runs" not in page(one, *made(tmp_path / "c", 1e-3, processor="Other")).text


def test_a_copy_has_no_history_and_the_reason_stands_there(tmp_path: Path) -> None:
    (one,) = made(tmp_path / "a", 1e-3)
    copy = Path(shutil.copytree(one, tmp_path / "copy"))
    assert "No history: no other run may be compared" in page(one, copy).text
    assert "is a copy of" in page(one, copy).text
