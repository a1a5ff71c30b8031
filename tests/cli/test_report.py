"""``attnbench report`` as a user meets it: what it writes where, and one line for whatever is wrong."""

from __future__ import annotations

import re
import shutil
import webbrowser
from pathlib import Path

import pytest

import attnbench
from attnbench.cli.app import main
from attnbench.errors import Exit
from tests.committed import copy_of

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A small run of its own."""
    return copy_of("headline-cpu", tmp_path / "20261123T024610Z-cpu")


def lines(capsys: Captured) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_it_goes_into_the_run_or_where_it_is_told_to(run: Path, tmp_path: Path, capsys: Captured) -> None:
    assert main(["report", str(run)]) == Exit.OK
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    page = (run / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "<title>headline on " in page
    out = tmp_path / "mine.html"
    assert main(["report", str(run / "results.csv"), "--out", str(out), "--title", "A & B"]) == Exit.OK
    assert "<title>A &amp; B</title>" in out.read_text(encoding="utf-8")


def test_what_is_wrong_is_one_line_and_nothing_is_written(run: Path, tmp_path: Path, capsys: Captured) -> None:
    damaged = Path(shutil.copytree(run, tmp_path / "damaged"))
    records = damaged / "records.jsonl"
    records.write_text(re.sub(r'("time_median_s": )', r"\g<1>9", records.read_text(), count=1))
    (tmp_path / "empty").mkdir()
    other = tmp_path / "no.json"
    other.write_text("{}")
    cases = {
        "no such file or folder": (["none"], Exit.USAGE),
        "holds no run": ([str(tmp_path / "empty")], Exit.USAGE),
        "is named twice": ([str(run), str(run / "results.csv")], Exit.USAGE),
        "this line was changed": ([str(damaged)], Exit.CORRUPT),
        "is a folder; name a file": ([str(run), "--out", str(tmp_path)], Exit.CANNOT_CREATE),
        "cannot write": ([str(run), "--out", str(tmp_path / "no" / "r.html")], Exit.CANNOT_CREATE),
        "not what attnbench check --json prints": ([str(run), "--check", str(other)], Exit.USAGE),
        "--title is empty": ([str(run), "--title", " "], Exit.USAGE),
    }
    for said, (arguments, code) in cases.items():
        assert main(["report", *arguments]) == code, said
        (line,) = lines(capsys)
        assert line.startswith("error: ")
        assert said in line
    assert not list(tmp_path.rglob("*.html"))


def test_a_link_in_the_place_of_the_file_is_not_followed(run: Path, tmp_path: Path, capsys: Captured) -> None:
    (run / "report.html").symlink_to(tmp_path / "elsewhere.html")
    assert main(["report", str(run)]) == Exit.CANNOT_CREATE
    assert "is a link" in lines(capsys)[0]
    assert not (tmp_path / "elsewhere.html").exists()


def test_a_doubt_about_a_run_is_in_the_report_as_well(run: Path, capsys: Captured) -> None:
    suite = run / "suite.yaml"
    suite.write_text(suite.read_text() + "\n")
    assert main(["report", str(run)]) == Exit.OK
    assert lines(capsys)[0].startswith(f"warning: {suite} is not the suite that was run")
    assert "is not the suite that was run; restore it" in (run / "report.html").read_text(encoding="utf-8")


def test_open_asks_for_a_browser_and_says_if_there_is_none(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: bool(opened.append(address)))
    assert main(["report", str(run), "--open"]) == Exit.OK
    assert opened == [(run / "report.html").resolve().as_uri()]
    assert lines(capsys)[-1].startswith("warning: no browser could be started; open ")


def test_from_python_it_is_a_page_that_a_notebook_shows(run: Path, tmp_path: Path) -> None:
    page = attnbench.report(str(run), save=tmp_path / "r.html", title="<i>")
    assert (tmp_path / "r.html").read_text(encoding="utf-8") == page
    assert page == attnbench.report(attnbench.read_results(run), title="<i>")
    shown = page._repr_html_()
    assert shown.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert 'sandbox="allow-scripts"' in shown
    assert "<i>" not in shown
