"""Runs of one suite on several machines become one run, or are refused with what differs."""

from __future__ import annotations

import json
import lzma
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnbench.answers.board.entries import submit
from attnbench.answers.gate.decide import read_runs
from attnbench.cli.app import main
from attnbench.errors import AttnbenchError, CannotCreate, CorruptResults, ResultsError, UsageError
from attnbench.measure.status import Status
from attnbench.results.audit import audit
from attnbench.results.manifest import read_manifest, write_manifest
from attnbench.results.measurements import load
from attnbench.results.merge import merge
from attnbench.results.read import read_results
from attnbench.results.runs import find_runs
from attnbench.results.store import ENVIRONMENT, FAILURES, RECORDS, TABLE, RunFolder
from attnbench.suite.cell import Cell
from attnbench.suite.shard import Shard
from tests.answers.machines import facts, files, measuring, state


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    return measuring(tmp_path, monkeypatch)


def refused(tmp_path: Path, runs: list[Path], kind: type[AttnbenchError] = UsageError) -> str:
    before = files(tmp_path)
    with pytest.raises(kind) as caught:
        merge(runs, tmp_path / "all")
    assert files(tmp_path) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_shards_of_two_machines_become_one_run_with_every_row_as_it_was(
    tmp_path: Path, measure: Callable[..., Path]
) -> None:
    parts = [measure(shard=Shard(0, 2)), measure(state(1), shard=Shard(1, 2))]
    before = {record.cell_id: record for part in parts for record in RunFolder(part).records().values()}
    merged = merge(parts, tmp_path / "all")
    assert merged.notes == []
    assert [count for _, _, count in merged.parts] == [4, 4]
    after = RunFolder(tmp_path / "all").records()
    assert {name: row.to_json() for name, row in after.items()} == {name: row.to_json() for name, row in before.items()}
    assert {row.machine_id for row in after.values()} == {state(0)["machine_id"], state(1)["machine_id"]}
    machines = merged.folder.environment["machines"]
    assert [(one["machine_id"], one["folder"], one["noise_floor"]) for one in machines] == [
        (state(0)["machine_id"], parts[0].name, 0.01),
        (state(1)["machine_id"], parts[1].name, 0.01),
    ]
    assert [one["matmul_rate"]["float32"] for one in machines] == [2e11, 2e11]


def test_a_merged_run_is_read_like_any_other_and_its_machines_share_a_series(
    tmp_path: Path, measure: Callable[..., Path]
) -> None:
    parts = [measure(shard=Shard(0, 2)), measure(state(1), shard=Shard(1, 2))]
    folder = merge(parts, tmp_path / "all").folder
    said: list[str] = []
    frame = read_results(folder.path, warn=said.append)
    assert (len(frame), said) == (8, [])
    assert set(frame["machine_id"]) == {f"{state(0)['machine_id']} and 1 more"}
    whole = load(measure())
    assert load(folder.path).rows.keys() == whole.rows.keys()
    assert load(folder.path).machine_class == whole.machine_class
    assert {len(rounds) for rounds in load(folder.path).samples.values()} == {2}
    assert folder.doubts() == []
    assert len(folder.history()) == 8


def test_rows_of_a_merged_run_stand_in_the_order_of_the_suite(tmp_path: Path, measure: Callable[..., Path]) -> None:
    folder = merge([measure(state(i), shard=Shard(i, 3)) for i in (2, 0, 1)], tmp_path / "all").folder
    expected = [(name, n) for name in ("softmax", "linear") for n in (2, 4, 8, 16)]
    assert [(row.label, row.seq_len) for row in folder.in_order()] == expected
    assert [row["label"] for _, row in read_results(folder.path).iterrows()] == [name for name, _ in expected]


def test_a_merged_run_may_be_merged_again(tmp_path: Path, measure: Callable[..., Path]) -> None:
    first, second, third = (measure(state(i), shard=Shard(i, 3)) for i in range(3))
    two = merge([first, second], tmp_path / "two")
    assert two.notes == ["without shard 2/3: it was not given, or is empty"]
    three = merge([tmp_path / "two", third], tmp_path / "three")
    assert three.notes == []
    assert [one["machine_id"] for one in three.folder.environment["machines"]] == [
        state(i)["machine_id"] for i in range(3)
    ]
    assert len(three.folder.records()) == 8


