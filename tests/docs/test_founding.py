"""The page of the founding documents names commands that can be typed, and counts its rows."""

from __future__ import annotations

import importlib
import re
import shlex
from types import ModuleType
from typing import Any

import pytest

from attnbench.answers.claims.claims import claims
from attnbench.cli.app import _command
from attnbench.cli.claims import _mentions
from attnbench.cli.run import _axes
from attnbench.cli.usage import COMMANDS, UsageProblem
from attnbench.contract.inputs import INPUTS
from attnbench.contract.spec import parse_specs
from attnbench.contract.task import TASKS
from attnbench.contract.variant import VARIANTS
from attnbench.errors import AttnbenchError
from attnbench.figures.pictures import PICTURES
from attnbench.harness.plan import Options, make_plan
from attnbench.laws import laws_named
from tests.docs import founding_run, making
from tests.docs.making import HERE

ROWS_OF_EACH = [16, 24, 16, 23]
"""Rows of the four documents, in order."""


@pytest.fixture(autouse=True)
def founding(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(HERE / "docs"))
    return importlib.import_module("generators.founding")


def rows(founding: ModuleType) -> list[Any]:
    return [row for rows in founding.documents().values() for row in rows]


def try_to_type(command: str) -> None:
    """Raise where the command line, or a name in it, is not known. Nothing is run."""
    program, name, *arguments = shlex.split(command)
    if program == "make":
        assert re.search(rf"^{name}:", (HERE / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        return
    assert program == "attnbench"
    assert name in COMMANDS
    given = _command(name).make_context(name, arguments).params
    for text in given.get("variants") or []:
        if ".py:" in text:
            file, _, module = text.partition(":")
            assert f"\nclass {module}(" in (HERE / file).read_text(encoding="utf-8")
            continue
        for spec in parse_specs(text):
            VARIANTS.get(spec.name).normalise(spec)
    if name == "plot":
        picture, *variants = map(str, given["results"])
        assert picture in PICTURES
        assert all(variant in VARIANTS for variant in variants)
    if name == "show":
        assert given["name"] in VARIANTS
    if name == "check":
        laws_named(given["law"])
    if name == "run":
        overrides = _axes(given["set_"] or [])
        assert make_plan(given["suite"], Options(device="cpu", overrides=overrides, select=given["select"])).cells
    if name == "claims":
        assert any(_mentions(claim, given["select"]) for claim in claims())
    for table, typed in ((INPUTS, given.get("inputs")), (TASKS, given.get("task"))):
        for spec in parse_specs(typed) if typed else []:
            table.get(spec.name).normalise(spec)


def test_every_command_of_the_page_can_be_typed(founding: ModuleType) -> None:
    for command in dict.fromkeys(row.command for row in rows(founding) if row.command):
        try_to_type(command)


@pytest.mark.parametrize(
    "command",
    [
        "attnbench compare softmax perfomer",
        "attnbench compare softmax performer:feature=3",
        "attnbench compare softmax performer --lengths 64",
        "attnbench run lraa",
        "attnbench run lra --set head=4",
        "attnbench run lra -k nobody",
        "attnbench check softmax --law causalty",
        "attnbench match topk --inputs gausian",
        "attnbench score softmax --task recal",
    ],
)
def test_a_command_with_a_wrong_word_is_found(command: str) -> None:
    with pytest.raises((AttnbenchError, UsageProblem)):
        try_to_type(command)


def test_a_row_has_a_command_unless_nothing_shows_it_and_says_what_is_missing_unless_it_is_full(
    founding: ModuleType,
) -> None:
    for row in rows(founding):
        assert row.status in founding.STATUSES, row
        assert bool(row.command) == (row.status in ("full", "part")), row
        assert bool(row.missing) == (row.status != "full"), row


def test_every_row_of_the_documents_is_on_the_page_and_counted(founding: ModuleType) -> None:
    assert [len(rows) for rows in founding.documents().values()] == ROWS_OF_EACH
    ((_, page),) = founding.pages()
    shown = re.findall(r"^\| \d+ \| .+ \| (full|part|not yet|outside) \| .* \| .* \|$", page, re.MULTILINE)
    assert len(shown) == sum(ROWS_OF_EACH)
    told = re.findall(r"(\d+) (full|part|not yet|outside)", founding.counts(rows(founding)))
    assert {status: int(count) for count, status in told} == {
        status: shown.count(status) for status in founding.STATUSES
    }


def test_every_command_of_the_page_was_run_to_its_end() -> None:
    record = founding_run.record()
    assert set(record) == set(founding_run.commands())
    assert {command for command, one in record.items() if one["exit"] != founding_run.wanted_exit(command)} == set()
    for name in (name for one in record.values() for name in one.get("runs", [])):
        assert (making.RUNS / name / "results.csv.xz").exists()
