"""The machine's side: it measures by the process by which a run on one machine does, and says what came of it."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnbench.errors import UsageError
from attnbench.harness.many import machine
from attnbench.harness.many.driver import begin_of, hello_of, misfit, ours
from attnbench.harness.many.machine import Machine
from attnbench.harness.outside.gate import HoldSetting, Verdict
from attnbench.harness.outside.isolation import CellFailed, Settings, WorkerFailed
from attnbench.harness.plan import Options, Plan, make_plan
from attnbench.harness.wire import process
from attnbench.harness.wire.protocol import MeasureLimits, Outcome, VisitCell
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
        if request["do"] == "limits":
            return {"limits": {"matmul_rate": {"float32": 9e11}}, "rows": request["records"]}
        cell, round_ = Cell.from_json(request["cell"]), request["round"]
        record = Record.of(cell, Status.OK, time_median_s=0.5, time_rounds=round_ + 1)
        samples = {"cell_id": cell.cell_id, "round": round_, "samples": [{"seconds": 0.5, "calls": 1}]}
        return {"record": record.to_json(), "samples": samples}


_of_this_machine = {name: state()[name] for name in ("machine_id", "environment", "process", "process_notes")}


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    Process.made, Process.fails, Process.starts = [], None, None
    monkeypatch.setattr(machine, "Worker", Process)
    monkeypatch.setattr(HoldSetting, "ask", lambda *_, **__: Verdict(HELD))
    monkeypatch.setattr(machine, "load_warning", lambda: "load 3 on 2 cores")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # a machine takes it out of its environment
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yaml").write_text(SUITE)
    return make_plan(tmp_path / "s.yaml", Options("cpu", on="ray", cell_timeout=30.0))


class Calling:
    """A machine, called as the driver calls it, through a message."""

    def __init__(self) -> None:
        self.machine = Machine()

    def __call__(self, method: str, message: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(json.dumps(self.machine.call(method, pickle.loads(pickle.dumps(message)))))
        return answer


def begun(plan: Plan, known: dict[str, Any] | None = None) -> Calling:
    call = Calling()
    assert "failed" not in call("hello", hello_of(plan))
    assert call("begin", begin_of(plan, 2, known))["state"]["machine_id"] == state()["machine_id"]
    return call


def test_a_machine_like_the_driver_fits(plan: Plan) -> None:
    from attnbench.harness.identity import identity

    hello = Calling()("hello", hello_of(plan))
    niceness = os.getpriority(os.PRIO_PROCESS, os.getppid())
    assert misfit({**hello, "niceness": niceness}, ours(identity(plan, ""))) == ""
    assert hello["host"] == host()
    assert hello["notes"] == []


def test_the_threads_are_those_of_the_machine_whatever_the_engine_reserved(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(machine, "available_cores", lambda: 6)
    hello = Calling()("hello", hello_of(plan))
    assert (hello["threads"], hello["variables"]["OMP_NUM_THREADS"]) == (6, "6")
    asked = make_plan("quick", Options("cpu", on="ray", threads=3))
    assert Calling()("hello", hello_of(asked))["threads"] == 3


def test_a_machine_sets_its_process_up_as_it_is_told(plan: Plan) -> None:
    begun(plan)
    settings = Process.made[-1].settings
    assert (settings.device, settings.threads, settings.process, settings.dtypes) == ("cpu", 2, "tuned", ("float32",))
    assert settings.memory_limit  # of this machine: none was given


def test_a_visit_gives_the_row_its_samples_and_what_the_user_should_know(plan: Plan) -> None:
    call, cell = begun(plan), plan.cells[0]
    answer = call("visit", {"request": VisitCell(cell, plan.rules).to_json()})
    outcome = Outcome.from_json(answer["outcome"], cell)
    assert (outcome.record.status, outcome.record.time_median_s) == (Status.OK, 0.5)
    assert outcome.samples is not None
    assert answer["notes"] == ["process 7 cannot be ended"]
    with pytest.raises(ValueError, match="for the cell of its id"):
        Outcome.from_json(answer["outcome"], plan.cells[1])


def test_a_fresh_round_has_another_process_that_keeps_what_is_known_of_the_machine(plan: Plan) -> None:
    call = begun(plan)
    process = Process.made[-1]
    rates, started = process.state["matmul_rate"], len(process.known)
    assert call("fresh", {}) == {"notes": []}
    assert (process.stops, len(process.known), process.state["matmul_rate"]) == (1, started + 1, rates)
    Process.starts = WorkerFailed("the measuring process did not start: no memory")
    assert call("fresh", {})["failed"] == "the measuring process did not start: no memory"


def test_a_cell_that_crashes_is_a_row_and_the_machine_goes_on(plan: Plan) -> None:
    call, cell = begun(plan), plan.cells[0]
    Process.fails = CellFailed(Status.CRASH, "exited with code 3", ["last words"])
    outcome = Outcome.from_json(call("visit", {"request": VisitCell(cell, plan.rules).to_json()})["outcome"], cell)
    assert (outcome.record.status, outcome.record.reason) == (Status.CRASH, "exited with code 3")
    assert outcome.stderr == ["last words"]
    Process.fails = None
    assert "outcome" in call("visit", {"request": VisitCell(cell, plan.rules).to_json()})


def test_what_fails_is_said_with_the_machine_s_name(plan: Plan) -> None:
    call = Calling()
    answer = call("hello", {**hello_of(plan), "plugins": ["nowhere.py"]})
    assert answer["failed"] == "plug-in nowhere.py: no such file"
    assert answer["name"]
    call("hello", hello_of(plan))
    Process.starts = WorkerFailed("the measuring process did not start: no memory")
    assert call("begin", begin_of(plan, 2))["failed"] == "the measuring process did not start: no memory"
    assert "missing 1 required positional argument: 'request'" in call("visit", {})["failed"]
    Process.starts = None
    assert call("fresh", {}) == {"notes": []}


def test_limits_are_measured_again_and_kept(plan: Plan) -> None:
    call, cell = begun(plan), plan.cells[0]
    record = Record.of(cell, Status.OK, time_median_s=0.5)
    request = MeasureLimits([cell], [record])
    found = request.answered(call("limits", {"request": request.to_json(), "most_s": 1.0}))
    assert found.limits == {"matmul_rate": {"float32": 9e11}}
    assert Process.made[-1].state["matmul_rate"] == {"float32": 9e11}
    Process.fails = CellFailed(Status.CRASH, "it ended")
    assert call("limits", {"request": request.to_json(), "most_s": 1.0})["failed"] == "it ended"


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
        "import time; from attnbench.harness.many.machine import Machine; "
        "Machine(); print(1, flush=True); time.sleep(60)"
    )
    shell = ["sh", "-c", '"$0" -c "$1" & read line', sys.executable, sleeps]
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin
        assert parent.stdout
        assert parent.stdout.readline() == b"1\n"
        parent.stdin.close()
        assert parent.stdout.read() == b""  # which it holds open as long as it lives


def test_files_are_named_as_the_driver_names_them(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = hello_of(plan)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    Calling()("hello", order)
    assert Path.cwd() == tmp_path


def test_torch_that_takes_other_threads_than_the_row_would_say_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    with pytest.raises(UsageError, match="torch computes with 1 threads instead of 4"):
        process.apply("as-shipped", threads=4, device="cpu")
