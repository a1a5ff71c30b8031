"""The last few results of a function are kept for the next cell, and their memory is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnbench.measure.reuse import Recent


@dataclass
class Made:
    x: Tensor
    more: list[Any]


def test_the_last_results_are_kept_and_their_bytes_counted() -> None:
    made: list[int] = []

    def make(n: int) -> tuple[Tensor, None]:
        made.append(n)
        return torch.zeros(n), None

    already = Recent.held("cpu")
    recent = Recent(make, 2)
    assert [len(recent(n)[0]) for n in (1, 2, 1, 3, 1, 2)] == [1, 2, 1, 3, 1, 2]
    assert made == [1, 2, 3, 2]
    assert Recent.held("cpu") - already == 4 * (1 + 2)
    assert Recent.held("cuda") == 0


def test_options_tell_results_apart() -> None:
    made: list[int] = []
    recent = Recent(lambda n, *, scale=1: made.append(n * scale) or [n * scale], 4)
    assert (recent(2), recent(2, scale=3), recent(2), recent(2, scale=3)) == ([2], [6], [2], [6])
    assert made == [2, 6]


def test_nobody_meets_what_another_wrote_into_a_result() -> None:
    recent = Recent(lambda: Made(torch.ones(3), [(torch.ones(2), None), "x"]), 1)
    for _ in range(2):
        lent = recent()
        assert lent.x.tolist() == [1, 1, 1]
        assert lent.more[0][0].tolist() == [1, 1]
        lent.x.numpy()[:] = 5  # which no version of the tensor tells
        lent.more[0][0].zero_()
        lent.more.clear()


def test_a_module_is_given_as_it_is_and_its_bytes_are_counted() -> None:
    already, module = Recent.held("cpu"), nn.Linear(3, 2)
    recent = Recent(lambda: (module, torch.zeros(1)), 1)
    assert recent()[0] is module
    assert Recent.held("cpu") - already == 4 * (3 * 2 + 2 + 1)


def test_bytes_are_counted_in_lists_tuples_and_dataclasses_and_in_all_that_is_kept() -> None:
    already, elsewhere = Recent.held("cpu"), Recent.held("meta")
    one = Recent(lambda: Made(torch.zeros(2), [(torch.zeros(3),), torch.zeros(4, device="meta"), "x", None]), 1)
    other = Recent(lambda: torch.zeros(5), 1)
    one()
    other()
    assert Recent.held("cpu") - already == 4 * (2 + 3 + 5)
    assert Recent.held("meta") - elsewhere == 4 * 4
