from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from attnbench.harness import runner
from attnbench.harness.outside import isolation
from attnbench.harness.outside.isolation import CellFailed, Settings, Worker, WorkerFailed
from attnbench.harness.plan import Options, Plan, make_plan
from attnbench.harness.runner import Watcher, execute
from attnbench.harness.wire import descendants
from attnbench.measure.status import Status
from attnbench.results.record import Record
from attnbench.suite.cell import Cell
from tests.instant import Listening

ANSWER = 'import sys\nfor line in sys.stdin: print("{}", flush=True)\n'


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *lives: str) -> None:
    """Replace the program of the worker by Python code: the first in the first process, and the last in all others."""
    for number, code in enumerate(lives):
        (tmp_path / f"{number}.py").write_text(code)
    program = tmp_path / "python"
    program.write_text(
        f"#!/bin/sh\ncd {tmp_path}\nnumber=$(ls started.* 2>/dev/null | wc -l)\ntouch started.$number\n"
        f"test -e $number.py || number={len(lives) - 1}\nexec {sys.executable} -I $number.py\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(isolation.sys, "executable", str(program))


LEAVING = """
import os, sys, time
from pathlib import Path
from attnbench.harness.wire.descendants import guard

def leave():
    if child := os.fork():
        Path("left").write_text(str(child))
    else:
        os.execv("/bin/sleep", ["sleep", "60"])

def get_away():
    if not os.fork():
        os.setsid()
        if child := os.fork():
            Path("left").write_text(str(child))
            os._exit(0)
        os.execve("/bin/sleep", ["sleep", "60"], {})
    os.wait()

guard()
for turn in range(2):
    sys.stdin.readline()
"""


def wait_until_over(pid: str) -> None:
    deadline = time.monotonic() + 2
    while not is_over(pid):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_over(pid: str) -> bool:
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


KILLED = "import os; os.kill(os.getpid(), 9)"


def test_a_worker_killed_while_it_sets_itself_up_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, KILLED, KILLED, ANSWER)
    with Worker(Settings()) as worker:
        assert worker.ask({}, 10.0) == {}
    assert len(list(tmp_path.glob("started.*"))) == 3


ECHO = "import sys; print(sys.stdin.readline(), flush=True); sys.stdin.readline()"


@pytest.mark.parametrize("lives", [(ECHO,), (KILLED, ECHO)])
def test_a_process_that_begins_early_is_told_the_settings_later_and_replaced_if_it_died_meanwhile(
    lives: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, *lives)
    with Worker(Settings()) as worker:
        worker.begin()
        while not list(tmp_path.glob("started.*")):
            time.sleep(0.01)
        worker.settings = Settings(dtypes=("float64",))
        assert worker.start()["dtypes"] == ["float64"]
        assert worker.start() is worker.state
    assert len(list(tmp_path.glob("started.*"))) == len(lives)


def test_a_worker_that_never_lives_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, KILLED)
    with Worker(Settings()) as worker, pytest.raises(WorkerFailed, match=r"did not start: .* killed by SIGKILL"):
        worker.start()
    assert len(list(tmp_path.glob("started.*"))) == 3


GUARDED = "from attnbench.harness.wire.descendants import guard; guard()\n"
HIDDEN_DEATH = "import os, time; os.fork() or time.sleep(20); os._exit(3)"
"""The child keeps the pipe open through which answers come."""


@pytest.mark.parametrize("each", [True, False])
def test_a_limit_holds_for_each_part_of_a_visit_or_for_all_and_the_part_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, each: bool
) -> None:
    part = 'time.sleep(0.6); print(\'{"progress": {"at": "its error"}}\', flush=True)\n'
    life = f'import sys, time\nsys.stdin.readline()\nprint("{{}}", flush=True)\nsys.stdin.readline()\n{part * 4}'
    stand_in(tmp_path, monkeypatch, GUARDED + life + "time.sleep(60)")
    monkeypatch.setattr(isolation, "_SLICE", 0.2)
    parts: list[object] = []
    with Worker(Settings()) as worker:
        worker.start()
        with pytest.raises(CellFailed) as failed:
            worker.ask({}, 1.8, told=parts.append if each else None)
    assert failed.value.status is Status.TIMEOUT
    assert str(failed.value) == f"no answer within 1.8 s {'for' if each else 'in all, at last for'} its error"
    assert len(parts) == 4 * each


