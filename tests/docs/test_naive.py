"""The times beside the formulas that the catalogue shows are there for every variant that has one."""

from __future__ import annotations

import importlib

import pytest
import torch

from attnbench.contract.variant import VARIANTS
from tests.docs import naive
from tests.docs.laws import shipped
from tests.docs.making import HERE

REMEDY = "python -m tests.docs.naive measures what is missing"


def test_the_file_has_each_variant_with_a_formula_once_and_nothing_else() -> None:
    VARIANTS.names()
    with torch.inference_mode():
        wanted = [name for name in shipped() if naive.both(name, n=512) is not None]
    assert [naive.name_of(row) for row in naive.read()] == wanted, REMEDY


def test_every_ratio_lies_in_its_interval_and_says_where_it_was_measured() -> None:
    for row in naive.read():
        assert 0 < float(row["low"]) <= float(row["ratio"]) <= float(row["high"]), row
        assert all(row[column] for column in naive.COLUMNS), row


@pytest.mark.parametrize("name", ["performer", "gla", "lstm", "sdpa"])
def test_what_is_timed_beside_a_variant_is_its_formula(name: str) -> None:
    calls = naive.both(name, n=64)
    assert calls is not None
    with torch.inference_mode():
        torch.testing.assert_close(calls[0](), calls[1](), atol=1e-4, rtol=1e-3)


def test_a_page_shows_the_ratio_with_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE / "docs"))
    times = importlib.import_module("generators.naive_times")
    (row,) = [row for row in naive.read() if row["variant"] == "performer"]
    shown = times.of_variant("performer")
    for number in ("ratio", "low", "high"):
        assert f"{float(row[number]):.2g}" in shown
    assert row["date"] in shown
    assert times.of_variant("no such variant") == ""