def test_runs_that_were_handed_in_become_one_run_also_with_a_whole_one(
    tmp_path: Path, measure: Callable[..., Path]
) -> None:
    *parts, whole = (measure(state(i), shard=Shard(i, 3), rounds=max(1, i)) for i in range(3))
    handed_in = [submit(part, tmp_path / part.name)[0] for part in parts]
    two = merge(handed_in, tmp_path / "two")
    assert (two.notes, audit(tmp_path / "two").findings) == (["without shard 2/3: it was not given, or is empty"], [])
    merged = merge([tmp_path / "two", whole], tmp_path / "three")
    assert (merged.notes, audit(tmp_path / "three").findings) == ([], [])
    rows, samples = merged.folder.records(), merged.folder.samples()
    assert (len(rows), samples) == (8, RunFolder(whole).samples())
    cell_id = next(iter(samples))
    one_lost = {**samples, cell_id: {0: samples[cell_id][0]}}
    assert merged.folder.without_samples(rows.values(), one_lost) == [rows[cell_id]]


def test_failed_cells_keep_their_reason_and_their_stderr(tmp_path: Path, measure: Callable[..., Path]) -> None:
    crashing = measure(shard=Shard(0, 2), fails=lambda cell: cell.variant.name == "linear")
    folder = merge([crashing, measure(state(1), shard=Shard(1, 2))], tmp_path / "all").folder
    failed = {row.cell_id for row in folder.records().values() if row.status is Status.CRASH}
    told = [json.loads(line) for line in (folder.path / FAILURES).read_text().splitlines()]
    assert len(failed) == 2
    assert {row["cell_id"] for row in told} == failed
    assert all(row["stderr"] == ["the last line"] for row in told)


def test_of_a_cell_that_one_machine_measured_twice_the_row_with_more_rounds_is_kept(
    tmp_path: Path, measure: Callable[..., Path]
) -> None:
    more, fewer = measure(rounds=3), measure(rounds=2, select="softmax")
    for runs in ([more, fewer], [fewer, more]):
        merged = merge(runs, tmp_path / f"all-{runs[0].parents[1].name}")
        assert merged.notes == [
            "4 cells are in two runs of one machine; of equal outcomes, those of the run with more measured variants, "
            "then more rounds, then given first are kept"
        ]
        assert {row.time_rounds for row in merged.folder.records().values()} == {3}
        assert {len(rounds) for rounds in merged.folder.samples().values()} == {3}
        assert {path: count for path, _, count in merged.parts} == {more: 8, fewer: 0}


def test_rows_that_are_compared_come_from_one_run_of_a_machine_that_measured_them_twice(
    tmp_path: Path, measure: Callable[..., Path]
) -> None:
    whole, again, part = measure(), measure(), measure(select="linear", rounds=3)
    failed = measure(rounds=3, fails=lambda cell: cell.variant.name == "linear")
    mixed = measure()
    with (folder := RunFolder(mixed)).lock():
        for row in [row for row in folder.in_order() if row.label == "linear"]:
            (one, *_) = folder.samples()[row.cell_id].values()
            folder.add(replace(row, time_rounds=3), {"cell_id": row.cell_id, "round": 2, "samples": one})
        folder.conclude()
    later = measure()
    cases = [(whole, [whole, again]), (again, [again, whole])]
    for kept, other in [(whole, part), (whole, failed), (mixed, later), (mixed, whole)]:
        cases += [(kept, [kept, other]), (kept, [other, kept])]
    for number, (kept, runs) in enumerate(cases):
        merged = merge(runs, tmp_path / str(number))
        assert {path for path, _, count in merged.parts if count} == {kept}


def test_a_cell_that_two_machines_measured_is_refused_and_named(tmp_path: Path, measure: Callable[..., Path]) -> None:
    said = refused(tmp_path, [measure(), measure(state(1), select="softmax and n2")])
    assert said.startswith("softmax n=2 (cell ")
    assert "was measured on two machines" in said


def test_what_an_interrupted_run_left_is_taken_from_the_machine_that_measured_it(
    tmp_path: Path, measure: Callable[..., Path]
) -> None:
    def interrupt(cell: Cell) -> bool:
        if cell.variant.name == "linear" and cell.shape.N == 16:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        measure(select="n16", rounds=1, fails=interrupt)
    (stopped,) = (tmp_path / "runs").rglob(RECORDS)
    assert Status.INTERRUPTED in {row.status for row in RunFolder(stopped.parent).records().values()}
    rest = measure(state(1), select="linear", rounds=1)
    merged = merge([stopped.parent, rest], tmp_path / "all")
    rows = merged.folder.records().values()
    assert {row.status for row in rows} == {Status.OK}
    in_two = [note for note in merged.notes if "between these" in note]
    both = {row.machine_id for row in rows if row.seq_len == 16}
    assert in_two == ["in 1 setting variants were timed on two machines, so their ratios are between these"] * (
        len(both) > 1
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"described": facts(processor="Intel")}, "processor AMD EPYC and Intel"),
        ({"described": facts(cores=4)}, "cores 2 and 4"),
        ({"described": facts(torch="2.13.1")}, "torch 2.13.0 and 2.13.1"),
        (
            {"float32_products": "MKL"},
            "float32_products: oneDNN and MKL: a probe chose otherwise; measure it again with",
        ),
        ({"process": "as-shipped"}, "process tuned and as-shipped"),
    ],
)
def test_machines_of_two_classes_are_refused_with_what_differs(
    tmp_path: Path, measure: Callable[..., Path], changes: dict[str, Any], said: str
) -> None:
    runs = [measure(shard=Shard(0, 2)), measure(state(1, **changes), shard=Shard(1, 2))]
    assert said in refused(tmp_path, runs)


