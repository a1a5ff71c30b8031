"""Whether a score was earned, and not by having seen the test.

After its training a model is asked about as many examples that nobody could know. And a task may give away in training
what it tests on; so sequences of the test are looked for among those of the training.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from attnbench.errors import BrokenContract
from attnbench.task import Examples, Task
from attnbench.training.accuracy import Answers, answer

_STANDARD_ERRORS = 5
"""How many standard errors a difference may have by chance."""
_LEAKED = 0.01
"""Share of the test that may have been trained on, as a note in the row; more is an error of the task."""


def hold_to_unseen(model: Callable[..., Tensor], task: Task, size: int, earned: Answers, device: str) -> None:
    """Ask about examples drawn now, from a seed that nobody can know.

    Nothing is asked where the task has no more examples than are stored.

    Raises:
        BrokenContract: it is better at the test than chance explains.
    """
    fresh = task.fresh(int.from_bytes(os.urandom(7)), size)
    if fresh is None:
        return
    unseen = answer(model, fresh, device)
    error = (earned.spread() ** 2 + unseen.spread() ** 2) ** 0.5
    if earned.accuracy - unseen.accuracy > _STANDARD_ERRORS * error + 1e-9:
        raise BrokenContract(
            f"it knows the test: {earned.accuracy:.2f} of its answers are right there, and {unseen.accuracy:.2f} on "
            "examples that were drawn after the training"
        )


class Leaks:
    """Counts the sequences of the test that a training saw."""

    def __init__(self, test: Iterable[Examples]) -> None:
        self._test = {one for some in test for one in _digests(some)}
        self._seen: set[bytes] = set()

    def look(self, examples: Examples) -> None:
        """Look at what a step of the training sees."""
        self._seen |= self._test.intersection(_digests(examples))

    def warning(self) -> str | None:
        """What the row says about leaks; None where there are none.

        Raises:
            BrokenContract: more than a hundredth of the test was trained on.
        """
        count, whole = len(self._seen), len(self._test)
        if count > _LEAKED * whole:
            raise BrokenContract(f"{count} of the {whole} test sequences were trained on: the task gives its test away")
        return f"{count} of the {whole} test sequences were trained on" if count else None

    @property
    def seen(self) -> list[str]:
        """What was seen, for a checkpoint to hold."""
        return sorted(one.hex() for one in self._seen)

    def add(self, seen: Iterable[str]) -> None:
        """Add what a checkpoint holds."""
        self._seen |= {bytes.fromhex(one) for one in seen}


def _digests(examples: Examples) -> Iterator[bytes]:
    for sequence in examples.tokens.numpy():
        yield hashlib.blake2b(sequence.tobytes(), digest_size=8).digest()
