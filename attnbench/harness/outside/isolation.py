"""The parent's side of the worker process: start, ask, watch and replace it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import IO, TYPE_CHECKING, Any, cast

from attnbench.errors import AttnbenchError, Exit
from attnbench.harness.outside.interpreter import WORKER, Interpreter
from attnbench.harness.wire.descendants import end_all, end_left_behind, seconds_used, seconds_waited
from attnbench.harness.wire.process import END_OF_REQUEST, Process, Products, environment_for
from attnbench.measure.cgroup import oom_kills
from attnbench.measure.machine import CORES
from attnbench.measure.status import FIRST_CALL, Status
from attnbench.results.sources import Changed
from attnbench.text import one_line, without_secrets

if TYPE_CHECKING:
    from attnbench.harness.wire.protocol import Ready

START_TIMEOUT = 120.0
_STARTS = 3
"""Attempts to start a process: one that was killed while it set itself up has lost nothing."""
SOON = 2.0
"""Seconds after which a first call is reported as compiling."""
_LONG_WAIT = 0.25
PATIENCE = 5.0
"""Seconds for a process to end when asked, when killed, and once its output is closed; much memory takes a while."""

_TAIL_LINES = 40
_SLICE = 1.0
"""Seconds between checks for a standstill of this process, and for the end of the other."""
_LEFT = 1.0
"""Seconds to read the rest of an ended process's pipes."""


class WorkerFailed(AttnbenchError):
    """The worker process could not be set up at all."""

    exit_code = Exit.FAILED


@dataclass(frozen=True, slots=True)
class Settings:
    """The state of the worker process. ``memory_limit`` in bytes, None for none."""

    device: str = "cpu"
    threads: int = 1
    process: Process = "tuned"
    memory_limit: int | None = None
    plugins: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("float32",)
    rates: bool = True
    alone: bool = True
    """No other process of the run computes at the same time."""
    models: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    products: Products | None = None
    """The matmul libraries of the tuned process; None to probe for the faster ones."""
    first_call_timeout: float = 600.0
    """Seconds for a part with a first call that may compile; the request's limits leave it out."""


class CellFailed(Exception):  # an outcome of the cell, not an error of ours
    """The worker did not answer or cannot go on. Carries the row's status and reason, and the end of stderr."""

    def __init__(
        self, status: Status, reason: str, stderr: Sequence[str] = (), *, killed: bool = False, waited: float = 0.0
    ) -> None:
        super().__init__(reason)
        self.starved = waited > _LONG_WAIT
        """True if a thread had no core for so much of the exceeded limit that it may well have ended in time otherwise;
        ``waited`` is the share."""
        reason += f", in {waited:.0%} of which one of its threads waited for a core" * self.starved
        self.status, self.reason, self.stderr = status, reason, list(stderr)
        self.killed = killed
        """True if a signal ended it that can come from outside: from the system short of memory, from a scheduler."""

    @property
    def late(self) -> bool:
        """True if it exceeded the limit of the request, not that of first calls."""
        return self.status is Status.TIMEOUT and FIRST_CALL not in self.reason