def test_other_options_of_the_run_are_refused_with_what_differs(tmp_path: Path, measure: Callable[..., Path]) -> None:
    first = measure(shard=Shard(0, 2))
    assert "threads 2 and 1" in refused(tmp_path, [first, measure(shard=Shard(1, 2), threads=1)])
    assert "rule quick False and True" in refused(tmp_path, [first, measure(shard=Shard(1, 2), quick=True)])
    assert "rule min_time 0.5 and 0.1" in refused(tmp_path, [first, measure(shard=Shard(1, 2), min_time=0.1)])
    axes = measure(shard=Shard(1, 2), overrides={"heads": "4"})
    assert "only runs of one suite" in refused(tmp_path, [first, axes])


def test_memories_within_5_percent_pass_and_others_are_refused(tmp_path: Path, measure: Callable[..., Path]) -> None:
    first = measure(shard=Shard(0, 2))
    near = measure(state(1, facts(memory_bytes=26_500_000_000)), shard=Shard(1, 2))
    far = measure(state(1, facts(memory_bytes=26_700_000_000)), shard=Shard(1, 2))
    assert "memory of" in (said := refused(tmp_path, [first, far]))
    assert "more than 5% apart" in said
    assert merge([first, near], tmp_path / "all").notes == []


def test_rates_that_one_machine_measured_twice_may_differ_by_noise(
    tmp_path: Path, measure: Callable[..., Path]
) -> None:
    slow = {"copy_rates": [[262_144, 2.7e10]]}  # half as fast as usual
    first, again = measure(shard=Shard(0, 2)), measure(state(**slow), shard=Shard(1, 2))
    elsewhere = measure(state(1, **slow), shard=Shard(1, 2))
    assert "copy rate of 256 KiB of" in refused(tmp_path, [first, elsewhere])
    assert len(merge([first, again], tmp_path / "all").folder.records()) == 8


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ({"matmul_rate": {"float32": 2.3e11}}, "matmul rate in float32"),
        ({"copy_rates": [[262_144, 4.4e10]]}, "copy rate of 256 KiB"),
    ],
)
def test_of_several_machines_the_one_with_other_rates_is_named(
    tmp_path: Path, measure: Callable[..., Path], rates: dict[str, Any], said: str
) -> None:
    near = {"matmul_rate": {"float32": 2.1e11, "bfloat16": 1e12}, "copy_rates": [[262_144, 4.8e10]]}
    runs = [
        measure(shard=Shard(0, 3)),
        measure(state(1, **rates), shard=Shard(1, 3)),
        measure(state(2, **near), shard=Shard(2, 3)),
    ]
    message = refused(tmp_path, runs)
    assert message.startswith(f"{said} is ")
    assert f"{runs[1]} is the odd one" in message
    assert len(merge(runs, tmp_path / "all", rates_within=0.2).folder.records()) == 8


def test_a_run_given_twice_and_a_copy_of_a_run_are_refused(tmp_path: Path, measure: Callable[..., Path]) -> None:
    run = measure()
    assert "is given twice" in refused(tmp_path, [run, run])
    assert "is given twice" in refused(tmp_path, [run, run / ".." / run.name])
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    assert f"{copy} is a copy of {run}" in refused(tmp_path, [run, copy])
    assert "two runs or more, and one is given" in refused(tmp_path, [run])


def test_a_merged_run_is_no_new_run_beside_its_own_parts(tmp_path: Path, measure: Callable[..., Path]) -> None:
    first, second, third = (measure(shard=Shard(i, 3)) for i in range(3))
    facts = read_manifest(third / ENVIRONMENT)
    write_manifest(third / ENVIRONMENT, {**facts, "machines": [{"host": "a"}, {"host": "b"}]})  # as an engine does
    two = merge([first, second], tmp_path / "two").folder.path
    three = merge([two, third], tmp_path / "three").folder.path
    other = merge([second, third], tmp_path / "other").folder.path
    for runs in ([two, first], [first, two], [three, first], [two, three], [three, third], [two, other]):
        said = f"{runs[1]} is a copy of {runs[0]}, or both hold rows of one run; give another run"
        assert said == refused(tmp_path, runs)
        with pytest.raises(UsageError, match=re.escape(said)):
            read_runs(runs)
    assert main(["gate", str(three), "--against", str(first)]) == 2
    assert main(["history", str(three), str(first)]) == 2
    assert read_runs([two, third])


