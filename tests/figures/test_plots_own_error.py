"""The figure of own errors has two panels for each data type, in roundings of that type over n."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure

from attnbench.figures import draw
from attnbench.figures.kit.page import NothingToDraw
from attnbench.figures.own_error import draw_own_error

Words = Callable[[Figure], str]
BFLOAT16, FLOAT32 = 2**-8, 2**-24


@pytest.fixture
def frame(run: Any) -> pd.DataFrame:
    rows = []
    for dtype, unit in (("float32", FLOAT32), ("bfloat16", BFLOAT16)):
        for n, errors in ((128, (1, 1, 2)), (256, (2, 3, 4))):
            at = {"seq_len": n, "dtype": dtype}
            columns = zip(
                ("own_error", "own_error_late", "own_error_grad"), (unit * one for one in errors), strict=True
            )
            rows.append(run.row("linear", **at, **dict(columns)))
            rows.append(run.row("performer", **at, own_error=8 * unit, own_error_late=8 * unit))
    return run.table(rows)  # type: ignore[no-any-return]


def lines(figure: Figure) -> list[list[tuple[list[float], list[float]]]]:
    """x and y of each line of each panel."""
    panels = [ax for ax in figure.axes if ax.get_xlabel() == "n (log2 scale)"]
    return [[([*map(float, x.get_xdata())], [*map(float, x.get_ydata())]) for x in ax.lines] for ax in panels]  # type: ignore[arg-type]


def test_each_data_type_has_outputs_with_their_last_half_and_gradients(frame: pd.DataFrame, words: Words) -> None:
    figure = draw(frame, figures=["own_error"])["own_error"]
    outputs, gradients, *others = lines(figure)
    n = [128.0, 256.0]
    assert sorted(outputs) == [(n, [1.0, 2.0]), (n, [1.0, 3.0]), (n, [8.0, 8.0]), (n, [8.0, 8.0])]
    assert gradients == [(n, [2.0, 4.0])], "performer has none"
    assert others == [outputs, gradients], "the other data type, in its own roundings"
    said = words(figure)
    assert "Largest error against the own formula: performer, 8 roundings" in said
    for part in ("bfloat16, outputs", "float32, gradients", "0.0039 in bfloat16"):
        assert part in said


def test_without_two_lengths_there_is_nothing_to_draw_and_a_reason(frame: pd.DataFrame) -> None:
    one = frame[frame["seq_len"] == 128]
    with pytest.raises(NothingToDraw, match="own errors at two lengths"):
        draw_own_error(one)
    why = frame.assign(own_error=None, own_error_note="own error: it states no formula of its own")
    with pytest.raises(NothingToDraw, match="it states no formula"):
        draw_own_error(why)


def test_the_largest_error_may_be_at_any_length(frame: pd.DataFrame, words: Words) -> None:
    first = (frame["variant"] == "linear") & (frame["seq_len"] == 128) & (frame["dtype"] == "float32")
    frame = frame.assign(own_error=frame["own_error"].mask(first, 20 * FLOAT32))
    assert "Largest error against the own formula: linear, 20 roundings" in words(draw_own_error(frame))
