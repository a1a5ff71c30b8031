from __future__ import annotations

import random
import statistics
from collections import Counter
from itertools import islice

import pytest
import torch

from attnbench.catalogue.tasks.listops import (
    CLOSE,
    OPERATORS,
    PAD,
    TOKENS,
    ListOps,
    evaluate,
    labelled,
    subtree_values,
    to_text,
)
from attnbench.contract.task import NO_LABEL

SMALL = ListOps(min_length=4, max_length=300)


def from_text(text: str) -> list[int]:
    """Inverse of :func:`to_text`."""
    return [TOKENS.index(word) for word in text.split()]


def direct_value(words: list[str]) -> int:
    """Recursive descent over the text, with the standard library's own median: independent of the stack machine."""
    word = words.pop(0)
    if word.isdigit():
        return int(word)
    arguments = []
    while words[0] != "]":
        arguments.append(direct_value(words))
    words.pop(0)
    of = {"[MIN": min, "[MAX": max, "[MED": lambda a: int(statistics.median(a)), "[SM": lambda a: sum(a) % 10}
    return int(of[word](arguments))


def depth(tokens: list[int]) -> int:
    """Depth of the deepest digit; the root has 1."""
    deepest = now = 1
    for token in tokens:
        now += (TOKENS[token] in OPERATORS) - (token == CLOSE)
        deepest = max(deepest, now)
    return deepest


def small_trees(count: int = 300) -> list[list[int]]:
    rng = random.Random(0)
    return [SMALL.sample(rng) for _ in range(count)]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[MIN 4 2 7 ]", 2),
        ("[MAX 4 2 7 ]", 7),
        ("[MED 9 1 4 ]", 4),
        ("[MED 1 2 ]", 1),
        ("[MED 8 3 4 1 ]", 3),
        ("[SM 9 9 9 ]", 7),
        ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
        ("[SM [MED 5 6 7 ] [MAX 1 8 ] [SM 2 9 ] ]", 5),
    ],
)
def test_operators_have_their_values(text: str, value: int) -> None:
    assert evaluate(from_text(text)) == value


def test_values_equal_a_direct_recursive_evaluation() -> None:
    for tokens in small_trees():
        assert evaluate(tokens) == direct_value(to_text(tokens).split())


def test_each_closing_bracket_has_the_value_of_what_it_closes() -> None:
    tokens = from_text("[SM 1 [MAX 2 3 ] 4 ]")
    assert subtree_values(tokens) == [NO_LABEL] * 5 + [3, NO_LABEL, 8]


@pytest.mark.parametrize(
    "text", ["", "5", "[MIN 1 2", "[MIN 1 2 ] ]", "[MIN 1 2 ] [MAX 1 2 ]", "[MIN ]", "]", "[MIN 1 2 ] 3"]
)
def test_what_is_no_tree_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a ListOps tree"):
        evaluate(from_text(text))


def test_trees_keep_the_rules_of_the_long_range_arena() -> None:
    rng = random.Random(0)
    for tokens in [ListOps().sample(rng) for _ in range(8)]:
        assert 500 < len(tokens) < 2000
        assert depth(tokens) <= 10
        assert PAD not in tokens
        arguments = [0]
        for token in tokens:
            if token == CLOSE:
                assert 2 <= arguments.pop() <= 10
            else:
                arguments[-1] += 1
                if TOKENS[token] in OPERATORS:
                    arguments.append(0)
        assert arguments == [1]


def test_depth_reaches_its_limit() -> None:
    rng = random.Random(0)
    assert max(depth(ListOps(max_depth=4, min_length=4).sample(rng)) for _ in range(50)) == 4


def test_one_argument_in_four_is_an_operator() -> None:
    # Depth 3 and no limit on the length: rejection leaves the growth probabilities as they are.
    rng = random.Random(0)
    trees = [ListOps(min_length=4, max_length=1999, max_depth=3).sample(rng) for _ in range(2000)]
    operators = sum(TOKENS[token] in OPERATORS for tree in trees for token in tree) - len(trees)
    arguments = sum(depth_two_arguments(tree) for tree in trees)
    assert operators / arguments == pytest.approx(0.25, abs=0.015)


