from __future__ import annotations

import pytest
import torch

from attnbench.catalogue.tasks.recall import Recall
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import NO_LABEL
from attnbench.errors import Unsupported, UsageError


def recall(n: int = 64, **options: object) -> Recall:
    return Recall(Shape(seq_len=n), **options)


def read(task: Recall, ids: int, row: list, keys: int, values: int) -> list[tuple[int | None, int | None]]:
    """Each token as (key, value), None for what it does not name: by arithmetic, not by the task's own tables."""
    if ids == 2:
        return [(k if k < keys else None, v if v < values else None) for k, v in row]
    words: list[tuple[int | None, int | None]] = []
    for token in row:
        if token < keys * values:
            words.append(divmod(token, values))
        else:
            words.append((token - keys * values if token < keys * values + keys else None, None))
    return words


@pytest.mark.parametrize("ids", [1, 2])
@pytest.mark.parametrize("form", ["filler", "long"])
@pytest.mark.parametrize("keys", [None, 9])
def test_every_label_is_the_value_that_a_dictionary_finds(ids: int, form: str, keys: int | None) -> None:
    task = recall(n=24, pairs=5, values=3, keys=keys, ids=ids, form=form)
    examples = task.batch(0, 0, 50)
    for row, labels in zip(examples.tokens.tolist(), examples.labels.tolist(), strict=True):
        words = read(task, ids, row, keys or 5, 3)
        facts = {key: value for key, value in words if value is not None}
        assert len(facts) == 5
        assert all(facts[key] == value for key, value in words if value is not None), "a key has one value"
        expected = [facts[key] if key is not None and value is None else NO_LABEL for key, value in words]
        assert labels == expected


def test_with_filler_each_key_stands_once_and_is_asked_once_after_all_pairs() -> None:
    task = recall(n=40, pairs=6, values=4)
    for row in task.batch(3, 1, 30).tokens.tolist():
        words = read(task, 1, row, 6, 4)
        assert sorted(key for key, _ in words[:6]) == list(range(6))
        assert all(value is not None for _, value in words[:6])
        assert sorted(key for key, _ in words[6:] if key is not None) == list(range(6))
        assert all(value is None for _, value in words[6:])


def test_questions_stand_anywhere_among_the_filler() -> None:
    labels = recall(n=24, pairs=4, values=4).batch(0, 0, 2000).labels
    asked = (labels != NO_LABEL).float().mean(0)
    assert asked[:4].sum() == 0
    assert asked[4:].sub(4 / 20).abs().max() < 5 * (0.2 * 0.8 / 2000) ** 0.5


def test_the_long_form_asks_at_every_place_of_the_second_half_and_nowhere_else() -> None:
    examples = recall(n=64, form="long", test=8).batch(0, 0, 16)
    assert (examples.labels[:, :32] == NO_LABEL).all()
    assert (examples.labels[:, 32:] != NO_LABEL).all()
    assert (examples.tokens[:, :32] < 128).all()
    assert (examples.tokens[:, 32:] >= 128).all()


def test_more_keys_than_pairs_come_and_go() -> None:
    task = recall(n=16, pairs=2, values=2, keys=12)
    seen = {key for row in task.batch(0, 0, 200).tokens.tolist() for key, _ in read(task, 1, row, 12, 2)[:2]}
    assert seen == set(range(12))


def test_one_id_and_two_ids_tell_the_same_story() -> None:
    one, two = recall(pairs=5, values=3, ids=1), recall(pairs=5, values=3, ids=2)
    a = one.draw(20, torch.Generator().manual_seed(1))
    b = two.draw(20, torch.Generator().manual_seed(1))
    assert a.labels.equal(b.labels)
    for single, double in zip(a.tokens.tolist(), b.tokens.tolist(), strict=True):
        assert read(one, 1, single, 5, 3) == read(two, 2, double, 5, 3)


def test_the_ids_are_as_many_as_are_needed() -> None:
    assert recall().form.vocab == (16 * 8 + 16 + 1,)
    assert recall(form="long").form.vocab == (16 * 8 + 16,)
    assert recall(ids=2, keys=20).form.vocab == (21, 9)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="raise keys or lower pairs"):
        recall(pairs=8, keys=7)
    with pytest.raises(Unsupported, match="at least 32, not 31"):
        recall(n=31)
    with pytest.raises(Unsupported, match="even length"):
        recall(n=65, form="long")
    assert recall(n=32).batch(0, 0, 2).tokens.shape == (2, 32)
    assert recall(n=32, form="long").batch(0, 0, 2).tokens.shape == (2, 32)
