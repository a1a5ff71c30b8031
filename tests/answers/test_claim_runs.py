"""Claims read more than the newest run of a suite, and never a mixture of runs of one sweep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from attnbench.answers.claims.assessment import judge
from attnbench.answers.claims.evidence import read_rows
from attnbench.errors import ResultsError
from attnbench.results.read import read_results
from attnbench.results.record import Record
from attnbench.results.table import csv_text
from tests.answers.test_claims import PARALLEL, claim, timed

MORNING, NOON, NIGHT = (f"20260101T{hour:02}0000Z-cpu" for hour in (6, 12, 23))


def ran(root: Path, name: str, rows: Iterable[Record]) -> Path:
    run = root / "claims" / name
    run.mkdir(parents=True)
    (run / "results.csv").write_text(csv_text(rows), encoding="utf-8")
    return run


def told(paths: list[Path]) -> tuple[pd.DataFrame, list[str]]:
    warnings: list[str] = []
    return read_rows(paths, warnings.append), warnings


def seconds(frame: pd.DataFrame) -> list[float]:
    return sorted(frame["time_median_s"])


def test_runs_of_two_numbers_of_threads_meet_though_one_is_newer(tmp_path: Path) -> None:
    ran(tmp_path, MORNING, [timed("linformer", n, 0.5, threads=2) for n in (512, 2048)])
    ran(tmp_path, NOON, [timed("linformer", n, 1.0, threads=1) for n in (512, 2048)])
    one = claim(**PARALLEL)
    assert judge(one, read_results(tmp_path)).verdict == "not tested here"  # the newest run alone: the trap
    found = judge(one, told([tmp_path])[0])
    assert (found.verdict, [point.value for point in found.points]) == ("holds", [pytest.approx(0.5)] * 2)


def test_a_later_run_of_a_part_does_not_hide_the_run_of_the_whole(tmp_path: Path) -> None:
    ran(tmp_path, MORNING, [timed("softmax", n, 1.0) for n in (512, 1024)])
    ran(tmp_path, NOON, [timed("softmax", 512, 3.0)])
    assert seconds(told([tmp_path])[0]) == [1.0, 1.0]


def test_of_equally_full_runs_the_newest_counts(tmp_path: Path) -> None:
    for name, time in ((MORNING, 1.0), (NIGHT, 3.0), (NOON, 2.0)):
        ran(tmp_path, name, [timed("softmax", 512, time)])
    assert seconds(told([tmp_path])[0]) == [3.0]


def test_runs_of_another_machine_and_runs_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    ran(tmp_path, NIGHT, [timed("softmax", 512, 1.0, threads=1)])
    ran(tmp_path, NOON, [timed("softmax", 512, 2.0, threads=2, machine_id="elsewhere")])
    broken = ran(tmp_path, MORNING, [])
    (broken / "results.csv").write_text("no,table\n", encoding="utf-8")
    frame, warnings = told([tmp_path])
    assert seconds(frame) == [1.0]
    (line,) = warnings
    assert str(broken) in line
    assert "left out" in line


def test_runs_that_are_given_are_read_whole(tmp_path: Path) -> None:
    runs = [ran(tmp_path, name, [timed("softmax", 512, time)]) for name, time in ((MORNING, 1.0), (NOON, 2.0))]
    frame, _ = told(runs)
    assert seconds(frame) == [1.0, 2.0]
    assert frame["run"].nunique() == 2
    assert seconds(told([runs[0] / "results.csv"])[0]) == [1.0]


def test_a_folder_without_runs_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="holds no run"):
        told([tmp_path])


def collected(root: Path, name: str, rows: Iterable[Record]) -> Path:
    """A run in a folder in which somebody collects runs."""
    run = root / "collected" / name
    run.mkdir(parents=True)
    (run / "results.csv").write_text(csv_text(rows), encoding="utf-8")
    return run


def of_suite(suite: str, seconds: float, **columns: object) -> Record:
    return replace(timed("softmax", 512, seconds, **columns), suite=suite)


def test_each_suite_of_a_folder_of_collected_runs_is_read_whatever_the_runs_are_called(tmp_path: Path) -> None:
    collected(tmp_path, "a", [of_suite("claims", 1.0, machine_id="one")])
    collected(tmp_path, "b", [of_suite("claims", 2.0, machine_id="two", sweep="other")])
    collected(tmp_path, "z", [of_suite("share", 3.0)])
    for path in (tmp_path, tmp_path / "collected"):
        frame, warnings = told([path])
        assert (seconds(frame), warnings) == ([1.0, 2.0, 3.0], [])


def test_a_newer_run_of_fewer_rows_on_another_device_hides_no_collected_rows(tmp_path: Path) -> None:
    early = "2026-01-01T00:00:00+00:00"
    full = [timed("softmax", n, float(n), started_at=early) for n in (1, 2)]
    collected(tmp_path, "full", [replace(row, suite="lra") for row in full])
    late = "2026-01-02T00:00:00+00:00"
    gpu = collected(tmp_path, "gpu", [of_suite("lra", 3.0, device="cuda", started_at=late)])
    collected(tmp_path, "other", [of_suite("share", 4.0)])
    frame, warnings = told([tmp_path])
    assert seconds(frame) == [1.0, 2.0, 4.0]
    assert warnings == [f"{gpu}: of device cuda, while full is of cpu; this run is left out"]


def test_a_collected_run_that_is_left_out_is_named(tmp_path: Path) -> None:
    gpu = collected(tmp_path, "a", [of_suite("lra", 1.0, device="cuda", started_at="2026-01-01T00:00:00+00:00")])
    collected(tmp_path, "b", [of_suite("lra", 2.0, started_at="2026-01-02T00:00:00+00:00")])
    collected(tmp_path, "c", [of_suite("share", 3.0)])
    frame, warnings = told([tmp_path])
    assert seconds(frame) == [2.0, 3.0]
    assert warnings == [f"{gpu}: of device cuda, while b is of cpu; this run is left out"]
    ran(tmp_path, NOON, [of_suite("lra", 4.0)])
    frame, warnings = told([tmp_path])
    assert seconds(frame) == [3.0, 4.0]
    assert warnings == [f"{tmp_path} has runs of its own of suite lra; left out: b, a"]
