from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from attnbench.errors import ResultsError
from attnbench.files import read_stored
from attnbench.results.read import find_results, read_results, run_names
from attnbench.results.record import COLUMNS
from attnbench.results.store import RECORDS
from attnbench.results.store import TABLE as FILE
from attnbench.suite.cell import METHOD_VERSION
from tests.committed import rows_of

COMMITTED = sorted(path.parent for path in Path(__file__).parents[2].glob("results/reference/*/results.csv.xz"))


def write(path: Path, rows: list[dict[str, Any]], columns: tuple[str, ...] = COLUMNS) -> Path:
    """A results.csv as a run writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(columns)
        for row in rows:
            cells = (row.get(column) for column in columns)
            out.writerow(["" if c is None else str(c).lower() if isinstance(c, bool) else c for c in cells])
    return path


@pytest.fixture
def rows(run: Any) -> list[dict[str, Any]]:
    return [
        run.row("softmax", time_median_s=0.25),
        run.row("local:window=8", causal=True, status="oom", reason="9 GiB"),
    ]


def test_numbers_that_were_not_measured_are_nan_and_text_never_is(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    frame = read_results(write(tmp_path / "results.csv", rows))
    assert list(frame.columns) == list(COLUMNS)
    assert frame["time_median_s"].tolist()[0] == 0.25
    assert np.isnan(frame["time_median_s"].tolist()[1])
    assert frame["kernel"].tolist() == ["", ""]
    assert frame["reason"].tolist() == ["", "9 GiB"]
    assert frame["causal"].dtype == bool
    assert frame["causal"].tolist() == [False, True]
    assert frame["seq_len"].dtype == np.int64
    assert frame["threads"].dtype == np.float64


def test_every_seed_of_a_table_keeps_its_digits(tmp_path: Path, run: Any) -> None:
    seeds = [0, 2**53, 2**53 + 1, 2**63 - 1]
    frame = read_results(write(tmp_path / "results.csv", [run.row("softmax", seed=seed) for seed in seeds]))
    assert frame["seed"].tolist() == seeds
    for wrong in ("nan", "inf", "1.5", str(2**63), ""):
        with pytest.raises(ResultsError, match="not a whole number"):
            read_results(write(tmp_path / "results.csv", [run.row("softmax", seed=wrong)]))
    assert read_results(write(tmp_path / "results.csv", [run.row("softmax", seed="7.0")]))["seed"].tolist() == [7]


def test_an_infinite_number_which_no_run_stores_is_refused_by_its_place(tmp_path: Path, run: Any) -> None:
    rows = [run.row("softmax", time_median_s=1.0), run.row("linear") | {"time_median_s": "inf"}]
    with pytest.raises(ResultsError, match=r"results.csv:3: time_median_s is 'inf', not a finite number"):
        read_results(write(tmp_path / "results.csv", rows))


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"time_median_s": -1}, "time_median_s is -1.0, below 0"),
        ({"time_median_s": 1e308}, "time_median_s is too large"),
        ({"time_median_s": 1e-320}, "time_median_s is 1e-320, below 1e-12"),
        ({"time_median_s": 1, "time_ci_low_s": 2, "time_ci_high_s": 3}, "time_ci_low_s is above time_median_s"),
        ({"peak_bytes": -1}, "peak_bytes is -1.0, below 0"),
        ({"peak_bytes": 1e308}, "peak_bytes is too large"),
        ({"time_rounds": -3}, "time_rounds is -3.0, below 0"),
        ({"seq_len": -4096}, "seq_len is -4096, below 1"),
        ({"heads": 0}, "heads is 0, below 1"),
    ],
)
def test_a_number_that_no_run_stores_is_refused_by_its_place(
    tmp_path: Path, run: Any, columns: dict[str, float], said: str
) -> None:
    file = write(tmp_path / "results.csv", [run.row("softmax"), run.row("linear") | columns])
    with pytest.raises(ResultsError, match=rf"results.csv:3: {re.escape(said)}; was the file edited\?"):
        read_results(file)


@pytest.mark.parametrize("name", ["NA", "null", "nan", "None", "1e3"])
def test_a_variant_may_have_the_name_of_a_missing_value(tmp_path: Path, run: Any, name: str) -> None:
    row = run.row("softmax") | {"variant": name, "label": name}
    assert read_results(write(tmp_path / "results.csv", [row]))["label"].tolist() == [name]


def test_the_mark_before_a_spreadsheet_formula_is_taken_off(tmp_path: Path, run: Any) -> None:
    frame = read_results(write(tmp_path / "results.csv", [run.row("softmax", status="error", reason="'=1+1 'quoted'")]))
    assert frame["reason"].tolist() == ["=1+1 'quoted'"]


def test_floats_are_read_exactly(tmp_path: Path, run: Any) -> None:
    value = 0.1 + 0.2
    frame = read_results(write(tmp_path / "results.csv", [run.row("softmax", time_median_s=value)]))
    assert frame["time_median_s"].tolist() == [value]


def test_a_results_folder_stands_for_the_newest_run_of_each_suite(tmp_path: Path, run: Any) -> None:
    for suite, when, label in (
        ("lra", "20261119T080000-cpu", "softmax"),
        ("lra", "20261120T080000-cpu", "local"),
        ("linformer", "20261101T080000-cpu", "linformer"),
    ):
        write(tmp_path / suite / when / "results.csv", [run.row(label, suite=suite)])
    (tmp_path / "lra" / "20261121T080000-cpu").mkdir()  # begun, nothing measured yet
    assert read_results(tmp_path)["label"].tolist() == ["linformer", "local"]
    assert read_results(tmp_path / "lra")["label"].tolist() == ["local"]
    assert read_results(tmp_path / "lra" / "20261119T080000-cpu")["label"].tolist() == ["softmax"]
    assert [path.name for path in find_results(tmp_path)] == ["results.csv", "results.csv"]


def test_several_paths_give_one_table_in_their_order(tmp_path: Path, run: Any) -> None:
    paths = [write(tmp_path / name / "results.csv", [run.row(name)]) for name in ("softmax", "local")]
    frame = read_results(paths[::-1])
    assert frame["label"].tolist() == ["local", "softmax"]
    assert frame.index.tolist() == [0, 1]


def test_each_refusal_is_one_line_that_names_the_file_and_the_remedy(
    tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    good = tuple(COLUMNS)
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "records.jsonl").write_text("")
    (tmp_path / "blank.csv").write_text("")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00,\x80\n")
    write(tmp_path / "columns.csv", rows, tuple(c for c in good if c not in ("time_median_s", "status")))
    write(tmp_path / "schema.csv", [row | {"schema_version": 99} for row in rows])
    write(tmp_path / "number.csv", [rows[0], rows[1] | {"seq_len": "many"}])
    write(tmp_path / "fraction.csv", [rows[0] | {"batch": 1.5}])
    write(tmp_path / "bool.csv", [rows[0] | {"causal": "perhaps"}])
    write(tmp_path / "status.csv", [rows[0] | {"status": "great"}])
    write(tmp_path / "none.csv", [])
    for name, sign in (("semicolons.csv", ";"), ("tabs.csv", "\t")):
        (tmp_path / name).write_text(f"{sign.join(good)}\n{sign.join(['1,5'] * len(good))}\n")
    for name, message in (
        ("missing", "no such file or folder"),
        ("empty", "holds no run"),
        ("begun", "no results.csv yet; continue it"),
        ("blank.csv", "empty file; measure again"),
        ("bytes.csv", "not a CSV table; give a results.csv of attnbench run"),
        ("semicolons.csv:1", "the columns are parted by ';'; part them by commas"),
        ("tabs.csv:1", r"the columns are parted by '\t'; part them by commas"),
        ("columns.csv", "column status, time_median_s missing; measure again"),
        ("schema.csv", "schema_version 99, this attnbench reads 1 to 3"),
        ("number.csv:3", "seq_len is 'many', not a whole number"),
        ("fraction.csv:2", "batch is '1.5', not a whole number"),
        ("bool.csv:2", "causal is 'perhaps', not True or False"),
        ("status.csv", "status 'great' does not exist"),
        ("none.csv", "no row yet; measure first with: attnbench run SUITE"),
    ):
        with pytest.raises(ResultsError) as caught:
            read_results(tmp_path / name.partition(":")[0])
        said = str(caught.value)
        assert name in said
        assert message in said
        assert "\n" not in said


def test_a_table_written_by_a_run_folder_comes_back(tmp_path: Path) -> None:
    from attnbench.contract.problem.shape import Shape
    from attnbench.contract.spec import Spec
    from attnbench.measure.status import Status
    from attnbench.results.record import Record
    from attnbench.results.store import RunFolder
    from attnbench.suite.cell import Cell

    cell = Cell(suite="s", sweep="w", variant=Spec("softmax"), shape=Shape(seq_len=64))
    folder = RunFolder.create(tmp_path / "s" / "20261120T080000-cpu", environment={}, suite_text="")
    longer = replace(cell, shape=Shape(seq_len=128))
    rows = [Record.of(cell, Status.OK, peak_bytes=7), Record.of(longer, Status.OOM, "too big")]
    for row in rows:
        folder.add(row)
    folder.write_csv(rows[::-1])
    frame = read_results(tmp_path)
    assert frame["status"].tolist() == ["oom", "ok"]
    assert frame["seq_len"].tolist() == [128, 64]
    assert frame["compiled"].tolist() == [False, False]
    assert pd.isna(frame["peak_bytes"]).tolist() == [True, False]


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda folder: folder.name)
def test_runs_that_earlier_methods_measured_are_read_and_named_after_their_method(folder: Path) -> None:
    (method,) = set(rows_of(folder.name)["method_version"])
    assert 1 <= method <= METHOD_VERSION
    lines = read_stored(folder / RECORDS).splitlines()
    assert {json.loads(line)["method_version"] for line in lines} == {method}


def test_runs_are_called_by_the_first_folder_that_tells_all_of_them_apart() -> None:
    files = [Path("/x/mine/lra/2026A-cpu/results.csv"), Path("/x/theirs/lra/2026B-cpu/results.csv")]
    assert run_names(files) == ["mine", "theirs"]
    assert run_names([*files, Path("/x/mine/lra/2026C-cpu/results.csv")]) == ["2026A-cpu", "2026B-cpu", "2026C-cpu"]


def test_in_a_folder_with_runs_of_several_suites_each_stands_for_itself(tmp_path: Path, run: Any) -> None:
    for name, suite in (("a", "lra"), ("b", "lra"), ("c", "share")):
        write(tmp_path / "kept" / name / "results.csv", [run.row("softmax", suite=suite)])
    for path in (tmp_path, tmp_path / "kept"):
        assert [file.parent.name for file in find_results(path)] == ["a", "b", "c"]
    (tmp_path / "kept" / "c" / "results.csv").unlink()
    assert [file.parent.name for file in find_results(tmp_path)] == ["b"]


@pytest.mark.parametrize("place", ["s", "s/notes", "."])
def test_a_table_that_somebody_else_put_beside_runs_is_not_taken_for_one(tmp_path: Path, place: str) -> None:
    run = tmp_path / "s" / "20260101T000000Z-cpu"
    run.mkdir(parents=True)
    (run / RECORDS).touch()
    (run / FILE).touch()
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / FILE).write_text("a,b\n1,2\n")
    assert find_results(tmp_path / "s") == find_results(tmp_path) == [run / FILE]
