"""A figure for one column is no taller than 1.2 times its width, and its caption has three lines at most."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from attnbench.figures import draw
from attnbench.figures.kit.page import counted, winners
from attnbench.figures.kit.sheets import sheets
from attnbench.figures.kit.style import BESIDE, notes_of, save
from attnbench.figures.kit.style import texts as texts_of
from tests.committed import rows_of


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("lra-cpu", "scaling"),
        ("lra-cpu", "tradeoff"),
        ("claims-cpu", "tradeoff"),
        ("recall-state-cpu", "scores"),
        ("recall-state-cpu", "recall"),
    ],
)
def test_sheets_for_a_column_are_at_most_a_fifth_taller_than_wide_and_lose_nothing(
    run: str, name: str, tmp_path: Path
) -> None:
    (figure,) = draw(rows_of(run), figures=[name], width="column").values()
    paths = save(figure, tmp_path / name, ["png", "svg"])
    sizes = [struct.unpack(">II", path.read_bytes()[16:24]) for path in paths if path.suffix == ".png"]
    assert len(sizes) > 1
    assert all(height <= 1.21 * width for width, height in sizes)
    drawn = [path.read_text(encoding="utf-8") for path in paths if path.suffix == ".svg"]
    found = [text for svg in drawn for text in re.findall(r"<text [^>]*>([^<]*)<", svg)]
    for text in texts_of(figure):
        for line in text.get_text().split("\n"):
            if text.get_visible() and line and text.figure is figure and "&" not in line:
                assert line in found


def test_a_heading_stands_on_the_sheet_of_its_panel() -> None:
    (figure,) = draw(rows_of("claims-24-cpu"), figures=["scaling"], width="column").values()
    parts, scale = sheets(figure), figure.dpi
    headings = [text.get_window_extent() for text in figure.texts if text.get_fontweight() == "bold"]
    panels = [axes.get_window_extent() for axes in figure.axes if axes.axison]
    assert len(headings) > 3
    for heading in headings:
        (sheet,) = [part for part in parts if part.y0 * scale <= heading.y0 < part.y1 * scale]
        assert any(sheet.y0 * scale <= panel.y0 and panel.y1 <= heading.y0 for panel in panels)


def test_the_meaning_of_the_marks_is_what_a_short_caption_says() -> None:
    (figure,) = draw(rows_of("headline-long-cpu"), figures=["scores"]).values()
    shown = " ".join(text.get_text() for text in figure.texts if text.get_position()[1] < 0.12)
    assert "Dots: means over seeds; ticks: single seeds; bars: 95 % t-intervals over seeds" in shown
    assert BESIDE in shown


def test_a_caption_has_three_lines_and_the_rest_stands_in_a_file_beside_it(tmp_path: Path) -> None:
    (figure,) = draw(rows_of("lra-cpu"), figures=["tradeoff"]).values()
    paths = save(figure, tmp_path / "tradeoff", ["svg"])
    small = [text for text in figure.texts if text.get_position()[1] < 0.12]
    assert 1 <= len(small) <= 3
    assert any(BESIDE in text.get_text() for text in small)
    assert paths[-1].name == "tradeoff.txt"
    assert paths[-1].read_text(encoding="utf-8").splitlines() == notes_of(figure)
    assert "Left out" in paths[-1].read_text(encoding="utf-8") or len(notes_of(figure)) > 2


@pytest.mark.parametrize(
    ("run", "figure", "said"),
    [
        ("lra-cpu", "tradeoff", "Unbeaten in speed and "),
        ("lra-cpu", "scaling", "Fastest at n = 4k: "),
        ("lra-cpu", "error", "Nearest to exact attention: bigbird, with an error of "),
        ("catalogue-cpu", "catalogue", "Fastest at n = 2k: "),
        ("selection-cpu", "steps", "Least mean error over the new tokens: snapkv (2 of 6), "),
        ("headline-cpu", "scores", "Nothing could be compared with softmax: that needs two common seeds"),
        ("headline-cpu", "curves", "Highest last score of validation: "),
        ("headline-cpu", "recall", "Highest score, whatever the state: "),
        ("lra-cpu", "share", "Attention is over half of the time at n = 4k with softmax, sdpa"),
        ("claims-cpu", "map", "performer is better than answering mean(V) in "),
        ("linformer-cpu", "speedup", "linformer is 1× to 16× as fast as softmax"),
        ("peers-cpu", "peers", "Of 122 comparisons the variant is faster than the package in 105, slower in 2"),
    ],
)
def test_a_title_answers(run: str, figure: str, said: str) -> None:
    (drawn,) = draw(rows_of(run), figures=[figure]).values()
    assert drawn.texts[0].get_text().replace("\n", " ").startswith(said)


def test_equal_winners_share_a_place() -> None:
    one, other = [(0.99, "a"), (0.991, "b"), (0.5, "c")], [(0.2, "a"), (0.1, "c")]
    assert winners([one]) == "a, b"
    assert counted("aabcdd", 2) == "a (2 of 2), d (2 of 2), b (1 of 2) and 1 more"
    assert winners([one, other]) == "a (2 of 2), b (1 of 2)"
    assert winners([one, other], largest=False) == "c (2 of 2)"
    assert winners([[(1.2e-4, "a"), (1.3e-4, "b"), (1.2002e-4, "c")]], largest=False) == "a, c"  # seconds
