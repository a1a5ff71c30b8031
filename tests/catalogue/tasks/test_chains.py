from __future__ import annotations

import pytest
import torch

from attnbench.catalogue.tasks.chains import Chains
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import NO_LABEL
from attnbench.errors import Unsupported, UsageError


@pytest.mark.parametrize("hops", [1, 2, 3])
@pytest.mark.parametrize("keys", [None, 11])
def test_every_label_is_the_value_that_a_dictionary_reaches(hops: int, keys: int | None) -> None:
    known, pairs = keys or 3 * hops, 3 * hops
    examples = Chains(Shape(seq_len=20), hops=hops, chains=3, values=5, keys=keys).batch(0, 0, 60)
    for row, labels in zip(examples.tokens.tolist(), examples.labels.tolist(), strict=True):
        leads_to = dict(row[:pairs])
        assert len(leads_to) == pairs, "no key has two pairs"
        assert labels[:pairs] == [NO_LABEL] * pairs
        asked = 0
        for (first, second), label in zip(row[pairs:], labels[pairs:], strict=True):
            assert second == known + 5, "no pair stands among the questions"
            if first == known:
                assert label == NO_LABEL
                continue
            at = first
            for turn in range(hops):
                assert at < known, f"a value after {turn} hops"
                at = leads_to[at]
            assert label == at - known
            assert first not in leads_to.values(), "a chain is asked from its first key on"
            asked += 1
        assert asked == 3


def test_the_order_of_the_pairs_says_nothing() -> None:
    tokens = Chains(Shape(seq_len=12), chains=3, hops=2).batch(0, 0, 3000).tokens[:, :6]
    beside = (tokens[:, :-1, 1] == tokens[:, 1:, 0]).double().mean(0)  # a pair stands behind its own as often as any
    assert (beside - 1 / 2 * 1 / 5).abs().max() < 5 * (1 / 10 * 9 / 10 / 3000) ** 0.5


def test_guessing_is_right_as_often_as_there_are_values_whichever_key_is_asked() -> None:
    examples = Chains(Shape(seq_len=12), chains=2, values=4).batch(0, 0, 4000)
    asked = examples.labels != NO_LABEL
    for key in range(4):
        labels = examples.labels[asked & (examples.tokens[..., 0] == key)]
        shares = torch.bincount(labels, minlength=4) / len(labels)
        assert shares.sub(1 / 4).abs().max() < 5 * (1 / 4 * 3 / 4 / len(labels)) ** 0.5


def test_what_does_not_fit_is_refused_with_the_remedy() -> None:
    with pytest.raises(UsageError, match="keys=7 are fewer than hops·chains = 8; raise keys or lower chains"):
        Chains(Shape(seq_len=64), keys=7)
    with pytest.raises(Unsupported, match="8 pairs and 4 questions need a length of at least 12, not 11"):
        Chains(Shape(seq_len=11))
    assert Chains(Shape(seq_len=12)).batch(0, 0, 2).tokens.shape == (2, 12, 2)
