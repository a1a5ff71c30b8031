"""The lines of the scaling figure: the power of n of each, and its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from attnbench.figures.kit.page import narrow, text_width
from attnbench.figures.kit.style import DASHES, SMALL_SIZE, Look, looks
from attnbench.measure.statistics import student
from attnbench.measure.status import UNFINISHED, Status
from attnbench.results.frame.settings import Setting
from attnbench.results.frame.words import short_names

Values = Sequence[float] | np.ndarray
LONGEST = 3
"""Number of lengths in the fit: the longest, since the constant part matters least there."""
LARGER = 0.2
"""A power that exceeds the claim by no more than this is the claimed one."""
_TOGETHER = 12
"""Most lines that may share a panel although they were measured differently."""
_STOPPED = [status for status in Status if status not in (Status.OK, Status.UNSUPPORTED, *UNFINISHED)]


@dataclass(frozen=True)
class Series:
    """One line of the scaling figure."""

    name: str
    look: Look
    rows: pd.DataFrame
    stopped: tuple[int, str] | None
    """The first length after the last measured one at which it failed, and its failure."""

    def power(self, column: str) -> float:
        return power_of_n(self.rows["seq_len"].to_numpy(), self.rows[column].to_numpy())

    def half(self, column: str) -> float:
        low, high = self.rows[["time_ci_low_s", "time_ci_high_s"]].to_numpy(dtype=float).T
        ends = (low, high) if column == "time_median_s" else None
        return half_of_power(self.rows["seq_len"].to_numpy(), self.rows[column].to_numpy(), ends)

    def is_above(self, column: str) -> bool:
        """True if the power with its whole interval exceeds the claim by :data:`LARGER`; never of references."""
        power, claim = self.power(column), self.claimed(column)
        accused = self.rows["family"].iloc[0] != "reference" and power > claim + LARGER
        return accused and power - self.half(column) > claim

    def claimed(self, column: str) -> float:
        """The claimed power of n for all tokens together; NaN for one decoding step."""
        if self.rows["pass"].iloc[0] == "decode":
            return math.nan
        name = "claimed_time_exponent" if column == "time_median_s" else "claimed_memory_exponent"
        return float(self.rows[name].iloc[0])

    @property
    def height(self) -> tuple[float, float]:
        time, memory = self.rows[["time_median_s", "peak_bytes"]].iloc[-1].fillna(0)
        return (self.stopped[0] if self.stopped else math.inf, -(float(time) or float(memory) * 1e-18))


def panels_of(found: Sequence[Setting]) -> list[tuple[str, list[Series]]]:
    """The heading and the lines of each panel: all in one if they are few and their names fit, else one a setting."""
    every = pd.concat([setting.rows for setting in found])
    look = looks(zip(every["label"], every["family"], strict=True))
    short, _ = short_names(every)
    panels = [(setting.about, series_of(setting, short, look)) for setting in found]
    if len(found) == 1 or len(found) > len(DASHES) or sum(len(lines) for _, lines in panels) > _TOGETHER:
        return panels
    together = [
        replace(line, name=f"{line.name} ({setting.name})", look=replace(line.look, dashes=DASHES[turn]))
        for turn, (setting, (_, lines)) in enumerate(zip(found, panels, strict=True))
        for line in lines
    ]
    if max(text_width(line.name, SMALL_SIZE) for line in together) > names_room():
        return panels
    return [("", sorted(together, key=lambda line: line.height))]


def names_room() -> float:
    """Width that the table has for the names of lines, in inches."""
    return 1.3 if narrow() else 2.6


def series_of(setting: Setting, short: dict[str, str], look: dict[str, Look]) -> list[Series]:
    """The lines of one setting, from top to bottom at their right ends; labels without a time or memory have none."""
    lines = []
    for label, part in setting.rows.groupby("label", sort=False):
        part = part.sort_values("seq_len")
        measured = part[(part["status"] == Status.OK) & (part[["time_median_s", "peak_bytes"]] > 0).any(axis=1)]
        if measured.empty:
            continue
        failed = part[part["status"].isin(_STOPPED) & (part["seq_len"] > measured["seq_len"].max())]
        stopped = (int(failed["seq_len"].iloc[0]), str(failed["status"].iloc[0])) if len(failed) else None
        lines.append(Series(short[str(label)], look[str(label)], measured, stopped))
    return sorted(lines, key=lambda line: line.height)


def power_of_n(lengths: Values, values: Values) -> float:
    """Slope of log value on log n, by least squares over the longest three lengths; NaN with fewer than three."""
    x, y, _ = _longest(lengths, values)
    return float(_weights(x) @ y) if len(x) == LONGEST else math.nan


def half_of_power(lengths: Values, values: Values, ends: tuple[Values, Values] | None = None) -> float:
    """Half the 95 % interval of :func:`power_of_n`, by the values' intervals ``ends``, else by Student's t; or NaN."""
    x, y, found = _longest(lengths, values)
    if len(x) < LONGEST:
        return math.nan
    weights = _weights(x)
    if ends is not None:
        halves = np.log(np.asarray(ends[1], dtype=float)[found] / np.asarray(ends[0], dtype=float)[found]) / 2
        if np.isfinite(halves).all():
            return float(np.sqrt((weights**2 * halves**2).sum()))
    off = y - y.mean() - (weights @ y) * (x - x.mean())
    freedom = LONGEST - 2
    return student(freedom) * math.sqrt((off @ off) / freedom * (weights @ weights))


def _longest(lengths: Values, values: Values) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logarithms of the longest lengths with a value above 0 and of these values, and their places."""
    n, value = np.asarray(lengths, dtype=float), np.asarray(values, dtype=float)
    good = np.flatnonzero(np.isfinite(value) & (value > 0))
    found = good[np.argsort(n[good])[-LONGEST:]]
    return np.log(n[found]), np.log(value[found]), found


def _weights(x: np.ndarray) -> np.ndarray:
    apart = x - x.mean()
    return np.asarray(apart / (apart @ apart))
