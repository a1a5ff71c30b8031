"""More rounds of some cells of a finished run, by a process that answers at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnbench.errors import UsageError
from attnbench.harness import runner
from attnbench.harness.outside.visit import HoldSetting, Verdict
from attnbench.harness.plan import Options, make_plan
from attnbench.harness.repeat import time_limits_of
from attnbench.harness.runner import more_rounds
from attnbench.measure.status import Status
from attnbench.measure.time import Sample, TimingRules, summarise
from attnbench.results.read import read_results
from attnbench.results.record import HELD
from attnbench.results.store import SUITE, TABLE, RunFolder
from attnbench.results.table import read_table
from attnbench.suite.cell import Cell
from tests.instant import Instant, timed

MACHINE = {"device": "cpu", "torch": "2.13.0", "processor": "p", "cores": 1}


class Worker(Instant):
    """``seconds`` is what every call takes."""

    seconds = 1.0
    limit = 0.0
    """Seconds for the last answer."""
    asked: list[tuple[str, int, TimingRules]]

    def __init__(self, settings: object = None) -> None:
        self.settings = settings
        self.state: Any = {}
        Worker.asked = []

    def start(self) -> dict[str, Any]:
        products = {"float32_products": "default", "window_products": "default"}
        return super().start() | {"environment": MACHINE, **products}

    def ask(self, request: dict[str, Any], timeout: float, **how: Any) -> dict[str, Any]:
        Worker.limit = timeout
        return super().ask(request, timeout, **how)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        cell, round_ = Cell.from_json(request["cell"]), request["round"]
        Worker.asked.append((cell.label, round_, TimingRules(**request["rules"])))
        seconds = [Worker.seconds * (1 + i / 1000) for i in range(8)]
        earlier = [[Sample(**sample) for sample in samples] for samples in request["earlier"]]
        summary = summarise([*earlier, [Sample(one, 1) for one in seconds]])
        low, high = summary.interval or (None, None)
        columns = {"time_ci_low_s": low, "time_ci_high_s": high, "time_samples": summary.used}
        return timed(cell, round_, seconds, time_median_s=summary.median, **columns)


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "seconds", 1.0)
    monkeypatch.setattr(HoldSetting, "ask", lambda *_, **__: Verdict(HELD))
    monkeypatch.setattr(runner, "Worker", Worker)
    monkeypatch.setattr(runner, "machine_id", lambda device: "m")
    monkeypatch.setattr(runner, "load_warning", lambda: None)


def measured(folder: Path, **options: Any) -> Path:
    """A run of four cells, two rounds of each."""
    suite = folder / "s.yaml"
    suite.write_text("name: s\nsweeps: [{name: w, matrix: {variant: [softmax, linear], seq_len: [2, 4]}}]\n")
    plan = make_plan(suite, Options("cpu", out=folder / "out", threads=1, rounds=2, **options))
    return runner.execute(plan)[0].path


@pytest.mark.usefixtures("instant")
def test_only_the_named_cells_get_more_rounds_in_the_same_folder(tmp_path: Path) -> None:
    path = measured(tmp_path)
    before = {row.label + str(row.seq_len): row for row in RunFolder(path).records().values()}
    more_rounds(path, [before["softmax4"].cell_id], 3)
    assert [(label, round_) for label, round_, _ in Worker.asked] == [("softmax/n4", round_) for round_ in (2, 3, 4)]
    rows = {row.label + str(row.seq_len): row for row in RunFolder(path).records().values()}
    assert {name: row.time_rounds for name, row in rows.items()} == {
        "softmax2": 2, "softmax4": 5, "linear2": 2, "linear4": 2
    }  # fmt: skip
    assert rows["softmax4"].time_samples == 40
    assert {name: row for name, row in rows.items() if name != "softmax4"} == {
        name: row for name, row in before.items() if name != "softmax4"
    }
    table = read_results(path, warn=pytest.fail)
    assert sorted(table["time_rounds"]) == [2, 2, 2, 5]


@pytest.mark.usefixtures("instant")
def test_cells_that_had_fewer_rounds_get_as_many_more_as_the_others(tmp_path: Path) -> None:
    path = measured(tmp_path)
    first, second, *_ = RunFolder(path).records()
    more_rounds(path, [first], 3)
    more_rounds(path, [first, second], 1)
    assert [round_ for _, round_, _ in Worker.asked] == [2, 5]
    assert [row.time_rounds for row in RunFolder(path).records().values()] == [6, 3, 2, 2]


@pytest.mark.usefixtures("instant")
def test_rows_of_other_cells_stay_in_the_table_whatever_their_outcome(tmp_path: Path) -> None:
    path = measured(tmp_path)
    folder = RunFolder(path)
    first, *others = folder.records().values()
    late = "no answer within 10 s; raise --cell-timeout"
    ends = [
        (Status.DISTURBED, "its threads waited"),
        (Status.INTERRUPTED, "stopped by the user"),
        (Status.TIMEOUT, late),
    ]
    nothing = dict.fromkeys(("time_median_s", "time_ci_low_s", "time_ci_high_s"))
    with folder.lock():
        for row, (status, reason) in zip(others, ends, strict=True):
            folder.add(replace(row, status=status, reason=reason, **nothing))
        folder.conclude()
    more_rounds(path, [first.cell_id], 1)
    table = read_table((path / TABLE).read_text())
    assert sorted(row["status"] for row in table) == ["disturbed", "interrupted", "ok", "timeout"]


@pytest.mark.usefixtures("instant")
def test_a_further_visit_has_the_time_limits_of_those_before(tmp_path: Path) -> None:
    path = measured(tmp_path, cell_timeout=600.0, first_call_timeout=7.5)
    (row, *_) = RunFolder(path).records().values()
    Worker.limit = 0.0
    more_rounds(path, [row.cell_id], 1)
    assert Worker.limit == 600.0
    limits = {"cell_timeout": 600.0, "first_call_timeout": 7.5}
    assert time_limits_of(RunFolder(path).environment) == limits
    assert time_limits_of({}) == {}


@pytest.mark.usefixtures("instant")
def test_further_rounds_mirror_the_order_of_the_first(tmp_path: Path) -> None:
    path = measured(tmp_path)

    def orders(*rounds: int) -> list[list[str]]:
        return [[label for label, round_, _ in Worker.asked if round_ == one] for one in rounds]

    first, second = orders(0, 1)
    assert first != second
    cells = [row.cell_id for row in RunFolder(path).records().values()]
    more_rounds(path, cells, 2)
    assert orders(2, 3) == [second[::-1], first[::-1]]
    fewer = [one for one in second if "softmax" in one or "n4" in one]
    more_rounds(
        path, [row.cell_id for row in RunFolder(path).records().values() if f"{row.label}/n{row.seq_len}" in fewer], 1
    )
    assert sorted(orders(4)[0]) == sorted(fewer)


@pytest.mark.usefixtures("instant")
def test_a_further_visit_takes_as_long_as_one_before(tmp_path: Path) -> None:
    path = measured(tmp_path, min_time=0.5)
    (row, *_) = RunFolder(path).records().values()
    first = Worker.asked[0][2]
    more_rounds(path, [row.cell_id], 2)
    rules = Worker.asked[-1][2]
    assert rules.rounds == 4
    for name in ("min_time", "max_time", "warmup_time", "min_samples", "max_samples"):
        assert getattr(rules, name) / rules.rounds == pytest.approx(getattr(first, name) / first.rounds), name


@pytest.mark.usefixtures("instant")
def test_the_command_that_began_the_run_finds_it_finished_afterwards(tmp_path: Path) -> None:
    path = measured(tmp_path)
    (row, *_) = RunFolder(path).records().values()
    more_rounds(path, [row.cell_id], 1)
    assert measured(tmp_path) == path
    assert Worker.asked == [] or {round_ for _, round_, _ in Worker.asked} == {2}


@pytest.mark.usefixtures("instant")
def test_a_run_of_a_part_of_a_suite_goes_on_without_the_rest(tmp_path: Path) -> None:
    path = measured(tmp_path, select="softmax")
    (row, *_) = RunFolder(path).records().values()
    more_rounds(path, [row.cell_id], 1)
    assert {one.variant for one in RunFolder(path).records().values()} == {"softmax"}


@pytest.mark.usefixtures("instant")
def test_a_run_that_could_not_be_repeated_here_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = measured(tmp_path)
    content = (path / "records.jsonl").read_bytes()
    (row, *_) = RunFolder(path).records().values()
    with monkeypatch.context() as other:
        other.setenv("MKL_CBWR", "COMPATIBLE")
        with pytest.raises(
            UsageError, match="cannot go on here, with other variables; measure it again, without --confirm"
        ):
            more_rounds(path, [row.cell_id], 1)
    with monkeypatch.context() as other:
        other.setattr(runner, "machine_id", lambda device: "another")
        with pytest.raises(UsageError, match="with other machine_id"):
            more_rounds(path, [row.cell_id], 1)
    (path / SUITE).write_text("name: t\n")
    with pytest.raises(UsageError, match="is not the suite that was run"):
        more_rounds(path, [row.cell_id], 1)
    RunFolder(path).correct({"method_version": 4})
    with pytest.raises(UsageError, match="measured by another version"):
        more_rounds(path, [row.cell_id], 1)
    assert (path / "records.jsonl").read_bytes() == content
