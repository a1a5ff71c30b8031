from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from attnbench.errors import UsageError
from attnbench.figures import tradeoff
from attnbench.figures.catalogue import ENOUGH, applies, draw_catalogue
from attnbench.figures.kit.palette import LIGHT

Words = Callable[[Figure], str]
MANY = 56


def catalogue_rows(run: Any, count: int = MANY) -> list[dict[str, Any]]:
    """Layers, errors and decoding of many variants, a few of which fail, are learned, or are other operators."""
    rows = []
    families = list(LIGHT.families)
    for i in range(count):
        name, family = f"variant-number-{i:02}", families[i % len(families)]
        at = {"suite": "catalogue", "family": family, "seq_len": 2048}
        if i == 7:
            rows.append(run.failed("oom", "needs 9 GiB", name, level="layer", sweep="layers", **at))
        else:
            time, peak = 1e-3 * (1 + i) ** 1.5, 1e6 * (1 + i)
            rows.append(run.row(name, level="layer", sweep="layers", time_median_s=time, peak_bytes=peak, **at))
        kind = "learned" if i % 9 == 4 else "distance" if i % 5 == 1 else "approximation"
        for inputs, factor in (("listops", 1.0), ("gaussian:logit_std=1", 1.7)):
            error = 40.0 if kind == "distance" else 1e-8 if i == 0 else 0.02 * (1 + i) * factor
            numbers = {"rel_error": error, "error_kind": kind, "trivial_error": 0.6}
            rows.append(run.row(name, level="operator", sweep="error", inputs=inputs, **numbers, **at))
        decode = {"level": "layer", "sweep": "decode", "pass": "decode", "causal": True}
        if i % 3:
            rows.append(run.row(name, time_median_s=1e-5, state_bytes=4096.0 * (1 + i), **decode, **at))
        else:
            rows.append(run.failed("unsupported", "decode: it sees the future", name, **decode, **at))
    return rows


@pytest.fixture(scope="module")
def frame(run: Any) -> pd.DataFrame:
    return run.table(catalogue_rows(run))


@pytest.fixture(scope="module")
def figure(frame: pd.DataFrame) -> Figure:
    return draw_catalogue(frame)


def test_every_variant_has_its_line_and_every_family_its_heading(figure: Figure, words: Words) -> None:
    said = words(figure).splitlines()
    for i in range(MANY):
        assert f"variant-number-{i:02}" in said
    for family in LIGHT.families:
        assert family.upper() in said
    for title in ("time", "peak memory", "relative error", "one token", "its state"):
        assert title in said


def test_no_two_texts_touch_and_none_leaves_the_page(figure: Figure) -> None:
    figure.canvas.draw()
    width, height = figure.canvas.get_width_height()  # type: ignore[attr-defined]  # of the Agg canvas
    boxes = [
        (text.get_text(), text.get_window_extent())
        for text in figure.findobj(Text)
        if isinstance(text, Text) and text.get_text() and text.get_visible()
    ]
    for i, (name, box) in enumerate(boxes):
        assert box.x0 >= 0, name
        assert box.x1 <= width, name
        assert box.y0 >= 0, name
        assert box.y1 <= height, name
        for other, its in boxes[i + 1 :]:
            common = min(box.x1, its.x1) - max(box.x0, its.x0), min(box.y1, its.y1) - max(box.y0, its.y0)
            assert min(common) <= 1.5, (name, other)  # the height of a line includes room for accents


def test_what_has_no_number_says_why(figure: Figure, words: Words) -> None:
    said = words(figure)
    assert "learned" in said.splitlines()
    assert "exact" in said.splitlines()
    assert "oom" in said.splitlines()
    assert "oom: variant-number-07 — needs 9 GiB" in said


def test_a_distance_does_not_stretch_the_scale_of_errors(figure: Figure) -> None:
    (ax,) = (ax for ax in figure.axes if ax.get_title(loc="left") == "relative error")
    assert ax.get_xlim()[1] < 10
    beyond = [line for line in ax.get_lines() if line.get_marker() == ">"]
    assert beyond
    assert all(float(line.get_xdata()[0]) == ax.get_xlim()[1] for line in beyond)  # type: ignore[arg-type, index]


def test_it_stands_in_for_the_scatter_plot_that_could_not_name_them_all(frame: pd.DataFrame, run: Any) -> None:
    assert applies(frame)
    assert not tradeoff.applies(frame)
    few = run.table(catalogue_rows(run, ENOUGH - 1))
    assert not applies(few)
    assert tradeoff.applies(few)


def test_a_table_without_errors_or_decoding_has_fewer_panels(run: Any) -> None:
    rows = [row for row in catalogue_rows(run) if row["sweep"] == "layers"]
    titles = [ax.get_title(loc="left") for ax in draw_catalogue(run.table(rows)).axes]
    assert [title for title in titles if title] == ["time", "peak memory"]


