"""Published tables stand beside a run as they were printed, never on its axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure

from attnbench.errors import UsageError
from attnbench.figures import draw
from attnbench.figures.published.lra import NYSTROMFORMER, read_linformer
from attnbench.figures.published.point_file import read_points
from attnbench.figures.scaling import draw_scaling
from attnbench.figures.speedup import draw_speedup


def test_linformers_table_has_every_rank_below_the_length_and_saves_more_the_longer() -> None:
    table = read_linformer()
    assert len(table) == 34
    assert (table["rank"] < table["n"]).all()
    for _, part in table.groupby("rank"):
        assert part.sort_values("n")["time_saved"].is_monotonic_increasing
        assert part.sort_values("n")["memory_saved"].is_monotonic_increasing


def test_nystromformers_table_has_the_factors_that_its_text_names() -> None:
    table = read_points(NYSTROMFORMER).table.set_index(["model", "n"])
    assert len(table) == 25
    transformer, own = table.loc[("Transformer", 8192)], table.loc[("Nyströmformer-32", 8192)]
    assert transformer["memory_mb"] / own["memory_mb"] == pytest.approx(26.7, abs=0.05)
    assert transformer["time_ms"] / own["time_ms"] == pytest.approx(13.4, abs=0.15)


@pytest.mark.parametrize(
    ("figure", "said"), [("scaling", "The Nyströmformer paper's own"), ("speedup", "The Linformer paper's own")]
)
def test_the_overlay_has_axes_of_its_own_and_leaves_those_of_the_run(
    figure: str, said: str, linformer: pd.DataFrame, words: Callable[[Figure], str], faults: Callable[..., list[str]]
) -> None:
    alone, beside = (draw(linformer, figures=[figure], overlay=overlay)[figure] for overlay in (None, "published"))
    assert beside.get_size_inches()[0] == 13.6
    assert len(beside.axes) > len(alone.axes)
    own, others = ([ax.get_xlim() for ax in one.axes if ax.axison][:2] for one in (alone, beside))
    assert own == others
    assert said in words(beside)
    assert said not in words(alone)
    assert set(faults(beside)) <= set(faults(alone))  # small words in the cells of the run's own table


@pytest.mark.parametrize(
    ("drawn", "said"),
    [(draw_scaling, "mine: no such file; give published, or a CSV file of points"), (draw_speedup, "not 'mine'")],
)
def test_an_overlay_that_does_not_exist_or_fit_is_refused(
    drawn: Callable[..., Any], said: str, linformer: pd.DataFrame
) -> None:
    with pytest.raises(UsageError, match=said):
        drawn(linformer, overlay="mine")
    name = drawn.__name__.removeprefix("draw_")
    with pytest.raises(UsageError, match=f"{name} with --overlay published is too wide for one column"):
        draw(linformer, figures=[name], overlay="published", width="column")
