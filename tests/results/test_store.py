from __future__ import annotations

import csv
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from attnbench.cli.screen.outputs import write_rows
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.errors import CannotCreate, CorruptResults, Locked, ResultsError, StoreError
from attnbench.measure.status import Status
from attnbench.results import store
from attnbench.results.manifest import ENDS, digest, write_manifest
from attnbench.results.read import read_results
from attnbench.results.record import COLUMNS, SCHEMA_VERSION, Record
from attnbench.results.runs import by_age, find_runs, suite_folder
from attnbench.results.store import RECORDS, SAMPLES, RunFolder
from attnbench.suite.cell import Cell


def record(name: str = "softmax", n: int = 64, **columns: object) -> Record:
    return Record.of(Cell("s", "w", Spec(name), Shape(seq_len=n)), Status.OK, **columns)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "s" / "run", environment={"run_key": "k"}, suite_text="name: s\n")


def test_rows_come_back_as_they_were_and_the_last_of_a_cell_counts(folder: RunFolder) -> None:
    folder.add(record(time_median_s=1.0))
    linear = record("linear")
    folder.add(linear, {"cell_id": linear.cell_id, "round": 0, "samples": []})
    folder.add(record(time_median_s=2.0))
    rows = folder.records()
    assert [(r.variant, r.time_median_s) for r in rows.values()] == [("softmax", 2.0), ("linear", None)]
    assert folder.samples() == {linear.cell_id: {0: []}}
    assert folder.environment["run_key"] == "k"


def test_a_torn_last_line_is_cut_off_and_the_next_row_is_whole(folder: RunFolder) -> None:
    folder.add(record(n=64))
    path = folder.path / RECORDS
    path.write_bytes(path.read_bytes() + b'{"suite": "s", "swe')
    reader = RunFolder(folder.path)
    assert len(reader.records()) == 1
    assert reader.repairs == [f"{path}:2: the last line is cut short; it is left out"]
    assert path.read_bytes().endswith(b'"swe')  # reading mends nothing
    again = RunFolder(folder.path)
    with again.lock():
        again.add(record(n=128))
    assert again.repairs == [f"{path}:2: the last line was cut short when a run ended; it was removed"]
    assert [r.seq_len for r in again.records().values()] == [64, 128]


def test_damage_elsewhere_is_refused_with_file_and_line_and_left_untouched(folder: RunFolder) -> None:
    folder.add(record(n=64))
    folder.add(record(n=128))
    path = folder.path / RECORDS
    damaged = path.read_bytes().replace(b'"seq_len": 64', b'"seq_len": 64,,', 1)
    path.write_bytes(damaged)
    with pytest.raises(CorruptResults, match=r"records\.jsonl:1: this line was changed"):
        folder.records()
    assert path.read_bytes() == damaged


def of_the_first_schema(folder: RunFolder) -> None:
    """Make it a run from before there were seals."""
    (folder.path / "environment.json").write_text("{}")


def damage_of(folder: RunFolder, change: Callable[[list[bytes]], list[bytes]], name: str = RECORDS) -> str:
    """What reading says after ``change`` of the lines of a file."""
    path = folder.path / name
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    fresh = RunFolder(folder.path)
    with pytest.raises(CorruptResults) as caught:
        _ = fresh.history() if name == RECORDS else fresh.samples()
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda lines: [lines[0], lines[1].replace(b"0.128", b"0.129"), *lines[2:]], 2),
        (lambda lines: [lines[0], lines[1].replace(b"0.128", b"0.128,"), *lines[2:]], 2),
        (lambda lines: [lines[0], lines[1][:-20] + b"\n", lines[2]], 2),
        (lambda lines: [lines[0], re.sub(rb', "seal": "\w+"', b"", lines[1]), lines[2]], 2),
        (lambda lines: [*lines[:2], re.sub(rb'"cell_id": "\w+"', rb'"cell_id": "00"', lines[2])], 3),
    ],
    ids=["digit", "byte", "cut", "seal-gone", "another-id"],
)
@pytest.mark.parametrize("name", [RECORDS, SAMPLES])
def test_a_line_that_is_not_as_it_was_written_is_refused_with_its_number(
    folder: RunFolder, change: Callable[[list[bytes]], list[bytes]], line: int, name: str
) -> None:
    for n in (64, 128, 256):
        row = record(n=n, time_median_s=n / 1000, time_rounds=1)
        folder.add(row, {"cell_id": row.cell_id, "round": 0, "samples": [{"seconds": n / 1000, "calls": 1}]})
    said = damage_of(folder, change, name)
    assert said.startswith(f"{folder.path / name}:{line}: this line was changed")


