"""``attnbench gate`` as a continuous integration meets them: exit codes, one line for bad input, files."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from attnbench.cli.app import main
from attnbench.errors import Exit
from attnbench.results.store import RunFolder
from tests.answers.fixture_runs import Row, environment, write_run

ROWS = [Row(variant, n) for variant in ("softmax", "linear:chunk=16") for n in (1024, 2048)]
SLOWER = [replace(row, seconds=1.3e-3) if row.variant == "softmax" else row for row in ROWS]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs: one to hold others against, good and bad ones, and what is no run at all."""
    folder = tmp_path_factory.mktemp("made")
    write_run(folder / "old", ROWS)
    write_run(folder / "same", ROWS, seed=1)
    write_run(folder / "slower", SLOWER, seed=1)
    write_run(folder / "elsewhere", ROWS, about=environment(processor="Other"))
    write_run(folder / "method", ROWS, about=environment(method=4))
    write_run(folder / "boot", ROWS, seed=1, about=environment(memory_bytes=25_276_063_744))
    write_run(folder / "empty", [])
    write_run(folder / "others", [Row(n=8)])
    RunFolder(shutil.copytree(folder / "old", folder / "schema")).correct({"schema_version": 9})
    damaged = shutil.copytree(folder / "old", folder / "damaged") / "records.jsonl"
    damaged.write_text(damaged.read_text().replace("4096", "4097"))
    (folder / "table.csv").write_text("suite\n")
    return folder


