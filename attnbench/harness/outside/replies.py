"""The worker's output, read as it comes: its answers, and the end of its stderr."""

from __future__ import annotations

import queue
import subprocess
import threading
import time
from collections import deque
from contextlib import suppress
from typing import IO

from attnbench.harness.wire.process import END_OF_REQUEST
from attnbench.text import without_secrets

_TAIL_LINES = 40
_SLICE = 1.0
"""Seconds between checks for a standstill of this process, and for the end of the other."""
_LEFT = 1.0
"""Seconds to read the rest of an ended process's pipes."""


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
            part, began = min(_SLICE, left), time.monotonic()
            try:
                return self._answers.get(timeout=part)
            except queue.Empty:
                left -= min(time.monotonic() - began, 2 * part)
                if left <= 1e-3:
                    raise TimeoutError from None
                if self._process.poll() is not None and self._answers.empty():
                    return None

    def close(self) -> None:
        """Let the threads read the rest, which is all unless another process holds the other end."""
        end = time.monotonic() + _LEFT
        for reader in self._readers:
            reader.join(timeout=max(0.0, end - time.monotonic()))


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
