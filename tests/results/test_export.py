"""What ``attnbench export`` writes is read by other programs as what the run stored."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnbench.cli.app import main
from attnbench.cli.compare import _printer as printer
from attnbench.cli.screen import console
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.measure.status import Status
from attnbench.results.export.tables import Table, as_text, tables_of
from attnbench.results.record import COLUMNS, Record
from attnbench.results.store import RECORDS, TABLE, RunFolder
from attnbench.suite.cell import Cell
from tests.answers.machines import files, measuring
from tests.results.test_scores import row as trained_row


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    with pytest.MonkeyPatch.context() as patch:
        return measuring(folder, patch)(rounds=2, fails=lambda cell: cell.label == "linear/n16")


def row(label: str = "performer", n: int = 64, **columns: Any) -> Record:
    cell = Cell("s", "w", parse_spec(label), Shape(seq_len=n))
    return Record.of(cell, Status.OK, **{"time_median_s": 0.0123, "peak_bytes": 2**20, **columns})


def test_a_parquet_file_has_typed_columns_with_units_and_every_row(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    assert main(["export", str(run), "--parquet", str(tmp_path / "rows.parquet")]) == 0
    table = parquet.read_table(tmp_path / "rows.parquet")
    assert table.column_names == list(COLUMNS)
    kinds = {name: str(table.schema.field(name).type) for name in ("seq_len", "causal", "score", "steps", "status")}
    assert kinds == {"seq_len": "int64", "causal": "bool", "score": "double", "steps": "int64", "status": "string"}
    assert table.column("steps").null_count == table.num_rows == 8  # typed, though no row has a value
    about = {name: table.schema.field(name).metadata for name in ("time_median_s", "peak_bytes", "options", "label")}
    assert about == {
        "time_median_s": {b"unit": b"seconds"},
        "peak_bytes": {b"unit": b"bytes"},
        "options": {b"format": b"json"},
        "label": None,
    }
    stored = RunFolder(run).records()
    for found in table.to_pylist():
        record = stored[found["cell_id"]]
        assert {name: value for name, value in found.items() if name != "seal"} == record.to_json()
    machine = json.loads(table.schema.metadata[b"attnbench.environment"])
    assert machine["environment"]["processor"] == "AMD EPYC"


def test_every_raw_sample_is_a_row_of_a_second_file(run: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert main(["export", str(run), "--samples", str(tmp_path / "samples.parquet")]) == 0
    found = parquet.read_table(tmp_path / "samples.parquet").to_pylist()
    stored = RunFolder(run).samples()
    assert len(found) == sum(len(one) for rounds in stored.values() for one in rounds.values()) == 14
    for one in found:
        assert stored[one["cell_id"]][one["round"]][one["position"]]["seconds"] == one["seconds"]


@pytest.mark.parametrize("option", ["--parquet", "--samples"])
def test_without_the_library_the_extra_is_named_and_nothing_is_written(
    run: Path, tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [one for one in sys.modules if one.partition(".")[0] == "pyarrow"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    before = files(run)
    assert main(["export", str(run), option, str(tmp_path / "x.parquet")]) == 2
    assert "pip install 'attnbench[export]'" in capsys.readouterr().err
    assert files(run) == before
    assert not (tmp_path / "x.parquet").exists()


def test_a_table_has_the_columns_that_say_something_and_a_failed_row_its_reason() -> None:
    rows = [row(), row(n=128), replace(row("linear"), status=Status.OOM, reason="9 GiB", time_median_s=None)]
    (table,) = tables_of(rows)
    assert table.title == "s: w"
    assert list(table.columns) == ["variant", "n", "time", "peak", "note"]
    assert list(table.rows[0]) == ["performer", "64", "12.3 ms", "1.00 MiB", ""]
    assert list(table.rows[2]) == ["linear", "64", "-", "1.00 MiB", "oom: 9 GiB"]
    both = [row(), replace(row(), causal=True)]
    assert list(tables_of(both)[0].columns) == ["variant", "causal", "n", "time", "peak"]


def test_trainings_among_which_no_rate_was_chosen_have_a_line_with_the_reason() -> None:
    (table,) = tables_of([trained_row("linear", 0.5, seed=0, rate=2e-3), trained_row("linear", 0.9, seed=1, rate=8e-3)])
    (line,) = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    assert line["variant"] == "linear"
    assert line["note"] == "no rate chosen: no seed was trained at every rate"


def test_markdown_is_a_table_whatever_is_in_a_cell() -> None:
    text = as_text(Table("a *b*", ["x|y", "n"], [["one\ntwo | <three>", "1"]], right=["n"]), "markdown")
    assert text == "**a \\*b\\***\n\n| x\\|y | n |\n| --- | ---: |\n| one two \\| \\<three\\> | 1 |\n"


def test_latex_escapes_what_it_would_obey() -> None:
    text = as_text(Table("100 %", ["±", "a_b"], [["$x^2 & \\input{y}", "#"]], right=["±"]), "latex")
    assert "\\caption{100 \\%}" in text
    assert "\\begin{tabular}{rl}" in text
    assert "  $\\pm$ & a\\_b \\\\" in text
    assert "  \\$x\\textasciicircum{}2 \\& \\textbackslash{}input\\{y\\} & \\# \\\\" in text


def test_tables_are_printed_or_written(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run), "--format", "markdown"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("**s: w**\n\n| variant | n | time | note |\n")
    assert main(["export", str(run), "--format", "markdown", "--out", str(tmp_path / "t.md")]) == 0
    assert (tmp_path / "t.md").read_text() == printed


def test_an_edited_table_is_a_warning_here_and_where_a_run_is_cited(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / TABLE).write_text((copy / TABLE).read_text().replace("softmax", "softmin", 1))
    for command in (["export", "--format", "latex"], ["cite"]):
        assert main([command[0], str(copy), *command[1:]]) == 0
        said = capsys.readouterr().err
        assert said == f"warning: {copy / TABLE}:2: not what the run stored; the rows of {RECORDS} are used\n"


def test_compare_prints_its_tables_in_the_same_forms(capsys: pytest.CaptureFixture[str]) -> None:
    printer("markdown")(["n", "performer:\nfeatures=16"], [["64", "1 ms ±2%"]], right=["n"], title="\ntime of a")
    assert capsys.readouterr().out == (
        "\n**time of a**\n\n| n | performer:features=16 |\n| ---: | --- |\n| 64 | 1 ms ±2% |\n\n"
    )
    printer("latex")(["n"], [["64"]])
    assert "\\begin{tabular}{l}" in capsys.readouterr().out
    assert printer("table") is console.table


def test_a_folder_of_several_suites_is_refused_and_that_of_one_is_its_newest_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run.parent), "--format", "latex"]) == 0
    for suite in ("s", "t"):
        shutil.copytree(run, tmp_path / suite / run.name)
    capsys.readouterr()
    assert main(["export", str(tmp_path), "--format", "latex"]) == 2
    assert "holds runs of several suites (s, t); give the folder of one run or one suite" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "nothing"), "--format", "latex"]) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "export needs --parquet FILE, --samples FILE or --format"),
        (["--out", "t.md"], "--out is for tables"),
        (["--format", "html"], "--format must be markdown or latex, not 'html'"),
    ],
)
def test_what_export_cannot_do_is_one_line(
    run: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
