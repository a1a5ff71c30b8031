"""Rows and verdicts from answers of a worker that is made up."""

from __future__ import annotations

import math
import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from attnbench.cli import compare as command
from attnbench.cli.app import main
from attnbench.cli.screen import console
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.errors import Exit
from attnbench.harness.compare import compare as module
from attnbench.harness.compare.compare import Comparison, Contest, Stopped
from attnbench.harness.outside.isolation import CellFailed, Settings, WorkerFailed
from attnbench.laws import Finding
from attnbench.measure import machine
from attnbench.measure.status import Status
from attnbench.measure.time import TimingRules
from attnbench.results.record import Record
from attnbench.suite.cell import Cell

LENGTHS = (512, 1024, 2048, 4096)
SLOPE = {"softmax": 2.0, "linear": 1.0, "sdpa": 2.0}
MIRROR = {"faster": "slower", "slower": "faster", "same": "same", "inconclusive": "inconclusive"}


class MadeUp:
    """A worker in which time is a power of n: the same samples of a variant in whatever order it is asked for."""

    noise_floor: ClassVar[float | None] = 0.0
    failing: ClassVar[CellFailed | None] = None
    traces = ""
    served = 0
    compiled = 0.0
    process = 0
    """How many processes have been ended."""

    def seconds_used(self) -> float:
        return 0.0

    load: ClassVar[dict[str, Any]] = {"disturbed": 0, "taken": 30, "stopped": 0, "others": 0.0}

    def __init__(self, settings: Settings, python: object = None) -> None:
        self.state = {"noise_floor": self.noise_floor}

    def __enter__(self) -> MadeUp:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stop(self) -> None:
        self.process += 1

    def start(self) -> dict[str, Any]:
        return self.state

    def garbage(self) -> CellFailed:
        return CellFailed(Status.CRASH, "garbage")

    faults: ClassVar[dict[str, Any]] = {}
    """Variant -> the law that it breaks."""

    launched: ClassVar[dict[str, dict[str, Any]]] = {}
    """Variant -> columns of a GPU."""

    def seconds(self, cell: Cell) -> float:
        return (cell.shape.N / 1500) ** SLOPE[cell.variant.name]

    def ask(self, request: dict[str, Any], timeout: float, **_: Any) -> dict[str, Any]:
        if request["do"].endswith("HoldSetting"):
            fault = self.faults.get(Cell.from_json(request["cell"]).variant.name)
            return {"found": {"tried": 1, "fault": fault}}
        if request["do"].endswith("VisitCell"):
            return self.look(Cell.from_json(request["cell"]), timeout)
        return self.turns([Cell.from_json(cell) for cell in request["cells"]], timeout)

    def look(self, cell: Cell, timeout: float) -> dict[str, Any]:
        more = self.launched.get(cell.variant.name, {})
        record = Record.of(cell, Status.OK, time_median_s=1e-3 * self.seconds(cell), quick=True, **more)
        return {"record": record.to_json(), "samples": None}

    def turns(self, cells: list[Cell], timeout: float) -> dict[str, Any]:
        if self.failing and len(cells) > 1:
            raise self.failing
        columns = []
        for cell in cells:
            rng = np.random.default_rng([self.process, cell.shape.N, *cell.variant.name.encode()])
            columns.append(self.seconds(cell) * rng.lognormal(0, 0.02, 30))
        blocks = np.stack(columns, axis=1).tolist()
        return {"ran": list(range(len(cells))), "blocks": blocks, "left_out": [], **self.load}


@pytest.fixture(autouse=True)
def _made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Worker", MadeUp)
    monkeypatch.setattr(machine, "available_cores", lambda: 2)
    monkeypatch.setattr(machine, "CORES", {0, 1})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def of(*names: str, settings: Settings | None = None, unchecked: bool = False, **more: Any) -> Comparison:
    cells = [Cell("s", "w", Spec(name), Shape(heads=1, seq_len=8, head_dim=4)) for name in names]
    return Contest(cells, LENGTHS, settings or Settings(), TimingRules(), unchecked=unchecked).answer(**more)