class Worker:
    """The process that measures; started at the first request, and after anything but an answer or a stop."""

    def __init__(self, settings: Settings, python: Interpreter | None = None) -> None:
        """``python``: that of another environment, which measures; None for this one."""
        self.settings, self.python = settings, python
        self._called = "the measuring process" + (f" of {python.name}" if python else "")
        self.state = cast("Ready", {})
        """The facts of the process; empty until one was set up."""
        self._process: subprocess.Popen[str] | None = None
        self._replies = Replies()
        """The output of the present process, or of the last one."""
        self._ready = False
        self.served = 0
        """Number of requests to the present process."""
        self._oom_kills = 0
        """As it stood before the last request."""
        self.compiled = 0.0
        """Seconds of the last request in its first calls, as far as they may compile."""
        self.traces = ""
        """Traces of the last request in its process, which was ended for them; empty for none."""
        self.warn: Callable[[str], None] = lambda message: warnings.warn(message, RuntimeWarning, stacklevel=2)
        """Called with a message to the user about a process that does not end."""

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def begin(self) -> None:
        """Start the process and let it import torch. It needs ``threads``; other settings may change until
        :meth:`start`."""
        if self._process is None:
            self._spawn()

    def start(self) -> Ready:
        """Start and set up the process unless it is ready; return its facts. Raises WorkerFailed."""
        if self._process is not None and self._process.poll() is not None:
            self.stop()
        if self._ready:
            return self.state
        for attempt in range(_STARTS):
            try:
                self.state, self._ready = self._set_up(), True
            except CellFailed as failed:
                if attempt + 1 == _STARTS or failed.status is Status.TIMEOUT:
                    raise WorkerFailed(f"{self._called} did not start: {failed.reason}") from None
            else:
                break
        return self.state

    def _spawn(self) -> None:
        if hasattr(os, "sched_setaffinity"):  # torch may have bound this thread, which hands it down
            os.sched_setaffinity(0, CORES)
        command, variables = [sys.executable, "-P", "-m", WORKER], environment_for(self.settings.threads)
        if self.python is not None:
            command, _ = self.python.command(), variables.pop("PYTHONPATH")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=variables,
            start_new_session=True,  # Ctrl-C reaches the parent only, and the whole group can be killed
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        self._replies = Replies()
        self._replies.listen(self._process)

    def _set_up(self) -> Ready:
        self.begin()
        settings = {f: getattr(self.settings, f) for f in Settings.__slots__}
        # A process started again takes over the limits of the machine: one run has one set of them.
        try:
            state = self._exchange({**settings, "known": self.state}, START_TIMEOUT)
        except CellFailed:
            if self.python is None or not self.python.own:
                raise
            state = {}
        protocol = state.pop("protocol", "")
        if self.python is not None and self.python.own:
            from attnbench.harness.wire.protocol import digest  # imports torch, which a start need not wait for

            if protocol != digest():  # another version, which may not even understand the settings
                self.stop()
                self.python = replace(self.python, own=False)
                return self._set_up()
        if "failed" in state:
            self.stop()
            raise WorkerFailed(f"{self._called} did not start: {one_line(state['failed'])}")
        state["attnbench"] = f"{state.get('attnbench')}{' (lent)' if self.python and not self.python.own else ''}"
        return cast("Ready", state)

    def ask(
        self,
        request: dict[str, Any],
        timeout: float,
        *,
        meanwhile: Callable[[], None] = lambda: None,
        told: Callable[[dict[str, Any]], None] | None = None,
        further: bool = False,
    ) -> dict[str, Any]:
        """Send one request and wait for its answer; end the processes that it left running.

        Args:
            timeout: seconds for the answer; with ``told``, for each message. After a message with ``first``, until the
                next one, :attr:`Settings.first_call_timeout` holds.
            told: called with each message of progress.
            further: this is one more message about the last request, whose answer was a turn.
            meanwhile: called once the request is sent. A few milliseconds cost nothing, since the process first builds
                the cell.

        Raises:
            CellFailed: no message in time, or the process died or lost its device; it is thrown away.
        """
        if not further:
            self.start()
            self._replies.forget()
            self.served += 1
        answer = self._exchange(request, timeout, meanwhile, told)
        if "failed" in answer:
            self.stop()
            status = Status.CRASH if answer.get("lost") else Status.ERROR
            raise CellFailed(status, one_line(answer["failed"]), self._replies.tail)
        if answer.keys() == {"turn"}:
            return cast("dict[str, Any]", answer["turn"])
        try:
            cast("dict[str, Any]", self.state).setdefault("sources", {}).update(answer.pop("sources", {}))
            if "card" in answer:
                from attnbench.measure.card import after  # brings numpy, which a start on a CPU need not wait for

                self.state["card"] = after(self.state.get("card", {}), answer.pop("card"))
        except (AttributeError, TypeError, ValueError):
            raise self.garbage() from None
        assert self._process is not None
        left = end_left_behind(self._process.pid)
        traces = [str(answer.pop("traces", "")), f"left {left} process{'es' * (left > 1)} behind" if left else ""]
        self.traces = " and ".join(filter(None, traces))
        if self.traces:
            self.stop()
        return answer

    def seconds_used(self) -> float:
        """Processor time of the process that runs now."""
        return seconds_used(self._process.pid) if self._process is not None else 0.0

    def said(self) -> list[str]:
        """The last lines that the last request wrote to stderr."""
        return self._replies.said()

    def _exchange(
        self,
        request: dict[str, Any],
        timeout: float,
        meanwhile: Callable[[], None] = lambda: None,
        told: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        self._oom_kills = oom_kills()
        before = seconds_waited(self._process.pid)
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._death() from None
        meanwhile()
        at, left, self.compiled = "", timeout, 0.0
        first: dict[str, Any] = {}
        """The message by which a first call began."""
        while True:
            began, limit = monotonic(), self.settings.first_call_timeout if first else timeout
            try:
                line = self._first_line(first, told) if first else self._replies.answer(left)
            except TimeoutError:
                waited = seconds_waited(self._process.pid)
                longest = max((one - before.get(thread, 0.0) for thread, one in waited.items()), default=0.0)
                self.stop()
                spent = f" {'for' if told or first else 'in all, at last for'} {at}" if at else ""
                late = f"no answer within {limit:g} s{spent}" + f", which may compile; {FIRST_CALL}" * bool(first)
                raise CellFailed(Status.TIMEOUT, late, self._replies.tail, waited=min(1.0, longest / limit)) from None
            finally:
                took = monotonic() - began
                self.compiled += took * bool(first)
            answer = self._read(line)
            if "changed" in answer:
                self.stop()
                raise Changed(one_line(answer["changed"], 400))
            if answer.keys() != {"progress"}:
                return answer
            try:
                at = str(answer["progress"].get("at", ""))
                if told:
                    told(answer["progress"])
                elif not first:
                    left = max(0.0, left - took)
                was_first, first = first, answer["progress"] if answer["progress"].get("first") else {}
                if told or was_first or first:  # a limit of its own begins
                    before = seconds_waited(self._process.pid)
            except (AttributeError, KeyError, TypeError, ValueError):
                raise self.garbage() from None

    def _first_line(self, first: dict[str, Any], told: Callable[[dict[str, Any]], None] | None) -> str | None:
        left = self.settings.first_call_timeout
        if told and left > SOON:
            with suppress(TimeoutError):
                return self._replies.answer(SOON)
            told({**first, "at": f"{first.get('at', '')}, compiling"})
            left -= SOON
        return self._replies.answer(left)

    def _read(self, line: str | None) -> dict[str, Any]:
        if line is None:
            raise self._death()
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        words = ("failed", "changed")
        if not isinstance(answer, dict) or not all(isinstance(answer.get(one, ""), str) for one in words):
            raise self.garbage()
        return answer

    def garbage(self) -> CellFailed:
        """Throw the process away after a senseless answer, since the next answers may be out of step."""
        self.stop()
        return CellFailed(Status.CRASH, "the measuring process sent garbage", self._replies.tail)

    def _death(self) -> CellFailed:
        assert self._process is not None
        tail = self._replies.tail
        try:
            code = self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.stop()
            return CellFailed(Status.CRASH, "the measuring process closed its output", tail)
        self.stop()
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
        killed = -code in (signal.SIGTERM, signal.SIGKILL)
        if killed and oom_kills() > self._oom_kills:
            short = "the system ran out of memory and killed the measuring process"
            return CellFailed(Status.OOM, f"{short}; close other programs or lower --memory-limit", tail, killed=True)
        said = "\n".join(tail)
        if "MemoryError" in said or "bad_alloc" in said:
            return CellFailed(Status.OOM, f"the measuring process ran out of memory and {how}", tail)
        last = one_line(tail[-1]) if tail else ""
        reason = f"the measuring process {how}" + (f": {last}" if last else "")
        if killed and -code != signal.SIGTERM:
            reason += "; if the system did so for lack of memory, lower --memory-limit"
        return CellFailed(Status.CRASH, reason, tail, killed=killed)

    def stop(self) -> None:
        """End the process and everything it started, at once; warn if the system does not let one end."""
        process, self._process, self._ready, self.served = self._process, None, False, 0
        if process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            if sys.platform == "linux":
                process.terminate()  # its guard ends the processes below it
            else:
                os.killpg(process.pid, signal.SIGKILL)
        if not _has_ended(process):  # the guard was stopped, or waits for what does not end
            end_all(process.pid)
            if not _has_ended(process):
                self.warn(f"process {process.pid} cannot be ended: it hangs in the system; look for a broken device")
        self._replies.close()
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()


def _has_ended(process: subprocess.Popen[str]) -> bool:
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        return False
    return True


class Replies:
    """The lines of one process, read by threads that close their pipes, since an escaped process may hold the other
    end."""

    def __init__(self) -> None:
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        """The last lines of stderr, which stay when the process has ended."""
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._all_read = threading.Event()
        """Set when stderr is read up to the end of the last request."""
        self._readers: list[threading.Thread] = []

    def listen(self, process: subprocess.Popen[str]) -> None:
        """Read the output of the process until it ends."""
        self._process = process
        self._readers = [
            threading.Thread(target=_read_answers, args=(process.stdout, self._answers), daemon=True),
            threading.Thread(target=_read_tail, args=(process.stderr, self.tail, self._all_read), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def forget(self) -> None:
        """Forget the messages on stderr, before the next request."""
        self.tail.clear()
        self._all_read.clear()

    def said(self) -> list[str]:
        """The last lines that the last request wrote to stderr."""
        self._all_read.wait(timeout=1)  # the process may have closed it
        return list(self.tail)

    def answer(self, timeout: float) -> str | None:
        """The next answer; None once the process has ended, even if a child still holds its end of the pipe.

        Waits in slices, since on Windows a signal interrupts the main thread only between them. A slice during a stop
        of this process counts for at most twice its length. Raises TimeoutError after ``timeout`` seconds.
        """
        assert self._process is not None
        left = timeout
        while True:
            part, began = min(_SLICE, left), monotonic()
            try:
                return self._answers.get(timeout=part)
            except queue.Empty:
                left -= min(monotonic() - began, 2 * part)
                if left <= 1e-3:
                    raise TimeoutError from None
                if self._process.poll() is not None and self._answers.empty():
                    return None

    def close(self) -> None:
        """Let the threads read the rest, which is all unless another process holds the other end."""
        end = monotonic() + _LEFT
        for reader in self._readers:
            reader.join(timeout=max(0.0, end - monotonic()))


def _read_answers(stream: IO[str], answers: queue.Queue[str | None]) -> None:
    with suppress(ValueError, OSError), stream:
        for line in stream:
            answers.put(line)
    answers.put(None)


def _read_tail(stream: IO[str], tail: deque[str], all_read: threading.Event) -> None:
    with suppress(ValueError, OSError), stream:
        while chunk := stream.readline(4096):
            if chunk == END_OF_REQUEST:
                all_read.set()
            elif chunk.strip():
                tail.append(without_secrets(chunk.rstrip())[-300:])


def signal_name(number: int) -> str:
    """``SIGSEGV``, or ``signal 40`` without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"
