"""Families, years and sets come out of the registry."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from attnbench.contract.variant import FAMILIES, VARIANTS, Variant, register
from attnbench.errors import UsageError
from attnbench.figures.pictures import draw
from attnbench.figures.pictures.taxonomy import draw_taxonomy, in_order, spans


def entry(name: str, family: str, *also: str) -> Variant:
    return Variant(name, nn.Identity, "", family=family, also=also, source="", formula="", cost="")


@pytest.mark.parametrize(
    ("source", "year"),
    [
        ("Choromanski et al. 2021, arXiv:2009.14794, equations 4-7", 2021),
        ("Rabe and Staats 2021, arXiv:2112.05682; Dao et al. 2022, arXiv:2205.14135", 2021),
        ("PyTorch flex_attention; Dong et al. 2024, arXiv:2412.05496", 2024),
        ("Eckart and Young 1936; this project's reference line", 1936),
        ("Somebody, arXiv:1901.1823, pages 20-21, doi:10.1002/2019.20", None),
        ("this project's reference line", None),
    ],
)
def test_the_year_is_the_first_that_the_source_names_and_no_part_of_a_number(source: str, year: int | None) -> None:
    assert Variant("x", nn.Identity, "", family="kernel", source=source, formula="", cost="").year == year


def test_every_paper_of_the_catalogue_has_a_year() -> None:
    shipped = [one for one in VARIANTS if one.make.__module__.startswith("attnbench.catalogue.attention.")]
    assert [one.name for one in shipped if one.year is None and "arXiv" in one.source] == []
    assert {one.year for one in shipped if one.year} <= set(range(1901, 2031))


def test_a_variant_in_two_families_is_between_them_and_in_both_bars() -> None:
    entries = [
        entry("a", "kernel"),
        entry("b", "kernel", "recurrence"),
        entry("c", "recurrence"),
        entry("d", "recurrence", "kernel"),
        entry("e", "fixed pattern", "recurrence"),
    ]
    rows = in_order(entries)
    assert [one.name for one in rows] == ["e", "a", "b", "d", "c"]
    assert spans(rows, "kernel") == [(1, 3)]
    assert spans(rows, "recurrence") == [(0, 0), (2, 4)]
    assert spans(rows, "mixing") == []


def test_the_table_has_every_variant_with_all_of_its_families() -> None:
    table = draw_taxonomy().numbers.set_index("variant")
    assert table.loc["longformer", "families"] == "fixed pattern; memory"
    assert table.loc["performer", "year"] == 2021
    assert table.loc["performer", "cost"] == "O(n·R·d)"
    assert bool(table.loc["retnet", "decode"])
    assert not table.loc["nystrom", "causal"]
    assert table.loc["performer", "longer"]
    assert not table.loc["linformer", "longer"]
    assert set(FAMILIES) == {one for families in table["families"] for one in families.split("; ")}


def test_every_word_can_be_read(faults: Callable[..., list[str]]) -> None:
    written = [f"{one!r} lies on {other!r}" for one in FAMILIES for other in FAMILIES]  # slanted, so that boxes overlap
    assert set(faults(draw("taxonomy").figure)) <= set(written)
    with pytest.raises(UsageError, match="taxonomy is too wide for one column"):
        draw("taxonomy", width="column")


@pytest.mark.parametrize("also", [("kernl",), ("kernel",), "memory", [["memory"]], (["memory"],)])
def test_further_families_are_known_others(also: object) -> None:
    facts = {"family": "kernel", "source": "s", "formula": "f", "cost": "O(n)"}
    with pytest.raises(UsageError, match="give a tuple of further families: exact, reference"):
        register("two", also=also, **facts)(nn.Identity)  # type: ignore[arg-type]