def test_who_breaks_a_law_is_not_timed_and_the_row_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    found = asdict(Finding("causality", "causal", False, 1.0, 1e-9, "later tokens moved the outputs"))
    monkeypatch.setattr(MadeUp, "faults", {"linear": found})
    for row in of("softmax", "linear").rows["softmax", "linear"]:
        assert (row.b.record.status, row.b.record.laws, row.b.time) == (Status.ERROR, "causality", None)
        assert row.b.record.reason.startswith("it breaks the law 'causality' (1, at most 1e-09): later tokens")
        assert (row.a.record.laws, row.ratio) == ("held", None)
    rows = of("softmax", "linear", unchecked=True).rows["softmax", "linear"]
    assert {(row.b.record.laws, row.verdict) for row in rows} == {("unchecked", "faster"), ("unchecked", "slower")}


def test_a_against_b_and_b_against_a_mirror_each_other_on_the_same_samples() -> None:
    one, other = of("softmax", "linear"), of("linear", "softmax")
    rows = zip(one.rows["softmax", "linear"], other.rows["linear", "softmax"], strict=True)
    for here, there in rows:
        assert here.ratio is not None
        assert there.ratio is not None
        assert here.ratio.estimate * there.ratio.estimate == pytest.approx(1, abs=1e-12)
        assert here.ratio.low * there.ratio.high == pytest.approx(1, abs=1e-12)  # type: ignore[operator]  # 30 pairs
        assert here.ratio.high * there.ratio.low == pytest.approx(1, abs=1e-12)  # type: ignore[operator]  # as above
        assert MIRROR[here.verdict] == there.verdict
        assert (here.a.time, here.b.time) == (there.b.time, there.a.time)
    assert [row.verdict for row in one.rows["softmax", "linear"]] == ["faster", "faster", "slower", "slower"]
    a, b = one.crossovers["softmax", "linear"], other.crossovers["linear", "softmax"]
    assert a.n == pytest.approx(1500, rel=0.02)
    assert a.n == pytest.approx(b.n, rel=1e-12)
    assert (a.low, a.high) == (b.low, b.high) == (1024, 2048)
    assert a.note == b.note


@pytest.mark.parametrize("more", [["--csv"], ["--json", "--csv"], ["--plot"]])
def test_what_was_measured_is_shown_though_the_file_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    taken = tmp_path / "taken.svg"

    class Described(MadeUp):
        def start(self) -> dict[str, Any]:
            taken.mkdir(exist_ok=True)  # before the command began it would have been refused
            return {**self.state, "process": "tuned", "process_notes": []}

    monkeypatch.setattr(module, "Worker", Described)
    command = ["compare", "softmax", "linear", "--n", "512..1024", "--device", "cpu", *more, str(taken)]
    assert main(command) == Exit.CANNOT_CREATE
    said = capsys.readouterr()
    assert "faster" in said.out
    assert str(taken) in said.err
    assert "Is a directory" in said.err


def test_the_noise_floor_of_the_machine_decides_which_verdicts_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MadeUp, "noise_floor", 0.6)
    verdicts = [row.verdict for row in of("softmax", "linear").rows["softmax", "linear"]]
    assert verdicts == ["faster", "inconclusive", "inconclusive", "slower"]
    monkeypatch.setattr(MadeUp, "noise_floor", None)
    assert "inconclusive" not in [row.verdict for row in of("softmax", "linear").rows["softmax", "linear"]]


def test_a_variant_against_itself_is_the_same() -> None:
    rows = of("softmax", "softmax").rows["softmax", "softmax"]
    assert [row.verdict for row in rows] == ["same"] * 4


def test_what_fails_only_together_is_said_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MadeUp, "failing", CellFailed(Status.ERROR, "ClockError: the clock gave 0.0 s"))
    for row in of("softmax", "linear").rows["softmax", "linear"]:
        assert (row.a.record.status, row.ratio) == (Status.ERROR, None)
        assert row.a.record.reason == "ClockError: the clock gave 0.0 s"
        assert row.verdict == "softmax error"


