"""The sinusoids of positions, and the law that a shift rotates them by one angle at each frequency."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from attnbench.errors import UsageError
from attnbench.figures.kit.page import Page, narrow, new_page
from attnbench.figures.kit.palette import palette
from attnbench.figures.kit.style import SMALL_SIZE, in_style
from attnbench.figures.kit.ticks import linear_ticks
from attnbench.figures.pictures.picture import Picture
from attnbench.models.encoder import sinusoids

TITLE = "Positions as sines and cosines"
N, WIDTH = 50, 128
"""Positions and width, by default: those of the well-known picture."""
MOST = 2048


def draw_positions(*, n: int = N, head_dim: int = WIDTH) -> Picture:
    """Draw the table of sinusoids and the rotation that a shift is.

    ``n`` positions, 50 by default, of an even width ``head_dim``, 128 by default. Raises UsageError if n is below 5 or
    the width is odd, or one of them is above :data:`MOST`.
    """
    if not 5 <= n <= MOST:
        raise UsageError(f"positions to draw are 5 to {MOST}, not {n}")
    if head_dim % 2 or not 2 <= head_dim <= MOST:
        raise UsageError(f"sinusoids come in pairs: --head-dim must be even and at most {MOST}, not {head_dim}")
    table = sinusoids(n, head_dim).double().numpy()
    shift = shift_of(table, n // 5)
    return Picture(_draw(table, shift), shift)


def frequencies(width: int) -> np.ndarray:
    """``(width / 2,)``: radians for each position, 10000^(-2i / width)."""
    return np.asarray(10_000.0 ** (-2 * np.arange(width // 2) / width))


def shift_of(table: np.ndarray, by: int) -> pd.DataFrame:
    """Fit one rotation to each pair of columns of ``table`` ``(n, width)``, sines in the even ones, for all rows.

    A row for each pair, with the rotation that fits all positions best, in radians from -π to π; and, the same for all
    pairs, the largest difference between the shifted positions and the rotated ones.
    """
    here, there = table[:-by], table[by:]
    sine, cosine = here[:, 0::2], here[:, 1::2]
    sine_then, cosine_then = there[:, 0::2], there[:, 1::2]
    angles = np.arctan2(
        (sine_then * cosine - cosine_then * sine).sum(0), (sine_then * sine + cosine_then * cosine).sum(0)
    )
    rotated = (sine * np.cos(angles) + cosine * np.sin(angles), cosine * np.cos(angles) - sine * np.sin(angles))
    error = max(float(np.abs(rotated[0] - sine_then).max()), float(np.abs(rotated[1] - cosine_then).max()))
    frequency = frequencies(table.shape[1])
    whole = by * frequency
    return pd.DataFrame(
        {
            "pair": range(len(frequency)),
            "frequency": frequency,
            "shift": by,
            "rotation": angles,
            "expected_rotation": np.arctan2(np.sin(whole), np.cos(whole)),
            "largest_error_of_all": error,
        }
    )


@in_style
def _draw(table: np.ndarray, shift: pd.DataFrame) -> Figure:
    n, width = table.shape
    by, error = shift["shift"].iloc[0], shift["largest_error_of_all"].iloc[0]
    notes = [
        "Columns 2i and 2i + 1 are the sine and the cosine of position / 10000^(2i / width); Vaswani et al. 2017, "
        f"section 3.5. A shift by {by} positions rotates each pair of columns by one angle, whatever the "
        "position: that is why a linear layer can look a fixed distance ahead or back. Dots: the angle that "
        "fits the positions drawn; line: the shift times the frequency."
    ]
    about = [
        f"{n} positions of width {width}",
        f"shift by {by}: one rotation for each pair of columns gives the shifted positions, largest error "
        f"{error:.0e}".replace("e-0", "e-"),
    ]
    page = new_page(TITLE, about, notes, height=1.0, room=5.4 if narrow() else 3.4)
    if narrow():
        tall = (page.top - page.bottom - 1.0) / 2
        places = [
            (page.left + 0.5, page.top - tall, page.right - page.left - 0.6, tall),
            (page.left + 0.5, page.bottom + 0.42, page.right - page.left - 0.6, tall),
        ]
    else:
        tall = page.top - page.bottom - 0.5
        places = [
            (page.left + 0.5, page.bottom + 0.42, 4.0, tall),
            (page.left + 5.1, page.bottom + 0.42, page.right - page.left - 5.2, tall),
        ]
    _picture(page, places[0], table)
    _rotation(page, places[1], shift)
    return page.figure


def _picture(page: Page, place: tuple[float, float, float, float], table: np.ndarray) -> None:
    ax = page.axes(*place)
    ax.imshow(table, cmap=palette().diverging, vmin=-1, vmax=1, interpolation="none", aspect="auto")
    ax.set_xlabel("column (blue 1, red -1)")
    ax.set_ylabel("position")
    ax.set_yticks(linear_ticks(0, len(table) - 1, 6))
    ax.set_xticks(linear_ticks(0, table.shape[1] - 1, 4 if narrow() else 8))
    ax.tick_params(length=2, labelsize=SMALL_SIZE)


def _rotation(page: Page, place: tuple[float, float, float, float], shift: pd.DataFrame) -> None:
    ax = page.axes(*place)
    pairs, expected = shift["pair"].to_numpy(), shift["expected_rotation"].to_numpy()
    wraps = np.flatnonzero(np.abs(np.diff(expected)) > math.pi) + 1
    line = np.insert(expected, wraps, np.nan)  # no line from -π to π
    ax.plot(np.insert(pairs.astype(float), wraps, np.nan), line, color=palette().ink, lw=0.9)
    ax.plot(pairs, shift["rotation"], "o", color=palette().sequence[0], markersize=3)
    ax.set_ylim(-math.pi * 1.05, math.pi * 1.05)
    ax.set_yticks([-math.pi, -math.pi / 2, 0, math.pi / 2, math.pi], ["-π", "-π/2", "0", "π/2", "π"])
    ax.set_xlim(-1, len(pairs))
    ax.set_xticks(linear_ticks(0, len(pairs) - 1, 4))
    ax.set_xlabel("pair of columns")
    ax.set_ylabel(f"rotation by a shift of {shift['shift'].iloc[0]}")
    ax.grid(axis="both")
