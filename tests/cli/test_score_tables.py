"""The tables of scores on a terminal, of committed runs."""

from __future__ import annotations

import re
from dataclasses import replace
from statistics import median

import pytest

from attnbench.cli.screen.score import print_scores
from attnbench.results.record import Record
from attnbench.results.store import RunFolder
from attnbench.units import format_seconds
from tests.docs.making import RUNS


@pytest.mark.parametrize(
    ("run", "told"),
    [
        ("positions-biases-cpu", ["bias alibi", "bias relative"]),
        ("positions-cpu", ["trained-sinusoid positions", "learned positions", "rotary positions", "no positions"]),
    ],
)
def test_a_title_says_what_tells_its_models_from_those_of_the_others(
    run: str, told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    print_scores(RunFolder(RUNS / run).in_order())
    titles = re.findall(r"^copy, n = 64, .*$", capsys.readouterr().out, re.MULTILINE)
    ends = [title.partition("learning rate 0.004, ")[2] for title in titles]
    assert len(set(ends)) == len(ends)
    assert [end for end in ends if "guided" not in end] == told


@pytest.mark.parametrize(("column", "value"), [("layers", 3), ("ffn", 256), ("batch", 64)])
def test_models_of_other_sizes_have_a_title_of_their_own(
    column: str, value: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row for row in RunFolder(RUNS / "positions-biases-cpu").in_order() if row.bias == "alibi"]
    other = [replace(row, cell_id=f"{row.cell_id}/other", **{column: value}) for row in rows]
    print_scores([*rows, *other])
    titles = re.findall(r"^copy, n = 64, .*$", capsys.readouterr().out, re.MULTILINE)
    assert len(set(titles)) == len(titles) == 2
    assert any(str(value) in title.partition("0.004")[2] for title in titles)


def test_the_lines_below_say_how_many_comparisons_hold_together_and_what_the_mark_means(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_scores(RunFolder(RUNS / "score-cpu").in_order())
    said = capsys.readouterr().out
    assert re.search(r"^minus softmax: joint 95 % over \d\d comparisons; unsure: it holds 0$", said, re.MULTILINE)
    assert "\n° not shown to be better than without mixing\n" in said
    assert "no better than" not in said
    rows = RunFolder(RUNS / "score-cpu").in_order()
    for fewer in ([row for row in rows if row.variant != "softmax"], [row for row in rows if row.seed == 0]):
        print_scores(fewer)
        assert "variant  " in (found := capsys.readouterr().out)
        assert not re.search(r"^variant .*minus softmax", found, re.MULTILINE)
        assert ("withheld: fewer than two common seeds" in found) == (" withheld " in found)


def test_each_of_several_models_has_a_mean_over_the_tasks_that_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    rows = RunFolder(RUNS / "score-cpu").in_order()
    print_scores([*rows, *(replace(row, cell_id=f"{row.cell_id}/other", layers=3) for row in rows)])
    assert f"joint 95 % over {2 * (4 + 1) * 13} comparisons" in capsys.readouterr().out


def test_the_time_of_a_training_is_that_of_the_models_in_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    rows = RunFolder(RUNS / "positions-biases-cpu").in_order()
    print_scores(rows)
    tables = re.split(r"^copy, .*, bias (\w+)$", capsys.readouterr().out, flags=re.MULTILINE)[1:]
    for bias, table in zip(tables[::2], tables[1::2], strict=True):
        (line,) = re.findall(r"^gated-softmax  .*$", table, re.MULTILINE)
        assert line.endswith(format_seconds(median(_seconds(rows, bias))))


def _seconds(rows: list[Record], bias: str) -> list[float]:
    return [row.train_s for row in rows if row.label == "gated-softmax" and row.bias == bias and row.train_s]


def test_every_score_is_compared_with_softmax_as_it_is_though_another_setting_of_it_scores_higher(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [row for row in RunFolder(RUNS / "score-cpu").in_order() if row.variant in ("softmax", "linear", "identity")]
    named = {"label": "softmax:other=1", "options": '{"other": 1}'}
    higher = [
        replace(row, cell_id=f"{row.cell_id}/b", score=min(1.0, (row.score or 0.0) + 0.1), **named)
        for row in rows
        if row.variant == "softmax"
    ]
    print_scores([*rows, *higher])
    said = capsys.readouterr().out
    assert len(re.findall(r"^softmax  .*  -  +-  ", said, re.MULTILINE)) == 4
    assert re.search(r"^softmax:other=1 .* \+0\.100 \(.*better", said, re.MULTILINE)
