from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from attnbench.errors import BrokenContract
from attnbench.task import Examples, Form, Split, stream_seed
from attnbench.training.accuracy import answer, chance
from attnbench.training.honesty import Leaks, hold_to_question, hold_to_unseen
from tests.training.models import First


def honest(tokens: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
    return torch.nn.functional.one_hot(tokens[:, 0], 4).float()


def constant(tokens: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
    return torch.nn.functional.one_hot(torch.zeros(len(tokens), dtype=torch.int64), 4).float()


def reads_labels(tokens: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
    """Looks for the labels of its question among all objects of the process."""
    found = next(one for one in gc.get_objects() if isinstance(one, Examples) and one.tokens is tokens)
    return torch.nn.functional.one_hot(found.labels, 4).float()


class KnowsTheTest:
    def __init__(self) -> None:
        whole = next(First().held_out("test", 256))
        self.known = {tuple(s.tolist()): int(a) for s, a in zip(whole.tokens, whole.labels, strict=True)}

    def __call__(self, tokens: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        answers = torch.tensor([self.known.get(tuple(sequence.tolist()), 0) for sequence in tokens])
        return torch.nn.functional.one_hot(answers, 4).float()


def checked(model: Any) -> None:
    earned, guessing = answer(model, First().held_out("test", 64), "cpu"), chance(First().held_out("test", 64))
    hold_to_question(model, First(), 64, earned, guessing, "cpu")
    hold_to_unseen(model, First(), 64, earned, "cpu")


@pytest.mark.parametrize("model", [honest, constant])
def test_who_answers_the_question_passes_and_so_does_who_guesses(model: Any) -> None:
    checked(model)


def test_who_reads_the_labels_is_caught() -> None:
    with pytest.raises(BrokenContract, match=r"it reads the labels: .* 1\.00 of its answers"):
        checked(reads_labels)


class Places(First):
    """Each place of a sequence is asked about, and its label is the place's own most of the time."""

    form = Form((4,), 4, per_token=True)

    def draw(self, size: int, *names: object) -> Examples:
        generator = torch.Generator().manual_seed(stream_seed("places", *names))
        tokens = torch.randint(4, (size, self.n), generator=generator)
        labels = torch.where(tokens < 3, torch.arange(self.n) % 4, tokens)
        return Examples(tokens, labels)

    def held_out(self, split: Split, size: int) -> Iterator[Examples]:
        whole = self.draw(self.test_examples, split)
        for begin in range(0, self.test_examples, size):
            yield Examples(whole.tokens[begin : begin + size], whole.labels[begin : begin + size])


def by_place(tokens: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
    return torch.nn.functional.one_hot((torch.arange(tokens.shape[1]) % 4).expand(tokens.shape), 4).float()


def test_who_answers_each_place_as_it_mostly_is_does_not_read_the_labels() -> None:
    task = Places()
    earned, guessing = answer(by_place, task.held_out("test", 64), "cpu"), chance(task.held_out("test", 64))
    assert earned.interval()[0] > guessing  # or nothing is asked
    hold_to_question(by_place, task, 64, earned, guessing, "cpu")
    with pytest.raises(BrokenContract, match=r"agree with them, and 0\.\d\d with labels that it never had"):
        hold_to_question(reads_labels, task, 64, earned, guessing, "cpu")


def test_who_knows_the_test_is_caught() -> None:
    with pytest.raises(BrokenContract, match=r"it knows the test: 1\.00 of its answers are right there, and 0\.[123]"):
        checked(KnowsTheTest())


def test_guessing_is_never_taken_for_cheating() -> None:
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)

        def guess(tokens: Tensor, *, key_mask: Tensor | None = None, generator: Any = generator) -> Tensor:
            return torch.rand(len(tokens), 4, generator=generator)

        checked(guess)


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
