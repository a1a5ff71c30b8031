"""A picture: the figure, and the numbers in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas.api.types import is_numeric_dtype

from attnbench.figures.kit.page import Page, narrow
from attnbench.files import write_output
from attnbench.results.table import no_formula


def two_panels(page: Page) -> list[Axes]:
    """Side by side, or in one column one above the other."""
    tall = (page.top - page.bottom - 1.2) / 2 if narrow() else page.top - page.bottom - 0.7
    wide = page.right - page.left - 0.7 if narrow() else (page.right - page.left - 0.66 - 0.6) / 2
    across, up = (0.0, tall + 0.6) if narrow() else (wide + 0.6, 0.0)
    left, bottom = page.left + 0.6, page.bottom + 0.42
    return [page.axes(left + place * across, bottom + (1 - place) * up, wide, tall) for place in (0, 1)]


@dataclass(frozen=True)
class Picture:
    """A figure with a table of everything that is drawn in it."""

    figure: Figure
    numbers: pd.DataFrame


def write_numbers(picture: Picture, path: Path) -> Path:
    """Write the numbers as a CSV without formulas; CannotCreate if a link is in its place, StoreError if it fails."""
    table = picture.numbers.copy()
    for name in table.columns:
        if not is_numeric_dtype(table[name]):
            table[name] = [no_formula(cell) if isinstance(cell, str) else cell for cell in table[name]]
    write_output(path, table.to_csv(index=False, float_format="%.6g", lineterminator="\n").encode())
    return path