def test_a_length_that_was_not_measured_is_refused(frame: pd.DataFrame) -> None:
    with pytest.raises(UsageError, match="no rows at n = 99; there are: 2048"):
        draw_catalogue(frame, n=99)


def test_a_variant_that_is_an_own_form_in_some_rows_only_has_all_its_marks_in_one_line(frame: pd.DataFrame) -> None:
    def marks(drawn: Figure) -> int:
        return sum(len(line.get_xdata()) for ax in drawn.axes for line in ax.lines)

    layers = frame["sweep"] == "layers"
    own = frame.assign(own_form=frame["own_form"].mask(layers, "both ways, where the paper goes one way"))
    assert marks(draw_catalogue(own)) == marks(draw_catalogue(frame))


def test_a_row_that_counts_for_nothing_has_no_interval(run: Any) -> None:
    rows = catalogue_rows(run)
    rows[3] |= {"status": "unsupported", "reason": "measured with an option that is gone"}
    time = next(ax for ax in draw_catalogue(run.table(rows)).axes if ax.get_title(loc="left") == "time")
    high = rows[3]["time_ci_high_s"]
    assert high not in [x for line in time.lines for x in line.get_xdata()]


def test_the_title_compares_rows_of_one_list(run: Any) -> None:
    rows = catalogue_rows(run)
    rows += [run.row("quick", family="kernel", level="model", sweep="m", seq_len=2048, time_median_s=1e-9)]
    title = draw_catalogue(run.table(rows)).texts[0].get_text()
    assert title.startswith("Fastest at n = 2k: variant-number-")
    assert "attention layer" in title


def of_length(n: int, frame: pd.DataFrame, **columns: Any) -> pd.DataFrame:
    return frame.assign(seq_len=n, kv_len=n, test_len=n, **columns)


def dots(figure: Figure, title: str) -> list[tuple[str, float]]:
    """Marker and value of each dot in the panels of this title, apart from those beyond the scale."""
    panels = [ax for ax in figure.axes if ax.get_title(loc="left") == title]
    lines = [line for ax in panels for line in ax.lines if line.get_zorder() == 3 and line.get_marker() not in "<>"]
    return [(str(line.get_marker()), float(line.get_xdata()[0])) for line in lines]  # type: ignore[arg-type, index]


def test_errors_and_decoding_are_of_the_same_length_as_the_times(frame: pd.DataFrame, figure: Figure) -> None:
    beside = frame[frame["sweep"].isin(["decode", "error"])]
    others = [
        of_length(n, beside, time_median_s=9 * beside["time_median_s"], rel_error=9 * beside["rel_error"])
        for n in (512, 8192)
    ]
    drawn = draw_catalogue(pd.concat([frame, *others], ignore_index=True))
    for title in ("relative error", "one token", "its state"):
        assert dots(drawn, title) == dots(figure, title)


def test_errors_and_decoding_of_another_length_say_so(frame: pd.DataFrame, words: Words) -> None:
    errors = frame["sweep"] == "error"
    moved = pd.concat([frame[~errors], of_length(512, frame[errors])], ignore_index=True)
    assert "Error, at n = 512: circles listops" in words(draw_catalogue(moved))
    assert "Error: circles listops" in words(draw_catalogue(frame))
    steps = frame["sweep"] == "decode"
    moved = pd.concat([frame[~steps], of_length(512, frame[steps])], ignore_index=True)
    assert "One token, at n = 512." in words(draw_catalogue(moved))


def test_a_length_of_one_list_only_is_drawn_of_that(frame: pd.DataFrame, words: Words) -> None:
    layers = frame[frame["sweep"] == "layers"]
    other = of_length(512, layers, dtype="bfloat16")
    assert "n = 512" in words(draw_catalogue(pd.concat([layers, other], ignore_index=True), n=512))


def test_an_input_has_one_mark_in_all_lists(frame: pd.DataFrame) -> None:
    listops = frame[frame["inputs"] != "gaussian:logit_std=1"].assign(run="a")
    gaussian = frame[frame["inputs"] != "listops"].assign(run="b")
    figure = draw_catalogue(pd.concat([listops, gaussian], ignore_index=True))
    assert {mark for mark, _ in dots(figure, "relative error")} == {"o", "s"}


def test_inputs_without_a_mark_are_named(frame: pd.DataFrame, words: Words) -> None:
    errors = frame[frame["inputs"] == "listops"]
    more = [errors.assign(inputs=f"gaussian:logit_std={std}") for std in (2, 4, 8)]
    said = words(draw_catalogue(pd.concat([frame, *more], ignore_index=True)))
    assert "diamonds gaussian:logit_std=4;" in said
    assert "Not drawn, for want of marks: gaussian:logit_std=8." in said
