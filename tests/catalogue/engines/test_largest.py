from __future__ import annotations

import torch

from attnbench.catalogue.engines.gathered.largest import argmax


def test_the_index_of_the_largest_entry_is_torch_s() -> None:
    x = torch.randn(3, 500, 7, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(argmax(x), x.argmax(-1, keepdim=True))


def test_of_equal_entries_one_is_taken_and_the_other_rows_stay_right() -> None:
    x = torch.randn(100, 32, generator=torch.Generator().manual_seed(1))
    x[3, 5] = x[3, 9] = x[70, 31] = x[70, 30] = x[70, 1] = 9.0
    x[8] = 0.0
    found = argmax(x)
    assert torch.equal(x.gather(1, found), x.amax(1, keepdim=True))
    others = [i for i in range(100) if i not in (3, 8, 70)]
    assert torch.equal(found[others], x[others].argmax(1, keepdim=True))


def test_rows_that_hold_no_largest_number_still_give_an_index() -> None:
    x = torch.zeros(4, 6)
    x[0, 2], x[1, 3], x[2] = float("nan"), float("inf"), float("-inf")
    found = argmax(x)
    assert found[1] == 3
    assert ((found >= 0) & (found < 6)).all()
