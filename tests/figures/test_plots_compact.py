"""The written SVG shows the same as that of matplotlib, in less than half of its bytes."""

from __future__ import annotations

import io
import re
from base64 import b64decode, b64encode
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from attnbench.figures import draw
from attnbench.figures.kit.compact import compact
from attnbench.figures.kit.style import styled
from tests.committed import rows_of

Placed = list[tuple[str, str, str, list[float]]]


def written(figure: Figure) -> str:
    drawn = io.BytesIO()
    with styled():
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue().decode()


def placed(svg: str) -> Placed:
    """Every shape, mark and word: its tag, its style with that of the group around it, its words, and its numbers."""
    css = dict(re.findall(r"\.(\w+)\{([^}]*)\}", svg))
    found: Placed = []

    def visit(element: ElementTree.Element, around: str) -> None:
        style = element.get("style") or css.get(element.get("class", ""), "")
        tag = element.tag.partition("}")[2]
        if tag in ("path", "use", "text", "image", "rect"):
            places = " ".join(element.get(name, "") for name in ("d", "x", "y", "width", "height", "transform"))
            numbers = [float(one) for one in re.findall(r"-?\d+(?:\.\d+)?", re.sub(r"rotate\(-0 [^)]*\)", "", places))]
            found.append((tag, style or around, element.text or "", numbers))
        for child in element:
            visit(child, style or around)

    visit(ElementTree.fromstring(svg), "")
    return found


@pytest.mark.parametrize(("run", "name"), [("lra-cpu", "tradeoff"), ("lra-cpu", "scaling"), ("claims-cpu", "map")])
def test_each_mark_and_word_stays_at_its_place_in_its_style(run: str, name: str) -> None:
    (figure,) = draw(rows_of(run), figures=[name]).values()
    whole = written(figure)
    short = compact(whole)
    assert len(short) < 0.6 * len(whole)
    before, after = placed(whole), placed(short)
    assert len(before) == len(after) > 50
    for (tag, style, text, numbers), (tag_after, style_after, text_after, numbers_after) in zip(
        before, after, strict=True
    ):
        assert (tag, style, text) == (tag_after, style_after, text_after)
        assert numbers_after == pytest.approx(numbers, abs=0.0051)


def test_words_that_look_like_tags_or_numbers_stay_as_they_are() -> None:
    figure = Figure()
    said = ['<g id="a">0.123456', "</g> 1.98765  2", 'style="fill: red"', "a & b > c"]
    for place, text in enumerate(said):
        figure.text(0.1, 0.1 + 0.2 * place, text, parse_math=False)
    assert [text for tag, _, text, _ in placed(compact(written(figure))) if tag == "text"] == said


def test_equal_styles_of_two_files_have_the_same_class_and_others_have_not() -> None:
    found = [dict(re.findall(r"\.(\w+)\{([^}]*)\}", compact(written(drawn)))) for drawn in (_line("b"), _line("r"))]
    common = found[0].keys() & found[1].keys()
    assert common
    assert all(found[0][name] == found[1][name] for name in common)
    assert set(found[0].values()) != set(found[1].values())


def _line(colour: str) -> Figure:
    figure = Figure()
    figure.subplots().plot([1, 2], colour)
    return figure


@pytest.mark.parametrize("colours", [5, 400])
def test_an_image_keeps_every_pixel(colours: int) -> None:
    places = np.random.default_rng(0).integers(0, colours, (32, 32))
    pixels = np.random.default_rng(1).integers(0, 256, (colours, 4), dtype=np.uint8)[places]
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    svg = (
        f'<svg><style></style><image xlink:href="data:image/png;base64,\n{b64encode(file.getvalue()).decode()}"/></svg>'
    )
    (found,) = re.findall(r'base64,\s*([^"]*)"', compact(svg))
    image = Image.open(io.BytesIO(b64decode(found)))
    assert np.array_equal(np.asarray(image.convert("RGBA")), pixels)
    assert (image.mode == "P") is (colours == 5)
