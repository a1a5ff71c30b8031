"""One text for a cell with its marks, and one definition of ±, wherever a table is shown."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnbench.answers.report.html_page import make_page
from attnbench.results.export.tables import as_text, tables_of
from attnbench.results.frame import marks
from attnbench.results.read import read_results
from attnbench.results.record import Record
from attnbench.results.store import RunFolder
from attnbench.units import format_interval, format_seconds, with_interval
from tests.answers.report.reading import Read
from tests.committed import REFERENCE

RUN = REFERENCE / "catalogue-cpu"


def rows() -> list[Record]:
    return RunFolder(RUN).in_order()


def test_a_large_distance_is_written_without_an_exponent() -> None:
    assert marks.error_text(190.4, "distance") == "190 *"
    assert marks.error_text(4008.0, "approximation", 3) == "4008"


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ((0.96e-3, 1.04e-3), "±4%"),
        ((0.999e-3, 1.001e-3), "±1%"),
        ((0.9e-3, 2.6e-3), "0.900 to 2.60 ms"),
        ((0.1e-3, 1.1e-3), "100 µs to 1.10 ms"),
        ((0.5e-3, 1.5e-3), "0.500 to 1.50 ms"),
        ((None, 1e-3), ""),
    ],
)
def test_an_interval_is_one_number_only_if_it_is_about_even_and_small(
    ends: tuple[float | None, float | None], said: str
) -> None:
    assert format_interval(1e-3, *ends).replace("500 µs to", "0.500 to").replace("900 µs to", "0.900 to") == said


@given(st.floats(1e-9, 1e3), st.floats(0, 0.999), st.floats(0, 50))
def test_no_interval_is_told_as_more_than_a_fifth_and_none_leaves_out_an_end(
    value: float, down: float, up: float
) -> None:
    said = format_interval(value, value * (1 - down), value * (1 + up))
    if found := re.fullmatch(r"±(\d+)%", said):
        assert 1 <= int(found[1]) <= 20
        assert max(down, up) <= int(found[1]) / 100 + 0.005 + 1e-9
    else:
        assert said.endswith(format_seconds(value * (1 + up)))


def test_the_same_row_has_the_same_texts_in_markdown_latex_and_a_report() -> None:
    run = rows()
    frame = read_results(RUN)
    shown = Read(make_page(frame)).rows
    text = "\n".join(as_text(table, "markdown") for table in tables_of(run))
    found = [one for one in shown if not one["status"] and one["time"]]
    assert len(found) > 50
    for one in found:
        assert f" {one['time']} | {one['time small'] or '-'} |" in text, one
        assert f"| {one['label']} |" in text.replace("\\_", "_")


@pytest.mark.parametrize("form", ["markdown", "latex"])
def test_tables_for_a_paper_keep_their_marks_and_say_what_they_mean(form: str) -> None:
    (first, *_) = [row for row in rows() if row.own_form]
    other = replace(first, rel_error=1.2, error_kind="distance", label="reformer", own_form="")
    learned = replace(first, rel_error=0.4, error_kind="learned", label="linformer", own_form="")
    text = as_text(tables_of([first, other, learned])[0], form)  # type: ignore[arg-type]  # one of both
    dagger = {"markdown": "†", "latex": r"$\dagger$"}[form]
    star = {"markdown": r"1.2 \*", "latex": "1.2 *"}[form]
    assert f"{first.label}{dagger}" in text
    assert star in text
    assert f"{dagger} not the form that the source describes" in text
    assert "another operator: its distance from softmax attention is not an error" in text
    assert "learned: an error means nothing before the projections are fitted" in text


def test_a_table_without_marks_has_no_notes() -> None:
    assert marks.notes(["softmax", "1.2", "-", "a * b"]) == []


def test_trainings_are_one_line_with_mean_and_interval_over_seeds() -> None:
    (table,) = [one for one in tables_of(RunFolder(REFERENCE / "score-cpu").in_order()) if one.title.endswith("recall")]
    labels = [row[0] for row in table.rows]
    assert len(labels) == len(set(labels))
    by_name = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    softmax = by_name["softmax"]
    scores = [
        row.score for row in RunFolder(REFERENCE / "score-cpu").in_order() if row.label == "softmax" and row.score
    ]
    mean = [row for row in scores if row is not None]
    assert softmax["seeds"] == "5"
    low, high = map(float, softmax["score 95 %"].split(" to "))
    assert low <= float(softmax["score"]) <= high
    assert min(mean) <= float(softmax["score"]) <= max(mean)
    assert by_name["identity"]["score"].endswith(marks.NOT_SHOWN)
    assert any("with one seed over test examples" in note for note in table.beneath)


def test_a_value_with_its_interval_is_a_cell() -> None:
    assert with_interval(1.2e-3, 0.99e-3, 2.6e-3) == "1.20 ms (990 µs to 2.60 ms)"
    assert with_interval(1.2e-3, 1.16e-3, 1.24e-3) == "1.20 ms ±3%"
    assert with_interval(None, None, None) == "-"