WRITTEN_ANEW = {
    "CRLF": lambda line: line.replace(b"\n", b"\r\n"),
    "a space at its end": lambda line: line.replace(b"\n", b" \n"),
    "no spaces": lambda line: json.dumps(json.loads(line), separators=(",", ":")).encode() + b"\n",
    "sorted": lambda line: json.dumps(json.loads(line), sort_keys=True).encode() + b"\n",
    "the seal first": lambda line: json.dumps(dict(reversed(json.loads(line).items()))).encode() + b"\n",
}


@pytest.mark.parametrize("how", WRITTEN_ANEW.values(), ids=WRITTEN_ANEW)
@pytest.mark.parametrize("name", [RECORDS, SAMPLES])
def test_json_that_is_written_otherwise_says_the_same_and_is_as_sealed_as_before(
    folder: RunFolder, how: Callable[[bytes], bytes], name: str
) -> None:
    for n in (64, 128):
        row = record(n=n, time_median_s=n / 1000, time_rounds=1, reason="µ")
        folder.add(row, {"cell_id": row.cell_id, "round": 0, "samples": [{"seconds": n / 1000, "calls": 1}]})
    with folder.lock():
        folder.conclude()
    before = folder.rows(name)
    path = folder.path / name
    path.write_bytes(b"".join(map(how, path.read_bytes().splitlines(keepends=True))))
    fresh = RunFolder(folder.path)
    assert fresh.rows(name) == before
    assert fresh.doubts() == []
    assert "line was changed" in damage_of(folder, lambda lines: [lines[0], lines[1].replace(b"0.128", b"0.127")], name)


@pytest.mark.parametrize("name", [RECORDS, SAMPLES])
def test_a_run_has_seals_whatever_its_lines_look_like(folder: RunFolder, name: str) -> None:
    for n in (64, 128):
        row = record(n=n, time_median_s=n / 1000, time_rounds=1)
        folder.add(row, {"cell_id": row.cell_id, "round": 0, "samples": [{"seconds": n / 1000, "calls": 1}]})

    def as_in_the_first_schema(lines: list[bytes]) -> list[bytes]:
        lines = [re.sub(rb', "seal": "\w+"', b"", line) for line in lines]
        return [line.replace(b'"schema_version": 3', b'"schema_version": 1') for line in lines]

    assert f"{name}:1: this line was changed" in damage_of(folder, as_in_the_first_schema, name)


