from __future__ import annotations

import sys
from pathlib import Path

import pytest

from attnbench.run import isolation
from attnbench.run.isolation import CellFailed, Settings, Worker, WorkerFailed
from attnbench.status import Status

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


KILLED = "import os; os.kill(os.getpid(), 9)"


def test_a_worker_killed_while_it_sets_itself_up_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, KILLED, KILLED, ANSWER)
    with Worker(Settings()) as worker:
        assert worker.ask({}, 10.0) == {}
    assert len(list(tmp_path.glob("started.*"))) == 3


def test_a_worker_that_never_lives_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, KILLED)
    with Worker(Settings()) as worker, pytest.raises(WorkerFailed, match=r"did not start: .* killed by SIGKILL"):
        worker.start()
    assert len(list(tmp_path.glob("started.*"))) == 3


@pytest.mark.parametrize(
    ("at_the_request", "status", "reason"),
    [
        (KILLED, Status.CRASH, "the measuring process was killed by SIGKILL"),
        ("import os; os.kill(os.getpid(), 40)", Status.CRASH, "the measuring process was killed by signal 40"),
        ("import os; os._exit(3)", Status.CRASH, "the measuring process exited with code 3"),
        ("raise MemoryError", Status.OOM, "the measuring process ran out of memory and exited with code 1"),
        ("raise ValueError('no')", Status.CRASH, "the measuring process exited with code 1: ValueError: no"),
        ("print('x')", Status.CRASH, "the measuring process sent garbage"),
        ("print('[1]')", Status.CRASH, "the measuring process sent garbage"),
        ("print('[' * 100_000)", Status.CRASH, "the measuring process sent garbage"),
        ("import time; time.sleep(60)", Status.TIMEOUT, "no answer within 1 s"),
    ],
)
def test_a_death_at_a_request_is_told_and_the_next_request_has_a_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_the_request: str, status: Status, reason: str
) -> None:
    life = f'import sys\nsys.stdin.readline()\nprint("{{}}", flush=True)\nsys.stdin.readline()\n{at_the_request}\n'
    stand_in(tmp_path, monkeypatch, life, ANSWER)
    with Worker(Settings()) as worker:
        worker.start()
        with pytest.raises(CellFailed) as failed:
            worker.ask({}, 1.0)
        assert (failed.value.status, str(failed.value)) == (status, reason)
        assert worker.ask({}, 10.0) == {}
