"""What is printed is what was given: no markup, no emoji, and nothing that moves the cursor."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path
from time import sleep

import numpy as np
import pytest
import rich.console
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from attnbench.cli.app import main
from attnbench.cli.screen import console
from attnbench.cli.screen.console import in_lines
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec, parse_spec
from attnbench.measure.status import Status
from attnbench.results.record import REPLACED, Record
from attnbench.results.table import csv_text
from attnbench.suite.cell import Cell
from attnbench.text import without_empty

HOSTILE = [chr(c) for c in (0x61C, 0x200B, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))]
"""Bidirectional marks, embeddings, overrides and isolates; a space without width."""

WORDS = st.sampled_from(
    ["[red]", "[/]", "[link=x]", "\\", "\\[", ":smile:", "$x^2$", "<b>", "\x1b[2J", "\x9b2J", "\x07", *HOSTILE]
)
UNHURRIED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
"""A busy machine draws slowly, which says nothing of the text."""
few = settings(max_examples=100, suppress_health_check=UNHURRIED, deadline=10_000)


CELLS = st.lists(st.sampled_from(["bfloat16", "linformer", "a", "gaussian:logit_std=1.0", "true"]), max_size=4)
COLUMN = st.lists(CELLS.map(" ".join), min_size=2, max_size=2)


@few
@given(st.lists(COLUMN, min_size=1, max_size=8), st.integers(20, 100))
def test_columns_of_a_line_fit_it_and_break_neither_a_number_nor_a_word(columns: list[list[str]], space: int) -> None:
    numbers = [i % 3 == 2 for i in range(len(columns))]
    found = in_lines(columns, numbers, space)
    assert [first for first, _, _ in found] == [0, *np.cumsum([len(widths) for _, widths, _ in found])][:-1]
    assert sum(len(widths) for _, widths, _ in found) == len(columns)
    for first, widths, gap in found:
        room = space - 2 * bool(first)
        assert sum(widths) + gap * (len(widths) - 1) <= room
        for place, width in enumerate(widths, start=first):
            head, cell = columns[place]
            whole = [cell] if numbers[place] else cell.split()
            assert width >= min(room, max([1, *map(len, (*whole, *head.split()))]))
    whole = [max(1, *map(len, cells)) for cells in columns]
    if sum(whole) + 2 * (len(columns) - 1) <= space:
        assert found == [(0, whole, 2)]


NAME = "performer:features=64,kernel=positive"
NUMBERS = ["1.23 ms ±12%", "0.123 to 0.456", "36.0 KiB", "6.4e-05", "16384"]


@pytest.mark.parametrize("columns", [20, 40, 50, 80])
def test_on_any_screen_numbers_and_names_stand_whole_and_no_line_is_too_long(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    heads = ["variant", "time", "95 % interval", "peak memory", "error", "n", "note"]
    prose = "the projection would lengthen the sequence"
    console.table(heads, [[NAME, *NUMBERS, prose], ["linear", *NUMBERS, ""]], right=heads[1:6])
    said = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in said.splitlines()) <= columns
    for one in [*NUMBERS, *[NAME] * (columns >= 40)]:
        assert len(re.findall(rf"(?:^| ){re.escape(one)}(?: |$)", said, re.MULTILINE)) == (1 if one == NAME else 2), one
    assert len(said.splitlines()) <= 35  # and not a letter a line
    assert " ".join(said.split()).count("lengthen the") == 1
    options = {"performer:", "features=64,", "kernel=positive"}
    assert options <= {line.strip() for line in said.splitlines()} or columns >= 40


@pytest.mark.parametrize(("columns", "width"), [("0", 80), ("1", 20), ("40", 40), ("", 80)])
def test_a_screen_without_columns_is_not_believed(
    columns: str, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert console.width() == width
    console.table(["n", "time"], [["16384", "1.23 ms"]], right=["n", "time"])
    assert re.search(r"^16384  1\.23 ms *$", capsys.readouterr().out, re.MULTILINE)


def test_no_table_has_an_empty_column(capsys: pytest.CaptureFixture[str]) -> None:
    console.table(["n", "time", "note"], [["1", "-", ""], ["2", "-", ""]], right=["n", "time"])
    console.table(["n", "time"], [], right=["n", "time"])
    assert capsys.readouterr().out.split() == ["n", "1", "2", "n", "time"]


def test_every_table_of_a_terminal_is_made_in_one_place() -> None:
    package = Path(console.__file__).parents[2]
    makers = [path.name for path in package.rglob("*.py") if "rich.table" in path.read_text(encoding="utf-8")]
    assert makers == ["console.py"]


def test_a_long_note_that_rows_share_stands_once(capsys: pytest.CaptureFixture[str]) -> None:
    why = "unsupported: causal: each projected row mixes keys from the whole sequence"
    console.table(["n", "note"], [["1", why], ["2", why], ["3", "oom"], ["4", "oom"]], right=["n"])
    said = " ".join(capsys.readouterr().out.split())
    assert said == f"n note 1 (1) 2 (1) 3 oom 4 oom (1) {why}"


def test_a_progress_that_no_terminal_shows_is_a_line_from_time_to_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "A_LINE_EACH", 0.01)
    with console.progress(7) as bar:
        bar.update(bar.task_ids[0], completed=3, description="softmax n=64")
        sleep(0.2)
    said = capsys.readouterr()
    assert said.out == ""
    assert "0 min: 3 of 7: softmax n=64" in said.err.splitlines()
    with console.progress(7, wanted=False):
        sleep(0.1)
    assert capsys.readouterr().err == ""


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


def test_a_short_word_is_broken_in_no_column_and_no_line_is_longer_than_the_screen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ["variant", "causal", "dtype", "time", "±", "examples/s", "peak", "error", "note"]
    note = "unsupported: rank 256 is above the 64 keys: the projection would lengthen the sequence"
    numbers = ["1.23 ms", "12%", "1.23e+03", "36.0 KiB", "0.0041"]
    rows = [
        ["performer:features=64,kernel=positive", "False", "bfloat16", *numbers, ""],
        ["linformer", "True", "float32", *["-"] * 5, note],
    ]
    console.table(names, rows, right=names[3:8])
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    for word in ("bfloat16", "linformer", "lengthen", "causal", *numbers):
        assert word in said


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


def test_a_number_that_is_not_finite_is_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"grad": math.nan, "ends": (math.inf, -math.inf), "output": 0.5, "note": "NaN"}]
    console.data(rows)
    with console.items() as tell:
        tell(rows[0])
    told = [{"grad": None, "ends": [None, None], "output": 0.5, "note": "NaN"}]
    assert capsys.readouterr().out.count("NaN") == 2
    console.data(rows)
    assert json.loads(capsys.readouterr().out) == told


@pytest.mark.parametrize("bad", ["\x1b[2J", "\n", "\u2028", *HOSTILE])
def test_the_tables_on_disk_hold_no_character_that_a_terminal_obeys(bad: str) -> None:
    cell = Cell("s", "w", Spec.of("mine", {"name": f"a{bad}b"}), Shape(1, 1, 1, 1), inputs=Spec(f"x{bad}"))
    text = csv_text([Record.of(cell, Status.ERROR, f"why{bad}not")])
    assert text.replace("\n", "").isprintable()
    assert text.count("\n") == 2


@pytest.mark.usefixtures("forks")
def test_a_name_from_a_file_of_somebody_else_never_reaches_the_terminal_as_it_is(tmp_path: Path) -> None:
    name = "\x1b[2J\u202egpj.exe"
    for arguments in (
        ["run", f"{name}.yaml"],
        ["show", name],
        ["list", "--plugin", f"{name}.py"],
        ["plot", name],
        ["report", name],
        ["compare", "softmax", f"linear:{name}=1", "--n", "8"],
    ):
        ended = subprocess.run(
            [sys.executable, "-m", "attnbench", *arguments], cwd=tmp_path, capture_output=True, encoding="utf-8"
        )
        assert ended.returncode == 2
        assert (ended.stdout + ended.stderr).replace("\n", "").isprintable()


def test_columns_in_which_no_row_says_anything_are_left_out() -> None:
    rows = [["1", "-", ""], ["", "-", "x"]]
    assert without_empty(["a", "b", "c"], rows) == (["a", "c"], [["1", ""], ["", "x"]])


def test_what_is_printed_beside_the_bar_of_a_terminal_stays_in_the_file_it_is_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(console, "_err", lambda: rich.console.Console(file=terminal, force_terminal=True))
    with console.progress(1):
        console.data(["for the file"])
    assert json.loads(capsys.readouterr().out) == ["for the file"]
    assert "file" not in terminal.getvalue()


def measured(text: str, **columns: object) -> Record:
    cell = Cell("a", "b", parse_spec(text), Shape(seq_len=64, heads=1, head_dim=4), device="cuda:1")
    return replace(Record.of(cell, Status.OK), **{"time_median_s": 1.0, **columns})  # type: ignore[arg-type]  # columns


def test_on_a_gpu_the_fused_form_is_named_where_it_was_not_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [measured(text) for text in ("local:window=9", "bigbird:block=32", "softmax", "linear:chunk=5")]
    console.fused_note([*rows, measured("longformer", time_median_s=None)])
    told = " ".join(capsys.readouterr().err.split())
    names = "flex:window=9 is local:window=9; bigbird:block=32,form=flex,random_blocks=3 is bigbird:block=32"
    assert told == f"the same in fused kernels, made for a GPU: {names}"
    both = [*rows[:1], measured("flex:window=9", kernel="flex")]
    console.fused_note([*both, *(replace(row, device="cpu") for row in rows)])
    assert capsys.readouterr().err == ""


def test_labels_that_the_compiler_made_another_algorithm_of_are_named_and_whether_in_all_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = f"{REPLACED} (flash_cpu) in the place of its softmax"
    compiled = {"device": "cpu", "compiled": True}
    rows = [
        measured("softmax", **compiled, warnings=f"noisy; {said}"),
        measured("sdpa", **compiled, kernel="flash_cpu"),
    ]
    plain = measured("softmax", device="cpu")
    console.replaced_note([*rows, plain])
    told = f"{REPLACED} in the place of the softmax of softmax:"
    assert " ".join(capsys.readouterr().err.split()) == f"{told} their rows are sdpa's algorithm"
    console.replaced_note([*rows, measured("softmax", **compiled, causal=True)])
    some = f"{told} some of their rows, which the column kernel names, are sdpa's algorithm"
    assert " ".join(capsys.readouterr().err.split()) == some
    console.replaced_note([rows[1], plain])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("local", {"pass_": "decode"}),
        ("local", {"dtype": "float64"}),
        ("bigbird", {"padding": 0.5}),
        ("linear", {"v_dim": 8}),
    ],
)
def test_a_fused_form_that_does_not_take_what_was_measured_is_not_named(
    text: str, columns: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    console.fused_note([measured(text, **columns)])
    assert capsys.readouterr().err == ""


def test_a_further_line_of_a_row_is_left_out_if_it_is_empty(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    console.table(["variant", "verdict"], [["a" * 15, ""], ["b" * 15, "slower"]])
    assert [line.strip() for line in capsys.readouterr().out.splitlines()] == [
        "variant", "verdict", "a" * 15, "b" * 15, "slower"
    ]  # fmt: skip


def test_claims_stand_within_a_narrow_screen_with_their_words_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, found = Path(__file__).parents[2] / "results/reference/lra-cpu", {}
    for columns in (400, 40):
        monkeypatch.setenv("COLUMNS", str(columns))
        console._out.cache_clear()
        assert main(["claims", str(run)]) == 0
        found[columns] = capsys.readouterr().out
        assert all(len(line.rstrip()) <= columns or " " not in line.strip() for line in found[columns].splitlines())
    assert {*found[40].split()} == {*found[400].split()}