def test_errors_are_not_measured_where_the_exact_answer_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_ERROR", 1024**2)
    asked = []

    class Seen(MadeUp):
        def look(self, cell: Cell, timeout: float) -> dict[str, Any]:
            asked.append((cell.shape.N, cell.measure))
            return super().look(cell, timeout)

    monkeypatch.setattr(module, "Worker", Seen)
    shape = Shape(heads=1, seq_len=8, head_dim=4)
    cells = [Cell("s", "w", Spec(name), shape, measure=("time", "error")) for name in ("softmax", "linear")]
    assert Contest(cells, LENGTHS, Settings(), TimingRules()).answer().without_error == [2048, 4096]
    assert {n for n, measure in asked if measure == ("time", "error")} == {512, 1024}
    assert {n for n, measure in asked if measure == ("time",)} == {2048, 4096}


def test_what_takes_too_long_with_its_error_is_measured_without(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(MadeUp):
        def look(self, cell: Cell, timeout: float) -> dict[str, Any]:
            if cell.shape.N >= 2048 and "error" in cell.measure:
                raise CellFailed(Status.TIMEOUT, "no answer")
            return super().look(cell, timeout)

    monkeypatch.setattr(module, "Worker", Slow)
    shape = Shape(heads=1, seq_len=8, head_dim=4)
    cells = [Cell("s", "w", Spec(name), shape, measure=("time", "error")) for name in ("softmax", "linear")]
    result = Contest(cells, LENGTHS, Settings(), TimingRules()).answer()
    assert result.without_error == [2048, 4096]
    assert all(row.ratio for row in result.rows["softmax", "linear"])


@pytest.mark.parametrize("status", [Status.OOM, Status.TIMEOUT])
def test_a_longer_length_of_what_ran_out_is_not_tried_and_says_so(
    monkeypatch: pytest.MonkeyPatch, status: Status
) -> None:
    asked = []

    class Small(MadeUp):
        def look(self, cell: Cell, timeout: float) -> dict[str, Any]:
            asked.append((cell.variant.name, cell.shape.N))
            if cell.variant.name == "softmax" and cell.shape.N >= 1024:
                raise CellFailed(status, "too much")
            return super().look(cell, timeout)

    monkeypatch.setattr(module, "Worker", Small)
    result = of("softmax", "linear")
    rows = result.rows["softmax", "linear"]
    assert [row.a.record.status for row in rows] == [Status.OK, status, status, status]
    assert [row.a.record.reason for row in rows][2:] == [f"inferred: {status} at n=1024 already, so not run"] * 2
    assert [row.b.record.status for row in rows] == [Status.OK] * 4
    assert {n for name, n in asked if name == "softmax"} == {512, 1024}
    assert all(row.b.time for row in rows)


def test_more_threads_than_cores_are_told_beside_a_comparison() -> None:
    told = "5 threads on 2 cores wait for each other; use --threads 2"
    assert of("softmax", "linear", settings=Settings(threads=5)).warnings == [told]
    assert not of("softmax", "linear", settings=Settings(threads=2)).warnings


def test_a_comparison_that_the_quota_of_its_group_held_back_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    periods = iter([3, 10])
    monkeypatch.setattr(module, "throttled_periods", lambda: next(periods))
    told = "held back 7 times by the CPU quota of the control group; use fewer --threads"
    assert of("softmax", "linear").warnings == [told]


def test_a_busy_machine_gets_the_verdicts_that_clear_its_noise_marked_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(MadeUp, "load", {**MadeUp.load, "others": 1.1})
    found = of("softmax", "sdpa", "linear", settings=Settings(threads=2))
    clear, equal = found.rows["softmax", "linear"], found.rows["softmax", "sdpa"]
    assert [(row.verdict, row.busy) for row in clear] == 2 * [("faster", "busy machine")] + 2 * [
        ("slower", "busy machine")
    ]
    assert {(row.verdict, row.withheld) for row in equal} == {("withheld", "the machine was busy (1.1 of 2 cores)")}
    assert all(row.ratio for row in equal)
    printed = [row for row in found.to_rows() if row["verdict"] == "withheld"]
    assert len(printed) == 4
    assert {row[name] for row in printed for name in ("ratio", "ratio_ci_low", "ratio_ci_high", "joint_ci_low")} == {
        None
    }
    assert found.crossovers["softmax", "linear"].low == 1024
    assert found.crossovers["softmax", "sdpa"].n is None
    assert found.warnings == [
        "the machine is busy (1.1 of 2 cores); times may be wrong by a factor; try --threads 1",
    ]
    beside = of("softmax", "linear", settings=Settings(threads=1))  # the other program leaves a core to one thread
    assert {row.busy for row in beside.rows["softmax", "linear"]} == {""}
    assert not beside.warnings


@pytest.mark.parametrize(("disturbed", "withheld"), [(15, False), (16, True)])
def test_a_machine_is_busy_where_most_turns_were_disturbed(
    monkeypatch: pytest.MonkeyPatch, disturbed: int, withheld: bool
) -> None:
    monkeypatch.setattr(MadeUp, "load", {**MadeUp.load, "disturbed": disturbed, "others": None})
    found = of("softmax", "sdpa")
    assert {row.verdict == "withheld" for row in found.rows["softmax", "sdpa"]} == {withheld}
    assert all(row.ratio and row.disturbed == disturbed * row.ratio.processes for row in found.rows["softmax", "sdpa"])


class AtOneLength(MadeUp):
    """The machine is busy at one length only, at which both are as quick."""

    def seconds(self, cell: Cell) -> float:
        return 1.0 if cell.shape.N == 1024 else super().seconds(cell)

    def turns(self, cells: list[Cell], timeout: float) -> dict[str, Any]:
        answer = super().turns(cells, timeout)
        return {**answer, "disturbed": 30 if cells[0].shape.N == 1024 else 0}


def test_the_load_of_each_length_counts_and_a_withheld_one_brackets_no_crossover(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "Worker", AtOneLength)
    found = of("softmax", "linear")
    assert [row.verdict for row in found.rows["softmax", "linear"]] == ["faster", "withheld", "slower", "slower"]
    crossing = found.crossovers["softmax", "linear"]
    assert (crossing.low, crossing.high) == (512, 2048)


class Noting(MadeUp):
    """Notes what each process is asked to do."""

    asked: ClassVar[list[tuple[int, str, int, tuple[str, ...]]]]

    def ask(self, request: dict[str, Any], timeout: float, **_: Any) -> dict[str, Any]:
        cells = [Cell.from_json(cell) for cell in request.get("cells", [request.get("cell")])]
        n, names = cells[0].shape.N, tuple(cell.variant.name for cell in cells)
        self.asked.append((self.process, request["do"].rpartition(".")[2], n, names))
        assert request.get("process", self.process) == self.process
        return super().ask(request, timeout)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str, int, tuple[str, ...]]]:
    monkeypatch.setattr(module, "Worker", Noting)
    monkeypatch.setattr(Noting, "asked", [], raising=False)
    return Noting.asked


