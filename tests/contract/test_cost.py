from __future__ import annotations

import pytest

from attnbench.contract.cost import power_of_n
from attnbench.contract.variant import VARIANTS


@pytest.mark.parametrize(
    ("cost", "power"),
    [
        ("O(1)", 0.0),
        ("O(n·d²)", 1.0),
        ("O(n²·d)", 2.0),
        ("O(N^2 D)", 2.0),
        ("O(nd)", 1.0),
        ("O(n * sqrt(n) * d)", 1.5),
        ("O(n·√n·d)", 1.5),
        ("O(2^g·n^1.5·d)", 1.5),
        ("O(n·b·d + n²·d/b)", 2.0),
        ("O(n²/n + d)", 1.0),
        ("O(r·n·(c·d + log n))", 1.0),
        ("O((n + m)·n·d)", 2.0),
        ("O((n/b)²)", 2.0),
    ],
)
def test_the_largest_power_of_n_is_read(cost: str, power: float) -> None:
    assert power_of_n(cost) == power


@pytest.mark.parametrize(
    "cost", ["", "-", "sum of its parts", "O()", "O(n", "O(n))", "O(n^k)", "O(2^n)", "O(something)", "O(n·)", "n²"]
)
def test_what_is_no_cost_says_nothing(cost: str) -> None:
    assert power_of_n(cost) is None


def test_the_costs_of_the_package_are_read_and_none_claims_less() -> None:
    for entry in VARIANTS:
        if entry.make.__module__.startswith("attnbench.catalogue.attention.") and entry.name != "per-head":
            read = power_of_n(entry.cost)
            assert read is not None, entry.name
            assert entry.time_exponent is not None
            assert entry.time_exponent >= read
