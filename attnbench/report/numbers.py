"""Numbers as a report holds them: few digits, and null where there is none; and how each row compares with softmax."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from attnbench.measure.statistics import judged
from attnbench.plots.setting import Setting

DIGITS = 5
"""Significant digits; three are shown."""


def compact(value: float | None) -> float | int | None:
    """``0.118965486`` -> ``0.11897``; None, NaN and infinity -> None."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() else rounded


def times(ratio: float) -> str:
    """A positive ratio in two digits, near 1 in three: ``3.6``, ``0.91``, ``1.03``, ``140``."""
    if 0.9 <= ratio < 1.1:
        return f"{ratio:.2f}"
    rounded = float(f"{ratio:.2g}")
    return f"{rounded:.{max(0, 1 - math.floor(math.log10(rounded)))}f}"


def tokens(n: int) -> str:
    """A length: ``4096``, ``65,536``."""
    return f"{n:,}" if n >= 10_000 else str(n)


BASELINE = "softmax"
_TIMES = ("median", "ci_low", "ci_high")


@dataclass(frozen=True)
class Relative:
    """One row beside softmax at the same length."""

    speed: float
    """Time of softmax over its time: above 1 it is faster."""
    low: float | None
    """Lower end of the interval of ``speed``, from the far ends of the intervals of both medians; ``high`` is the upper
    end. None where a median has none."""
    high: float | None
    memory: float | None
    """Its peak over that of softmax; None where one was not measured, or is zero."""

    @property
    def verdict(self) -> str:
        """``faster`` or ``slower`` by the rule of ``compare``, else ``unsure``."""
        word = judged(None if self.low is None or self.high is None else (1 / self.high, 1 / self.low)).word
        return word if word in ("faster", "slower") else "unsure"


def baseline_at(rows: pd.DataFrame) -> pd.Series[Any] | None:
    """The measured row of softmax among rows of one length; None if there is none."""
    found = rows[(rows["variant"] == BASELINE) & (rows["time_median_s"] > 0)]
    return None if found.empty else found.iloc[int(found["label"].str.len().argmin())]


def relative(setting: Setting) -> dict[Hashable, Relative]:
    """Row's index -> how it stands beside softmax; without softmax itself."""
    found: dict[Hashable, Relative] = {}
    columns = ["label", "variant", "seq_len", "kv_len", *(f"time_{what}_s" for what in _TIMES), "peak_bytes"]
    for _, rows in setting.ok[columns].groupby(["seq_len", "kv_len"]):
        base = baseline_at(rows)
        if base is not None:
            timed = rows[(rows["time_median_s"] > 0) & (rows.index != base.name)]
            found |= {index: ratio(base, row) for index, row in timed.iterrows()}
    return found


def ratio(base: pd.Series[Any], row: pd.Series[Any]) -> Relative:
    """``row`` beside ``base``; both have a time."""
    low, high = (
        _over(base[f"time_ci_{ours}_s"], row[f"time_ci_{theirs}_s"])
        for ours, theirs in (("low", "high"), ("high", "low"))
    )
    speed = base["time_median_s"] / row["time_median_s"]
    return Relative(float(speed), low, high, _over(row["peak_bytes"], base["peak_bytes"]))


def _over(one: float, other: float) -> float | None:
    return float(one / other) if math.isfinite(one) and math.isfinite(other) and one > 0 and other > 0 else None


def of_all(settings: Sequence[Setting]) -> dict[Hashable, Relative]:
    """The same of several settings."""
    return {index: one for setting in settings for index, one in relative(setting).items()}