def test_facts_that_are_written_otherwise_say_the_same(folder: RunFolder) -> None:
    file, before = folder.path / "environment.json", folder.environment
    data = json.loads(file.read_text())
    file.write_text(json.dumps(data, sort_keys=True).replace("\n", "\r\n") + " ")
    assert folder.environment == before
    file.write_text(json.dumps(data | {"run_key": "other"}))
    with pytest.raises(CorruptResults, match="changed after the run"):
        _ = folder.environment


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"time_median_s": -1.0}, "time_median_s is -1.0, below 0"),
        ({"time_median_s": 1e10}, "time_median_s is too large"),
        ({"peak_bytes": -1}, "peak_bytes is -1, below 0"),
        ({"cosine": -1.5}, "cosine is -1.5, beyond 1"),
        ({"time_median_s": 1.0, "time_ci_low_s": 1.1, "time_ci_high_s": 1.2}, "time_ci_low_s is above time_median_s"),
        ({"time_median_s": 1.0, "time_ci_low_s": 0.8, "time_ci_high_s": 0.9}, "time_median_s is above time_ci_high_s"),
        ({"time_median_s": 1.0, "time_min_s": 1.1}, "time_min_s is above time_median_s"),
        ({"machine_id": "other"}, "a row of another run: machine_id is 'other', but 'm' for this run"),
        ({"torch_version": "1"}, "a row of another run: torch_version is '1', but '2' for this run"),
        ({"threads": 4}, "a row of another run: threads is 4, but 2 for this run"),
        ({"method_version": 3}, "a row of another run: method_version is 3, but 4 for this run"),
    ],
)
def test_a_row_that_this_run_cannot_have_measured_is_refused(
    tmp_path: Path, columns: dict[str, Any], said: str
) -> None:
    about = {"machine_id": "m", "threads": 2, "method_version": 4, "environment": {"torch": "2"}}
    folder = RunFolder.create(tmp_path / "run", environment=about, suite_text="")
    ours = {"machine_id": "m", "threads": 2, "method_version": 4, "torch_version": "2"}
    folder.add(record(n=32, cosine=-1.0, **ours))
    folder.add(record(**ours | columns))
    with pytest.raises(CorruptResults, match=rf"records\.jsonl:2: .*{re.escape(said)}"):
        folder.history()


def test_a_time_needs_the_samples_of_each_of_its_rounds_and_lies_among_them(folder: RunFolder) -> None:
    row = record(time_median_s=0.5, time_rounds=2, time_samples=2)
    taken = {"cell_id": row.cell_id, "samples": [{"seconds": 0.4, "calls": 1}]}
    folder.add(row, taken | {"round": 0})
    assert folder.without_samples([row]) == [row]
    folder.append(SAMPLES, [taken | {"round": 1}])
    with pytest.raises(CorruptResults, match=r"time_median_s is 0\.5, but the samples lie between 0\.4 and 0\.4"):
        folder.without_samples([row])
    folder.append(SAMPLES, [taken | {"round": 1, "samples": [{"seconds": 0.6, "calls": 1}]}])
    assert folder.without_samples([row]) == []
    row.time_samples = 3
    with pytest.raises(CorruptResults, match="time_samples is 3, but there are 2 samples"):
        folder.without_samples([row])


def test_a_changed_environment_or_suite_is_told(folder: RunFolder) -> None:
    assert folder.doubts() == []
    for name, old, new in (("environment.json", '"k"', '"l"'), ("suite.yaml", "s", "t")):
        file = folder.path / name
        text = file.read_text()
        file.write_text(text.replace(old, new))
        assert str(file) in told(folder)
        file.unlink()
        assert str(file) in told(folder)
        file.write_text(text)
    assert folder.doubts() == []


def told(folder: RunFolder) -> str:
    """The doubt about a suite, or the error that an environment is."""
    try:
        (said,) = folder.doubts()
    except CorruptResults as error:
        return f"error: {error}" if "environment.json" in str(error) else ""
    return said if "suite.yaml" in said else ""


def test_a_table_names_the_line_of_each_row_and_tells_where_it_was_edited(folder: RunFolder) -> None:
    rows = [record(n=n, time_median_s=n / 1000) for n in (64, 128)]
    for row in rows:
        folder.add(row)
    folder.write_csv(rows)
    history = folder.history()
    seals = [json.loads(line)["seal"] for line in (folder.path / RECORDS).read_text().splitlines()]
    file = folder.path / "results.csv"
    assert pd.read_csv(file)["seal"].tolist() == seals
    assert folder.compare_table(history) == ([row.cell_id for row in rows], "")
    later = record(n=64, time_median_s=0.065)
    folder.add(later)
    assert folder.compare_table(folder.history()) == ([row.cell_id for row in rows], "")  # older, but true
    file.write_text(file.read_text().replace("0.128", "0.127"))
    assert folder.compare_table(history)[1] == f"{file}:3"
    file.write_text("x")
    assert folder.compare_table(history)[1] == f"{file}:1"