def depth_two_arguments(tokens: list[int]) -> int:
    now = count = 0
    for token in tokens:
        if token == CLOSE:
            now -= 1
            continue
        count += now == 1
        now += TOKENS[token] in OPERATORS
    return count


def test_operators_digits_and_argument_counts_are_uniform() -> None:
    rng = random.Random(1)
    # Depth 2: one operator over digits, so that the length is the number of arguments + 2.
    trees = [ListOps(min_length=4, max_length=12, max_depth=2).sample(rng) for _ in range(9000)]
    lengths = Counter(map(len, trees))
    assert set(lengths) == set(range(4, 13))
    assert all(abs(count - 1000) < 150 for count in lengths.values())  # five standard deviations
    operators = Counter(TOKENS[tree[0]] for tree in trees)
    assert set(operators) == set(OPERATORS)
    assert all(abs(count - 2250) < 205 for count in operators.values())
    digits = Counter(token for tree in trees for token in tree[1:-1])
    assert set(digits) == set(range(1, 11))
    assert all(abs(count - 5400) < 350 for count in digits.values())


def test_a_single_level_has_the_values_that_can_be_counted() -> None:
    # Two arguments: of the hundred pairs, min is 9 once and 0 nineteen times; SM is uniform.
    rng = random.Random(2)
    trees = [ListOps(min_length=4, max_length=4, max_args=2).sample(rng) for _ in range(8000)]
    of_min = Counter(evaluate(tree) for tree in trees if TOKENS[tree[0]] == "[MIN")
    total = sum(of_min.values())
    assert of_min[0] / total == pytest.approx(0.19, abs=0.045)
    assert of_min[9] / total == pytest.approx(0.01, abs=0.012)
    of_sum = Counter(evaluate(tree) for tree in trees if TOKENS[tree[0]] == "[SM")
    assert all(count / sum(of_sum.values()) == pytest.approx(0.1, abs=0.035) for count in of_sum.values())


def test_batches_are_padded_at_the_end_and_labelled() -> None:
    batch = next(ListOps(min_length=4, max_length=60).batches(16, seed=3))
    lengths = batch.key_mask.sum(1)
    assert batch.tokens.shape == (16, int(lengths.max()))
    assert batch.tokens.dtype == torch.int64
    for row, length in enumerate(lengths.tolist()):
        tokens = batch.tokens[row, :length].tolist()
        assert batch.tokens[row, length:].eq(PAD).all()
        assert not batch.key_mask[row, length:].any()
        assert batch.labels[row, :length].tolist() == subtree_values(tokens)
        assert batch.labels[row, length:].eq(NO_LABEL).all()


def test_batches_group_similar_lengths() -> None:
    batches = list(islice(ListOps(min_length=4, max_length=200).batches(8, seed=0), 16))
    real = sum(int(batch.key_mask.sum()) for batch in batches)
    assert real / sum(batch.key_mask.numel() for batch in batches) > 0.8


def test_the_same_seed_gives_the_same_batches_and_another_seed_others() -> None:
    def first(seed: int) -> list[list[int]]:
        return next(SMALL.batches(4, seed)).tokens.tolist()

    assert first(0) == first(0)
    assert first(0) != first(1)


def test_a_batch_of_one_needs_no_padding() -> None:
    assert labelled([from_text("[MIN 1 2 ]")]).key_mask.all()


@pytest.mark.parametrize(
    "sizes",
    [
        {"max_length": 3},
        {"min_length": 60, "max_length": 50},
        {"max_args": 1},
        {"min_length": 4, "max_depth": 1},
        {"min_length": 13, "max_depth": 2},
    ],
)
def test_rules_that_no_tree_can_keep_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="no tree can be drawn"):
        ListOps(**sizes)


def test_text_and_tokens_are_inverse() -> None:
    for tokens in small_trees(20):
        assert from_text(to_text(tokens)) == tokens
