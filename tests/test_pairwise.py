from __future__ import annotations

from collections import Counter
from itertools import combinations, product
from typing import Any

import pytest

from tests.pairwise import Case, covering, each_once, pairwise


def met(cases: list[Case]) -> set[Any]:
    return {pair for case in cases for pair in combinations(enumerate(case), 2)}


@pytest.mark.parametrize("axes", [("ab", "cde", "fghi"), ("abc", "abc", "abc", "ab"), ("abcdefghijk", "xy", "zw")])
def test_every_two_values_meet_in_about_as_few_cases_as_the_two_longest_axes_have(axes: tuple[str, ...]) -> None:
    chosen, every = pairwise(*axes), list(product(*axes))
    assert met(chosen) == met(every)
    assert chosen == [case for case in every if case in chosen]
    first, second = sorted(map(len, axes))[-2:]
    assert len(chosen) <= 1.5 * first * second < len(every)


def test_values_that_never_meet_need_not_be_brought_together() -> None:
    possible = [(a, b, c) for a, b, c in product(range(3), repeat=3) if a <= b]
    assert met(covering(possible)) == met(possible)
    assert len(covering(possible)) < len(possible)
    assert covering([]) == []


def test_of_axes_that_do_not_act_on_each_other_every_value_is_there_about_as_often_as_any() -> None:
    every = list(product("abc", "xyzuvw"))
    chosen = each_once(every)
    assert chosen == [case for case in every if case in chosen]
    assert len(chosen) == 6
    assert {second for _, second in chosen} == set("xyzuvw")
    assert Counter(first for first, _ in chosen) == {"a": 2, "b": 2, "c": 2}
    assert each_once([]) == []
