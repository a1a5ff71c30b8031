"""The table of bits has every shipped variant and question, and shows what the file says."""

from __future__ import annotations

import importlib

import pytest

from attnbench.contract.variant import VARIANTS
from attnbench.laws.bits import QUESTIONS
from tests.docs import bits
from tests.docs.laws import shipped
from tests.docs.making import HERE

REMEDY = "python -m tests.docs.bits asks what is missing"


def test_the_file_has_each_variant_with_each_question_once() -> None:
    VARIANTS.names()
    wanted = [(name, question) for name in shipped() for question in QUESTIONS]
    assert [(row["variant"], row["question"]) for row in bits.read()] == wanted, REMEDY


def test_every_row_has_an_answer_or_a_reason() -> None:
    for row in bits.read():
        assert bool(row["answer"]) != bool(row["why"]), row
        assert bool(row["share"]) == (row["answer"] not in ("", bits.EQUAL)), row
        assert "raises" not in row["why"], row
        assert not row["bfloat16"] or row["answer"], row


def test_a_row_says_what_the_report_says() -> None:
    one = {"question": "padded", "setting": "float32 on cpu", "case": "here", "share": 0.25, "why": ""}
    report = {"variant": "linear", "bits": [one | {"equal": False, "ulps": 1.5}, one | {"equal": True, "ulps": 0.0}]}
    assert [(row["answer"], row["share"]) for row in bits.rows_of(report)] == [("1.5", "0.25"), ("equal", "")]


def test_the_page_shows_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE / "docs"))
    ((path, page),) = importlib.import_module("generators.bits").pages()
    assert path == "reference/bits.md"
    for column, part in zip(("answer", "bfloat16"), page.split("## In ")[1:], strict=True):
        lines = {line.split("`")[1]: line for line in part.splitlines() if line.startswith("| [`")}
        assert list(lines) == shipped()
        answers = [row[column] for row in bits.read() if row["variant"] == "gla"]
        shown = [cell.strip() for cell in lines["gla"].split("|")[2:-1]]
        assert shown == [{"equal": "=", "": "–"}.get(one, one) for one in answers[:-1]]
