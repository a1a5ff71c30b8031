"""What ``attnbench export`` writes is read by other programs as what the run stored."""

from __future__ import annotations

import json
import re
import shutil
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attnbench.cli.app import main
from attnbench.cli.compare import _printer as printer
from attnbench.cli.screen import console
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.errors import UsageError
from attnbench.measure.status import Status
from attnbench.results.export.mlflow import log_run, metrics
from attnbench.results.export.tables import Table, as_text, tables_of
from attnbench.results.record import COLUMNS, Record
from attnbench.results.store import RunFolder
from attnbench.suite.cell import Cell
from tests.answers.machines import files, measuring


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


@pytest.mark.parametrize("option", ["--parquet", "--samples", "--mlflow"])
def test_without_the_library_the_extra_is_named_and_nothing_is_written(
    run: Path, tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [one for one in sys.modules if one.partition(".")[0] in ("pyarrow", "mlflow")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("pyarrow", "pyarrow.parquet", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    extra = "mlflow" if option == "--mlflow" else "export"
    before = files(run)
    arguments = [option] if option == "--mlflow" else [option, str(tmp_path / "x.parquet")]
    assert main(["export", str(run), *arguments]) == 2
    assert f"pip install 'attnbench[{extra}]'" in capsys.readouterr().err
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
    assert "holds runs of several suites; give the folder of one run or one suite" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "nothing"), "--format", "latex"]) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "export needs --parquet FILE, --samples FILE, --mlflow or --format"),
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


class Refused(Exception):
    """Stands for MLflow's own."""


class Ledger:
    """Stands for the module mlflow: notes what is logged, and refuses names as MLflow does."""

    exceptions = SimpleNamespace(MlflowException=Refused)

    def __init__(self) -> None:
        self.parameters: dict[str, str] = {}
        self.numbers: dict[tuple[str, int], float] = {}
        self.files: list[str] = []

    @contextmanager
    def start_run(self, run_name: str) -> Any:
        yield SimpleNamespace(info=SimpleNamespace(run_id=f"id of {run_name}"))

    def log_params(self, given: dict[str, str]) -> None:
        assert all(len(value) <= 500 for value in given.values())
        self.parameters = given

    def log_metrics(self, given: dict[str, float], step: int) -> None:
        for name, value in given.items():
            if not re.fullmatch(r"[A-Za-z0-9_\-. :/]{1,250}", name):
                raise Refused(f"invalid name {name}")
            self.numbers[name, step] = value

    def log_table(self, data: dict[str, list[Any]], artifact_file: str) -> None:
        assert len({len(column) for column in data.values()}) == 1
        self.files.append(artifact_file)

    def log_text(self, text: str, artifact_file: str) -> None:
        assert text.startswith("<")
        self.files.append(artifact_file)

    def log_artifact(self, path: str) -> None:
        self.files.append(Path(path).name)


def test_mlflow_gets_one_run_with_a_series_over_n_for_each_variant(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger()
    monkeypatch.setitem(sys.modules, "mlflow", ledger)  # type: ignore[arg-type]
    assert log_run(RunFolder(run), lambda: "<html>") == f"id of {run.name}"
    assert ledger.parameters["processor"] == "AMD EPYC"
    assert ledger.parameters["suite"] == "s"
    assert {n for name, n in ledger.numbers if name == "time_s/softmax"} == {2, 4, 8, 16}
    assert ledger.numbers["time_s/linear", 4] == 4 / 7
    assert ("time_s/linear", 16) not in ledger.numbers  # it failed
    assert ledger.files == ["results.json", "report.html", "results.csv", "environment.json", "suite.yaml"]


def test_the_command_gives_mlflow_a_report_that_nobody_wrote_before(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[str] = []

    class Reading(Ledger):
        def log_text(self, text: str, artifact_file: str) -> None:
            pages.append(text)

    monkeypatch.setitem(sys.modules, "mlflow", Reading())  # type: ignore[arg-type]
    assert main(["export", str(run), "--mlflow"]) == 0
    (page,) = pages
    assert page.startswith("<!doctype html>")
    assert not (run / "report.html").exists()


def test_no_two_rows_share_a_name_in_mlflow() -> None:
    rows = [row("performer:features=64"), row("performer:features=128"), row("performer:features=64", causal=True)]
    rows += [replace(rows[0], cell_id="f" * 16)]
    found = metrics(rows)[64]
    assert len([name for name in found if name.startswith("time_s/")]) == 4
    assert all(re.fullmatch(r"[A-Za-z0-9_\-. :/]+", name) for name in found)


def test_what_mlflow_refuses_is_one_line(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Ledger):
        def log_params(self, given: dict[str, str]) -> None:
            raise Refused("no server")

    monkeypatch.setitem(sys.modules, "mlflow", Broken())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="--mlflow: no server; set MLFLOW_TRACKING_URI to a server, or to file:///"):
        log_run(RunFolder(run), lambda: "<html>")
