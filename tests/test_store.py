from __future__ import annotations

import csv
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnbench.cell import Cell
from attnbench.cli.compare import _write_csv
from attnbench.errors import CannotCreate, CorruptResults, Locked, StoreError
from attnbench.record import COLUMNS, Record
from attnbench.shape import Shape
from attnbench.spec import Spec
from attnbench.status import Status
from attnbench.store import RECORDS, SAMPLES, RunFolder, find_runs, suite_folder


def record(name: str = "softmax", n: int = 64, **columns: object) -> Record:
    return Record.of(Cell("s", "w", Spec(name), Shape(seq_len=n)), Status.OK, **columns)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "s" / "run", environment={"run_key": "k"}, suite_text="name: s\n")


def test_rows_come_back_as_they_were_and_the_last_of_a_cell_counts(folder: RunFolder) -> None:
    folder.add(record(time_median_s=1.0))
    folder.add(record("linear"), {"cell_id": record("linear").cell_id, "round": 0, "samples": []})
    folder.add(record(time_median_s=2.0))
    rows = folder.records()
    assert [(r.variant, r.time_median_s) for r in rows.values()] == [("softmax", 2.0), ("linear", None)]
    assert list(folder.samples()) == [record("linear").cell_id]
    assert folder.environment == {"run_key": "k"}


def test_a_torn_last_line_is_cut_off_and_the_next_row_is_whole(folder: RunFolder) -> None:
    folder.add(record(n=64))
    path = folder.path / RECORDS
    path.write_bytes(path.read_bytes() + b'{"suite": "s", "swe')
    assert len(folder.records()) == 1
    folder.add(record(n=128))
    assert [r.seq_len for r in folder.records().values()] == [64, 128]


def test_damage_elsewhere_is_refused_with_file_and_line_and_left_untouched(folder: RunFolder) -> None:
    folder.add(record(n=64))
    folder.add(record(n=128))
    path = folder.path / RECORDS
    damaged = path.read_bytes().replace(b'"seq_len": 64', b'"seq_len": 64,,', 1)
    path.write_bytes(damaged)
    with pytest.raises(CorruptResults, match=r"records\.jsonl:1: damaged line"):
        folder.records()
    assert path.read_bytes() == damaged


@pytest.mark.parametrize(
    "row", [{"suite": "s"}, {**record().to_json(), "status": "fine"}, {**record().to_json(), "x": 1}]
)
def test_a_row_of_another_schema_is_refused(folder: RunFolder, row: dict[str, object]) -> None:
    folder.append(RECORDS, [row])
    with pytest.raises(CorruptResults, match=":1: not a record of this version"):
        folder.records()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("time_median_s", "1e999"),
        ("peak_bytes", "9" * 400),
        ("peak_bytes", "-" + "9" * 400),
        ("reason", r'"\ud800"'),
    ],
)
def test_a_value_that_no_table_can_hold_is_refused(folder: RunFolder, name: str, value: str) -> None:
    row = json.dumps({**record().to_json(), name: "here"}).replace('"here"', value)
    (folder.path / RECORDS).write_text(row + "\n")
    with pytest.raises(CorruptResults, match=r"records\.jsonl:1: not a record of this version"):
        folder.records()


@pytest.mark.parametrize(
    "sample", ['"seconds": 1e999, "calls": 1', '"seconds": -1, "calls": 1', '"seconds": 1, "calls": 0']
)
def test_a_sample_that_no_clock_gives_is_refused(folder: RunFolder, sample: str) -> None:
    (folder.path / SAMPLES).write_text(f'{{"cell_id": "c", "round": 0, "samples": [{{{sample}}}]}}\n')
    with pytest.raises(CorruptResults, match=r"samples\.jsonl:1: not samples of one round"):
        folder.samples()


@pytest.mark.parametrize("name", [RECORDS, SAMPLES, "failures.jsonl", ".writer"])
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(folder: RunFolder, name: str) -> None:
    (folder.path / name).unlink(missing_ok=True)
    os.mkfifo(folder.path / name)
    with pytest.raises(CannotCreate, match="is not a file; remove it"), folder.lock():
        pass


def test_a_run_whose_environment_is_a_pipe_is_no_run_to_go_on_with(folder: RunFolder) -> None:
    (folder.path / "environment.json").unlink()
    os.mkfifo(folder.path / "environment.json")
    assert folder.environment == {}


