"""What holds for every task that is drawn without end."""

from __future__ import annotations

import pytest
import torch
from torch import Generator

from attnbench.catalogue.tasks.streams import Stream, choices, shuffles
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import Examples, Form
from attnbench.errors import Unsupported


class Coins(Stream):
    """Sequences of zeros and ones: so few that they repeat."""

    def __init__(self, n: int = 6, test: int = 8) -> None:
        super().__init__("coins", Shape(seq_len=n), Form((2,), 2), settings={}, version=1, test=test)

    def draw(self, count: int, generator: Generator) -> Examples:
        tokens = torch.randint(2, (count, self.n), generator=generator)
        return Examples(tokens, tokens.sum(1) % 2)


def sequences(examples: Examples) -> list[tuple[int, ...]]:
    return [tuple(row) for row in examples.tokens.tolist()]


def held(task: Stream, split: str, size: int = 3) -> list[tuple[int, ...]]:
    return [row for part in task.held_out(split, size) for row in sequences(part)]


def test_what_is_held_out_is_never_trained_on_even_where_sequences_are_few() -> None:
    task = Coins()
    test, validation = set(held(task, "test")), set(held(task, "validation"))
    assert not test & validation
    batches = [task.batch(0, step, 40) for step in range(5)]
    trained = {row for batch in batches for row in sequences(batch)}
    assert all(batch.tokens.shape == (40, 6) for batch in batches)
    assert trained == set(sequences(task.draw(5000, Generator().manual_seed(0)))) - test - validation


def test_labels_stay_with_their_sequences_when_some_are_drawn_anew() -> None:
    batch = Coins().batch(0, 0, 200)
    assert batch.labels.equal(batch.tokens.sum(1) % 2)


def test_a_task_without_enough_sequences_is_refused() -> None:
    with pytest.raises(Unsupported, match="nearly every sequence is in the test set"):
        Coins(n=2, test=200).batch(0, 0, 4)


def test_a_batch_depends_on_seed_and_step_and_on_nothing_asked_before() -> None:
    first, second = Coins(), Coins()
    list(second.held_out("test", 5))
    second.batch(0, 3, 9)
    torch.manual_seed(5)
    assert first.batch(1, 2, 9).tokens.equal(second.batch(1, 2, 9).tokens)
    assert not first.batch(1, 2, 9).tokens.equal(first.batch(1, 3, 9).tokens)
    assert not first.batch(1, 2, 9).tokens.equal(first.batch(2, 2, 9).tokens)


def test_what_is_held_out_is_the_same_in_parts_of_any_size() -> None:
    assert held(Coins(), "test", 3) == held(Coins(), "test", 100)
    assert (len(held(Coins(), "test")), len(held(Coins(), "validation"))) == (8, 4)
    assert [len(part.labels) for part in Coins().held_out("test", 3)] == [3, 3, 2]


def test_fresh_sequences_are_as_many_as_the_test_has_and_depend_on_the_seed() -> None:
    def fresh(seed: int, size: int = 3) -> list[tuple[int, ...]]:
        return [row for part in Coins(n=40).fresh(seed, size) for row in sequences(part)]

    assert len(fresh(0)) == 8
    assert fresh(0) == fresh(0, size=8)
    assert not set(fresh(0)) & set(fresh(1))
    assert not set(fresh(0)) & set(held(Coins(n=40), "test"))


def test_the_digest_is_of_name_settings_length_and_version() -> None:
    def digest(name: str = "coins", pairs: int = 1, n: int = 4, version: int = 1) -> str:
        form = Form((2,), 2)
        return Stream(name, Shape(seq_len=n), form, settings={"pairs": pairs}, version=version, test=1).digest

    same = digest()
    assert len(same) == 16
    assert int(same, 16)
    assert digest() == same
    assert same not in {digest("dice"), digest(pairs=2), digest(n=5), digest(version=2)}


def test_shuffles_are_permutations_and_every_order_is_equally_likely() -> None:
    orders = shuffles(6000, 3, Generator().manual_seed(0))
    assert orders.sort(1).values.equal(torch.arange(3).expand(6000, 3))
    counts = torch.unique(orders, dim=0, return_counts=True)[1]
    assert len(counts) == 6
    assert counts.sub(1000).abs().max() < 150


def test_choices_are_without_repetition_and_every_one_is_equally_likely() -> None:
    chosen = choices(12_000, 4, 2, Generator().manual_seed(0))
    pairs, counts = torch.unique(chosen, dim=0, return_counts=True)
    assert len(pairs) == 12
    assert (pairs[:, 0] != pairs[:, 1]).all()
    assert counts.sub(1000).abs().max() < 150