def test_a_kill_by_the_system_short_of_memory_is_told_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life = f'import sys\nsys.stdin.readline()\nprint("{{}}", flush=True)\nsys.stdin.readline()\n{KILLED}\n'
    stand_in(tmp_path, monkeypatch, GUARDED + life)
    counts = iter(range(10))
    monkeypatch.setattr(isolation, "oom_kills", lambda: next(counts))
    with Worker(Settings()) as worker:
        worker.start()
        with pytest.raises(CellFailed) as failed:
            worker.ask({}, 5.0)
    assert (failed.value.status, failed.value.killed) == (Status.OOM, True)
    assert str(failed.value) == (
        "the system ran out of memory and killed the measuring process; close other programs or lower --memory-limit"
    )


@pytest.mark.parametrize(
    ("at_the_request", "status", "reason"),
    [
        (
            KILLED,
            Status.CRASH,
            "the measuring process was killed by SIGKILL; "
            "if the system did so for lack of memory, lower --memory-limit",
        ),
        ("import os; os.kill(os.getpid(), 40)", Status.CRASH, "the measuring process was killed by signal 40"),
        ("import os; os._exit(3)", Status.CRASH, "the measuring process exited with code 3"),
        ("raise MemoryError", Status.OOM, "the measuring process ran out of memory and exited with code 1"),
        ("raise ValueError('no')", Status.CRASH, "the measuring process exited with code 1: ValueError: no"),
        ("print('x')", Status.CRASH, "the measuring process sent garbage"),
        ("print('[1]')", Status.CRASH, "the measuring process sent garbage"),
        ("print('{\"failed\": 1}')", Status.CRASH, "the measuring process sent garbage"),
        ("print('{\"changed\": 1}')", Status.CRASH, "the measuring process sent garbage"),
        ("print('{\"sources\": 1}')", Status.CRASH, "the measuring process sent garbage"),
        ('print(\'{"failed": "why"}\', flush=True); sys.stdin.readline()', Status.ERROR, "why"),
        ('print(\'{"failed": "why", "lost": true}\', flush=True); sys.stdin.readline()', Status.CRASH, "why"),
        (HIDDEN_DEATH, Status.CRASH, "the measuring process exited with code 3"),
        ("print('[' * 100_000)", Status.CRASH, "the measuring process sent garbage"),
        ("import time; time.sleep(60)", Status.TIMEOUT, "no answer within 1 s"),
    ],
)
def test_a_death_at_a_request_is_told_and_the_next_request_has_a_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_the_request: str, status: Status, reason: str
) -> None:
    life = f'import sys\nsys.stdin.readline()\nprint("{{}}", flush=True)\nsys.stdin.readline()\n{at_the_request}\n'
    stand_in(tmp_path, monkeypatch, life if at_the_request == HIDDEN_DEATH else GUARDED + life, ANSWER)
    monkeypatch.setattr(isolation, "_SLICE", 0.2)
    with Worker(Settings()) as worker:
        worker.start()
        with pytest.raises(CellFailed) as failed:
            worker.ask({}, 5.0 if at_the_request == HIDDEN_DEATH else 1.0)
        assert (failed.value.status, str(failed.value)) == (status, reason)
        assert worker.ask({}, 10.0) == {}


