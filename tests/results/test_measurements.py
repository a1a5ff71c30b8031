from __future__ import annotations

import re
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from attnbench.answers.gate.decide import GateQuestion, decide, read_runs
from attnbench.cli.app import main
from attnbench.errors import CorruptResults, ResultsError, UsageError
from attnbench.measure.machine import class_facts, machine_class
from attnbench.measure.status import Status
from attnbench.results.key import NAMES, key_of
from attnbench.results.measurements import differing_facts, load
from attnbench.results.merge import merge
from attnbench.results.record import Record
from attnbench.results.store import SAMPLES, RunFolder
from attnbench.version import __version__
from tests.answers.fixture_runs import Row, environment, write_run

REFERENCE = Path(__file__).parents[2] / "results/reference"


def test_every_column_that_says_what_was_measured_is_in_the_key_or_named_here_as_left_out() -> None:
    names = [field.name for field in fields(Record)]
    identity = set(names[: names.index("status")])
    about_the_variant = {"label", "family", "target", "cost", "claimed_time_exponent", "claimed_memory_exponent"}
    about_the_run = {"suite", "sweep", "cell_id", "device"}
    of_models_and_trainings = {"task", "layers", "ffn", "positions", "protocol", "steps", "learning_rate"}
    expected = (identity - about_the_variant - about_the_run) | of_models_and_trainings
    expected |= {"process", "threads", "pretrain_steps", "guide", "model"}
    assert set(NAMES) == expected


def test_a_key_is_the_same_in_another_suite_and_sweep_and_whatever_the_order_of_options() -> None:
    one = Record.of(Row().cell("a"), Status.OK)
    other = Record.of(replace(Row().cell("b"), sweep="v"), Status.OK, options='{"b": 1, "a": 2}')
    assert one.cell_id != other.cell_id
    assert key_of(replace(one, options='{"a": 2, "b": 1}')) == key_of(other)
    assert key_of(replace(one, options='{"a": 2, "b": 2}')) != key_of(other)
    assert key_of(replace(one, options="no JSON")).to_json()["options"] == "no JSON"


@pytest.mark.parametrize("column", [name for name in NAMES if name != "options"])
def test_rows_that_differ_in_any_column_of_the_key_are_apart(column: str) -> None:
    one = Record.of(Row().cell("a"), Status.OK)
    assert key_of(one) != key_of(replace(one, **{column: "other"}))


def test_a_run_is_read_by_its_folder_by_its_table_and_by_the_folder_of_its_suite(tmp_path: Path) -> None:
    write_run(tmp_path / "s" / "20260101T000000Z-cpu", [Row()])
    newest = write_run(tmp_path / "s" / "20260102T000000Z-cpu", [Row(), Row(n=128)])
    for path in (newest, newest / "results.csv", tmp_path / "s", tmp_path):
        assert (load(path).path, len(load(path).rows)) == (newest, 2)
    assert load(newest).name == "20260102T000000Z-cpu"
    assert load(newest).doubts == ()


def test_of_two_rows_with_one_key_the_one_with_more_samples_counts_and_gets_what_only_the_other_has(
    tmp_path: Path,
) -> None:
    few, many = Row(seconds=1e-3), Row(seconds=2e-3, sweep="again", columns={"time_samples": 40})
    few.columns = {"time_samples": 7}
    errors = Row(sweep="errors", seconds=None, peak=None, error=0.5)
    run = load(write_run(tmp_path / "run", [few, many, errors]))
    (row,) = run.rows.values()
    assert row.sweep == "again"
    assert row.rel_error == 0.5
    assert row.peak_bytes == 4096
    assert set(run.samples[row.cell_id]) == set(range(5))


def test_a_time_of_one_visit_gets_no_interval_of_another_row(tmp_path: Path) -> None:
    one = Row(sweep="again", visits=(2e-3,))
    (row,) = load(write_run(tmp_path / "run", [Row(columns={"time_samples": 7}), one])).rows.values()
    assert (row.sweep, row.time_median_s, row.time_ci_low_s, row.time_ci_high_s) == ("again", 2e-3, None, None)


