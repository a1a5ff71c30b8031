"""A report as Chromium shows it: it filters, sorts, tells, fits a telephone, and keeps to its own policy."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnbench.results.read import read_results
from attnbench.units import format_bytes
from tests.answers.report.chromium import PROGRAM, Chromium
from tests.answers.report.reading import Read, page_of, page_of_run, rows_of
from tests.figures.trained_rows import table

pytestmark = [
    pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt-get install chromium"),
    pytest.mark.timeout(600),
]
POINTS = "document.querySelectorAll('figure[data-figure]:not([hidden]) .wide .m')"
SHOWN = (
    "[...document.querySelectorAll('#table-1 tbody tr')].filter(row => row.offsetHeight).map(row => row.dataset.row)"
)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    browser = Chromium(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page_of_run("lra-cpu"), encoding="utf-8")
    return path


@pytest.fixture
def browser(chromium: Chromium) -> Iterator[Chromium]:
    chromium.size(1280)
    chromium.media()
    yield chromium
    assert chromium.said == [], "an error, or something that the policy forbids"
    assert [one for one in chromium.asked if not one.startswith("file:")] == []


def type_filter(browser: Chromium, text: str) -> None:
    browser.ask(
        f"(field => {{ field.value = {json.dumps(text)}; field.dispatchEvent(new Event('input')); }})"
        "(document.querySelector('#filter-1'))"
    )


def test_every_row_is_shown_with_the_units_of_the_command_line(browser: Chromium, report: Path) -> None:
    browser.open(report)
    rows = Read(page_of_run("lra-cpu")).rows
    texts = browser.ask("[...document.querySelectorAll('#table-1 tbody tr')].map(row => row.textContent)")
    assert len(texts) == len(rows)
    for row, text in zip(rows, texts, strict=True):
        assert text.startswith(row["label"])
        assert row["time"] in text
        assert row["peak"] in text


def test_a_trained_model_that_loses_less_is_higher_and_its_row_says_how_much(browser: Chromium, tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    table().to_csv(file, index=False)
    report = tmp_path / "report.html"
    report.write_text(page_of(read_results(file)), encoding="utf-8")
    browser.open(report)
    found = browser.ask(
        f"[...{POINTS}].map(point => [point.ariaLabel.split(',')[0], "
        "Number(point.querySelector('circle').getAttribute('cy'))])"
    )
    heights = dict(found)
    order = ["sdpa", "better", "local", "performer", "mean-value", "linear"]
    assert sorted(order, key=heights.__getitem__) == order
    gaps = [heights["performer"] - heights["better"], heights["linear"] - heights["performer"]]
    assert gaps[0] / gaps[1] == pytest.approx(0.9 / 1.2, abs=2e-3), "the scale is linear, in tenths of a point"
    rows = browser.ask("[...document.querySelectorAll('#table-1 tbody tr')].map(row => row.textContent)")
    assert [one for one in ("2.000 (+0.000)", "2.140 (+0.140)", "1.800 (-0.200)") if one in "".join(rows)][2:]


def test_words_filter_and_words_after_a_minus_leave_out(browser: Chromium, report: Path) -> None:
    browser.open(report)
    type_filter(browser, "performer -relu n4096")
    rows = Read(page_of_run("lra-cpu")).rows
    wanted = [
        str(place)
        for place, row in enumerate(rows)
        if "performer" in row["label"] and "relu" not in row["label"] and row["n"] == "4096"
    ]
    assert wanted
    assert browser.ask(SHOWN) == wanted
    assert browser.ask("document.querySelector('#count-1').textContent") == f"{len(wanted)} of {len(rows)} rows"
    assert "filter=performer+-relu+n4096" in browser.ask("location.hash")
    pale = browser.ask(f"[...{POINTS}].map(p => p.classList.contains('dim'))")
    assert pale.count(False) == len(wanted)


def test_a_click_or_the_keyboard_sorts_and_rows_without_a_value_come_last(browser: Chromium, report: Path) -> None:
    browser.open(report)
    values = [format_bytes(size) if size == size else None for size in rows_of("lra-cpu")["peak_bytes"]]
    browser.click("#table-1 th:nth-of-type(5) button")
    known = [format_bytes(size) for size in sorted(rows_of("lra-cpu")["peak_bytes"].dropna())]
    assert [values[int(place)] for place in browser.ask(SHOWN)][: len(known)] == known
    assert browser.ask("document.querySelector('#table-1 [aria-sort=ascending]').textContent") == "peak memory"
    assert browser.ask(SHOWN)[len(known) :] == [str(place) for place, size in enumerate(values) if size is None]
    browser.press("Enter")  # the button has the focus
    assert [values[int(place)] for place in browser.ask(SHOWN)][: len(known)] == known[::-1]
    assert browser.ask("document.querySelector('#table-1 [aria-sort=descending]').textContent") == "peak memory"
    assert browser.ask("location.hash") == "#sort=-peak"


def test_the_focus_alone_shows_the_tip_and_arrows_go_from_point_to_point(browser: Chromium, report: Path) -> None:
    browser.open(report)
    browser.ask("document.querySelector('#figure-1').focus()")
    browser.press("Tab")
    first = browser.ask("document.activeElement.getAttribute('aria-label')")
    assert browser.ask("!document.querySelector('#tip').hidden")
    said = browser.ask("document.querySelector('#tip').textContent")
    assert first.split(",")[0] in said
    assert "peak memory" in said
    browser.press("ArrowRight")
    second = browser.ask("document.activeElement.getAttribute('aria-label')")
    assert second != first
    browser.press("Escape")
    assert browser.ask("document.querySelector('#tip').hidden")
    browser.press("Enter")
    marked = browser.ask("document.querySelector('tr[aria-current]').textContent")
    assert marked.startswith(second.split(",")[0])
    assert browser.ask("document.querySelector('.m[aria-pressed=true]').getAttribute('aria-label')") == second
    others = f"[...{POINTS}].filter(p => !p.classList.contains('dim')).map(p => p.ariaLabel)"
    assert browser.ask(others) == [second], "the other variants are pale"


def test_a_row_finds_its_point_at_its_length(browser: Chromium, report: Path) -> None:
    browser.open(report)
    rows = Read(page_of_run("lra-cpu")).rows
    place = next(k for k, row in enumerate(rows) if row["label"] == "sdpa" and row["n"] == "1024" and row["time"])
    browser.click(f"#table-1 tr[data-row='{place}'] button")
    assert browser.ask("document.querySelector('#figure-1').value") == "0-1024"
    assert browser.ask("document.querySelector('figure:not([hidden]) .m.on').ariaLabel").startswith("sdpa, n 1024, ")
    assert browser.ask("location.hash") == f"#figure=0-1024&row={place}"
    browser.click(f"#table-1 tr[data-row='{place}'] button")
    assert browser.ask("document.querySelectorAll('.m.on, .dim').length") == 0


def test_an_address_gives_the_view_that_was_sent_and_nonsense_the_usual_one(browser: Chromium, report: Path) -> None:
    browser.open(report, "#filter=sdpa&sort=-time&figure=0-2048&row=3")
    assert browser.ask("document.querySelector('#figure-1').value") == "0-2048"
    shown = (
        "[...document.querySelectorAll('figure[data-figure]')].filter(f => f.offsetHeight).map(f => f.dataset.figure)"
    )
    assert browser.ask(shown) == ["0-2048"]
    assert browser.ask("document.querySelector('#filter-1').value") == "sdpa"
    assert browser.ask("document.querySelector('tr[aria-current]').dataset.row") == "3"
    times = [rows_of("lra-cpu")["time_median_s"].iloc[int(place)] for place in browser.ask(SHOWN)]
    known = [time for time in times if time == time]
    assert len(known) > 3
    assert known == sorted(known, reverse=True)
    browser.open(report, "#filter=%3Cimg%20src=x%3E&sort=__proto__&figure=constructor&row=length&view=1e9")
    assert browser.ask("document.querySelectorAll('img').length") == 0
    assert browser.ask("document.querySelector('#figure-1').value") == "0-4096"
    assert browser.ask(SHOWN) == []


@pytest.mark.independent
@pytest.mark.parametrize("width", [390, 320, 768])
@pytest.mark.parametrize("name", ["lra-cpu", "score-cpu"])
def test_a_narrow_page_does_not_scroll_sideways(browser: Chromium, tmp_path: Path, name: str, width: int) -> None:
    report = tmp_path / "report.html"
    report.write_text(page_of_run(name), encoding="utf-8")
    browser.size(width, 844)
    browser.open(report)
    assert browser.ask("document.documentElement.scrollWidth") == width
    outside = browser.ask(
        "[...document.querySelectorAll('main *, header *')].filter(e => !e.closest('.box') && "
        f"e.getBoundingClientRect().right > {width} + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    assert outside == []


@pytest.mark.parametrize("name", ["lra-cpu", "catalogue-cpu", "score-cpu"])
def test_no_column_of_any_table_is_cut_on_a_usual_screen(browser: Chromium, tmp_path: Path, name: str) -> None:
    report = tmp_path / "report.html"
    report.write_text(page_of_run(name), encoding="utf-8")
    browser.open(report)
    wider = "[...document.querySelectorAll('.box')].filter(e => e.scrollWidth > e.clientWidth).map(e => e.className)"
    assert browser.ask(wider) == []
    browser.size(390, 844)
    browser.open(report)
    assert set(browser.ask(wider)) <= {"box rows"}, "the rows scroll inside their box; their key does not"


def contrast(one: str, other: str) -> float:
    """WCAG 2's ratio of two colours such as ``rgb(34, 34, 34)``."""

    def light(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([light(one), light(other)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("style", ["light", "dark"])
def test_text_stands_out_from_the_page_in_both_styles(browser: Chromium, report: Path, style: str) -> None:
    browser.media(prefers_color_scheme=style)
    browser.open(report)
    page = browser.ask("getComputedStyle(document.body).backgroundColor")
    assert (contrast(page, "rgb(0, 0, 0)") < 2) == (style == "dark")
    for place in ("p", "dt", ".note", "figcaption", "thead button", "td.a", "summary", "output"):
        colour = browser.ask(f"getComputedStyle(document.querySelector('{place}')).color")
        assert contrast(colour, page) >= 4.5, place
    texts = browser.ask("[...document.querySelectorAll('figure svg text')].map(t => getComputedStyle(t).fill)")
    assert len(set(texts)) >= 2
    assert min(contrast(colour, page) for colour in set(texts)) >= 4.5
    marks = browser.ask("[...document.querySelectorAll('figure svg .m > *')].map(m => getComputedStyle(m).stroke)")
    assert min(contrast(colour, page) for colour in set(marks)) >= 1.8, "the lightest hue on a white page"


def test_print_is_light_has_all_rows_and_no_controls(browser: Chromium, report: Path) -> None:
    browser.size(718)  # A4 without its margins
    browser.media("print", prefers_color_scheme="dark")
    browser.open(report, "#filter=sdpa")
    assert browser.ask("document.documentElement.scrollWidth") <= 718
    assert browser.ask("getComputedStyle(document.body).color") == "rgb(34, 34, 34)"
    assert len(browser.ask(SHOWN)) == len(rows_of("lra-cpu"))
    assert browser.ask("[...document.querySelectorAll('.controls')].every(e => !e.offsetHeight)")
    assert browser.ask("getComputedStyle(document.querySelector('.box.rows')).overflow") == "visible"
    assert browser.pages().startswith(b"%PDF")


def test_foreign_text_is_shown_and_runs_nowhere(browser: Chromium, tmp_path: Path) -> None:
    frame = rows_of("lra-cpu").head(20).copy()
    text = "</script><script>document.title='owned'</script><img src=x onerror=document.title='owned'>"
    for column in ("label", "suite", "inputs", "family", "warnings", "variant"):
        frame[column] = text
    frame.loc[frame.index[:3], ["status", "reason"]] = ["error", text]
    path = tmp_path / "hostile.html"
    path.write_text(page_of(frame), encoding="utf-8")
    browser.open(path)
    browser.ask("document.querySelector('#table-1 tbody button').focus()")
    assert "owned" not in browser.ask("document.title").partition("<script>")[0]
    assert browser.ask("document.querySelectorAll('img').length + document.querySelectorAll('script').length") == 1
    assert "<script>document.title" in browser.ask("document.querySelector('#tip').textContent")


def test_motion_stops_where_it_is_not_wanted(browser: Chromium, report: Path) -> None:
    browser.media(prefers_reduced_motion="reduce")
    browser.open(report)
    assert browser.ask("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
