"""A figure for one column is no taller than 1.2 times its width, and its caption has three lines at most."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from attnbench.plots import draw
from attnbench.plots.style import BESIDE, notes_of, save
from attnbench.plots.style import texts as texts_of
from tests.committed import rows_of


def test_sheets_for_a_column_are_at_most_a_fifth_taller_than_wide_and_lose_nothing(tmp_path: Path) -> None:
    (figure,) = draw(rows_of("lra-cpu"), figures=["scaling"], width="column").values()
    paths = save(figure, tmp_path / "scaling", ["png", "svg"])
    sizes = [struct.unpack(">II", path.read_bytes()[16:24]) for path in paths if path.suffix == ".png"]
    assert len(sizes) > 1
    assert all(height <= 1.3 * width for width, height in sizes)
    drawn = [path.read_text(encoding="utf-8") for path in paths if path.suffix == ".svg"]
    found = [text for svg in drawn for text in re.findall(r"<text [^>]*>([^<]*)<", svg)]
    for text in texts_of(figure):
        for line in text.get_text().split("\n"):
            if text.get_visible() and line and text.figure is figure and "&" not in line:
                assert line in found


def test_a_caption_has_three_lines_and_the_rest_stands_in_a_file_beside_it(tmp_path: Path) -> None:
    (figure,) = draw(rows_of("lra-cpu"), figures=["tradeoff"]).values()
    paths = save(figure, tmp_path / "tradeoff", ["svg"])
    small = [text for text in figure.texts if text.get_position()[1] < 0.12]
    assert 1 <= len(small) <= 3
    assert any(BESIDE in text.get_text() for text in small)
    assert paths[-1].name == "tradeoff.txt"
    assert paths[-1].read_text(encoding="utf-8").splitlines() == notes_of(figure)
    assert "Left out" in paths[-1].read_text(encoding="utf-8") or len(notes_of(figure)) > 2


def test_a_title_answers() -> None:
    drawn = draw(rows_of("lra-cpu"), figures=["tradeoff", "scaling"])
    assert drawn["tradeoff"].texts[0].get_text().startswith("Unbeaten in speed and ")
    assert drawn["scaling"].texts[0].get_text().startswith("Fastest at n = 4k: ")