def test_three_processes_measure_and_more_only_what_these_leave_undecided(
    asked: list[tuple[int, str, int, tuple[str, ...]]],
) -> None:
    found = of("softmax", "sdpa", "linear")
    first = {do for process, do, _, _ in asked if process == 0}
    assert first == {"HoldSetting", "VisitCell", "TakeTurns"}
    assert {do for process, do, _, _ in asked if process} == {"TakeTurns"}  # laws, errors and memory are measured once
    turns = [(process, n, names) for process, do, n, names in asked if do == "TakeTurns"]
    for process in range(3):
        assert [n for one, n, _ in turns if one == process] == list(LENGTHS)
    more = {names for process, _, names in turns if process >= 3}
    assert more == {("softmax", "sdpa")}  # which are equal; the others are far apart
    decided = found.rows["softmax", "linear"]
    assert {row.ratio.processes for row in decided if row.ratio} == {3}
    assert all(row.ratio and row.ratio.processes in (6, 9) for row in found.rows["softmax", "sdpa"])
    assert (found.family, found.processes[0]) == (12, 3)
    assert {row["processes"] for row in found.to_rows()} == set(found.processes)


class Placed(MadeUp):
    """The first three processes happen to favour one of two equal programs by six percent; no later one does."""

    def turns(self, cells: list[Cell], timeout: float) -> dict[str, Any]:
        answer = super().turns(cells, timeout)
        if self.process < 3:
            share = {"softmax": 1.05 + 0.01 * self.process}
            factors = [share.get(cell.variant.name, 1.0) for cell in cells]
            answer["blocks"] = [[x * y for x, y in zip(block, factors, strict=True)] for block in answer["blocks"]]
        return answer


