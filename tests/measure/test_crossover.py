"""Where `compare` says that two variants cross, in noise that is known."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from attnbench.measure.crossover import Crossover, crossover
from attnbench.measure.statistics import Ratio

NOISES = ("independent", "autocorrelated", "drifting")
COUNTS = (3, 5, 12, 24)


def of(verdicts: str, *, lengths: list[int] | None = None) -> Crossover:
    """The crossover of A against B. A letter is a length: faster, slower, inconclusive, same; - is unknown."""
    found = {"f": (0.7, 0.8, 0.9), "s": (1.1, 1.25, 1.4), "i": (0.9, 1.0, 1.2), "=": (0.995, 1.0, 1.005)}
    ratios = [Ratio(found[one][1], *found[one][::2], 30, found[one][::2]) if one in found else None for one in verdicts]
    return crossover(lengths or [2**i for i in range(len(verdicts))], ratios, names=("a", "b"))


@pytest.mark.parametrize(
    ("verdicts", "bracket", "note"),
    [
        ("fs", (1, 2), "a is faster below, b above"),
        ("sf", (1, 2), "b is faster below, a above"),
        ("ffiss", (2, 8), "a is faster below, b above"),
        ("f=-s", (1, 8), "a is faster below, b above"),
        ("i-fsi", (4, 8), "a is faster below, b above"),
    ],
)
def test_a_crossover_lies_between_the_nearest_lengths_with_opposite_verdicts(
    verdicts: str, bracket: tuple[int, int], note: str
) -> None:
    found = of(verdicts)
    assert (found.low, found.high) == bracket
    assert found.n is not None
    assert bracket[0] < found.n < bracket[1]
    assert found.note == note


@pytest.mark.parametrize(
    ("verdicts", "note"),
    [
        ("iii", "no difference found"),
        ("=i=", "no difference found"),
        ("===", "none: the same at every length"),
        ("fff", "not in range: a is faster throughout"),
        ("sss", "not in range: b is faster throughout"),
        ("ffi", "not in range: a is faster at n = 1 to 2, no difference found elsewhere"),
        ("fffi", "not in range: a is faster at n = 1 to 4, no difference found elsewhere"),
        ("f-f", "not in range: a is faster at n = 1, 4, no ratio elsewhere"),
        ("f-fi", "not in range: a is faster at n = 1, 4, no difference found or no ratio elsewhere"),
        ("fsf", "2 crossings: a is faster at n = 1, 4 and b is faster at n = 2"),
        ("ffssiffs", "3 crossings: a is faster at n = 1 to 2, 32 to 64 and b is faster at n = 4 to 8, 128"),
        ("f--", "not looked for: fewer than two lengths have a ratio"),
        ("f", "not looked for: fewer than two lengths have a ratio"),
        ("", "not looked for: fewer than two lengths have a ratio"),
    ],
)
def test_without_one_pair_of_opposite_verdicts_no_length_is_named(verdicts: str, note: str) -> None:
    assert of(verdicts) == Crossover(None, None, None, note)


def test_each_length_has_a_ratio_or_none() -> None:
    with pytest.raises(ValueError, match="shorter"):
        crossover([1, 2, 4], [None, None], names=("a", "b"))


def test_the_order_of_the_lengths_does_not_matter() -> None:
    assert of("sfi", lengths=[4, 1, 2]) == of("fis")


@pytest.mark.parametrize(
    ("estimates", "n"),
    [
        ((0.5, 0.9, 1.2, 2.0), 4 * 4 ** (math.log(1 / 0.9) / math.log(1.2 / 0.9))),  # a straight line from 4 to 16
        ((0.5, 1.25, 0.8, 2.0), 8.0),  # the middle of the first and the last of three places
    ],
)
def test_the_place_is_where_straight_lines_between_logarithms_pass_one(estimates: Sequence[float], n: float) -> None:
    ends = {0.5: (0.4, 0.6), 2.0: (1.8, 2.2)}
    ratios = [Ratio(one, *ends.get(one, (0.7, 1.4)), 30, ends.get(one, (0.7, 1.4))) for one in estimates]
    found = crossover([1, 4, 16, 64], ratios, names=("a", "b"))
    assert (found.low, found.high) == (1, 64)
    assert found.n == pytest.approx(n)