def test_a_sample_line_without_its_cell_is_refused(folder: RunFolder) -> None:
    folder.append(SAMPLES, [{"round": 0}])
    with pytest.raises(CorruptResults, match="without cell_id"):
        folder.samples()


def test_the_csv_has_the_documented_columns_and_full_precision(folder: RunFolder) -> None:
    folder.write_csv([record(time_median_s=0.1 + 0.2, rel_error=-1e-9, reason="=HYPERLINK(1)", quick=True)])
    with (folder.path / "results.csv").open(newline="", encoding="utf-8") as file:
        header, row = csv.reader(file)
    assert tuple(header) == COLUMNS
    cells = dict(zip(header, row, strict=True))
    assert float(cells["time_median_s"]) == 0.1 + 0.2
    assert cells["rel_error"] == "-1e-09"  # a negative number stays a number
    assert cells["reason"] == "'=HYPERLINK(1)"  # a formula does not
    assert (cells["time_iqr_s"], cells["quick"], cells["pass"]) == ("", "true", "forward")
    assert not list(folder.path.glob(".results*"))


def test_nan_never_enters_the_store(folder: RunFolder) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        folder.add(record(rel_error=float("nan")))
    assert folder.records() == {}


def test_on_a_full_disk_what_was_half_written_is_taken_back(folder: RunFolder) -> None:
    folder.add(record())
    whole = (folder.path / RECORDS).read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 100, limits[1]))  # so much fits, and no more
    try:
        with pytest.raises(StoreError, match=r"cannot write .*records\.jsonl: .*; earlier rows are safe, make room"):
            folder.add(record(n=128))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (folder.path / RECORDS).read_bytes() == whole
    folder.add(record(n=128))
    assert len(folder.records()) == 2


@pytest.mark.parametrize("room", [0, 100])
def test_a_folder_for_which_there_is_no_room_is_not_left_half_made(tmp_path: Path, room: int) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(CannotCreate, match="cannot create"):
            RunFolder.create(tmp_path / "s" / "run", environment={"run_key": "k"}, suite_text="name: s\n" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "s").iterdir())


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("a file")
    with pytest.raises(CannotCreate, match="choose another folder with --out"):
        RunFolder.create(tmp_path / "s" / "run", environment={}, suite_text="")


HOLD = """
import sys, time
from pathlib import Path
from attnbench.store import RunFolder
with RunFolder(Path(sys.argv[1])).lock():
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_run_in_the_same_folder_is_refused_until_the_first_is_gone(folder: RunFolder) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder.path)], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(Locked, match="another attnbench run"), folder.lock():
            pass
        first.kill()
    with folder.lock():
        pass


def test_runs_are_found_below_a_results_folder_or_as_themselves(folder: RunFolder, tmp_path: Path) -> None:
    assert [run.path for run in find_runs(tmp_path)] == [folder.path]
    assert [run.path for run in find_runs(folder.path)] == [folder.path]
    assert [run.path for run in find_runs(tmp_path / "s")] == [folder.path]
    assert find_runs(tmp_path / "nothing") == []


def test_every_line_of_the_truth_is_json(folder: RunFolder) -> None:
    folder.add(record(reason="ünïcode\nand lines"))
    (line,) = (folder.path / RECORDS).read_text().splitlines()
    assert json.loads(line)["reason"] == "ünïcode and lines"


def test_two_suites_whose_names_differ_in_upper_and_lower_case_only_do_not_share_a_folder(tmp_path: Path) -> None:
    assert suite_folder(tmp_path / "none yet", "lra") == tmp_path / "none yet" / "lra"
    (tmp_path / "Lra").mkdir()
    assert suite_folder(tmp_path, "Lra") == tmp_path / "Lra"
    with pytest.raises(CannotCreate, match="Lra differs from lra in upper and lower case only"):
        suite_folder(tmp_path, "lra")


@pytest.mark.parametrize("start", list("=+-@\t＝＋－＠"))
def test_a_comparison_starts_no_formula_and_keeps_its_negative_numbers(tmp_path: Path, start: str) -> None:
    rows = [{"a": "softmax", "a_reason": f"{start}1+1", "ratio": -0.5, "b_error": None}]
    _write_csv(SimpleNamespace(to_rows=lambda: rows), tmp_path / "c.csv")
    with (tmp_path / "c.csv").open(newline="", encoding="utf-8") as file:
        assert list(csv.DictReader(file)) == [
            {"a": "softmax", "a_reason": f"'{start}1+1", "ratio": "-0.5", "b_error": ""}
        ]
