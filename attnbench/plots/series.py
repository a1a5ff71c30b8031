"""The lines of the scaling figure: the power of n that each one follows, and where it stopped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from attnbench.plots.captions import short_names
from attnbench.plots.page import narrow, text_width
from attnbench.plots.setting import Setting
from attnbench.plots.style import DASHES, SMALL_SIZE, Look, looks
from attnbench.status import UNFINISHED, Status

LONGEST = 3
"""Number of lengths in the fit: the longest, where the constant part matters least."""
_TOGETHER = 12
"""Most lines that may share a panel although they were measured differently."""
_STOPPED = [status for status in Status if status not in (Status.OK, Status.UNSUPPORTED, *UNFINISHED)]


@dataclass(frozen=True)
class Series:
    """One line."""

    name: str
    look: Look
    rows: pd.DataFrame
    """Measured rows in order of length."""
    stopped: tuple[int, str] | None
    """The first length after the last measured one at which it failed, and how."""

    def power(self, column: str) -> float:
        """The power of n that the column follows; NaN for fewer than three lengths."""
        return power_of_n(self.rows["seq_len"].to_numpy(), self.rows[column].to_numpy())

    def claimed(self, column: str) -> float:
        """The power that the paper claims; NaN if it claims none."""
        name = "claimed_time_exponent" if column == "time_median_s" else "claimed_memory_exponent"
        return float(self.rows[name].iloc[0])

    @property
    def height(self) -> tuple[float, float]:
        """Sort key that orders lines from top to bottom by their right ends."""
        time, memory = self.rows[["time_median_s", "peak_bytes"]].iloc[-1].fillna(0)
        return (self.stopped[0] if self.stopped else math.inf, -(float(time) or float(memory) * 1e-18))


def panels_of(found: Sequence[Setting]) -> list[tuple[str, list[Series]]]:
    """The heading and the lines of each panel.

    All lines share one panel if they are few and their names have room for what tells them apart; otherwise each
    setting has a panel.
    """
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


def power_of_n(lengths: Sequence[float] | np.ndarray, values: Sequence[float] | np.ndarray) -> float:
    """Slope of log value on log n, by least squares over the longest three lengths; NaN with fewer than three."""
    n, value = np.asarray(lengths, dtype=float), np.asarray(values, dtype=float)
    good = np.isfinite(value) & (value > 0)
    n, value = n[good], value[good]
    longest = np.argsort(n)[-LONGEST:]
    if len(longest) < LONGEST:
        return math.nan
    x, y = np.log(n[longest]), np.log(value[longest])
    x = x - x.mean()
    return float((x * (y - y.mean())).sum() / (x * x).sum())