def test_what_three_processes_seem_to_find_is_no_verdict_unless_fresh_ones_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "Worker", Placed)
    rows = of("softmax", "sdpa").rows["softmax", "sdpa"]
    assert not {"faster", "slower"} & {row.verdict for row in rows}
    assert {row.ratio.processes for row in rows if row.ratio} == {9}


class Dying(MadeUp):
    """A process ends in the turns of one length."""

    dies: ClassVar[set[int]]

    def turns(self, cells: list[Cell], timeout: float) -> dict[str, Any]:
        if self.process in self.dies and cells[0].shape.N == 1024 and len(cells) > 1:
            raise CellFailed(Status.CRASH, "the measuring process was killed by SIGKILL")
        return super().turns(cells, timeout)


@pytest.mark.parametrize(("dies", "processes"), [({1}, 5), (set(range(1, 9)), 1)])
def test_a_process_that_dies_takes_nothing_of_what_others_measured_and_is_told(
    monkeypatch: pytest.MonkeyPatch, dies: set[int], processes: int
) -> None:
    monkeypatch.setattr(module, "Worker", Dying)
    monkeypatch.setattr(Dying, "dies", dies, raising=False)
    found = of("softmax", "linear")
    rows = {row.n: row for row in found.rows["softmax", "linear"]}
    assert all(row.a.record.status is Status.OK and row.a.time for row in rows.values())
    assert rows[1024].ratio is not None
    assert rows[1024].ratio.processes == processes
    said = "withheld" if processes < 3 else "faster"
    assert (rows[1024].verdict, rows[512].verdict) == (said, "faster")
    assert rows[1024].withheld == ("a verdict needs 3 processes" if processes < 3 else "")
    assert "n = 1024: softmax: crash in a later process: the measuring process was killed by SIGKILL" in found.warnings


def test_a_measuring_process_that_does_not_start_again_leaves_what_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Gone(MadeUp):
        def turns(self, cells: list[Cell], timeout: float) -> dict[str, Any]:
            if self.process:
                raise WorkerFailed("the measuring process did not start: no memory")
            return super().turns(cells, timeout)

    monkeypatch.setattr(module, "Worker", Gone)
    found = of("softmax", "linear")
    assert {row.verdict for row in found.rows["softmax", "linear"]} == {"withheld"}
    assert all(row.a.time for row in found.rows["softmax", "linear"])
    assert "did not start: no memory; what earlier processes measured stands" in found.warnings[0]


def test_lengths_that_are_finished_outlive_a_process_that_does_not_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(MadeUp):
        def look(self, cell: Cell, timeout: float) -> dict[str, Any]:
            if cell.shape.N == 2048:
                raise WorkerFailed("the measuring process did not start: no memory")
            return super().look(cell, timeout)

    monkeypatch.setattr(module, "Worker", Gone)
    found = of("softmax", "linear")
    assert [row.n for row in found.rows["softmax", "linear"] if row.a.time and row.b.time] == [512, 1024]
    assert found.warnings[0].endswith("measured stands; n = 2048 is missing; n = 4096 is missing")


def test_ctrl_c_keeps_the_lengths_that_are_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pressed(MadeUp):
        def turns(self, cells: list[Cell], timeout: float) -> dict[str, Any]:
            if cells[0].shape.N == 2048:
                raise KeyboardInterrupt
            return super().turns(cells, timeout)

    monkeypatch.setattr(module, "Worker", Pressed)
    with pytest.raises(Stopped) as stopped:
        of("softmax", "linear")
    rows = stopped.value.comparison.rows["softmax", "linear"]
    assert [row.n for row in rows] == [512, 1024]
    assert all(row.a.time and row.verdict == "withheld" for row in rows)  # one process says nothing for sure