def test_a_damaged_run_is_refused_with_its_place(tmp_path: Path, measure: Callable[..., Path]) -> None:
    first, second = measure(shard=Shard(0, 2)), measure(state(1), shard=Shard(1, 2))
    rows = (second / RECORDS).read_text()
    (second / RECORDS).write_text(rows.replace('"seq_len": 8', '"seq_len": 9', 1))
    assert f"{second / RECORDS}:" in refused(tmp_path, [first, second], CorruptResults)
    (second / RECORDS).write_text(rows)
    environment = (second / ENVIRONMENT).read_text()
    (second / ENVIRONMENT).write_text(environment.replace("AMD", "IBM"))
    assert str(second / ENVIRONMENT) in refused(tmp_path, [first, second], CorruptResults)
    (second / ENVIRONMENT).write_text(environment)
    suite = (second / "suite.yaml").read_bytes()
    (second / "suite.yaml").write_text("name: t\n")
    assert str(second / "suite.yaml") in refused(tmp_path, [first, second], CorruptResults)
    (second / "suite.yaml").unlink()
    facts = read_manifest(second / ENVIRONMENT)
    write_manifest(second / ENVIRONMENT, {name: one for name, one in facts.items() if name != "suite_digest"})
    assert f"{second / 'suite.yaml'}: No such file" in refused(tmp_path, [first, second], CorruptResults)
    (second / "suite.yaml.xz").write_bytes(lzma.compress(suite))
    assert len(merge([first, second], tmp_path / "all").folder.records()) == 8


def test_an_edited_table_is_told_and_its_rows_are_those_that_were_stored(
    tmp_path: Path, measure: Callable[..., Path]
) -> None:
    runs = [measure(shard=Shard(i, 2)) for i in range(2)]
    table = runs[1] / TABLE
    table.write_text(table.read_text().replace("softmax", "softmin", 1))
    merged = merge(runs, tmp_path / "all")
    assert merged.notes == [f"{table}:2: not what the run stored; the rows of {RECORDS} are used"]
    assert {row.label for row in merged.folder.in_order()} == {"softmax", "linear"}


def test_a_row_of_a_third_machine_is_foreign_to_a_merged_run(tmp_path: Path, measure: Callable[..., Path]) -> None:
    merge([measure(shard=Shard(0, 2)), measure(state(1), shard=Shard(1, 2))], tmp_path / "all")
    folder = RunFolder(tmp_path / "all")
    (row, *_) = folder.records().values()
    row.machine_id = "m2"
    folder.add(row)
    with pytest.raises(CorruptResults, match=r"machine_id is 'm2', but '.* and 1 more' for this run"):
        RunFolder(tmp_path / "all").history()


def test_what_is_no_run_and_a_folder_that_exists_are_refused(tmp_path: Path, measure: Callable[..., Path]) -> None:
    first, second = measure(shard=Shard(0, 2)), measure(state(1), shard=Shard(1, 2))
    assert "no records.jsonl here" in refused(tmp_path, [first, tmp_path / "nothing"], ResultsError)
    (tmp_path / "all").mkdir()
    assert "it exists" in refused(tmp_path, [first, second], CannotCreate)


def test_a_merge_that_was_killed_is_not_in_the_way_of_the_next(
    tmp_path: Path, measure: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [measure(shard=Shard(0, 2)), measure(state(1), shard=Shard(1, 2))]

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "conclude", kill)
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as if it were SIGKILL
        with pytest.raises(KeyboardInterrupt):
            merge(runs, tmp_path / "merged" / "all")
    with pytest.raises(ResultsError):
        read_results(tmp_path / "merged")
    merged = merge(runs, tmp_path / "merged" / "all").folder
    assert [run.path for run in find_runs(tmp_path / "merged")] == [merged.path]
    assert len(merged.records()) == 8


def test_the_command_prints_each_run_and_where_the_new_one_is(
    tmp_path: Path, measure: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [str(measure(shard=Shard(0, 2))), str(measure(state(1), shard=Shard(1, 2)))]
    monkeypatch.chdir(tmp_path)
    assert main(["merge", *runs]) == 2
    assert capsys.readouterr().err.startswith("error: merge needs --out FOLDER")
    assert main(["merge", *runs, "--out", "all"]) == 0
    said = capsys.readouterr().out
    assert "results: all/results.csv" in said
    assert "figures: attnbench plot all" in said
    assert main(["merge", *runs, "--out", "all"]) == 73