@pytest.mark.parametrize("told", [None, lambda progress: None])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("waited", [0.2, 0.6])
def test_a_late_process_that_waited_for_a_core_says_so_by_its_waits_since_the_limit_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Any, first: bool, waited: float
) -> None:
    message = json.dumps({"progress": {"done": 0, "of": 0, "at": "its error", "first": first}})
    life = 'import sys, time\nsys.stdin.readline()\nprint("{}", flush=True)\nsys.stdin.readline()\n'
    stand_in(tmp_path, monkeypatch, f"{life}print({message!r}, flush=True)\ntime.sleep(60)\n")
    before = [0.0, 0.0, *([3.0] if told or first else [])]  # as it is set up, at the request, at the message
    waits = iter([*before, before[-1] + waited])
    monkeypatch.setattr(isolation, "seconds_waited", lambda pid: {"a thread": next(waits)})
    monkeypatch.setattr(isolation, "_SLICE", 0.2)
    with Worker(Settings(first_call_timeout=1.0)) as worker:
        worker.start()
        with pytest.raises(CellFailed) as failed:
            worker.ask({}, 60.0 if first else 1.0, told=told)
    words = ", in 60% of which one of its threads waited for a core"
    assert (failed.value.starved, failed.value.reason.endswith(words)) == (waited > 0.5,) * 2


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("leave", ["leave()", "get_away()"])
@pytest.mark.parametrize("then", ["print('{}', flush=True); sys.stdin.readline()", "os._exit(3)", "time.sleep(60)"])
def test_what_a_cell_left_running_ends_with_the_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leave: str, then: str
) -> None:
    stand_in(tmp_path, monkeypatch, LEAVING + f"    if turn: {leave}; {then}\n    print('{{}}', flush=True)\n")
    with Worker(Settings()) as worker:
        worker.start()
        with suppress(CellFailed):
            worker.ask({}, 1.0)
        wait_until_over((tmp_path / "left").read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
def test_what_a_cell_left_running_ends_when_the_whole_command_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = "    if turn: get_away(); open('ready', 'w'); time.sleep(60)\n    print('{}', flush=True)\n"
    stand_in(tmp_path, monkeypatch, LEAVING + life)
    command = os.fork()
    if not command:
        try:
            Worker(Settings()).ask({}, 60.0)
        finally:
            os._exit(1)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    os.kill(command, signal.SIGKILL)
    os.waitpid(command, 0)
    wait_until_over((tmp_path / "left").read_text())


def test_what_is_to_be_done_meanwhile_is_done_while_the_process_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = "while not os.path.exists('done'): time.sleep(0.001)"
    life = "import os, sys, time\nsys.stdin.readline(); print('{}', flush=True)\nsys.stdin.readline()\n"
    stand_in(tmp_path, monkeypatch, f"{life}{wait}\nprint('{{}}', flush=True)\nsys.stdin.readline()")
    with Worker(Settings()) as worker:
        assert worker.ask({}, 10.0, meanwhile=(tmp_path / "done").touch) == {}


def test_the_last_lines_of_stderr_come_with_a_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"line {number}" for number in range(100)]
    said = "\n".join(lines)
    stand_in(tmp_path, monkeypatch, f"import os, sys; print({said!r}, file=sys.stderr, flush=True); os._exit(3)")
    with Worker(Settings()) as worker, pytest.raises(CellFailed) as failed:
        worker._set_up()
    assert failed.value.stderr == lines[-40:]


def test_a_process_that_ends_between_two_requests_costs_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, "import sys; sys.stdin.readline(); print('{}')", ANSWER)
    with Worker(Settings()) as worker:
        worker.start()
        time.sleep(0.2)
        assert worker.ask({}, 10.0) == {}


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_process_that_got_away_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away = "subprocess.Popen(['sleep', '60'], start_new_session=True, env={}).pid"
    life = f"import os, subprocess; open('away', 'w').write(str({away})); os._exit(3)"
    stand_in(
        tmp_path,
        monkeypatch,
        f"import sys\nsys.stdin.readline()\nprint({{}}, flush=True)\nsys.stdin.readline()\n{life}",
        ANSWER,
    )
    monkeypatch.setattr(isolation, "_SLICE", 0.2)
    with Worker(Settings()) as worker:
        worker.start()
        started = time.monotonic()
        with pytest.raises(CellFailed, match="exited with code 3"):
            worker.ask({}, 60.0)
        assert worker.ask({}, 60.0) == {}
        assert time.monotonic() - started < 10
    os.kill(int((tmp_path / "away").read_text()), signal.SIGKILL)


