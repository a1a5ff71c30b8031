from __future__ import annotations

import pytest
import torch

from attnbench.catalogue.tasks.chains import Chains
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import NO_LABEL
from attnbench.errors import Unsupported, UsageError


@pytest.mark.parametrize("hops", [1, 2, 3])
@pytest.mark.parametrize("keys", [None, 11])
def test_every_label_is_the_key_that_a_dictionary_reaches(hops: int, keys: int | None) -> None:
    known = keys or 7
    examples = Chains(Shape(seq_len=20), hops=hops, pairs=7, keys=keys).batch(0, 0, 60)
    for row, labels in zip(examples.tokens.tolist(), examples.labels.tolist(), strict=True):
        leads_to = dict(row[:7])
        assert len(leads_to) == len(set(leads_to.values())) == 7
        assert sorted(leads_to) == sorted(leads_to.values())
        asked = [first for first, second in row[7:] if first < known]
        assert sorted(asked) == sorted(leads_to), "each key is asked once"
        assert all(second == known for _, second in row[7:]), "no pair stands among the questions"
        for (first, _), label in zip(row[7:], labels[7:], strict=True):
            key = first
            for _ in range(hops if first < known else 0):
                key = leads_to[key]
            assert label == (key if first < known else NO_LABEL)
        assert labels[:7] == [NO_LABEL] * 7


def test_all_pairs_form_one_ring_in_an_order_that_says_nothing() -> None:
    tokens = Chains(Shape(seq_len=12), pairs=5).batch(0, 0, 2000).tokens[:, :5]
    for row in tokens[:50].tolist():
        leads_to, key, met = dict(row), 0, set()
        while key not in met:
            met.add(key)
            key = leads_to[key]
        assert len(met) == 5
    beside = (tokens[:, :-1, 1] == tokens[:, 1:, 0]).double().mean(0)  # the next pair goes on as often as any other
    assert (beside - 1 / 4).abs().max() < 5 * (1 / 4 * 3 / 4 / 2000) ** 0.5


def test_from_two_hops_on_no_pair_holds_key_and_answer_and_neither_way_round_is_shorter() -> None:
    examples = Chains(Shape(seq_len=16), hops=3, pairs=6).batch(0, 0, 50)
    for row, labels in zip(examples.tokens.tolist(), examples.labels.tolist(), strict=True):
        pairs = {tuple(pair) for pair in row[:6]}
        asked = [(row[at][0], label) for at, label in enumerate(labels) if label != NO_LABEL]
        assert not pairs & {*asked, *((answer, key) for key, answer in asked)}


def test_guessing_is_right_as_often_as_there_are_keys() -> None:
    labels = Chains(Shape(seq_len=32), pairs=4, keys=8).batch(0, 0, 2000).labels
    shares = torch.bincount(labels[labels != NO_LABEL], minlength=8) / 8000
    assert shares.sub(1 / 8).abs().max() < 5 * (1 / 8 * 7 / 8 / 8000) ** 0.5


def test_what_does_not_fit_is_refused_with_the_remedy() -> None:
    with pytest.raises(UsageError, match="raise keys or lower pairs"):
        Chains(Shape(seq_len=64), pairs=8, keys=7)
    with pytest.raises(UsageError, match="hops=4 need at least 8 pairs; raise pairs or lower hops"):
        Chains(Shape(seq_len=64), hops=4, pairs=7)
    with pytest.raises(Unsupported, match="at least 16, not 15"):
        Chains(Shape(seq_len=15))
    assert Chains(Shape(seq_len=16)).batch(0, 0, 2).tokens.shape == (2, 16, 2)
