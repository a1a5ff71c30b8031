from __future__ import annotations

from itertools import permutations

import pytest
from torch import Generator

from attnbench.catalogue.tasks.mqar import MQAR
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import NO_LABEL
from attnbench.errors import Unsupported, UsageError


def test_every_label_is_the_value_that_a_dictionary_finds() -> None:
    examples = MQAR(Shape(seq_len=40), pairs=6, vocab=20).batch(0, 0, 60)
    for row, labels in zip(examples.tokens.tolist(), examples.labels.tolist(), strict=True):
        facts = {row[at]: row[at + 1] for at in range(0, 12, 2)}
        assert len(facts) == len(set(facts.values())) == 6
        assert all(key < 10 <= value < 20 for key, value in facts.items())
        asked = [token for token in row[12:] if token != 20]
        assert sorted(asked) == sorted(facts)
        expected = [NO_LABEL] * 12 + [facts[token] - 10 if token in facts else NO_LABEL for token in row[12:]]
        assert labels == expected


def test_questions_stand_in_the_first_of_two_places() -> None:
    labels = MQAR(Shape(seq_len=41), pairs=6, vocab=20).batch(0, 0, 200).labels
    asked = (labels != NO_LABEL).any(0)
    assert asked[12::2].tolist() == [True] * 14 + [False]
    assert not asked[13::2].any()


def test_no_answer_stands_after_its_question() -> None:
    examples = MQAR(Shape(seq_len=40), pairs=6, vocab=20).batch(0, 0, 60)
    after = examples.tokens[:, 1:][examples.labels[:, :-1] != NO_LABEL]
    assert (after == 20).all()


@pytest.mark.parametrize("power", [0.01, 0.5, 1.0])
def test_gaps_follow_the_power_law_without_replacement(power: float) -> None:
    # Two questions in four places: the chance of each ordered choice can be counted.
    count = 20_000
    drawn = MQAR(Shape(seq_len=12), pairs=2, vocab=8, power=power)._gaps(count, Generator().manual_seed(0))
    weights = [g ** (power - 1) for g in range(1, 5)]
    for first, second in permutations(range(4), 2):
        expected = weights[first] / sum(weights) * weights[second] / (sum(weights) - weights[first])
        found = ((drawn[:, 0] == first) & (drawn[:, 1] == second)).double().mean()
        assert abs(found - expected) < 5 * (expected * (1 - expected) / count) ** 0.5


def test_what_does_not_fit_is_refused() -> None:
    for options in ({"vocab": 9, "pairs": 2}, {"vocab": 6, "pairs": 4}):
        with pytest.raises(UsageError, match="must be even and at least"):
            MQAR(Shape(seq_len=64), **options)
    with pytest.raises(Unsupported, match="at least 32, not 31"):
        MQAR(Shape(seq_len=31))
    assert MQAR(Shape(seq_len=32)).batch(0, 0, 2).tokens.shape == (2, 32)
    assert MQAR(Shape(seq_len=64)).form.vocab == (8193,)