CELLS = """
import json, sys, time

with open("rows.json") as file:
    rows = json.load(file)

def say(what): print(json.dumps(what), flush=True)

sys.stdin.readline()
say({"machine_id": "m", "process": "tuned", "process_notes": [], "environment": {"torch": "2"}})
for line in sys.stdin:
    time.sleep(0.02)
    say({"record": rows[json.dumps(json.loads(line)["cell"], sort_keys=True)], "samples": None})
"""
"""A measuring process that answers without importing what takes seconds."""


def with_answers(plan: Plan, folder: Path) -> Plan:
    """Write down what :data:`CELLS` answers for each cell."""
    rows = {json.dumps(cell.to_json(), sort_keys=True): Record.of(cell, Status.OK).to_json() for cell in plan.cells}
    (folder / "rows.json").write_text(json.dumps(rows))
    return plan


GARBLED = """
import re

def say(what):
    row = json.dumps(what)
    print(re.sub('NAME: [^,]*', lambda _: 'NAME: VALUE', row) if '"seq_len": 3,' in row else row, flush=True)

sys.stdin.readline()
"""


@pytest.mark.parametrize(
    ("name", "value"),
    [("rel_error", "NaN"), ("rel_error", "1e999"), ("seq_len", '"3"'), ("reason", r'"\\ud800"'), ("peak_bytes", "1.5")],
)
def test_an_answer_that_could_not_be_read_again_is_a_row_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    garbled = GARBLED.replace("NAME", f'"{name}"').replace("VALUE", value)
    stand_in(tmp_path, monkeypatch, CELLS.replace("sys.stdin.readline()\n", garbled))
    monkeypatch.setattr(runner, "machine_id", lambda device: "m")
    suite = tmp_path / "s.yaml"
    suite.write_text("name: s\nsweeps: [{name: w, measure: [memory], matrix: {variant: linear, seq_len: 1..5+1}}]\n")
    folder, records = execute(
        with_answers(make_plan(suite, Options("cpu", out=tmp_path / "out", rounds=1, unchecked=True)), tmp_path)
    )
    assert {record.seq_len: record.reason for record in records if record.status is not Status.OK} == {
        3: "the measuring process sent garbage"
    }
    assert len(folder.records()) == 5


def test_kills_of_the_measuring_process_alone_cost_no_row_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, CELLS)
    monkeypatch.setattr(runner, "machine_id", lambda device: "m")
    suite = tmp_path / "s.yaml"
    suite.write_text("name: s\nsweeps: [{name: w, measure: [memory], matrix: {variant: linear, seq_len: 1..40+1}}]\n")
    at = (1, 10, 20, 39)

    class Killer(Watcher):
        visits = 0

        def visiting(self, cell: Cell) -> None:
            self.visits += 1
            if self.visits in at:
                assert worker._process is not None
                threading.Timer(0.01, os.kill, (worker._process.pid, signal.SIGKILL)).start()

    plan = with_answers(make_plan(suite, Options("cpu", out=tmp_path / "out", rounds=1, unchecked=True)), tmp_path)
    with Worker(plan.settings) as worker:
        _, records = execute(plan, Killer(), worker)
    assert len({record.cell_id for record in records}) == len(records) == 40
    assert {record.reason for record in records} == {""}  # each was tried once more


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_compilers_that_torch_keeps_stay_until_the_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = "[sys.executable, '-c', 'import time; time.sleep(60)', 'torch/_inductor/compile_worker/__main__.py']"
    begin = GUARDED + f"import subprocess, sys\nopen('left', 'w').write(str(subprocess.Popen({compiler}).pid))\n"
    stand_in(tmp_path, monkeypatch, begin + ANSWER)
    with Worker(Settings()) as worker:
        worker.start()
        worker.ask({}, 10.0)
        time.sleep(0.1)
        assert not is_over((tmp_path / "left").read_text())
    wait_until_over((tmp_path / "left").read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="the guard")
