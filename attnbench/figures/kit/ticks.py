"""Ticks of log axes: at powers of two for lengths and rates, at powers of ten for errors and times."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator, NullLocator

from attnbench.figures.kit.page import text_width
from attnbench.figures.kit.style import SMALL_SIZE
from attnbench.units import format_bytes, format_seconds

_BETWEEN = 0.03
"""Least inches between the texts of two ticks."""
_TALL = SMALL_SIZE / 72


def plain(value: float) -> str:
    """``0.25``, ``1024``, ``65536``, ``2.1M``: no exponents in the usual range and no mathematics markup."""
    for scale, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{suffix}"
    if abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}" if value == 0 or abs(value) >= 1e-4 else f"{value:.0e}".replace("e-0", "e-")


def length(n: float) -> str:
    """A number of tokens: ``512``, ``1k`` for 1024, ``64k``, ``1M`` for 1,048,576; ``1000`` if it is not a multiple."""
    for scale, suffix in ((2**20, "M"), (2**10, "k")):
        if n >= scale and n % scale == 0:
            return f"{n // scale:.0f}{suffix}"
    return f"{n:.0f}"


def halves(value: float) -> str:
    """Like :func:`plain`, but with ``1/16`` for powers of two below 1."""
    inverse = 1 / value if value > 0 else 0
    return f"1/{inverse:.0f}" if inverse >= 2 and math.log2(inverse).is_integer() else plain(value)


def trimmed(text: str) -> str:
    """``1.00 GiB`` -> ``1 GiB``, for the round numbers of ticks and keys."""
    number, _, unit = text.partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"


COSTS: dict[str, tuple[str, Callable[[float], str], int]] = {
    "time_median_s": ("median time", lambda value: trimmed(format_seconds(value)), 10),
    "peak_bytes": ("peak memory", lambda value: trimmed(format_bytes(value)), 2),
}
"""Column -> the name of its axis, the text of its values, and the base of its ticks."""


def power_ticks(low: float, high: float, base: int, most: int = 8) -> list[float]:
    """Powers of ``base`` between two positive numbers, thinned to ``most``; round numbers if these are too few."""
    first, last = math.log(low, base), math.log(high, base)
    powers = list(range(math.ceil(first - 1e-9), math.floor(last + 1e-9) + 1))
    if len(powers) >= (2 if base == 10 and most <= 3 and last - first > 1.6 else 3):
        step = -(-len(powers) // most)
        return [float(base) ** p for p in max([p for p in powers if p % step == 0], powers[::step], key=len)]
    if last - first > (2 if base == 2 else 0.5):
        steps = (1, 1.25, 1.5, 1.75) if base == 2 else (1, 2, 5) if last - first > 1.6 else (1, 1.5, 2, 3, 5, 7)
        ticks = [s * float(base) ** p for p in range(math.floor(first), math.ceil(last) + 1) for s in steps]
    else:
        unit = 2.0 ** math.floor(math.log2((high - low) / 3)) if base == 2 and low >= 1024 else 0.0  # 80 MiB is round
        ticks = list(np.arange(low // unit, high // unit + 1) * unit if unit else MaxNLocator(5).tick_values(low, high))
    return [tick for tick in ticks if low <= tick * (1 + 1e-9) and tick <= high * (1 + 1e-9)]


def decade_ticks(low: float, high: float) -> list[float]:
    """Round numbers in every decade between two positive ones: the more, the fewer decades there are."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = math.log10(high / low)
    steps = (1, 1.5, 2, 3, 5, 7) if decades < 1 else (1, 2, 5) if decades < 2.5 else (1, 3) if decades < 4 else (1,)
    ticks = [s * 10.0**power for power in range(first, last + 1) for s in steps]
    ticks = [tick for tick in ticks if low <= tick <= high]
    return ticks if len(ticks) > 2 else power_ticks(low, high, 10)


def padded(
    values: Sequence[float] | np.ndarray | pd.Series[float], share: float = 0.06, least: float = 1.3
) -> tuple[float, float]:
    """Limits of a log axis: the positive finite values, ``share`` more at each end, at least a factor ``least``."""
    numbers = np.asarray(values, dtype=float)
    numbers = numbers[np.isfinite(numbers) & (numbers > 0)]
    if not numbers.size:
        return 1.0, 2.0
    low, high = math.log(numbers.min()), math.log(numbers.max())
    extra = max(share * (high - low), (math.log(least) - (high - low)) / 2, 1e-3)
    return math.exp(max(low - extra, -700)), math.exp(min(high + extra, 700))


def linear_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers between two limits."""
    ticks = MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    rounded = [round(float(tick), 12) for tick in ticks]  # 1.0000000000000002 is beyond a limit of 1
    return [tick for tick in rounded if low <= tick <= high]


def _apart(
    ax: Axes,
    which: Literal["x", "y"],
    ticks: Sequence[float],
    limits: tuple[float, float],
    text: Callable[[float], str],
) -> list[float]:
    figure = ax.get_figure(root=True)
    assert figure is not None
    page, box = figure.get_size_inches(), ax.get_position()
    wide = box.width * page[0] if which == "x" else box.height * page[1]
    kept: list[float] = []
    end = -math.inf
    for tick in sorted(ticks, reverse=limits[0] > limits[1]):
        at = math.log(tick / limits[0]) / math.log(limits[1] / limits[0]) * wide
        half = (text_width(text(tick), SMALL_SIZE) if which == "x" else _TALL) / 2
        if at - half > end:
            kept.append(tick)
            end = at + half + _BETWEEN
    return kept


def log_axis(
    ax: Axes,
    which: Literal["x", "y"],
    limits: tuple[float, float],
    *,
    base: int = 2,
    text: Callable[[float], str] = plain,
    at: Sequence[float] | None = None,
    most: int = 8,
) -> None:
    """Give ``ax`` a log scale with few, plainly written ticks; ``at`` fixes them (the measured lengths, say)."""
    axis = ax.xaxis if which == "x" else ax.yaxis
    (ax.set_xscale if which == "x" else ax.set_yscale)("log", base=base)
    (ax.set_xlim if which == "x" else ax.set_ylim)(*limits)
    if at is not None and len(at) > most:
        at = list(at)[:: -(-len(at) // most)]
    ticks = power_ticks(min(limits), max(limits), base, most) if at is None else list(at)
    ticks = _apart(ax, which, ticks, limits, text)
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(FixedFormatter([text(tick) for tick in ticks]))
    axis.set_minor_locator(NullLocator())
