"""The pictures in the documentation are those that today's code draws.

``attnbench plot NAME --format svg --out docs/pictures`` draws one again.
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib
import pytest

from attnbench.contract.variant import HOME, VARIANTS
from attnbench.figures.kit.style import BESIDE, save
from attnbench.figures.pictures import PICTURES, draw

FOLDER = Path(__file__).parents[3] / "docs" / "pictures"
OF_THE_CATALOGUE = ("pattern", "taxonomy")
"""They change with every variant; that they have all of them is asked here, and not where each one stands."""


def texts(svg: Path) -> list[str]:
    return re.findall(r"<text [^>]*>([^<]*)<", svg.read_text(encoding="utf-8"))


def test_every_picture_is_in_the_documentation_with_the_command_that_draws_it() -> None:
    page = (FOLDER.parent / "pictures.md").read_text(encoding="utf-8")
    for name in PICTURES:
        assert f"\nattnbench plot {name}\n" in page
        assert f"](pictures/{name}.svg)" in page
    drawn = {path.name for path in FOLDER.iterdir() if path.suffix not in (".csv", ".txt")}
    assert drawn == {f"{name}.svg" for name in PICTURES}


@pytest.mark.parametrize("name", [name for name in PICTURES if name not in OF_THE_CATALOGUE])
def test_a_committed_picture_says_what_is_drawn_today(name: str, tmp_path: Path) -> None:
    picture = draw(name)
    assert len(picture.numbers) > 0
    today, *_ = save(picture.figure, tmp_path / name, ["svg"])
    committed, drawn = texts(FOLDER / f"{name}.svg"), texts(today)
    if matplotlib.__version_info__ < (3, 11):  # which ends lines elsewhere
        committed, drawn = " ".join(committed).split(), " ".join(drawn).split()
    assert committed == drawn
    assert len(texts(today)) > 10


@pytest.mark.parametrize("name", OF_THE_CATALOGUE)
def test_a_committed_sheet_has_every_variant_and_cuts_no_word(name: str) -> None:
    written = texts(FOLDER / f"{name}.svg")
    shipped = {entry.name for entry in VARIANTS if entry.make.__module__.startswith(f"{HOME}.")}
    missing = shipped - {text.rstrip("†") for text in written}
    assert not missing, f"draw it again: attnbench plot {name} --format svg --out docs/pictures"
    assert [text for text in written if "…" in text and BESIDE not in text] == []
