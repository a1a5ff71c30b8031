"""What README.md and docs/ say in figures stands in the committed runs."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

from attnbench.cli.run import _print_records
from attnbench.results.store import RunFolder
from attnbench.units import format_seconds
from tests.docs import making, rows

MEASURED = re.compile(r"\d[\d.,]*( to \d[\d.,]*)? ?(µs|ms|s|MiB|GiB|MB|GB|GFLOP/s|times as|times the)(?![\w`])")
"""What looks like something that was measured."""


@pytest.mark.parametrize("page", making.PAGES, ids=lambda page: page.name)
def test_pages_show_what_the_rows_of_today_say(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == rows.renew(text), "python -m tests.docs.rows writes it anew"


def test_everything_that_is_made_is_shown() -> None:
    shown = [name for page in making.PAGES for name, _ in making.MARK.findall(page.read_text(encoding="utf-8"))]
    assert set(shown) == set(making.ROWS)


@pytest.mark.parametrize("page", making.PAGES, ids=lambda page: page.name)
def test_excerpts_of_what_a_command_printed_are_in_what_it_printed(page: Path) -> None:
    for path, excerpt in making.PRINTED.findall(page.read_text(encoding="utf-8")):
        printed = iter((making.HERE / path).read_text(encoding="utf-8").splitlines())
        for line in excerpt.splitlines():
            assert line == "..." or line in printed, f"{path} has no line {line!r}, or not in this place"


@pytest.mark.parametrize("page", making.PAGES, ids=lambda page: page.name)
def test_nothing_measured_stands_in_a_sentence_by_hand(page: Path) -> None:
    text = making.MARK.sub("", page.read_text(encoding="utf-8"))
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert [match[0] for match in MEASURED.finditer(text)] == []


def test_the_printed_comparison_is_that_of_its_rows() -> None:
    printed = (making.HERE / "docs/printed/compare.txt").read_text(encoding="utf-8")
    for row in pd.read_csv(making.RUNS / "compare-cpu/compare.csv").to_dict("records"):
        first, other = re.findall(rf"^ *{row['seq_len']}  (.* ±.*)$", printed, re.MULTILINE)
        assert first.startswith(f"{row['a']}  ")
        assert format_seconds(row["a_time_median_s"]) in first
        assert other.startswith(f"{row['b']}  ")
        assert format_seconds(row["b_time_median_s"]) in other
        assert f" {1 / row['ratio']:.3g} " in other
        assert other.split()[-1] == {"slower": "faster", "faster": "slower"}[row["verdict"]]


def test_the_printed_run_is_that_of_its_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = (making.HERE / "docs/printed/run.txt").read_text(encoding="utf-8")
    tables = printed[printed.index("speed, n = ") : printed.index("results: ")]
    monkeypatch.setenv("COLUMNS", "200")
    _print_records(RunFolder(making.RUNS / "lra-cpu").in_order())
    assert capsys.readouterr().out.strip() == tables.strip()


def test_every_committed_run_is_named_in_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in making.PAGES)
    assert [run.name for run in making.RUNS.iterdir() if f"results/reference/{run.name}" not in text] == []


def test_a_committed_run_is_compressed_and_has_no_figure_that_no_page_shows() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in making.PAGES)
    files = {path for path in making.RUNS.glob("*/**/*") if path.is_file()}
    figures = {path for path in files if path.suffix == ".svg"}
    assert [path for path in figures if str(path.relative_to(making.HERE)) not in text] == []
    notes = {path for path in files if path.suffix == ".txt" and path.with_suffix(".svg") in figures}
    plain = {"environment.json", "suite.yaml", "compare.csv"}
    assert {path for path in files - figures - notes if path.name not in plain and path.suffix != ".xz"} == set()


@pytest.mark.parametrize("line", ["it takes 1.2 times as long", "in 12 ms", "10 GiB", "3 s", "0.5 to 0.7 GFLOP/s"])
def test_what_was_measured_is_known_by_its_unit(line: str) -> None:
    assert MEASURED.search(line)


@pytest.mark.parametrize("line", ["samples of at least 1 ms,", "4096 tokens", "95 %", "n = 512, softmax"])
def test_what_was_not_measured_is_let_through(line: str) -> None:
    assert not MEASURED.search(line.replace("1 ms", "a millisecond"))
