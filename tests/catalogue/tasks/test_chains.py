from __future__ import annotations

import pytest
import torch

from attnbench.catalogue.tasks.chains import Chains
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import NO_LABEL
from attnbench.errors import Unsupported, UsageError


@pytest.mark.parametrize("hops", [1, 2, 4])
@pytest.mark.parametrize(("keys", "values"), [(None, None), (11, 9)])
def test_every_label_is_the_value_that_dictionaries_reach(hops: int, keys: int | None, values: int | None) -> None:
    none = keys or 7, values or 7
    examples = Chains(Shape(seq_len=20), hops=hops, ring=7, keys=keys, values=values).batch(0, 0, 60)
    for row, labels in zip(examples.tokens.tolist(), examples.labels.tolist(), strict=True):
        following = {key: after for key, after, _ in row[:7]}
        value = {key: one for key, _, one in row[:7]}
        assert len(set(following.values())) == len(set(value.values())) == 7
        assert labels[:7] == [NO_LABEL] * 7
        for (key, after, one), label in zip(row[7:], labels[7:], strict=True):
            assert (after, one) == none, "nothing is told among the questions"
            at = key
            for _ in range(hops - 1 if key < none[0] else 0):
                at = following[at]
            assert label == (value[at] if key < none[0] else NO_LABEL)
        assert sorted(key for key, *_ in row[7:] if key < none[0]) == sorted(following), "each key is asked once"


def test_all_keys_form_one_ring_in_an_order_that_says_nothing() -> None:
    tokens = Chains(Shape(seq_len=12), ring=5).batch(0, 0, 2000).tokens[:, :5]
    for row in tokens[:50].tolist():
        following, key, met = {key: after for key, after, _ in row}, 0, set[int]()
        while key not in met:
            met.add(key)
            key = following[key]
        assert len(met) == 5
    beside = (tokens[:, :-1, 1] == tokens[:, 1:, 0]).double().mean(0)  # the next one stands there as often as any other
    assert (beside - 1 / 4).abs().max() < 5 * (1 / 4 * 3 / 4 / 2000) ** 0.5


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_guessing_is_right_as_often_as_there_are_values_whichever_key_is_asked(hops: int) -> None:
    examples = Chains(Shape(seq_len=12), ring=4, hops=hops).batch(0, 0, 4000)
    asked = examples.labels != NO_LABEL
    for key in range(4):
        labels = examples.labels[asked & (examples.tokens[..., 0] == key)]
        shares = torch.bincount(labels, minlength=4) / len(labels)
        assert shares.sub(1 / 4).abs().max() < 5 * (1 / 4 * 3 / 4 / len(labels)) ** 0.5


def test_what_does_not_fit_is_refused_with_the_remedy() -> None:
    for fewer in ({"keys": 7}, {"values": 7}):
        with pytest.raises(UsageError, match="7 keys or values are fewer than ring=8; lower ring"):
            Chains(Shape(seq_len=64), **fewer)
    with pytest.raises(UsageError, match="hops=5 need a ring of at least 8; raise ring or lower hops"):
        Chains(Shape(seq_len=64), hops=5, ring=7)
    with pytest.raises(Unsupported, match="ring=8 needs a length of at least 16, not 15"):
        Chains(Shape(seq_len=15))
    assert Chains(Shape(seq_len=16)).batch(0, 0, 2).tokens.shape == (2, 16, 3)
