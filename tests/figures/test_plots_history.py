"""The figure of a history has a line for each cell, a ring for each change, and counts all of them."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
import pytest
from matplotlib.figure import Figure

from attnbench.figures.history import draw_history
from attnbench.figures.kit.page import laid_out


def rows(cells: int, changes: tuple[int, ...] = (2, 4)) -> pd.DataFrame:
    """As ``History.to_rows`` gives them: five runs, with changes in some of them."""
    return pd.DataFrame(
        {
            "cell": f"softmax n={cell}",
            "family": "exact",
            "run": f"2026110{run + 1}T090000-cpu",
            "began": f"2026110{run + 1}T090000",
            "time": 1e-3 * (1 + cell) * (1 + run),
            "change": "more memory" * (run in changes),
        }
        for cell in range(cells)
        for run in range(5)
    )


@pytest.mark.parametrize("width", ["page", "column"])
def test_its_title_counts_the_changes_of_cells_without_room_too(
    width: str, words: Callable[[Figure], str], faults: Callable[[Figure], list[str]]
) -> None:
    with laid_out(width):
        figure = draw_history(rows(10), "time")
        assert "20 changes of time in 5 runs" in words(figure)
        assert "Without room: 2 more cells." in words(figure)
        assert faults(figure) == []
