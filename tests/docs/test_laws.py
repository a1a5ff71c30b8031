"""The numbers of the laws that the catalogue shows belong to the variants and the laws of today."""

from __future__ import annotations

import dataclasses
import importlib
import re
from types import ModuleType

import pytest

from attnbench.contract.variant import VARIANTS
from attnbench.laws import LAWS, Finding, check_variant, laws_of
from tests.docs import laws
from tests.docs.making import HERE

REMEDY = "python -m tests.docs.laws measures what is missing"


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(HERE / "docs"))
    return importlib.import_module("generators.law_numbers")


def test_the_file_has_each_law_of_each_variant_once_and_nothing_else() -> None:
    rows = laws.read()
    assert laws.lacking(rows) == [], REMEDY
    assert list(dict.fromkeys(row["variant"] for row in rows)) == laws.shipped(), REMEDY


def test_a_law_or_a_variant_that_the_file_lacks_is_missed() -> None:
    rows = laws.read()
    known = laws.lacking(rows)
    without = [row for row in rows if row["variant"] != "linear"]
    assert set(laws.lacking(without)) == {*known, "linear"}
    without = [row for row in rows if (row["variant"], row["law"]) != ("local", "formula")]
    assert set(laws.lacking(without)) == {*known, "local"}


def test_every_number_is_within_its_bound_or_a_note_says_why_there_is_none() -> None:
    for row in laws.read():
        if row["number"]:
            assert float(row["number"]) <= float(row["bound"]), row
            assert row["setting"], row
        else:
            assert row["note"], row
        assert all(row[column] for column in ("torch", "processor", "date")), row


@pytest.mark.parametrize("name", ["linear", "fnet"])
def test_bounds_are_those_of_today(name: str) -> None:
    report = check_variant(name, laws=["formula", "batch", "permutation"])
    found = {"variant": name, "held": True, "findings": [dataclasses.asdict(one) for one in report.findings]}
    bounds = {row["law"]: row["bound"] for row in laws.rows_of(found)}
    written = {row["law"]: row["bound"] for row in laws.read() if row["variant"] == name}
    assert {law: written[law] for law in report_laws(report.findings)} == {
        law: bounds[law] for law in report_laws(report.findings)
    }


def report_laws(findings: tuple[Finding, ...]) -> set[str]:
    return {finding.law for finding in findings}


PRINTED = re.compile(r"^(\S.*?) +held +\S+ +\S+  (.*(?:\n {40,}.*)*)", re.MULTILINE)


def test_the_check_that_pages_print_has_the_laws_of_today() -> None:
    """``COLUMNS=88 attnbench check performer`` prints it anew."""
    text = (HERE / "docs/printed/check.txt").read_text(encoding="utf-8")
    printed = {law: " ".join(said.split()) for law, said in PRINTED.findall(text)}
    held = [row["law"] for row in laws.read() if row["variant"] == "performer" and row["number"]]
    assert printed == {law: LAWS[law].sentence for law in held}
    assert f"{len(held)} laws hold" in text


def test_what_is_kept_is_the_number_nearest_to_its_bound() -> None:
    findings = [Finding("batch", "one", True, 1e-12, 1e-9), Finding("batch", "two", True, 1e-10, 1e-9)]
    report = {"variant": "linear", "held": True, "findings": [dataclasses.asdict(one) for one in findings]}
    (row,) = [row for row in laws.rows_of(report) if row["law"] == "batch"]
    assert (row["number"], row["setting"]) == ("1e-10", "two")
    (row,) = [row for row in laws.rows_of(report) if row["law"] == "seed"]
    assert (row["number"], row["note"]) == ("", laws.NOTHING)


def test_a_variant_that_breaks_a_law_gives_no_rows() -> None:
    with pytest.raises(ValueError, match="linear: it breaks a law"):
        laws.rows_of({"variant": "linear", "held": False, "findings": []})
    with pytest.raises(ValueError, match="linear: it wants a GPU"):
        laws.rows_of({"variant": "linear", "unsupported": "it wants a GPU"})


@pytest.mark.parametrize("name", ["performer", "fnet"])
def test_a_page_shows_the_number_and_the_bound_of_every_law(name: str, numbers: ModuleType) -> None:
    shown = numbers.of_variant(VARIANTS.get(name))
    for row in laws.read():
        if row["variant"] == name:
            (line,) = [line for line in shown.splitlines() if f"[{row['law']}](" in line]
            assert f" {row['number'] or '-'} | {row['bound'] or '-'} |" in line
            assert LAWS[row["law"]].sentence.split()[0] in line
            assert row["date"] in shown
    assert all(f"[{law}](" in shown for law in laws_of(VARIANTS.get(name)))
