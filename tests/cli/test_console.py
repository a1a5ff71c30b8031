"""What is printed is what was given: no markup, no emoji, and nothing that moves the cursor."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from attnbench.cli import console

WORDS = st.sampled_from(
    ["[red]", "[/]", "[link=x]", "\\", "\\[", ":smile:", "$x^2$", "<b>", "\x1b[2J", "\x9b2J", "\x07"]
)
few = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=10_000)


def shown(text: str) -> str:
    return "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) == "Cc" else c for c in text)


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