def unlink(file: Path) -> None:
    file.unlink()


def empty(file: Path) -> None:
    file.write_bytes(b"")


def halve(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def move(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))


def copy(file: Path) -> None:
    shutil.copy(file, file.with_name("copy"))
    file.with_name("copy").replace(file)


def link(file: Path) -> None:
    move(file)
    file.symlink_to(file.with_name("elsewhere"))


def move_folder(file: Path) -> None:
    file.parent.rename(file.parent.with_name("elsewhere"))


def another_folder(file: Path) -> None:
    move_folder(file)
    shutil.copytree(file.parent.with_name("elsewhere"), file.parent)


@pytest.mark.parametrize("harm", [unlink, empty, halve, move, copy, link, move_folder, another_folder])
def test_rows_are_appended_to_the_file_that_was_opened_and_to_no_other(
    folder: RunFolder, harm: Callable[[Path], None]
) -> None:
    with folder.lock():
        folder.add(record(n=64))
        harm(folder.path / RECORDS)
        for store in (lambda: folder.add(record(n=128)), folder.refuse_changes):
            with pytest.raises(StoreError, match="run the same command again") as caught:
                store()
            assert caught.value.exit_code == 74


@pytest.mark.parametrize("name", [SAMPLES, "failures.jsonl"])
def test_a_file_that_another_program_makes_during_a_run_is_not_written_to(folder: RunFolder, name: str) -> None:
    with folder.lock():
        (folder.path / name).write_text("theirs\n")
        with pytest.raises(StoreError, match="cannot write"):
            folder.append(name, [{"cell_id": "c"}])
    assert (folder.path / name).read_text() == "theirs\n"


def test_a_run_from_the_future_is_older_than_all_others() -> None:
    names = ["20301231T235959Z-cpu", "20261120T080000Z-cpu", "20991231T235959Z-cpu", "20261119T080000Z-cpu", "a-copy"]
    assert [path.name for path in by_age(map(Path, names))] == [names[i] for i in (0, 2, 3, 1, 4)]


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
    of_the_first_schema(folder)
    row = json.dumps({**record().to_json(), name: "here"}).replace('"here"', value)
    (folder.path / RECORDS).write_text(row + "\n")
    with pytest.raises(CorruptResults, match=r"records\.jsonl:1: not a record of this version"):
        folder.records()


@pytest.mark.parametrize(
    "sample", ['"seconds": 1e999, "calls": 1', '"seconds": -1, "calls": 1', '"seconds": 1, "calls": 0']
)
def test_a_sample_that_no_clock_gives_is_refused(folder: RunFolder, sample: str) -> None:
    of_the_first_schema(folder)
    (folder.path / SAMPLES).write_text(f'{{"cell_id": "c", "round": 0, "samples": [{{{sample}}}]}}\n')
    with pytest.raises(CorruptResults, match=r"samples\.jsonl:1: not samples of one round"):
        folder.samples()


@pytest.mark.parametrize("name", [RECORDS, SAMPLES, "failures.jsonl", ".writer"])
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(folder: RunFolder, name: str) -> None:
    (folder.path / name).unlink(missing_ok=True)
    os.mkfifo(folder.path / name)
    with pytest.raises(CannotCreate, match="is not a file; remove it"), folder.lock():
        pass


@pytest.mark.parametrize("name", [SAMPLES, "suite.yaml"])
def test_a_pipe_in_the_place_of_a_file_is_not_read(folder: RunFolder, name: str) -> None:
    (folder.path / name).unlink(missing_ok=True)
    os.mkfifo(folder.path / name)
    if name == SAMPLES:
        with pytest.raises(StoreError, match="it is not a file"):
            folder.samples()
    else:
        assert folder.doubts() == [f"{folder.path / name} is not the suite that was run; restore it"]


