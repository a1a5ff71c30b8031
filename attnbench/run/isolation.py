"""The parent's side of the worker process: start it, ask it, watch it, throw it away."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from attnbench.errors import AttnbenchError, Exit
from attnbench.record import one_line
from attnbench.run.process import Process, environment_for
from attnbench.status import Status

START_TIMEOUT = 120.0
_STARTS = 3
"""Attempts: a process that was killed while it set itself up has lost nothing."""
_TAIL_LINES = 40
_NOISE = ("USDT:",)
"""torch's profiler writes lines of its own to stderr."""


class WorkerFailed(AttnbenchError):
    """The worker process could not be set up at all."""

    exit_code = Exit.FAILED


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides the state of the worker process. ``memory_limit`` in bytes, None for none."""

    device: str = "cpu"
    threads: int = 1
    process: Process = "tuned"
    memory_limit: int | None = None
    plugins: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("float32",)
    rates: bool = True


class CellFailed(Exception):  # an outcome of the cell, not an error of ours
    """The worker did not answer: it died or ran out of time. Carries the status and reason of the row."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class Worker:
    """One persistent worker; started when first asked, started anew after anything but an answer."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.state: dict[str, Any] = {}
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._tail_reader = threading.Thread()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> dict[str, Any]:
        """Start the process if it is not running; returns what it says about itself.

        Raises:
            WorkerFailed: it could not be set up.
        """
        if self._process is not None:
            return self.state
        for attempt in range(_STARTS):
            try:
                self.state = self._set_up()
            except CellFailed as failed:
                if attempt + 1 == _STARTS or failed.status is Status.TIMEOUT:
                    raise WorkerFailed(f"the measuring process did not start: {failed.reason}") from None
            else:
                break
        return self.state

    def _set_up(self) -> dict[str, Any]:
        self._answers, self._tail = queue.Queue(), deque(maxlen=_TAIL_LINES)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "attnbench.run.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment_for(self.settings.threads),
            start_new_session=True,  # Ctrl-C reaches the parent only, and the whole group can be killed
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        threading.Thread(target=_read_answers, args=(self._process.stdout, self._answers), daemon=True).start()
        self._tail_reader = threading.Thread(target=_read_tail, args=(self._process.stderr, self._tail), daemon=True)
        self._tail_reader.start()
        settings = {f: getattr(self.settings, f) for f in Settings.__slots__}
        # A process started anew takes the limits of the machine over: one run has one set of them.
        state = self._exchange({**settings, "known": self.state}, START_TIMEOUT)
        if "failed" in state:
            self.stop()
            raise WorkerFailed(f"the measuring process did not start: {one_line(state['failed'])}")
        return state

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Send one request and wait for its answer.

        Raises:
            CellFailed: no answer within ``timeout`` seconds, or the process died; it is thrown away.
        """
        self.start()
        answer = self._exchange(request, timeout)
        if "failed" in answer:
            self.stop()
            raise CellFailed(Status.ERROR, one_line(answer["failed"]))
        return answer

    def _exchange(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._death() from None
        try:
            line = self._wait(timeout)
        except queue.Empty:
            self.stop()
            raise CellFailed(Status.TIMEOUT, f"no answer within {timeout:.0f} s") from None
        if line is None:
            raise self._death()
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise self.garbage()
        return answer

    def garbage(self) -> CellFailed:
        """An answer that makes no sense: throw the process away, since the next answers may be out of step."""
        self.stop()
        return CellFailed(Status.CRASH, "the measuring process sent garbage")

    def _wait(self, timeout: float) -> str | None:
        """The next answer. Waits in slices, since a signal only interrupts the main thread between them on Windows."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                return self._answers.get(timeout=max(0.0, min(1.0, deadline - time.monotonic())))
            except queue.Empty:
                if time.monotonic() >= deadline:
                    raise

    def _death(self) -> CellFailed:
        """What the exit of the process tells."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.stop()
            return CellFailed(Status.CRASH, "the measuring process closed its output")
        self._tail_reader.join(timeout=1)
        self.stop()
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
        said = "\n".join(self._tail)
        if "MemoryError" in said or "bad_alloc" in said:
            return CellFailed(Status.OOM, f"the measuring process ran out of memory and {how}")
        last = one_line(self._tail[-1]) if self._tail else ""
        return CellFailed(Status.CRASH, f"the measuring process {how}" + (f": {last}" if last else ""))

    def stop(self) -> None:
        """End the process and everything it started, at once."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


def _read_answers(stream: IO[str], answers: queue.Queue[str | None]) -> None:
    with suppress(ValueError, OSError):
        for line in stream:
            answers.put(line)
    answers.put(None)


def _read_tail(stream: IO[str], tail: deque[str]) -> None:
    with suppress(ValueError, OSError):
        while chunk := stream.readline(4096):
            if chunk.strip() and not chunk.startswith(_NOISE):
                tail.append(chunk.rstrip()[-300:])
