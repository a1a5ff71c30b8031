"""The committed figures say what today's code says of the committed rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attnbench.figures import draw
from attnbench.figures.kit.style import save
from tests.committed import REFERENCE, rows_of

FIGURES = sorted(REFERENCE.glob("*/plots/**/*.svg"))
FIRST = {path.relative_to(path.parents[1]): path for path in reversed(FIGURES)}.values()
"""One of each kind, with and without published numbers."""


def texts(svg: Path) -> list[tuple[str, str]]:
    """The size of everything written, and what it is, in the order in which it is drawn."""
    drawn = svg.read_text(encoding="utf-8")
    sizes = dict(re.findall(r"\.(\w+)\{[^}]*?([0-9.]+)px", drawn))
    return [(sizes[style], text) for style, text in re.findall(r'<text [^>]*?class="(\w+)"[^>]*>([^<]*)<', drawn)]


@pytest.mark.parametrize(
    "figure",
    [
        pytest.param(path, id=str(path.relative_to(REFERENCE)), marks=[pytest.mark.slow] * (path not in FIRST))
        for path in FIGURES
    ],
)
def test_a_committed_figure_is_drawn_from_the_committed_rows(figure: Path, tmp_path: Path) -> None:
    overlay = "published" if figure.parent.name == "published" else None
    run = figure.relative_to(REFERENCE).parts[0]
    (drawn,) = draw(rows_of(run), figures=[figure.stem], overlay=overlay).values()
    today, *_ = save(drawn, tmp_path / "today", ["svg"])
    assert texts(figure) == texts(today)
    assert len(texts(today)) > 15
