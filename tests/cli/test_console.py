"""What is printed is what was given: no markup, no emoji, and nothing that moves the cursor."""

from __future__ import annotations

import json
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from attnbench.cell import Cell
from attnbench.cli import console
from attnbench.record import Record
from attnbench.shape import Shape
from attnbench.spec import Spec
from attnbench.status import Status
from attnbench.table import csv_text

HOSTILE = [chr(c) for c in (0x61C, 0x200B, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))]
"""Bidirectional marks, embeddings, overrides and isolates; a space without width."""

WORDS = st.sampled_from(
    ["[red]", "[/]", "[link=x]", "\\", "\\[", ":smile:", "$x^2$", "<b>", "\x1b[2J", "\x9b2J", "\x07", *HOSTILE]
)
few = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=10_000)


def shown(text: str) -> str:
    kinds = ("Cc", "Cf", "Zl", "Zp")  # control, bidirectional and invisible, ends of lines and paragraphs
    return "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in kinds else c for c in text)


@few
@given(st.lists(WORDS | st.text("ab ", max_size=3), max_size=5).map("".join))
@example("[bold]x[/bold]\\")
@example(":warning:")
def test_words_are_printed_as_they_are(capsys: pytest.CaptureFixture[str], text: str) -> None:
    for to_stderr, say in (
        (False, console.line),
        (False, console.heading),
        (True, console.note),
        (True, console.warning),
        (True, console.error),
    ):
        say(text)
        said = capsys.readouterr()
        line = (said.err if to_stderr else said.out).removesuffix("\n")
        assert line.removeprefix("warning: ").removeprefix("error: ") == shown(text)


@few
@given(st.lists(WORDS | st.text("ab", max_size=3), min_size=1, max_size=3).map("".join))
def test_cells_of_a_table_are_printed_as_they_are(capsys: pytest.CaptureFixture[str], text: str) -> None:
    console.table(["n", f"/{text}/"], [["1", f"|{text}|"]], right=["n"], title=text)
    title, head, row = capsys.readouterr().out.splitlines()
    assert title == shown(text)
    assert head.split(None, 1)[1].rstrip() == f"/{shown(text)}/"
    assert row.split(None, 1)[1].rstrip() == f"|{shown(text)}|"


@pytest.mark.parametrize("end", ["\n", "\r", "\x85", "\u2028", "\v"])
def test_an_error_is_one_line_whatever_stands_in_it(end: str, capsys: pytest.CaptureFixture[str]) -> None:
    console.error(f"a{end}b")
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("bad", ["\x1b[2J", "\x7f", "\x9b", "\u2028", "\U000e0041", *HOSTILE])
def test_json_for_a_terminal_is_escaped_and_means_the_same(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    value = {f"a{bad}": [f"√{bad}"]}
    console.data(value)
    said = capsys.readouterr().out
    assert json.loads(said) == value
    assert said.replace("\n", "").isprintable()


@pytest.mark.parametrize("bad", ["\x1b[2J", "\n", "\u2028", *HOSTILE])
def test_the_tables_on_disk_hold_no_character_that_a_terminal_obeys(bad: str) -> None:
    cell = Cell("s", "w", Spec.of("mine", {"name": f"a{bad}b"}), Shape(1, 1, 1, 1), inputs=Spec(f"x{bad}"))
    text = csv_text([Record.of(cell, Status.ERROR, f"why{bad}not")])
    assert text.replace("\n", "").isprintable()
    assert text.count("\n") == 2


def test_a_name_from_a_file_of_somebody_else_never_reaches_the_terminal_as_it_is(tmp_path: Path) -> None:
    name = "\x1b[2J\u202egpj.exe"
    for arguments in (
        ["run", f"{name}.yaml"],
        ["show", name],
        ["list", "--plugin", f"{name}.py"],
        ["plot", name],
        ["compare", "softmax", f"linear:{name}=1", "--n", "8"],
    ):
        ended = subprocess.run(
            [sys.executable, "-m", "attnbench", *arguments], cwd=tmp_path, capture_output=True, encoding="utf-8"
        )
        assert ended.returncode == 2
        assert (ended.stdout + ended.stderr).replace("\n", "").isprintable()
