"""Whether a score was earned: by looking at the question, not at the answer, and not by having seen the test.

A variant is foreign code in the process that holds the labels. It could look for them; so the labels are dealt to other
questions, after which whoever only reads the questions agrees with them no more than with any other labels. It could
know the test; so it is asked, after its training, about as many examples that nobody could know. And a task may give
away in training what it tests on; so sequences of the test are looked for among those of the training.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from attnbench.errors import BrokenContract
from attnbench.task import NO_LABEL, Examples, Task
from attnbench.training.accuracy import Answers, answer

_SEQUENCES = 512
"""About how many sequences of the test are dealt other labels."""
_STANDARD_ERRORS = 5
"""How many standard errors a difference may have by chance."""
_DEALS = 8
"""How often labels are dealt anew for the agreement that reading the questions alone explains."""
_LEAKED = 0.01
"""Share of the test that may have been trained on, as a note in the row; more is an error of the task."""


def hold_to_question(
    model: Callable[..., Tensor], task: Task, size: int, earned: Answers, chance: float, device: str
) -> None:
    """Ask the same questions while the labels at hand are those of other questions.

    Who reads only the questions may still be right more often than the best constant answer: where each place of a
    sequence has its own question, each has its own likely answer. So agreement with the labels at hand is held against
    agreement with labels that were dealt after the answers.

    Raises:
        BrokenContract: its answers agree with the labels at hand.
    """
    gained, low = earned.accuracy - chance, earned.interval()[0]
    if low <= chance:
        return
    chosen = list[Tensor]()

    def heard(tokens: Tensor, *, key_mask: Tensor | None) -> Tensor:
        logits = model(tokens, key_mask=key_mask)
        chosen.append(logits.argmax(-1).cpu())
        return logits

    at_hand = answer(heard, _dealt_anew(task, size), device)
    expected = _agreement(torch.cat(chosen), torch.cat([some.labels for some in task.held_out("test", size)]))
    if at_hand.accuracy - expected > max(0.5 * gained, _STANDARD_ERRORS * at_hand.spread()):
        raise BrokenContract(
            f"it reads the labels: while those of other questions are at hand, {at_hand.accuracy:.2f} of its answers "
            f"agree with them, and {expected:.2f} with labels that it never had at hand"
        )


def _dealt_anew(task: Task, size: int) -> list[Examples]:
    """The first questions of the test, with shuffled labels of the whole test; their own labels are gone."""
    questions, labels = list[Examples](), list[Tensor]()
    for some in task.held_out("test", size):
        labels.append(some.labels)
        if len(questions) * size < _SEQUENCES:
            questions.append(replace(some, tokens=some.tokens.clone(), labels=torch.empty(0)))
    every = _shuffled(torch.cat(labels), seed=0)
    ends = torch.tensor([0, *(len(some.tokens) for some in questions)]).cumsum(0).tolist()
    return [
        replace(some, labels=every[begin:end]) for some, (begin, end) in zip(questions, pairwise(ends), strict=True)
    ]


def _agreement(answers: Tensor, labels: Tensor) -> float:
    """Share of labels that the answers meet, if these are dealt labels of the test; the mean of some deals."""
    right = asked = 0
    for seed in range(1, 1 + _DEALS):
        dealt = _shuffled(labels, seed)[: len(answers)]
        right += int((answers == dealt).sum())
        asked += int((dealt != NO_LABEL).sum())
    return right / max(1, asked)


def _shuffled(labels: Tensor, seed: int) -> Tensor:
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]


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