class Random(MadeUp):
    """Blocks of any kind: wild, in two speeds, few, disturbed."""

    seed: ClassVar[int] = 0

    def turns(self, cells: list[Cell], timeout: float) -> dict[str, Any]:
        rng = np.random.default_rng([self.seed, self.process, cells[0].shape.N])
        blocks = np.exp(rng.normal(0, rng.choice([0.01, 0.1, 1]), (rng.integers(1, 30), len(cells))))
        modes = np.exp(rng.choice([0, rng.normal(0, 2)], blocks.shape)) * np.exp(rng.normal(0, 0.3, len(cells)))
        times = (np.exp(np.log(cells[0].shape.N)) * blocks * modes).tolist()
        load = {"disturbed": int(rng.integers(0, len(times) + 1)), "taken": len(times), "stopped": 0, "others": 0.0}
        return {"ran": list(range(len(cells))), "blocks": times, "left_out": [], **load}


def test_a_ratio_is_never_printed_beside_medians_that_contradict_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as 0.155 beside 521 and 347 µs: both are of the same blocks, or no ratio stands there."""
    monkeypatch.setattr(module, "Worker", Random)
    shown = withheld = 0
    for seed in range(40):
        monkeypatch.setattr(Random, "seed", seed)
        for flat in of("softmax", "sdpa", "linear").to_rows():
            medians = flat["a_time_median_s"] / flat["b_time_median_s"]
            if flat["ratio"] is None:
                assert flat["verdict"] == "withheld"
                assert flat["withheld"]
                withheld += 1
                continue
            shown += 1
            assert flat["joint_ci_low"] / 1.021 <= medians <= 1.021 * flat["joint_ci_high"]
            assert (flat["verdict"], medians < 1) not in {("faster", False), ("slower", True)}
    assert shown > 50
    assert withheld > 20


class Falling(MadeUp):
    """A time that a busy core made too long, at one length."""

    def seconds(self, cell: Cell) -> float:
        longer = 20 if cell.variant.name == "linear" and cell.shape.N == 1024 else 1
        return longer * super().seconds(cell)


def test_a_time_that_falls_as_n_doubles_is_not_believed_at_either_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Worker", Falling)
    found = of("softmax", "linear")
    assert [row.verdict for row in found.rows["softmax", "linear"]] == ["faster", "withheld", "withheld", "slower"]
    (warning,) = found.warnings
    assert re.fullmatch(r"linear took .* s at n = 1024 but .* s at n = 2048: impossible; run it again.*", warning)
    cells = [Cell("s", "w", Spec(name), Shape(seq_len=8), pass_="decode") for name in ("softmax", "linear")]
    decoded = Contest(cells, LENGTHS, Settings(), TimingRules()).answer()  # a step may cost the same at every length
    assert "withheld" not in {row.verdict for row in decoded.rows["softmax", "linear"]}


def test_an_unknown_noise_floor_and_turns_of_a_stopped_process_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    told = machine.noise_warning(None, None)
    assert told
    monkeypatch.setattr(MadeUp, "noise_floor", None)
    monkeypatch.setattr(MadeUp, "load", {**MadeUp.load, "stopped": 2})
    monkeypatch.setattr(MadeUp, "start", lambda worker: {**worker.state, "process_notes": [told]})  # as a worker does
    found = of("softmax", "linear")
    turns = sum(2 * row.ratio.processes for row in found.rows["softmax", "linear"] if row.ratio)
    assert found.warnings == [told, f"{turns} turns left out: the measuring process was stopped meanwhile"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"blocks": [[1.0]] * 30},
        {"blocks": [[1.0, 1.0]] * 29 + [[1.0, 0.0]]},
        {"blocks": [[1.0, -1.0]] * 30},
        {"blocks": [[1.0, math.nan]] * 30},
        {"blocks": [[1.0, math.inf]] * 30},
        {"blocks": [[1.0, "1.0"]] * 30},
        {"blocks": [[1.0, True]] * 30},
        {"blocks": []},
        {"blocks": None},
        {"ran": [0]},
        {"ran": [0, 0]},
        {"ran": [0, 2]},
        {"left_out": [[1, "ok", ""]], "ran": [0]},
        {"left_out": [[1, "tired", "no such status"]], "ran": [0]},
        {"left_out": [[1, "oom"]], "ran": [0]},
        {"disturbed": 31},
        {"disturbed": 0.5},
        {"stopped": -1},
        {"others": math.nan},
        {"others": "some"},
        {"prompts": [[2, 0.5]]},
        {"prompts": [[0, 1.5]]},
        {"surprise": 1},
    ],
)
def test_an_answer_that_makes_no_sense_is_garbage_and_never_a_time(
    monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    class Garbled(MadeUp):
        def turns(self, cells: list[Cell], timeout: float) -> dict[str, Any]:
            return super().turns(cells, timeout) | wrong

    monkeypatch.setattr(module, "Worker", Garbled)
    for row in of("softmax", "linear").rows["softmax", "linear"]:
        assert row.ratio is None
        assert {row.a.record.status, row.b.record.status} <= {Status.CRASH, Status.OK}
        assert Status.CRASH in (row.a.record.status, row.b.record.status)


@pytest.mark.parametrize("wrong", [{}, {"record": 1}, {"record": {"status": "ok"}}, {"record": "other"}])
def test_a_first_look_that_makes_no_sense_is_garbage_too(
    monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    class Garbled(MadeUp):
        def look(self, cell: Cell, timeout: float) -> dict[str, Any]:
            if wrong.get("record") == "other":  # the answer to another question
                return super().look(replace(cell, seed=7), timeout)
            return wrong

    monkeypatch.setattr(module, "Worker", Garbled)
    found = of("softmax", "linear")
    assert {row.a.record.reason for row in found.rows["softmax", "linear"]} == {"garbage"}
    assert not found.ok


def test_a_verdict_and_a_crossover_say_where_a_time_is_that_of_the_host(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The time that counts is that in turns, which is 1 s at 1500 tokens here."""
    of_host = {"launched": "eager", "device_s": 0.2, "kernels": 300, "host_share": 0.1, "launch_note": "it asks"}
    captured = {"launched": "graph", "device_s": 0.1, "kernels": 2}
    monkeypatch.setattr(MadeUp, "launched", {"linear": of_host, "softmax": captured})
    found = of("softmax", "linear")
    rows = found.rows["softmax", "linear"]
    assert [row.word.partition("; ")[0] for row in rows] == ["faster", "faster", "slower", "slower"]
    shares = [1 - 0.2 / (row.b.time or 0.0) for row in rows]
    assert [row.b.host_share for row in rows] == [max(0.0, share) for share in shares]
    said = [f"eager: {100 * share:.0f} % of linear's time is the host" for share in shares]
    assert [row.word.endswith(one) for row, one in zip(rows, said, strict=True)] == [True] * 4
    assert ("softmax's time is the host" in rows[0].word, "softmax's time is the host" in rows[3].word) == (False, True)
    note = found.crossovers["softmax", "linear"].note
    assert note.endswith(f"; {said[-1]} at n = 4096")
    flat = found.to_rows()[-1]
    assert (flat["a_launched"], flat["b_launched"], flat["b_kernels"]) == ("graph", "eager", 300)
    assert flat["b_host_share"] == rows[-1].b.host_share
    command._print(found, console.table)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"slower; {said[0]}" in shown
    assert "it asks" in shown


def test_on_a_cpu_no_table_and_no_row_speaks_of_launches(capsys: pytest.CaptureFixture[str]) -> None:
    found = of("softmax", "linear")
    assert {row.word for row in found.rows["softmax", "linear"]} == {"faster", "slower"}
    command._print(found, console.table)
    shown = capsys.readouterr().out
    assert "launch" not in shown
    assert "host" not in shown


def test_graphs_are_refused_in_one_line_on_a_device_that_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "softmax", "linear", "--launch", "graph", "--device", "cpu"]) == Exit.USAGE
    assert capsys.readouterr().err.startswith("error: --launch graph: cpu has no CUDA graphs; leave it out")