def test_a_failed_row_does_not_hide_one_that_is_ok_and_an_interrupted_one_is_no_row(tmp_path: Path) -> None:
    oom = Row(status=Status.OOM, reason="too little", sweep="v")
    stopped = Row("linear", status=Status.INTERRUPTED)
    run = load(write_run(tmp_path / "run", [oom, Row(), stopped]))
    assert [(row.variant, row.status) for row in run.rows.values()] == [("softmax", Status.OK)]


@pytest.mark.parametrize(
    ("fact", "other", "said"),
    [
        ("processor", "Other", "processor: Some Processor and Other"),
        ("cores", 4, "cores: 2 and 4"),
        ("instructions", "AVX512 amx_bf16", "instructions: AVX512 avx512f and AVX512 amx_bf16"),
        ("system", "Darwin arm64", "system: Linux x86_64 and Darwin arm64"),
        ("torch", "2.14.0+cpu", "torch: 2.13 and 2.14"),
        ("float32_products", "oneDNN", "float32_products: default and oneDNN"),
        ("window_products", "oneDNN", "window_products: default and oneDNN"),
        ("process", "as-shipped", "process: tuned and as-shipped"),
        ("threads", 2, "threads: 1 and 2"),
        ("method", 4, "method_version: 5 and 4"),
        ("memory_bytes", 16 * 2**30, "memory: 23.5 GiB and 16.0 GiB"),
    ],
)
def test_each_fact_that_keeps_two_runs_apart_is_named(tmp_path: Path, fact: str, other: object, said: str) -> None:
    about = environment(**{fact: other})
    ours, theirs = load(write_run(tmp_path / "a", [Row()])), load(write_run(tmp_path / "b", [Row()], about=about))
    assert differing_facts(ours, theirs) == [said]
    same_class = fact in ("method", "memory_bytes", "float32_products", "window_products")
    assert (ours.machine_class == theirs.machine_class) is same_class


@pytest.mark.parametrize(
    "boot", [{"memory_bytes": 25_276_063_744}, {"torch": "2.13.1+cpu"}, {"python": "3.11.99"}], ids=str
)
def test_another_boot_and_patches_of_torch_and_python_are_the_same_machine(
    tmp_path: Path, boot: dict[str, object]
) -> None:
    ours = load(write_run(tmp_path / "a", [Row()]))
    theirs = load(write_run(tmp_path / "b", [Row()], about=environment(**boot)))
    assert differing_facts(ours, theirs) == []
    assert ours.machine_class == theirs.machine_class


def test_libraries_that_an_older_run_does_not_tell_keep_nothing_apart(tmp_path: Path) -> None:
    about = {name: fact for name, fact in environment().items() if name != "window_products"}
    older = load(write_run(tmp_path / "old", [Row()], about=about))
    newer = load(write_run(tmp_path / "new", [Row()], about=environment(window_products="oneDNN")))
    assert differing_facts(newer, older) == differing_facts(older, newer) == []


def test_instructions_that_an_older_run_does_not_tell_keep_nothing_apart(tmp_path: Path) -> None:
    described = {name: fact for name, fact in environment()["environment"].items() if name != "instructions"}
    older = load(write_run(tmp_path / "old", [Row()], about={**environment(), "environment": described}))
    newer = load(write_run(tmp_path / "new", [Row()]))
    assert differing_facts(newer, older) == differing_facts(older, newer) == []
    assert newer.machine_class != older.machine_class