def test_an_environment_that_is_a_pipe_is_not_waited_for(folder: RunFolder) -> None:
    (folder.path / "environment.json").unlink()
    os.mkfifo(folder.path / "environment.json")
    with pytest.raises(CorruptResults, match=r"environment\.json: there is no such file"):
        _ = folder.environment


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


def test_on_a_full_disk_a_folder_is_named_as_the_user_named_it(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with (
            pytest.raises(StoreError, match=f"^cannot write {tmp_path / 'run' / RECORDS}: "),
            RunFolder.whole(tmp_path / "run", environment={"run_key": "k"}, suite_text="name: s") as folder,
        ):
            folder.add(record())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("room", [0, 100])
def test_a_folder_for_which_there_is_no_room_is_not_left_half_made(tmp_path: Path, room: int) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(StoreError, match=r"cannot write .*; make room"):
            RunFolder.create(tmp_path / "s" / "run", environment={"run_key": "k"}, suite_text="name: s\n" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "s").iterdir())


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("a file")
    with pytest.raises(CannotCreate, match="choose another place"):
        RunFolder.create(tmp_path / "s" / "run", environment={}, suite_text="")


HOLD = """
import sys, time
from pathlib import Path
from attnbench.results.store import RunFolder
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


@pytest.mark.parametrize("start", list("=+-@＝＋－＠"))
def test_a_comparison_starts_no_formula_and_keeps_its_negative_numbers(tmp_path: Path, start: str) -> None:
    rows = [{"a": "softmax", "a_reason": f"{start}1+1", "ratio": -0.5, "b_error": None}]
    write_rows(rows, tmp_path / "c.csv")
    with (tmp_path / "c.csv").open(newline="", encoding="utf-8") as file:
        assert list(csv.DictReader(file)) == [
            {"a": "softmax", "a_reason": f"'{start}1+1", "ratio": "-0.5", "b_error": ""}
        ]


def place_of(file: Path) -> int:
    """Which file it is: one that is written anew has another number."""
    return file.stat().st_ino


def test_a_new_folder_has_the_suite_no_rows_and_a_number_of_its_own(folder: RunFolder, tmp_path: Path) -> None:
    other = RunFolder.create(
        tmp_path / "other", environment={"schema_version": 1, "threads": 3}, suite_text="name: o\n"
    )
    assert (other.path / "suite.yaml").read_text() == "name: o\n"
    assert (other.path / RECORDS).read_bytes() == b""
    facts = other.environment
    assert (facts["threads"], facts["schema_version"]) == (3, SCHEMA_VERSION)
    assert re.fullmatch("[0-9a-f]{16}", facts["run_id"])
    assert facts["run_id"] != folder.environment["run_id"]
    assert facts["suite_digest"] == digest("name: o\n") != folder.environment["suite_digest"]


def test_what_describes_the_machine_is_added_once_and_corrected_when_asked(folder: RunFolder) -> None:
    file = folder.path / "environment.json"
    folder.describe({"noise": 1, "cores": 2})
    written = place_of(file)
    folder.describe({"noise": 5})  # said before
    folder.describe(folder.environment)
    assert (place_of(file), folder.environment["noise"]) == (written, 1)
    folder.describe({"noise": 6, "speed": 3})
    assert [folder.environment[name] for name in ("run_key", "noise", "cores", "speed")] == ["k", 6, 2, 3]
    folder.correct({"cores": 4})
    assert [folder.environment[name] for name in ("run_key", "noise", "cores", "speed")] == ["k", 6, 4, 3]
    assert folder.doubts() == []


def test_a_complete_run_notes_where_its_files_end_until_it_goes_on(folder: RunFolder) -> None:
    file = folder.path / "environment.json"
    with folder.lock():
        folder.add(record(n=64))
        folder.add(record(n=128))
        assert ENDS not in folder.environment
        folder.conclude()
        (told,) = folder.environment[ENDS].items()
        assert (told[0], told[1]["lines"]) == (RECORDS, 2)
        written = place_of(file)
        folder.conclude()  # nothing new
        assert place_of(file) == written
        folder.add(record(n=192))
        assert ENDS not in folder.environment
        folder.conclude()
    assert folder.doubts() == []
    again = RunFolder(folder.path)
    with again.lock():
        assert ENDS in again.environment
        again.add(record(n=256))
        assert ENDS not in again.environment
    assert again.doubts() == []


def test_facts_that_cannot_be_written_are_one_line(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write_manifest", full)
    with pytest.raises(StoreError) as caught:
        folder.correct({"noise": 1})
    assert str(caught.value) == f"cannot write {folder.path / 'environment.json'}: No space left on device; make room"


def test_a_run_without_a_digest_of_its_suite_is_not_doubted(folder: RunFolder) -> None:
    write_manifest(folder.path / "environment.json", {"schema_version": 2, "run_key": "k"})
    assert folder.doubts() == []
    folder.add(record())
    assert [one.seq_len for one in RunFolder(folder.path).history()] == [64]


def test_what_killed_runs_left_half_written_is_removed_under_the_lock_and_nothing_else(folder: RunFolder) -> None:
    left = [folder.path / name for name in (".results.csv.x1", ".environment.json.x2")]
    others = [folder.path / name for name in ("results.csv", "environment.json.bak", ".mine")]
    for file in (*left, *others):
        file.touch()
    (folder.path / ".results.csv.a-folder").mkdir()  # cannot be unlinked, and stays
    with folder.lock():
        assert [file.exists() for file in (*left, *others)] == [False, False, True, True, True]
    assert (folder.path / ".results.csv.a-folder").exists()


def test_a_visit_that_failed_is_kept_with_the_end_of_its_stderr(folder: RunFolder) -> None:
    failed = Record.of(Cell("s", "w", Spec("softmax"), Shape(seq_len=64)), Status.CRASH, reason="signal 11")
    folder.add(record(), failure=failed, stderr=("one", "two"))
    folder.add(record(), failure=failed)
    folder.add(record(), stderr=("of nobody",))
    (row,) = folder.rows("failures.jsonl")
    assert row.pop("seal")
    assert row == {
        "cell_id": failed.cell_id,
        "label": "softmax",
        "seq_len": 64,
        "status": "crash",
        "reason": "signal 11",
        "stderr": ["one", "two"],
    }


def point(step: int) -> dict[str, Any]:
    return {"step": step, "train_loss": 1.0, "val_score": 0.5, "val_loss": 1.0, "learning_rate": 0.1, "cpu_s": 1.0}


def test_a_row_that_is_stored_has_its_seal_and_the_last_learning_curve_of_a_cell_counts(folder: RunFolder) -> None:
    one, other = record(n=64), record(n=128)
    folder.add(one, points=[point(1), point(2)])
    folder.add(other)
    folder.add(record(n=64), points=[point(3)])
    assert one.seal
    assert [row.seal for row in folder.history()][:2] == [one.seal, other.seal]
    assert folder.curves() == {one.cell_id: [point(3)]}
    assert folder.samples() == {}


@pytest.mark.parametrize("row", [{"points": []}, {"cell_id": 3, "points": []}, {"cell_id": "c", "points": [{}]}])
def test_what_is_no_learning_curve_is_refused_with_its_place(folder: RunFolder, row: dict[str, Any]) -> None:
    folder.append("curves.jsonl", [{"cell_id": "c", "points": []}, row])
    with pytest.raises(CorruptResults, match=rf"^{re.escape(str(folder.path))}/curves\.jsonl:2: not a learning curve$"):
        folder.curves()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"cell_id": 3, "round": 0, "samples": []}, "a line without cell_id"),
        ({"cell_id": "c", "round": True, "samples": []}, "not samples of one round"),
        ({"cell_id": "c", "round": "0", "samples": []}, "not samples of one round"),
        ({"cell_id": "c", "round": 0}, "not samples of one round"),
    ],
)
def test_what_are_no_samples_is_refused_with_its_place(folder: RunFolder, row: dict[str, Any], said: str) -> None:
    folder.append(SAMPLES, [{"cell_id": "c", "round": 0, "samples": []}, row])
    with pytest.raises(CorruptResults) as caught:
        folder.samples()
    assert str(caught.value) == f"{folder.path / SAMPLES}:2: {said}"


@pytest.mark.parametrize(("version", "where"), [(4, "row"), (0, "row"), (4, "environment")])
def test_a_run_of_another_schema_is_not_damaged_but_not_read(folder: RunFolder, version: int, where: str) -> None:
    if where == "environment":
        folder.correct({"schema_version": version})
    folder.append(RECORDS, [{**record().to_json(), "schema_version": version if where == "row" else 2, "later": 1}])
    with pytest.raises(ResultsError) as caught:
        folder.history()
    assert type(caught.value) is ResultsError
    assert str(caught.value) == (
        f"{folder.path}: schema_version {version}, this attnbench reads 1 to 3; use the attnbench that wrote it"
    )


def test_a_row_of_the_first_schema_is_read_without_a_seal(folder: RunFolder) -> None:
    of_the_first_schema(folder)
    row = {**record().to_json(), "schema_version": 1}
    (folder.path / RECORDS).write_text(json.dumps(row) + "\n")
    assert [(one.seq_len, one.seal) for one in folder.history()] == [(64, "")]


def test_rows_stand_in_the_order_of_the_table_and_those_that_it_lacks_at_its_end(folder: RunFolder) -> None:
    rows = [record(n=n) for n in (64, 128, 256)]
    for row in rows:
        folder.add(row)
    assert [row.seq_len for row in folder.in_order()] == [64, 128, 256]
    folder.write_csv([record(n=512), rows[2], rows[0]])  # 512 is in the table alone
    assert [row.seq_len for row in folder.in_order()] == [256, 64, 128]


def test_rows_without_a_time_need_no_samples_and_one_round_is_the_least(folder: RunFolder) -> None:
    untimed, lacking, timed = record(n=64), record(n=128, time_median_s=1.0), record(n=256, time_median_s=1.0)
    taken = {"cell_id": timed.cell_id, "round": 0, "samples": [{"seconds": 1.0, "calls": 1}]}
    folder.append(SAMPLES, [taken])
    assert folder.without_samples([untimed, lacking, timed]) == [lacking]
    later = record(n=256, time_median_s=1.0, time_rounds=2)
    assert folder.without_samples([later]) == [later]
    folder.append(SAMPLES, [{**taken, "round": 1, "samples": [{"seconds": 3.0, "calls": 1}]}])
    wrong = record(n=256, time_median_s=4.0, time_rounds=2)
    with pytest.raises(CorruptResults) as caught:
        folder.without_samples([wrong])
    assert str(caught.value) == (
        f"{folder.path / RECORDS}: cell {wrong.cell_id}: time_median_s is 4.0, but the samples lie between 1.0 and "
        "3.0; restore it or start with --fresh"
    )


def test_the_table_is_written_as_often_as_is_asked_and_no_more(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = {"s": 100.0}
    monkeypatch.setattr(store, "time", SimpleNamespace(monotonic=lambda: now["s"]))
    written = []
    for seconds, most in ((100.0, 10.0), (109.5, 10.0), (110.0, 10.0), (110.5, 0.0), (111.0, 10.0)):
        now["s"] = seconds
        (folder.path / "results.csv").unlink(missing_ok=True)
        folder.write_csv([record()], at_most_every=most)
        written.append((folder.path / "results.csv").exists())
    assert written == [True, False, True, True, False]
    folder.write_csv([record()])
    assert (folder.path / "results.csv").exists()


def test_a_table_that_cannot_be_written_is_one_line(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "replace_file", full)
    with pytest.raises(StoreError) as caught:
        folder.write_csv([record()])
    table = folder.path / "results.csv"
    assert str(caught.value) == f"cannot write {table}: No space left on device; records.jsonl is intact"


@pytest.mark.parametrize(
    ("harm", "what"),
    [
        (move_folder, "the folder is gone, and the rows in it; run the same command again"),
        (another_folder, "another folder stands in its place; run the same command again"),
    ],
)
def test_nothing_is_written_where_the_folder_was(folder: RunFolder, harm: Callable[[Path], None], what: str) -> None:
    with folder.lock():
        harm(folder.path / RECORDS)
        for write in (folder.refuse_changes, lambda: folder.write_csv([record()])):
            with pytest.raises(StoreError) as caught:
                write()
            assert str(caught.value) == f"cannot write in {folder.path}: {what}"


def test_lines_of_a_table_that_match_no_row_are_counted(folder: RunFolder) -> None:
    rows = [record(n=n, time_median_s=n / 1000) for n in (64, 128, 256)]
    for row in rows:
        folder.add(row)
    file, history = folder.path / "results.csv", folder.history()
    assert folder.compare_table(history) == ([], "")  # there is none
    folder.write_csv([*rows[:1], record(n=512), record(n=1024)])
    assert folder.compare_table(history)[1] == f"{file}:3 and 1 more lines"
    file.write_text("label\nsoftmax\n")
    assert folder.compare_table(history) == ([""], f"{file}:2")
    file.unlink()
    file.mkdir()
    assert folder.compare_table(history) == ([], f"{file}:1")


def test_rows_are_stored_and_read_though_the_facts_of_the_run_are_lost(folder: RunFolder) -> None:
    folder.add(record(n=64))
    file = folder.path / "environment.json"
    file.write_text("{")
    again = RunFolder(folder.path)
    with again.lock():
        again.add(record(n=128))
        again.conclude()
    assert file.read_text() == "{"
    fresh = RunFolder(folder.path)
    assert [one.seq_len for one in fresh.history()] == [64, 128]
    with pytest.raises(CorruptResults, match=r"environment\.json"):
        fresh.doubts()


def test_rows_of_another_run_are_no_rows_of_this_one(folder: RunFolder, tmp_path: Path) -> None:
    other = RunFolder.create(tmp_path / "other", environment={"run_key": "k"}, suite_text="name: s\n")
    other.add(record())
    with folder.lock():
        folder.add(record(n=128))
        folder.conclude()
    shutil.copy(other.path / RECORDS, folder.path / RECORDS)
    assert folder.doubts() == [f"{folder.path / RECORDS}: its lines are others, or in another order; restore it"]


def test_a_number_of_a_schema_that_fills_a_page_is_cut(folder: RunFolder) -> None:
    folder.correct({"schema_version": 10**60})
    with pytest.raises(ResultsError) as caught:
        folder.history()
    assert str(caught.value).startswith(f"{folder.path}: schema_version 1{'0' * 38}…, this attnbench reads 1 to 3; ")


def test_a_cell_of_a_table_may_be_as_long_as_the_losses_of_all_windows(folder: RunFolder) -> None:
    row = record(window_losses=json.dumps([1.0] * 100_000))
    folder.add(row)
    folder.write_csv([row])
    assert folder.compare_table(folder.history()) == ([row.cell_id], "")
    (folder.path / RECORDS).unlink()
    assert read_results(folder.path / "results.csv", warn=str)["window_losses"].tolist() == [row.window_losses]


def test_a_line_that_stands_twice_in_a_table_is_told(folder: RunFolder) -> None:
    rows = [record(n=n, time_median_s=n / 1000) for n in (64, 128)]
    for row in rows:
        folder.add(row)
    folder.write_csv([*rows, rows[0]])
    assert folder.compare_table(folder.history())[1] == f"{folder.path / 'results.csv'}:4"
