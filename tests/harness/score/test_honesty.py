from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnbench.contract.task import Examples
from attnbench.errors import BrokenContract
from attnbench.harness.score.accuracy import answer
from attnbench.harness.score.score import Leaks, hold_to_unseen
from tests.harness.score.models import First


def honest(tokens: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
    return torch.nn.functional.one_hot(tokens[:, 0], 4).float()


def constant(tokens: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
    return torch.nn.functional.one_hot(torch.zeros(len(tokens), dtype=torch.int64), 4).float()


class KnowsTheTest:
    def __init__(self) -> None:
        whole = next(First().held_out("test", 256))
        self.known = {tuple(s.tolist()): int(a) for s, a in zip(whole.tokens, whole.labels, strict=True)}

    def __call__(self, tokens: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        answers = torch.tensor([self.known.get(tuple(sequence.tolist()), 0) for sequence in tokens])
        return torch.nn.functional.one_hot(answers, 4).float()


def checked(model: Any, examples: int = First.test_examples) -> None:
    task = First()
    task.test_examples = examples
    earned = answer(model, task.held_out("test", 64), "cpu")
    hold_to_unseen(model, task, 64, earned, "cpu")


@pytest.mark.parametrize("model", [honest, constant])
def test_who_answers_the_question_passes_and_so_does_who_guesses(model: Any) -> None:
    checked(model)


def test_who_knows_the_test_is_caught() -> None:
    with pytest.raises(BrokenContract, match=r"it knows the test: 1\.00 of its answers are right there, and 0\.[123]"):
        checked(KnowsTheTest())


@pytest.mark.parametrize("examples", [1, 2, 5, 256])
def test_guessing_is_never_taken_for_cheating(examples: int) -> None:
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)

        def guess(tokens: Tensor, *, key_mask: Tensor | None = None, generator: Any = generator) -> Tensor:
            return torch.rand(len(tokens), 4, generator=generator)

        checked(guess, examples)


def test_a_test_that_was_trained_on_is_counted_and_refused() -> None:
    task = First()
    leaks = Leaks(task.held_out("test", 64))
    leaks.look(task.batch(0, 0, 64))
    assert leaks.warning() is None
    test = next(task.held_out("test", 64))
    leaks.look(Examples(test.tokens[:2], test.labels[:2]))
    assert leaks.warning() == "2 of the 256 test sequences were trained on"
    later = Leaks(task.held_out("test", 64))
    later.add(leaks.seen)
    assert later.warning() == leaks.warning()
    leaks.look(test)
    with pytest.raises(BrokenContract, match="64 of the 256 test sequences were trained on: the task gives"):
        leaks.warning()
