from __future__ import annotations

import random

import pytest
import torch

from attnbench.catalogue.tasks.listops import ListOps, evaluate, subtree_values, to_text
from attnbench.contract.task import NO_LABEL
from attnbench.errors import UsageError
from attnbench.models.pretrained.models import Trees, filled
from tests.catalogue.tasks.test_listops import from_text


@pytest.mark.parametrize("length", [4, 5, 13, 40, 200])
def test_every_window_is_one_whole_tree_of_exactly_the_length_with_its_values(length: int) -> None:
    windows = Trees(length).batch(0, 0, 6)
    assert windows.tokens.shape == windows.targets.shape == (6, length)
    for tokens, targets in zip(windows.tokens.tolist(), windows.targets.tolist(), strict=True):
        assert targets == subtree_values(tokens)
        assert targets[-1] == evaluate(tokens)


def test_the_same_call_gives_the_same_windows_and_others_give_others() -> None:
    trees = Trees(20)
    held = trees.held_out(5)
    assert torch.equal(held.tokens, trees.held_out(5).tokens)
    assert torch.equal(held.tokens, Trees(20).held_out(8).tokens[:5])
    assert torch.equal(trees.batch(1, 2, 4).tokens, trees.batch(1, 2, 4).tokens)
    batches = [trees.batch(seed, step, 4).tokens for seed, step in ((1, 2), (1, 3), (2, 2))]
    assert not any(torch.equal(batches[0], other) for other in batches[1:])


def test_no_training_sees_a_tree_that_is_held_out() -> None:
    trees = Trees(4)  # there are 400 of them
    held = set(map(tuple, trees.held_out(100).tokens.tolist()))
    seen = {tuple(tree) for step in range(20) for tree in trees.batch(0, step, 20).tokens.tolist()}
    assert len(seen) > 200
    assert not held & seen
    untold = {tuple(tree) for step in range(20) for tree in Trees(4).batch(0, step, 20).tokens.tolist()}
    assert held & untold


def test_a_short_tree_gets_digits_as_last_arguments_and_nothing_else() -> None:
    tree = from_text("[MAX 1 [MIN 5 6 ] ]")
    longer = filled(tree, 12, 10, random.Random(0))
    assert len(longer) == 12
    assert to_text(longer).startswith("[MAX 1 [MIN 5 6 ")
    assert subtree_values(longer).count(NO_LABEL) == 10


def test_no_operator_gets_more_arguments_than_it_may_have() -> None:
    full = from_text("[MAX 1 2 3 ]")
    assert filled(full, 20, 3, random.Random(0)) == full


@pytest.mark.parametrize("length", [1, 3])
def test_a_length_that_no_tree_has_is_refused(length: int) -> None:
    with pytest.raises(UsageError, match=f"--length {length}: no ListOps tree"):
        Trees(length)


def test_trees_are_near_those_that_the_rules_draw() -> None:
    rng = random.Random(0)
    drawn = ListOps(min_length=90, max_length=100)
    ours, theirs = Trees(100).batch(3, 0, 60).tokens.tolist(), [drawn.sample(rng) for _ in range(60)]
    share = [sum(t >= 11 for tree in trees for t in tree) / sum(map(len, trees)) for trees in (ours, theirs)]
    assert share[0] == pytest.approx(share[1], rel=0.15)


def test_a_training_without_a_tree_that_is_not_held_out_is_refused() -> None:
    trees = Trees(4)
    assert len(set(map(tuple, trees.held_out(5000).tokens.tolist()))) == 400, "all that there are"
    with pytest.raises(UsageError, match="--length 4: nearly all trees are held out; take fewer --windows"):
        trees.batch(0, 0, 1)