@pytest.mark.parametrize("stopped", ["guard", "all"])
def test_a_process_that_was_stopped_ends_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: str
) -> None:
    monkeypatch.setattr(isolation, "PATIENCE", 1.0)
    stand_in(
        tmp_path, monkeypatch, LEAVING + "    if turn: get_away()\n    print('{}', flush=True)\nsys.stdin.read()\n"
    )
    worker = Worker(Settings())
    told: list[str] = []
    worker.warn = told.append
    worker.start()
    monkeypatch.setattr(isolation, "end_left_behind", lambda guard: None)
    worker.ask({}, 10.0)
    assert worker._process is not None
    guard = worker._process.pid
    processes = [guard, *descendants._below(guard)]
    assert len(processes) == 3  # the guard, what measures, and what got away from it
    for process in processes if stopped == "all" else [guard]:
        os.kill(process, signal.SIGSTOP)
    worker.stop()
    for process in processes:
        wait_until_over(str(process))
    assert told == []


def test_a_process_that_nothing_ends_is_told_and_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "PATIENCE", 0.2)
    monkeypatch.setattr(isolation, "_LEFT", 0.2)
    stand_in(tmp_path, monkeypatch, ANSWER)
    worker = Worker(Settings())
    worker.start()
    process = worker._process
    assert process is not None
    with monkeypatch.context() as deaf:  # as one that waits for a disk which is gone
        deaf.setattr(process, "terminate", lambda: None)
        deaf.setattr(os, "killpg", lambda *_: None)
        deaf.setattr(isolation, "end_all", lambda guard: None)
        with pytest.warns(RuntimeWarning, match=f"process {process.pid} cannot be ended: it hangs in the system"):
            worker.stop()
    assert worker.ask({}, 10.0) == {}  # by another process
    worker.stop()
    process.kill()
    process.wait()


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
def test_a_stop_of_the_command_that_is_longer_than_the_limit_is_no_timeout_of_the_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = (
        "import time\nsys.stdin.readline(); print('{}', flush=True)\nsys.stdin.readline(); open('asked', 'w').close()\n"
    )
    stand_in(tmp_path, monkeypatch, f"import sys\n{life}time.sleep(2.5); print('{{}}', flush=True); sys.stdin.read()")
    monkeypatch.setattr(isolation, "_SLICE", 0.2)
    command = os.fork()
    if not command:
        try:
            Worker(Settings()).ask({}, 2.0)
            os._exit(0)
        except CellFailed:
            os._exit(1)
        finally:
            os._exit(2)
    while not (tmp_path / "asked").exists():
        time.sleep(0.01)
    os.kill(command, signal.SIGSTOP)
    time.sleep(2.3)
    os.kill(command, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(command, 0)[1]) == 0


@pytest.mark.usefixtures("forked_workers")
def test_what_a_visit_does_is_told_part_by_part(tmp_path: Path) -> None:
    suite = tmp_path / "s.yaml"
    suite.write_text(
        "name: s\nsweeps: [{name: w, measure: [error, time], "
        "matrix: {variant: softmax, seq_len: 16, heads: 1, head_dim: 8}}]\n"
    )
    watcher = Listening()
    execute(make_plan(suite, Options("cpu", out=tmp_path / "out", threads=1, quick=True)), watcher)
    laws = [part for part in watcher.parts if part.startswith("law ")]
    assert laws[0] == f"law 1 of {len(laws)}"
    visit = ["its error", "its first calls", "its timed calls", "the checks of its timed calls"]
    assert watcher.parts == laws + visit
