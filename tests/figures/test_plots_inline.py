"""Figures inside a page: the words of the figures in files, colours of the page, and marks that name their rows."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pandas as pd
import pytest
from matplotlib.figure import Figure

from attnbench.figures.error import draw_error
from attnbench.figures.kit.inline import SharedStyles
from attnbench.figures.kit.palette import LIGHT, VARIABLES, drawn_inline, variables
from attnbench.figures.kit.style import CAPTIONS
from attnbench.figures.scaling import draw_scaling
from attnbench.figures.scores import draw_scores
from attnbench.figures.tradeoff import MOST_NAMES, draw_tradeoff
from tests.committed import rows_of

HOSTILE = "a</text></svg><script>alert(1)</script>\"'&<!--"
DRAW = {"tradeoff": draw_tradeoff, "scaling": draw_scaling, "error": draw_error, "scores": draw_scores}


class Elements(HTMLParser):
    """Elements with their attributes, and text, as a browser reads them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.all: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def inline(name: str, frame: pd.DataFrame, shared: SharedStyles | None = None) -> tuple[Elements, Figure]:
    with drawn_inline():
        figure = DRAW[name](frame)
        return Elements((shared or SharedStyles()).svg(figure, HOSTILE)), figure


def marked(found: Elements) -> list[int]:
    return [int(row) for _, given in found.all for row in str(given.get("data-r") or "").split() if row]


@pytest.fixture(scope="module")
def lra() -> pd.DataFrame:
    return rows_of("lra-cpu").reset_index(drop=True)


def test_every_point_names_its_row_and_its_name_stands_beside_it(lra: pd.DataFrame) -> None:
    found, figure = inline("tradeoff", lra)
    focus = [given for _, given in found.all if given.get("class") == "m"]
    rows = lra.loc[[int(str(given["data-r"])) for given in focus]]
    assert len(rows) == len(set(rows["label"])) > 10
    assert {*rows["level"]} == {"model"}
    assert rows["seq_len"].nunique() == 1
    assert {*rows["variant"]} <= {text.rstrip("†").partition(":")[0] for text in found.texts}
    assert CAPTIONS[figure].title.startswith("Unbeaten in speed")
    assert not any(CAPTIONS[figure].title in text for text in found.texts), "the page writes the words"


@pytest.mark.parametrize(("name", "run"), [("scaling", "lra-cpu"), ("error", "lra-cpu"), ("scores", "score-cpu")])
def test_a_line_names_the_rows_of_its_points(name: str, run: str) -> None:
    frame = rows_of(run).reset_index(drop=True)
    found, _ = inline(name, frame)
    lines = [str(given["data-r"]).split() for _, given in found.all if given.get("class") == "m"]
    assert len(lines) > 5
    for line in lines:
        assert frame.loc[map(int, line), "variant"].nunique() == 1
    assert max(map(len, lines)) > 1
    column = {"scaling": "time_median_s", "error": "rel_error", "scores": "score"}[name]
    assert frame.loc[marked(found), column].notna().all()


def test_colours_are_those_of_the_page_and_styles_are_shared(lra: pd.DataFrame) -> None:
    shared = SharedStyles()
    found, _ = inline("tradeoff", lra, shared)
    once = shared.css
    inline("tradeoff", lra, shared)
    assert shared.css == once, "the same figure needs no further style"
    assert not any("style" in given or "fill" in given or "stroke" in given for _, given in found.all)
    assert {*re.findall(r"#\w{6}", once)} == set()
    assert {*re.findall(r"var\(--(\w+)\)", once)} <= variables(LIGHT).keys()
    assert len(VARIABLES) == len(variables(LIGHT)), "each colour has a stand-in of its own"


def test_text_of_others_stays_text(lra: pd.DataFrame) -> None:
    frame = lra.assign(label=lra["label"].where(lra["variant"] != "local", f"local:{HOSTILE}"))
    frame = frame.assign(variant=frame["variant"].where(frame["variant"] != "sdpa", HOSTILE), suite=HOSTILE)
    found, _ = inline("tradeoff", frame)
    assert {tag for tag, _ in found.all} <= {"svg", "g", "path", "circle", "use", "text"}
    assert any(text.startswith("a</text></svg><script>") for text in found.texts)
    assert found.all[0][1]["aria-label"] == HOSTILE


def test_of_many_points_only_the_front_has_names(lra: pd.DataFrame) -> None:
    timed = lra[(lra["level"] == "model") & (lra["variant"] == "local")]
    more = [
        timed.assign(label=f"local:window={k}", time_median_s=timed["time_median_s"] * (1 + k / 50)) for k in range(60)
    ]
    frame = pd.concat([lra, *more], ignore_index=True)
    found, figure = inline("tradeoff", frame)
    assert len([given for _, given in found.all if given.get("class") == "m"]) > MOST_NAMES
    assert sum("local:window=" in text for text in found.texts) < 5
    assert any("pointing at another circle" in note for note in CAPTIONS[figure].notes)


def test_nothing_reaches_beyond_its_axes(lra: pd.DataFrame) -> None:
    wide = lra.assign(time_ci_high_s=lra["time_ci_high_s"] * 1e6)
    for name in ("tradeoff", "scaling"):
        found, _ = inline(name, wide)
        width, height = map(float, str(found.all[0][1]["viewbox"]).split()[2:])
        numbers = [
            re.findall(r"-?[\d.]+", str(given["d"]))
            for tag, given in found.all
            if tag == "path" and "l" not in str(given["d"])
        ]
        places = [(float(x), float(y)) for one in numbers for x, y in zip(one[::2], one[1::2], strict=True)]
        assert all(-2 <= x <= width + 2 and -2 <= y <= height + 2 for x, y in places)
