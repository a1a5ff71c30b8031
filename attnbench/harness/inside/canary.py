"""Detect a cell that has slowed this process, by a fixed piece of work between cells.

No list of settings is complete, but a tracer, a hook or an allocator costs time in work that never changes. Only this
thread's processor time counts, and the quickest of several tries: a busy machine costs none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from math import inf
from time import monotonic, sleep, thread_time  # bound before a plug-in can replace them

import torch

_TRIES = 5
_TRIES_AT_FIRST = 40
"""Tries for the baseline: one that is too slow would hide a slow-down for good."""
SLOWER = 2.0
"""Smaller slow-downs are not reported."""
_PATIENCE = 0.5
"""Seconds in which an apparent slow-down may end, while the core is shared."""
_SMALL = torch.linspace(-1, 1, 16).view(4, 4)
"""So small that torch works on it with this thread alone: threads of larger products wait on a busy machine."""
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
    """The speed of this process when the canary was made, in some 20 milliseconds. One look takes a few."""

    def __init__(self) -> None:
        self._quickest = {words: self._seconds(words, _TRIES_AT_FIRST) for words in _PIECES}

    def slowed(self) -> str:
        """The lasting slow-down, in words after "the cell"; empty without one."""
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
    def _seconds(words: str, tries: int = _TRIES) -> float:
        return _quickest(_PIECES[words], tries) / _quickest(lambda: sha256(_BYTES), tries)


def _quickest(work: Callable[[], object], tries: int) -> float:
    seconds = []
    for number in range(tries):
        began = thread_time()
        # Where Python's stack ends a block of memory, each call makes and frees the next block: every second try stands
        # some frames below.
        _below(8 * (number % 2), work)
        seconds.append(thread_time() - began)
    return min(seconds)


def _below(frames: int, work: Callable[[], object]) -> None:
    if frames:
        _below(frames - 1, work)
    else:
        work()