def test_variables_that_change_arithmetic_keep_two_runs_apart_wherever_these_are_compared(tmp_path: Path) -> None:
    there = {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1", "PYTORCH_API_TOKEN": "s3cret"}
    plain = write_run(tmp_path / "a", [Row()], about={**environment(), "variables": {"OMP_NUM_THREADS": "1"}})
    limited = write_run(tmp_path / "b", [Row()], about={**environment(), "variables": there})
    older = write_run(tmp_path / "c", [Row()])
    said = "variable ATEN_CPU_CAPABILITY: unset and default"
    assert differing_facts(load(plain), load(limited)) == [said]
    assert differing_facts(load(plain), load(older)) == differing_facts(load(older), load(limited)) == []
    with pytest.raises(UsageError, match=f"differ in {said}: measure the new run again with these variables"):
        decide(load(plain), [load(limited)], GateQuestion())
    with pytest.raises(UsageError, match=said):
        merge([plain, limited], tmp_path / "both")


def test_another_python_keeps_two_runs_apart_wherever_these_are_compared(tmp_path: Path) -> None:
    ours = write_run(tmp_path / "a", [Row()], about=environment(python="3.11.7"))
    theirs = write_run(tmp_path / "b", [Row()], about=environment(python="3.12.1"))
    said = "python: 3.11 and 3.12"
    assert differing_facts(load(ours), load(theirs)) == [said]
    assert load(ours).machine_class == load(theirs).machine_class
    with pytest.raises(UsageError, match=f"differ in {said}: measure both with one version of Python"):
        decide(load(ours), [load(theirs)], GateQuestion())
    with pytest.raises(UsageError, match=said):
        merge([ours, theirs], tmp_path / "both")
    older = write_run(tmp_path / "c", [Row()], about=environment(python="3.12.1", torch="2.9.1"))
    with pytest.raises(UsageError, match="measure both with one version of torch and Python, or give"):
        decide(load(ours), [load(older)], GateQuestion())


def test_versions_that_keep_no_runs_apart_are_said_wherever_these_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def written(day: int, python: str, numpy: str, taken: str, **more: Any) -> Path:
        about = {**environment(python=python, numpy=numpy), "libraries": {"performer-pytorch": taken}, **more}
        return write_run(tmp_path / "s" / f"2026030{day}T120000Z-cpu", [Row()], seed=day, about=about)

    def told(*words: str) -> str:
        assert main([*words]) == 0
        return " ".join(capsys.readouterr().out.split())

    ours = written(1, "3.11.7", "2.4.6", "1.1.4", plugins={"peers": "0.1", "mine.py": "0123456789abcdef"})
    theirs = written(2, "3.11.9", "2.3.5", "1.1.5", plugins={"peers": "0.2", "mine.py": "fedcba9876543210"})
    assert differing_facts(load(ours), load(theirs)) == []
    said = "python: 3.11.9 and 3.11.7; numpy: 2.3.5 and 2.4.6; performer-pytorch: 1.1.5 and 1.1.4; peers: 0.2 and 0.1"
    for words in (["diff", ours, theirs], ["gate", theirs, "--against", ours, "--format", "markdown"]):
        assert f"other versions now and before: {said} " in told(*map(str, words))
    assert "2026-03-02: other versions than in the run before: python: 3.11.7 and 3.11.9; numpy: 2.4.6 and 2.3.5" in (
        told("history", str(tmp_path / "s"))
    )
    older = write_run(tmp_path / "older", [Row()], seed=3)
    assert "other versions now and before: python: 3.11.9 and 3.11.7 0 of" in told("diff", str(older), str(theirs))
    assert "other versions" not in told("diff", str(older), str(ours))


def test_other_rules_of_timing_are_said_and_rounds_are_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def written(name: str, **rules: Any) -> str:
        return str(write_run(tmp_path / name, [Row()], seed=len(name), about={**environment(), "rules": rules}))

    old = written("old", min_time=0.5, quick=False, rounds=5)
    older, new = (
        written("older", min_time=0.5, quick=False, rounds=3),
        written("new run", min_time=0.1 + 0.2, quick=True),
    )
    assert main(["gate", new, "--against", old, "--against", older]) == 0
    said = "other rules of timing now and before: min_time: 0.3 and 0.5; quick: True and False\n"
    assert capsys.readouterr().out.count(said) == 1
    assert main(["diff", old, older]) == 0
    assert "other rules" not in capsys.readouterr().out


def test_a_merged_run_says_which_versions_of_libraries_it_mixes(tmp_path: Path) -> None:
    ours, theirs = (
        write_run(tmp_path / name, [Row()], seed=place, about=environment(numpy=name))
        for place, name in enumerate(("2.4.6", "2.3.5"))
    )
    found = merge([ours, theirs], tmp_path / "both").notes
    assert found[-1] == f"{ours} and {theirs}: other versions: numpy: 2.4.6 and 2.3.5"


def test_a_run_is_not_held_against_its_own_copy(tmp_path: Path) -> None:
    run, copy = write_run(tmp_path / "a", [Row()]), tmp_path / "copy"
    shutil.copytree(run, copy)
    with pytest.raises(UsageError, match=f"{copy} is a copy of {run}, or both hold rows of one run; give another run"):
        read_runs([run, copy])


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({"attnbench": "9.9"}, f"attnbench {__version__} and 9.9"),
        ({"sources": {"attnbench": ["other", ""]}}, "contents of attnbench's own code"),
        ({"sources": {"~/side.py": ["other", ""]}}, "contents of ~/side.py"),
    ],
    ids=str,
)
def test_runs_of_two_programs_are_not_merged(tmp_path: Path, there: dict[str, Any], said: str) -> None:
    here = {"attnbench": __version__, "sources": {"attnbench": ["one", ""], "~/side.py": ["one", ""]}}
    ours = write_run(tmp_path / "a", [Row()], about={**environment(), **here})
    theirs = write_run(tmp_path / "b", [Row()], about={**environment(), **here, **there})
    with pytest.raises(UsageError, match=re.escape(said)):
        merge([ours, theirs], tmp_path / "both")


