from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest
import torch

from attnbench.catalogue.tasks.permutations import Permutations
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import NO_LABEL
from attnbench.errors import Unsupported


def matrix(of: tuple[int, ...]) -> np.ndarray:
    """The permutation as a matrix of zeros and ones, which multiply as permutations do."""
    return np.eye(len(of), dtype=int)[:, list(of)]


@pytest.mark.parametrize(("size", "moves"), [(2, "all"), (3, "all"), (3, "swaps"), (5, "all"), (5, "swaps")])
@pytest.mark.parametrize("answers", ["each", "last"])
def test_every_label_is_the_product_of_matrices_so_far(size: int, moves: str, answers: str) -> None:
    matrices = [matrix(one) for one in permutations(range(size))]
    examples = Permutations(Shape(seq_len=9), size=size, moves=moves, answers=answers, test=20).batch(0, 0, 40)
    for row, labels in zip(examples.tokens.tolist(), examples.labels.tolist(), strict=True):
        state = matrices[row[0]]
        assert labels[0] == NO_LABEL
        for place, (token, label) in enumerate(zip(row[1:], labels[1:], strict=True), start=1):
            state = state @ matrices[token]
            if answers == "each" or place == 8:
                assert (matrices[label] == state).all()
            else:
                assert label == NO_LABEL


def test_parity_is_the_group_of_two() -> None:
    examples = Permutations(Shape(seq_len=12), size=2, test=20).batch(0, 0, 50)
    assert examples.labels[:, 1:].equal((examples.tokens.cumsum(1) % 2)[:, 1:])


def test_swaps_exchange_two_things_each_and_all_of_them_come() -> None:
    every = list(permutations(range(5)))
    tokens = Permutations(Shape(seq_len=20), size=5, moves="swaps").batch(0, 0, 200).tokens
    swaps = {token for row in tokens[:, 1:].tolist() for token in row}
    assert len(swaps) == 10
    assert all(sum(at != to for at, to in enumerate(every[token])) == 2 for token in swaps)
    assert len(set(tokens[:, 0].tolist())) > 80, "the first token is any permutation"


@pytest.mark.parametrize("moves", ["all", "swaps"])
def test_every_product_is_as_likely_at_each_place_whatever_the_token_there(moves: str) -> None:
    count = 12_000
    examples = Permutations(Shape(seq_len=4), moves=moves, test=1).draw(count, torch.Generator().manual_seed(0))
    for place, label in product(range(1, 4), range(6)):
        for token in set(examples.tokens[:, place].tolist()):
            there = examples.labels[examples.tokens[:, place] == token, place]
            share = float((there == label).double().mean())
            assert abs(share - 1 / 6) < 5 * (1 / 6 * 5 / 6 / len(there)) ** 0.5


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(Unsupported, match="two tokens or more"):
        Permutations(Shape(seq_len=1))
    assert Permutations(Shape(seq_len=2), size=5).form.vocab == (120,)
