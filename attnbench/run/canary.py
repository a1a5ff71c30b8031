"""Whether a cell has made this process slower: a fixed piece of work, timed between cells.

No list of settings is complete. A tracer, a hook or an allocator that goes on working costs time whatever its name is,
and that shows in work that never changes. Only the processor's time of this thread counts, and the quickest of several
tries: a busy machine takes the core away, which costs none.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from math import inf
from time import monotonic, sleep, thread_time  # bound before a plug-in can replace them

import torch

_TRIES = 5
SLOWER = 2.0
"""More than this many times as slow is told."""
_PATIENCE = 0.5
"""Seconds in which what seems slower may show that it is not, while the core is shared."""
_SMALL = torch.linspace(-1, 1, 16).view(4, 4)
"""So small that torch works on it with this thread alone. Products have more, which wait where the machine is busy."""
_BYTES = bytes(2**16)


def _objects() -> None:
    kept = [(str(number), {"number": number}) for number in range(300)]
    del kept


def _called(number: int) -> int:
    return number + 1


def _calls() -> None:
    number = 0
    while number < 1000:
        number = _called(number)


def _operations() -> None:
    with torch.enable_grad():
        given = _SMALL.clone().requires_grad_()
        for _ in range(10):
            torch.exp(given * 0.5 + 1)


_PIECES: dict[str, Callable[[], object]] = {
    "objects of Python": _objects,
    "calls of Python": _calls,
    "operations of torch": _operations,
}


class Canary:
    """Knows how quick this process was when the canary was made. One look takes a few milliseconds."""

    def __init__(self) -> None:
        self._quickest = {words: self._seconds(words) for words in _PIECES}

    def slowed(self) -> str:
        """What has become slower for good, in words after "the cell"; empty where nothing has."""
        slow, deadline = dict.fromkeys(_PIECES, inf), monotonic() + _PATIENCE
        while True:
            slow = {words: min(ratio, self._seconds(words) / self._quickest[words]) for words, ratio in slow.items()}
            slow = {words: ratio for words, ratio in slow.items() if ratio > SLOWER}
            if not slow:
                return ""
            if monotonic() > deadline:
                return f"made {' and '.join(f'{words} {ratio:.1f} times as slow' for words, ratio in slow.items())}"
            sleep(_PATIENCE / 50)

    @staticmethod
    def _seconds(words: str) -> float:
        """Time of one piece, in times of what no setting of Python or torch reaches but a shared core slows too."""
        return _quickest(_PIECES[words]) / _quickest(lambda: sha256(_BYTES))


def _quickest(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_TRIES):
        began = thread_time()
        work()
        seconds.append(thread_time() - began)
    return min(seconds)