@pytest.fixture
def runs(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of them to stand in."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.mark.usefixtures("runs")
def test_what_is_no_worse_passes_with_0_and_what_is_slower_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", "same", "--against", "old"]) == Exit.OK
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == "passed: nothing is worse beyond doubt"
    assert said.err == ""
    assert main(["gate", "slower", "--against", "old"]) == Exit.FAILED
    said = capsys.readouterr()
    assert said.err == "error: failed: 2 slower\n"
    assert [line.split()[-1] for line in said.out.splitlines() if line.startswith("softmax")] == ["slower"] * 2
    assert "linear" not in said.out
    assert max(map(len, said.out.splitlines())) <= 80


def test_hundreds_of_faster_cells_end_with_0_and_hundreds_of_slower_ones_with_1(tmp_path: Path) -> None:
    rows = [Row(n=n, seconds=1e-3, columns={"peak_bytes": None}) for n in range(1, 301)]
    old = write_run(tmp_path / "old", rows, samples=2)
    new = write_run(tmp_path / "new", [replace(row, seconds=5e-4) for row in rows], samples=2, seed=1)
    assert main(["gate", str(new), "--against", str(old)]) == Exit.OK
    assert main(["gate", str(old), "--against", str(new)]) == Exit.FAILED


@pytest.mark.usefixtures("runs")
def test_a_boot_with_other_kilobytes_of_memory_is_the_same_machine() -> None:
    assert main(["gate", "boot", "--against", "old", "--against", "same"]) == Exit.OK


BAD = [
    (
        "gate same",
        Exit.USAGE,
        "gate needs a run, and --against an older one; for example: attnbench gate NEW --against OLD",
    ),
    ("gate elsewhere --against old", Exit.USAGE, "elsewhere and old differ in processor: Other and Some Processor"),
    ("gate method --against old", Exit.USAGE, "method and old differ in method_version: 4 and 5"),
    ("gate method --against old --other-machine ratios", Exit.USAGE, "method and old differ in method_version"),
    ("gate schema --against old", Exit.USAGE, "schema: schema_version 9, this attnbench reads 1 to 3"),
    ("gate damaged --against old", Exit.CORRUPT, "damaged/records.jsonl:1: this line was changed"),
    ("gate same --against damaged", Exit.CORRUPT, "damaged/records.jsonl:1: this line was changed"),
    ("gate empty --against old", Exit.USAGE, "empty: no row yet; measure first"),
    ("gate nowhere --against old", Exit.USAGE, "nowhere: no such folder"),
    (f"gate {'x' * 5000} --against old", Exit.USAGE, f"{'x' * 199}…: cannot be read (File name too long)"),
    ("gate table.csv --against old", Exit.USAGE, "table.csv: a table alone does not say where"),
    ("gate old --against old", Exit.USAGE, "old is given twice; give each run once"),
    ("gate same --against old --against old/results.csv", Exit.USAGE, "old is given twice"),
    ("gate others --against old", Exit.USAGE, "others and old have no cell in common: they differ in seq_len"),
    *(
        (
            f"gate same --against old {option} {value}",
            Exit.USAGE,
            f"{option} must be a ratio from 1 to 1000000, such as 1.05, not '{value}'; attnbench gate --help",
        )
        for option in ("--fail-above", "--memory-above", "--error-above")
        for value in ("nan", "inf", "-inf", "0.99", "-1", "1e7", "5%")
    ),
    ("gate same --against old --format xml", Exit.USAGE, "--format must be table, markdown, json, junit or action"),
    ("gate same --against old --missing never", Exit.USAGE, "--missing must be fail, warn or ignore, not 'never'"),
    ("gate same --against old --other-machine any", Exit.USAGE, "--other-machine must be refuse or ratios"),
    ("gate same --against old --on speed", Exit.USAGE, "--on 'speed': must be time, memory, error, score or status"),
    ("gate same --against old --on ,", Exit.USAGE, "--on is empty; name time"),
    ("gate same --against old --confirm -1", Exit.USAGE, "--confirm must be at least 0"),
    (
        "gate same --against old --on memory --relative-to softmax",
        Exit.USAGE,
        "--on memory: --other-machine ratios, --relative-to and",
    ),
    ("gate same --against old --on error --as-measured", Exit.USAGE, "--on error: --other-machine"),
    (
        "gate elsewhere --against old --other-machine ratios --on error,status",
        Exit.USAGE,
        "--on error,status: --other-machine ratios, --relative-to and --as-measured judge times; add time",
    ),
    ("gate same --against old --relative-to gla", Exit.USAGE, "--relative-to 'gla': no variant of this name was timed"),
    ("gate same --against old -k gla", Exit.USAGE, "-k 'gla': no cell matches; a cell is called w/softmax/n1024"),
    ("gate same --against old -k (", Exit.USAGE, "-k '(': not words with and, or, not and parentheses"),
    ("gate same --against old --out no/such/file", Exit.CANNOT_CREATE, "cannot write no/such/file: there is no folder"),
]


@pytest.mark.parametrize(("command", "code", "said"), BAD, ids=[command[:60] for command, _, _ in BAD])
def test_bad_input_is_one_line_and_nothing_is_written(
    runs: Path, command: str, code: Exit, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*")}
    extra = [] if "--out" in command or "--against" not in command else ["--out", "written"]
    assert main([*command.split(), *extra]) == code
    told = capsys.readouterr()
    assert told.out == ""
    (line,) = told.err.splitlines()
    assert line.startswith(f"error: {said}")
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*")} == before


@pytest.mark.parametrize("name", ["markdown", "json", "junit", "action", "table"])
def test_a_format_goes_to_stdout_alone_or_to_a_file_beside_the_table(
    runs: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["gate", "slower", "--against", "old", "--format", name]
    assert main(command) == Exit.FAILED
    alone = capsys.readouterr().out
    assert main([*command, "--out", "file"]) == Exit.FAILED
    beside = capsys.readouterr().out
    text = (runs / "file").read_text(encoding="utf-8")
    assert "slower against old" in beside
    if name == "junit":
        assert ElementTree.fromstring(text).find("testsuite") is not None
    if name in ("json", "action"):
        assert json.loads(alone) == json.loads(text)
    elif name != "table":
        assert alone.rstrip() == text.rstrip()
    assert "slower" in text


@pytest.mark.usefixtures("runs")
def test_other_machines_are_compared_by_ratios_if_that_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", "elsewhere", "--against", "old", "--other-machine", "ratios"]) == Exit.OK
    out = capsys.readouterr().out
    assert "another machine: only times are judged, each divided by the time of softmax" in out
    assert "times the old time over that of softmax (median of 2)" in out


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """The rounds that ``--confirm`` has measured; in each a call takes ``AGAIN`` seconds and a little more."""
    asked: list[tuple[str, int, int]] = []

    def more_rounds(path: Path, cells: list[str], rounds: int, **options: object) -> None:
        asked.append((path.name, len(cells), rounds))
        folder = RunFolder(path)
        with folder.lock():
            for cell_id in cells:
                for round_ in range(5, 5 + rounds):
                    taken = [{"seconds": AGAIN * (1 + 1e-3 * round_), "calls": 1} for _ in range(8)]
                    folder.append("samples.jsonl", [{"cell_id": cell_id, "round": round_, "samples": taken}])

    monkeypatch.setattr("attnbench.harness.runner.more_rounds", more_rounds)
    return asked


AGAIN = 1e-3


@pytest.mark.usefixtures("runs")
def test_what_is_slower_is_measured_again_before_the_gate_is_closed(
    asked: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Chance made two cells slower, and new rounds show that they are not."""
    shutil.copytree("slower", "twice")
    shutil.copytree("slower", "once")
    assert main(["gate", "slower", "--against", "old", "--confirm", "3"]) == Exit.OK
    assert asked == [("slower", 2, 3)]
    said = capsys.readouterr()
    assert "2 cells seem slower; 3 more rounds of each" in said.err
    assert "seemed slower, and with 3 more rounds is not beyond doubt" in said.out
    monkeypatch.setattr(f"{__name__}.AGAIN", 1.3e-3)
    assert main(["gate", "twice", "--against", "old", "--confirm", "3"]) == Exit.FAILED
    assert "seemed slower, and with 3 more rounds is beyond doubt" in capsys.readouterr().out
    assert main(["gate", "same", "--against", "old", "--confirm", "3"]) == Exit.OK
    assert len(asked) == 2
    main(["gate", "once", "--against", "old", "--confirm", "1"])
    assert "seemed slower, and with 1 more round is " in capsys.readouterr().out


def test_all_rounds_decide_on_what_the_first_ones_leave_open(
    runs: Path, asked: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    visits = (1.15e-3, 1.35e-3, 1.2e-3, 1.1e-3, 1.4e-3)
    write_run(runs / "open", [replace(row, visits=visits) if row.n == 2048 else row for row in ROWS])
    assert main(["gate", "open", "--against", "old"]) == Exit.OK
    monkeypatch.setattr(f"{__name__}.AGAIN", 1.24e-3)
    assert main(["gate", "open", "--against", "old", "--confirm", "5"]) == Exit.FAILED
    assert asked == [("open", 2, 5)]
    assert capsys.readouterr().err.endswith("error: failed: 2 slower\n")


def test_rounds_before_that_were_slow_do_not_outvote_new_ones_that_are_not(
    runs: Path, asked: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(runs / "late", [replace(row, visits=(1.3e-3,) * 5) if row.n == 2048 else row for row in ROWS])
    monkeypatch.setattr(f"{__name__}.AGAIN", 1.03e-3)
    assert main(["gate", "late", "--against", "old", "--confirm", "1"]) == Exit.OK
    assert asked == [("late", 2, 1)]


def test_an_old_run_of_one_round_fails_no_gate_and_is_not_worth_more_rounds(
    runs: Path, asked: list[tuple[str, int, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(runs / "once", ROWS, rounds=1)
    assert main(["gate", "slower", "--against", "once", "--confirm", "5"]) == Exit.OK
    assert asked == []
    assert "not known: 1 round cannot tell whether a time is worse" in capsys.readouterr().out


@pytest.mark.usefixtures("runs")
def test_the_verdict_is_told_where_the_run_cannot_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", "slower", "--against", "old", "--confirm", "3"]) == Exit.FAILED
    said = capsys.readouterr()
    assert [line.split()[-1] for line in said.out.splitlines() if line.startswith("softmax")] == ["slower"] * 2
    assert "warning: not measured again: slower: measured by another version" in said.err
    assert said.err.splitlines()[-1] == "error: failed: 2 slower"


def test_other_threads_are_told_with_what_to_type(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(runs / "threads", ROWS, about=environment(threads=2))
    assert main(["gate", "threads", "--against", "old"]) == Exit.USAGE
    said = "differ in threads: 2 and 1: measure the new run again with --threads 1, or give --other-machine ratios"
    assert said in capsys.readouterr().err


def test_of_another_method_only_that_is_told_where_ratios_would_allow_the_rest(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(runs / "both", ROWS, about=environment(method=4, processor="Other"))
    assert main(["gate", "both", "--against", "old", "--other-machine", "ratios"]) == Exit.USAGE
    said = capsys.readouterr().err
    assert "differ in method_version: 4 and 5: numbers of two methods" in said
    assert "processor" not in said
    assert main(["gate", "both", "--against", "old"]) == Exit.USAGE
    assert "processor: Other and Some Processor" in capsys.readouterr().err


def test_an_edited_table_is_a_warning(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = runs / "same" / "results.csv"
    table.write_text(table.read_text().replace(",4096,", ",2048,", 1))
    assert main(["gate", "same", "--against", "old"]) == Exit.OK
    assert "warning: same/results.csv:2: not what the run stored" in capsys.readouterr().err


@pytest.mark.usefixtures("runs")
def test_lost_samples_are_a_warning(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "same" / "samples.jsonl").unlink()
    assert main(["gate", "same", "--against", "old"]) == Exit.OK
    assert capsys.readouterr().err == "warning: same: the samples behind 4 of 4 rows are lost\n"