def test_two_gpus_of_one_kind_are_one_class_and_their_own_memory_counts() -> None:
    about = environment(device="cuda", gpu="H", gpu_memory_bytes=80, cuda="13.0")
    second = environment(device="cuda:1", gpu="H", gpu_memory_bytes=80, cuda="13.0", memory_bytes=1)
    assert machine_class(about) == machine_class(second)
    assert class_facts(about)["processor"] == "H"
    assert machine_class(about) != machine_class(environment(device="cuda", gpu="H", cuda="12.8"))


def test_the_committed_runs_of_two_boots_are_one_machine_by_class_and_two_by_id() -> None:
    score, rates = load(REFERENCE / "score-cpu"), load(REFERENCE / "score-rates")
    assert differing_facts(score, rates) == []
    old, new = load(REFERENCE / "peers-cpu"), load(REFERENCE / "headline-cpu")
    assert old.environment["machine_id"] != new.environment["machine_id"]
    assert old.machine_class == new.machine_class
    assert differing_facts(old, new) == ["method_version: 4 and 5"]


@pytest.mark.parametrize("run", sorted(path.parent.name for path in REFERENCE.glob("*/suite.yaml")))
def test_every_committed_run_can_be_read(run: str) -> None:
    read = load(REFERENCE / run)
    assert read.rows
    assert read.doubts == ()


def test_what_is_no_run_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "table.csv").write_text("suite\n")
    for name in ("a", "b"):
        write_run(tmp_path / "several" / name / "run", [Row()])
    for name in ("x", "y"):
        write_run(tmp_path / "collected" / name, [Row()], suite=f"of {name}")
    write_run(tmp_path / "no-row", [])
    RunFolder(write_run(tmp_path / "future", [Row()])).correct({"schema_version": 9})
    said = {
        "nowhere": "no such folder; give a folder written by attnbench run",
        "empty": "holds no run; measure first",
        "table.csv": "a table alone does not say where it was measured",
        "several": r"holds runs of several suites \(a, b\); give the folder of one run",
        "collected": r"holds runs of several suites \(of x, of y\); give the folder of one run",
        "no-row": "no row yet; measure first",
        "future": "schema_version 9, this attnbench reads 1 to 3; use the attnbench that wrote it",
    }
    for name, words in said.items():
        with pytest.raises(ResultsError, match=words):
            load(tmp_path / name)


def test_an_edited_table_is_told_and_the_rows_of_the_run_are_read(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [Row(), Row(n=128)])
    assert load(run).doubts == ()
    table = run / "results.csv"
    table.write_text(table.read_text().replace(",4096,", ",2048,", 1))
    read = load(run)
    assert read.doubts == (f"{table}:2: not what the run stored; the rows of records.jsonl are used",)
    assert {row.peak_bytes for row in read.rows.values()} == {4096}


def test_damage_is_refused_and_lost_samples_are_told(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [Row(), Row(n=128)])
    (run / SAMPLES).unlink()
    read = load(run)
    assert read.doubts == (f"{run}: the samples behind 2 of 2 rows are lost",)
    assert read.samples == {}
    text = (run / "records.jsonl").read_text()
    (run / "records.jsonl").write_text(text.replace("4096", "4097"))
    with pytest.raises(CorruptResults):
        load(run)
    (run / "environment.json").unlink()
    with pytest.raises(CorruptResults):
        load(run)
