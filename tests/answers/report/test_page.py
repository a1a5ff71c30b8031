"""What is in a report: every row, nothing from elsewhere, and foreign text as text."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

from attnbench.answers.report.html_page import make_page
from attnbench.answers.report.provenance import by_machine, read_sources, title_of
from attnbench.figures.kit.palette import DARK, LIGHT, variables
from attnbench.files import read_stored
from attnbench.results.frame.marks import error_text
from attnbench.units import format_bytes, format_seconds
from tests.answers.fixture_runs import Row, environment, write_run
from tests.answers.report.reading import REFERENCE, Read, page_of, page_of_run, rows_of

RUNS = ["lra-cpu", "headline-cpu", "score-cpu"]
HOSTILE = "</script><img src=x onerror=alert(1)>\"'`${alert(1)}<!--\u202e\u2066abc"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest) -> tuple[pd.DataFrame, str]:
    return rows_of(request.param), page_of_run(request.param)


def test_every_row_is_in_the_file_with_its_numbers(run: tuple[pd.DataFrame, str]) -> None:
    frame, page = run
    rows = Read(page).rows
    assert len(rows) == len(frame)
    for row, wanted in zip(rows, frame.to_dict("records"), strict=True):
        assert row["label"].removesuffix("†") == wanted["label"]
        assert (row["n"], row["status"] or "ok") == (str(wanted["seq_len"]), wanted["status"])
        assert row["time"] == format_seconds(wanted["time_median_s"]).removeprefix("-")
        assert row["peak"] == format_bytes(wanted["peak_bytes"]).removeprefix("-")
        assert row["error"] == error_text(wanted["rel_error"], wanted["error_kind"]).removeprefix("-")
        assert row["score"] == ("" if pd.isna(wanted["score"]) else f"{wanted['score']:.3f}")


def test_rows_of_one_label_and_length_are_told_apart_in_words(run: tuple[pd.DataFrame, str]) -> None:
    frame, page = run
    told = [(row["label"], row["n"], row["about"]) for row in Read(page).rows]
    twice = {one for one in told if told.count(one) > 1}
    columns = ["label", "seq_len", "level", "pass", "inputs", "causal", "dtype", "seed", "protocol", "process", "task"]
    assert len(twice) <= frame.duplicated([*columns, "learning_rate", "kv_len"]).sum()


def test_what_was_timed_unchecked_says_so_in_its_row_and_is_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [Row("softmax", columns={"laws": "unchecked"}), Row("linear")])
    read = Read(make_page(read_sources([folder], warn=pytest.fail)))
    said = {row["label"]: row["warnings"] for row in read.rows}
    assert said == {"softmax": "not held to its laws before it was measured (--unchecked)", "linear": ""}


def test_it_is_small_and_asks_for_nothing(run: tuple[pd.DataFrame, str]) -> None:
    _, page = run
    assert len(page.encode()) < 300_000
    assert re.findall(r"https?:[^\s\"'`<>)]*", page) == []
    found = Read(page)
    assert not [tag for tag, _ in found.elements if tag in ("link", "iframe", "object", "embed", "base", "form")]
    assert not [given for _, given in found.elements if "src" in given]
    (policy,) = [str(given["content"]) for tag, given in found.elements if given.get("http-equiv")]
    assert policy.startswith(POLICY)


def test_the_scripts_write_text_and_never_markup() -> None:
    folder = Path(make_page.__code__.co_filename).parent / "parts"
    scripts = "\n".join(file.read_text() for file in folder.glob("*.js"))
    assert 5_000 < len(scripts) < 15_000
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|fetch\(|XMLHttp", scripts
    )


def test_colours_are_those_of_the_figures_in_both_styles() -> None:
    page = page_of_run("lra-cpu")
    for name, colour in variables(LIGHT).items():
        assert re.findall(rf"--{name}: (#\w+);", page) == [colour, variables(DARK)[name]]
    used = set(re.findall(r"var\(--(\w+)\)", "".join(re.findall(r"^\.z\d+\{.*", page, re.MULTILINE))))
    assert {"ink", "faint", "f0", "f2", "band"} <= used <= variables(LIGHT).keys()
    assert "#fe" not in page, "a stand-in for a colour"


def test_foreign_text_stays_text_wherever_it_comes_from() -> None:
    frame = rows_of("lra-cpu").head(40).copy()
    frame.loc[frame.index[0], ["status", "reason"]] = ["error", "plain"]
    before = Read(page_of(frame))
    columns = [
        "label",
        "variant",
        "reason",
        "suite",
        "inputs",
        "warnings",
        "family",
        "sweep",
        "dtype",
        "task",
        "kernel",
    ]
    for place, column in enumerate(columns):
        frame.loc[frame.index[3 * place : 3 * place + 3], column] = HOSTILE
    frame.loc[frame["reason"] == HOSTILE, "status"] = "error"
    page = page_of(frame, title=HOSTILE, doubts=[HOSTILE])
    after = Read(page)
    assert {tag for tag, _ in after.elements} - {tag for tag, _ in before.elements} <= {"small", "strong"}
    assert len(after.scripts) == len(before.scripts) == 1
    assert not any(name.startswith("on") for _, given in after.elements for name in given)
    assert not any(sign in page for sign in ("\u202e", "\u2066"))
    for column in ("label", "status small", "warnings"):
        assert sum("</script><img" in row[column] for row in after.rows) == 3


def test_runs_of_one_machine_by_other_libraries_have_no_common_axis(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / name, [Row(), Row("linear")], about=environment(window_products=library))
        for name, library in (("a", "default"), ("b", "oneDNN"), ("c", "default"))
    ]
    sources = read_sources(runs, warn=pytest.fail)
    first, second = by_machine(sources)
    assert ([*first.environments], [*second.environments]) == (["a", "c"], ["b"])
    shown = Read(make_page(sources)).text
    assert all(f"{title_of(machine)}: {names}" in shown for machine, names in ((first, "a, c"), (second, "b")))


def test_machines_have_sections_of_their_own_and_views_of_one_share_no_row_with_the_other() -> None:
    sources = read_sources([REFERENCE / "lra-cpu", REFERENCE / "lra-h200"], warn=pytest.fail)
    assert len(by_machine(sources)) == 2
    found = Read(make_page(sources))
    assert [*map(len, found.sections)] == [len(rows_of(name)) for name in ("lra-cpu", "lra-h200")]
    figures = [given for tag, given in found.elements if tag == "figure" and given.get("data-figure")]
    assert sum(given["data-figure"] == "0-4096" for given in figures) == 2
    assert [sum(tag == "h2" and given.get("class") == "name" for tag, given in found.elements)] == [2]
    assert "H200" in found.text


def test_a_table_without_its_folder_makes_a_report(tmp_path: Path) -> None:
    alone = tmp_path / "results.csv"
    alone.write_bytes(read_stored(REFERENCE / "lra-cpu" / "results.csv"))
    sources = read_sources([alone], warn=pytest.fail)
    assert rows_of("lra-cpu")["machine_id"].iloc[0] in Read(make_page(sources)).text


def test_failed_cells_stand_there_with_their_reasons() -> None:
    frame = rows_of("lra-cpu").head(30).copy()
    frame.loc[frame.index[:2], ["status", "reason"]] = ["oom", "needs more than the limit of 2.00 GiB"]
    text = Read(page_of(frame)).text
    assert "Without a number" in text
    assert "oom 2 cells" in text
    assert "needs more than the limit of 2.00 GiB" in text
    assert "Without a number" not in Read(page_of_run("lra-cpu")).text


def test_no_row_with_a_number_still_makes_a_report() -> None:
    frame = rows_of("lra-cpu").head(5)
    numbers = frame.select_dtypes("float").columns
    frame = frame.assign(status="timeout", reason="took longer", **dict.fromkeys(numbers, float("nan")))
    found = Read(page_of(frame))
    assert "No row of this run has a time" in found.text
    assert len(found.rows) == 5


def test_the_other_figures_of_plot_stand_there_if_they_are_wanted() -> None:
    frame = rows_of("catalogue-cpu")
    assert "More figures of attnbench plot" not in page_of_run("catalogue-cpu")
    found = Read(page_of(frame, figures=True))
    assert "More figures of attnbench plot" in found.text
    assert "FIXED PATTERN" in found.text, "a heading of the figure of the whole catalogue"


def test_the_same_rows_give_the_same_file_however_they_are_numbered() -> None:
    frame = rows_of("headline-cpu")
    assert page_of(frame.set_index(frame.index + 1000)) == page_of_run("headline-cpu")


def test_at_most_six_figures_of_speed_stand_there_and_the_rest_is_named() -> None:
    found = Read(page_of_run("decoding-cpu"))
    figures = [given for tag, given in found.elements if tag == "figure" and given.get("data-figure")]
    assert len(figures) == 6
    options = [given["value"] for tag, given in found.elements if tag == "option"]
    assert options == [given["data-figure"] for given in figures]
    assert "Not drawn here, for want of room: whole model, forward pass at n = 64; " in found.text


def test_each_figure_has_a_form_for_a_narrow_screen_and_a_name() -> None:
    found = Read(page_of_run("score-cpu"))
    forms = [
        given.get("class") for tag, given in found.elements if tag == "div" and given.get("class") in ("wide", "narrow")
    ]
    assert forms == ["wide", "narrow"] * (len(forms) // 2)
    assert len(forms) >= 4
    assert all(given["aria-label"] for tag, given in found.elements if tag == "svg" and given.get("role") == "group")


def test_a_score_that_could_not_be_compared_says_why_in_the_table() -> None:
    assert " withheld: fewer than two common seeds" in Read(page_of_run("headline-cpu")).text


def test_the_scores_of_the_figure_stand_in_a_table() -> None:
    text = Read(page_of_run("score-cpu")).text
    for words in ("minus softmax", "−0.862 worse", "−0.931 to −0.793"):
        assert words in text
