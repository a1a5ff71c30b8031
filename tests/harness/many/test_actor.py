"""The machine's side: it measures by the process by which a run on one machine does, and says what came of it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnbench.errors import UsageError
from attnbench.harness.many import actor
from attnbench.harness.many.actor import Event, Machine, misfit, requirements
from attnbench.harness.outside.isolation import CellFailed, Settings, WorkerFailed
from attnbench.harness.outside.visit import HoldSetting, Verdict
from attnbench.harness.plan import Options, Plan, make_plan
from attnbench.harness.run_identity import identity
from attnbench.harness.wire import process
from attnbench.harness.wire.protocol import Outcome
from attnbench.measure.machine import host
from attnbench.measure.status import Status
from attnbench.results.record import HELD, Record
from attnbench.suite.cell import Cell
from tests.answers.machines import state
from tests.harness.many.fakes import SUITE


class Process:
    """Stands for the process that measures."""

    made: list[Process]
    fails: Exception | None = None
    starts: WorkerFailed | None = None
    served = 0
    peak = 0.5

    def __init__(self, settings: Settings) -> None:
        self.settings, self.state, self.traces, self.stops = settings, dict[str, Any](), "", 0
        self.warn: Callable[[str], None] = lambda message: None
        self.known: list[dict[str, Any]] = []
        Process.made.append(self)

    def start(self) -> dict[str, Any]:
        if Process.starts:
            raise Process.starts
        self.known.append(self.state)
        self.state = {"matmul_rate": {"float32": 3e11}, **self.state, **_of_this_machine}
        return self.state

    def stop(self) -> None:
        self.stops += 1

    def said(self) -> list[str]:
        return ["the last line"]

    def garbage(self) -> CellFailed:
        return CellFailed(Status.CRASH, "garbage")

    def ask(self, request: dict[str, Any], timeout: float, **how: Any) -> dict[str, Any]:
        self.warn("process 7 cannot be ended")
        if Process.fails:
            raise Process.fails
        if request["do"].endswith("MeasureLimits"):
            rows = [{**row, "peak_fraction": 0.9} for row in request["records"]]
            return {"limits": {"matmul_rate": {"float32": 9e11}}, "rows": rows}
        cell, round_ = Cell.from_json(request["cell"]), request["round"]
        record = Record.of(cell, Status.OK, time_median_s=0.5, time_rounds=round_ + 1, peak_fraction=Process.peak)
        samples = {"cell_id": cell.cell_id, "round": round_, "samples": [{"seconds": 0.5, "calls": 1}]}
        return {"record": record.to_json(), "samples": samples}


_of_this_machine = {name: state()[name] for name in ("machine_id", "environment", "process", "process_notes")}


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    Process.made, Process.fails, Process.starts = [], None, None
    monkeypatch.setattr(actor, "Worker", Process)
    monkeypatch.setattr(HoldSetting, "ask", lambda *_, **__: Verdict(HELD))
    monkeypatch.setattr(actor, "load_warning", lambda: "load 3 on 2 cores")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # a machine takes it out of its environment
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "nice", lambda step: os.getpriority(os.PRIO_PROCESS, os.getppid()))
    (tmp_path / "s.yaml").write_text(SUITE)
    return make_plan(tmp_path / "s.yaml", Options("cpu", on="ray", cell_timeout=30.0))


class Calling:
    """A machine, called as the driver calls it, through messages."""

    def __init__(self, plan: Plan, **changes: str) -> None:
        self.machine, self.plan = Machine(), plan
        facts = identity(plan, "")
        self.wanted = requirements(facts["input_files"], facts["plugins"]) | changes

    def __call__(self, method: str, *arguments: Any) -> list[Event]:
        events = list(self.machine.work(method, *pickle.loads(pickle.dumps(arguments))))
        assert pickle.loads(pickle.dumps(events)) == events
        assert events.pop(0) == ("alive", os.uname().nodename)
        return events

    def begin(self, known: dict[str, Any] | None = None) -> list[Event]:
        return self("begin", str(Path.cwd()), self.plan, self.wanted, {host(): known} if known else {})

    def measure(self, *cells: Cell) -> list[Event]:
        plan = replace(self.plan, cells=list(cells), only=frozenset(cell.cell_id for cell in cells))
        return self("measure", plan, ({}, {}))


def begun(plan: Plan, known: dict[str, Any] | None = None) -> Calling:
    call = Calling(plan)
    *_, (word, (_, facts)) = call.begin(known)
    assert (word, facts["machine_id"]) == ("done", state()["machine_id"])
    return call


def outcomes(events: list[Event], cell: Cell) -> list[Outcome]:
    return [Outcome.from_json(one[1], cell) for one in events if one[0] == "add"]


def test_a_machine_like_the_driver_takes_part(plan: Plan) -> None:
    warned, (word, (process, facts)) = Calling(plan).begin()
    assert warned == ("warned", "load 3 on 2 cores")
    assert (word, process["host"], facts) == ("done", host(), Process.made[-1].state)


def test_a_machine_that_is_other_than_the_driver_does_not(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Calling(plan, torch="1.0").begin() == [
        ("failed", misfit({"torch": Calling(plan).wanted["torch"]}, {"torch": "1.0"}))
    ]
    monkeypatch.setattr(os, "nice", lambda step: 19)
    ((word, why),) = Calling(plan).begin()
    assert (word, why[-63:]) == (
        "failed",
        "anything else there goes first; set RAY_worker_niceness=0 before ray start"[-63:],
    )


def test_the_threads_are_those_of_the_machine_whatever_the_engine_reserved(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "available_cores", lambda: 6)
    *_, (_, (process, _)) = Calling(plan).begin()
    assert (process["threads"], process["variables"]["OMP_NUM_THREADS"]) == (6, "6")
    asked = make_plan("quick", Options("cpu", on="ray", threads=3))
    *_, (_, (process, _)) = Calling(asked).begin()
    assert process["threads"] == 3


def test_a_machine_sets_its_process_up_as_it_is_told(plan: Plan) -> None:
    begun(plan)
    settings = Process.made[-1].settings
    assert (settings.device, settings.process, settings.dtypes) == ("cpu", "tuned", ("float32",))
    assert settings.memory_limit  # of this machine: none was given


def test_a_lot_is_measured_round_by_round_each_in_a_fresh_process(plan: Plan) -> None:
    call, cells = begun(plan), plan.cells[:2]
    process, begun_with = Process.made[-1], len(Process.made[-1].known)
    events = call.measure(*cells)
    added = {
        cell.cell_id: outcomes(
            [one for one in events if one[0] == "add" and one[1]["record"]["cell_id"] == cell.cell_id], cell
        )
        for cell in cells
    }
    assert [[one.record.time_rounds for one in found] for found in added.values()] == [[1, 2, 3]] * 2
    assert all(
        one.samples and one.record.machine_id == state()["machine_id"] for found in added.values() for one in found
    )
    assert [one[0] for one in events].count("visiting") == [one[0] for one in events].count("visited") == 6
    assert ("warned", "process 7 cannot be ended") in events
    assert events[-1] == ("done", None)
    assert process.stops == 2
    assert all(known["matmul_rate"] for known in process.known[begun_with:])


def test_a_cell_that_crashes_is_a_row_and_the_machine_goes_on(plan: Plan) -> None:
    call, cell = begun(plan), plan.cells[0]
    Process.fails = CellFailed(Status.CRASH, "exited with code 3", ["last words"])
    events = call.measure(cell)
    (outcome,) = outcomes(events, cell)
    assert (outcome.record.status, outcome.record.reason) == (Status.CRASH, "exited with code 3")
    assert (outcome.stderr, events[-1]) == (["last words"], ("done", None))
    Process.fails = None
    assert [one.record.status for one in outcomes(call.measure(plan.cells[1]), plan.cells[1])] == [Status.OK] * 3


def test_what_fails_is_said(plan: Plan) -> None:
    missing = replace(plan, settings=replace(plan.settings, plugins=("nowhere.py",)))
    assert Calling(missing).begin() == [("failed", "plug-in nowhere.py: no such file")]
    call = begun(plan)
    Process.starts = WorkerFailed("the measuring process did not start: no memory")
    assert call.measure(plan.cells[0])[-1] == ("failed", "the measuring process did not start: no memory")
    assert Calling(plan).begin()[-1] == ("failed", "the measuring process did not start: no memory")
    ((word, why),) = call("measure")
    assert (word, "missing 2 required positional arguments" in why) == ("failed", True)


def test_rows_faster_than_the_machine_are_corrected(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Process, "peak", 3.0)
    call, cell = begun(plan), plan.cells[0]
    events = call.measure(cell)
    assert ("correct", {"matmul_rate": {"float32": 9e11}}) in events
    assert [one.record.peak_fraction for one in outcomes(events, cell)] == [3.0, 3.0, 3.0, 0.9]


def test_a_machine_at_work_says_so_every_ten_seconds(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "ALIVE_EVERY", 0.05)
    monkeypatch.setattr(actor, "load_warning", lambda: time.sleep(0.5))
    call = Calling(plan)
    assert len([one for one in call.begin() if one[0] == "alive"]) >= 4
    call.machine._most_s = 0.1  # longer than that nothing may take
    assert len([one for one in call.begin() if one[0] == "alive"]) <= 3


def test_a_host_that_took_part_before_takes_its_rates_over_unless_it_is_another_machine(plan: Plan) -> None:
    known = {"matmul_rate": {"float32": 7e11}, "machine_id": state()["machine_id"]}
    begun(plan, known)
    assert Process.made[-1].state["matmul_rate"] == {"float32": 7e11}
    begun(plan, {**known, "machine_id": "another"})
    assert Process.made[-1].known[-1] == {}
    assert Process.made[-1].state["matmul_rate"] == {"float32": 3e11}


def test_a_machine_ends_with_the_process_that_started_it() -> None:
    """Here that is a shell, which ends while the machine sleeps."""
    sleeps = (
        "import time; from attnbench.harness.many.actor import Machine; Machine(); print(1, flush=True); time.sleep(60)"
    )
    shell = ["sh", "-c", '"$0" -c "$1" & read line', sys.executable, sleeps]
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin
        assert parent.stdout
        assert parent.stdout.readline() == b"1\n"
        parent.stdin.close()
        assert parent.stdout.read() == b""  # which it holds open as long as it lives


def test_files_are_named_as_the_driver_names_them(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call, folder = Calling(plan), str(Path.cwd())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    call("begin", folder, plan, call.wanted, {})
    assert Path.cwd() == tmp_path


def test_torch_that_takes_other_threads_than_the_row_would_say_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    with pytest.raises(UsageError, match="torch computes with 1 threads instead of 4"):
        process.apply("as-shipped", threads=4, device="cpu")
