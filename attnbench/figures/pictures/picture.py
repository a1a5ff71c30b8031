"""A picture: the figure, and the numbers in it; and matrices as squares: the larger a weight, the fuller the colour."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from pandas.api.types import is_numeric_dtype

from attnbench.figures.kit.page import Page, narrow
from attnbench.figures.kit.palette import palette
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


QUARTILES = {"low": 0.25, "median": 0.5, "high": 0.75}
"""End of a column of numbers -> the quartile that it has."""


def write_numbers(picture: Picture, path: Path) -> Path:
    """Write the numbers as a CSV without formulas; CannotCreate if a link is in its place, StoreError if it fails."""
    table = picture.numbers.copy()
    for name in table.columns:
        if not is_numeric_dtype(table[name]):
            table[name] = [no_formula(cell) if isinstance(cell, str) else cell for cell in table[name]]
    write_output(path, table.to_csv(index=False, float_format="%.6g", lineterminator="\n").encode())
    return path


def rows_of(matrix: np.ndarray, **about: object) -> pd.DataFrame:
    """A row for each query of a matrix: facts about it, the query, and a column for each key."""
    keys = pd.DataFrame(matrix, columns=[f"key_{j}" for j in range(matrix.shape[1])])
    return pd.concat([pd.DataFrame({**about, "query": range(len(matrix))}), keys], axis=1)


LEVELS = ((0.5, 1.0), (0.1, 0.6), (0.01, 0.32))
"""Steps of colour: (share of the largest weight in the row, strength of the colour from that share on)."""
FAINTEST = 0.13
"""The colour of every other pair with a weight at all: only unseen pairs are white."""

DECADES_BELOW = 2.0
"""Decades below the uniform weight 1/n at which :func:`by_size` begins to show a weight."""


def by_share(share: np.ndarray) -> np.ndarray:
    """The fullness of each weight's colour, in the steps of :data:`LEVELS`, from shares of the row's largest."""
    full = np.where(share > 0, FAINTEST, 0.0)
    for least, value in reversed(LEVELS):
        full[share >= least] = value
    return full


def by_size(weights: np.ndarray, largest: float) -> np.ndarray:
    """The fullness of each weight's colour, by its logarithm: nothing at 1/(100 n), full at ``largest``."""
    least = 10.0**-DECADES_BELOW / weights.shape[-1]
    with np.errstate(divide="ignore"):
        place = np.log(np.abs(weights) / least) / math.log(max(largest, 2 * least) / least)
    return np.asarray(np.clip(place, 0.0, 1.0))


def draw_matrix(ax: Axes, full: np.ndarray, colour: str, *, other: np.ndarray | None = None) -> None:
    """Draw a matrix from the top left, a row for each query.

    ``full`` (rows, columns) goes from 0, the page, to 1, the colour; ``other`` is True for the colour of negative
    weights.
    """
    image = np.empty((*full.shape, 4))
    image[..., :3] = to_rgb(colour)
    if other is not None:
        image[other, :3] = to_rgb(palette().family("kernel"))
    image[..., 3] = full.round(2)  # few enough colours for a palette
    ax.imshow(image, interpolation="none", aspect="auto", clip_on=False)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)
    ax.patch.set(facecolor="none", edgecolor=palette().line, linewidth=0.6, zorder=3)


def positive() -> str:
    """The colour of weights if it does not mean a family."""
    return palette().family("fixed pattern")
