"""Times of rows relative to others at the same length, and the rows that are told apart: the one rule for a winner."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnbench.measure.statistics import Ends, Said, joint_ratio, judged, spread_of_visits
from attnbench.results.frame.settings import Setting
from attnbench.suite.cell import STEPS

BASELINE = "softmax"
APART = ("faster", "slower")
"""Verdicts on a ratio that differs from 1."""
FEW_CLEAN = "too few clean ones"
"""Words of the warning of a row with counted disturbed samples."""
_WIDEST = 1000
"""Ends of an interval farther apart than this say nothing: few visits that differ."""
_COMPARED = [
    *("label", "variant", "seq_len", "kv_len", "time_median_s", "time_ci_low_s", "time_ci_high_s", "time_rounds"),
    *("pass", "peak_bytes", "state_bytes", "warnings"),
]
_Row = Mapping[Hashable, Any]


@dataclass(frozen=True)
class Relation:
    """One row relative to softmax, or to the fastest of other rows, at the same length."""

    speed: float
    """Time of softmax over its time: above 1 it is faster."""
    low: float | None
    """Lower end of the interval of ``speed``, which holds together with those of all rows (``high``: upper); None if a
    median has no interval, or so few visits that this one says nothing."""
    high: float | None
    memory: float | None
    """Its peak, or cache or state if it decodes, over that of softmax; None if one was not measured, or is zero."""
    noise: float = 0.0
    """The machine's noise floor, as a share."""
    busy: str = ""
    rounds: int = 0
    """Visits to the one of both that has fewer."""
    family: int = 0
    """Number of ratios whose intervals hold together."""
    base: str = ""
    """The fastest of the rows that it is relative to; empty if that is softmax by definition."""
    decodes: bool = False

    @property
    def said(self) -> Said:
        """The statement of ``compare`` on such a ratio."""
        ends = None if self.low is None or self.high is None else (1 / self.high, 1 / self.low)
        return judged(ends, self.noise, busy=self.busy)


def relative(settings: Sequence[Setting], noise: float = 0.0, bases: Collection[str] = ()) -> dict[Hashable, Relation]:
    """Row's index -> its numbers relative to softmax; without softmax itself.

    ``noise``: the machine's noise floor. ``bases``: labels of which the fastest takes the place of softmax; the
    interval is then that of the least of the ratios to all of them.
    """
    pairs = list(_pairs(settings, bases))
    family = sum(len(held) for _, held, row, _ in pairs if None not in map(_ends, [*held, row]))
    return {index: _ratio(held, row, shared, family, noise, bool(bases)) for index, held, row, shared in pairs}


def apart(setting: Setting, label: str, noise: float = 0.0) -> dict[Hashable, str]:
    """Row's index -> ``faster`` or ``slower`` than the label at its length; without rows that are not told apart."""
    held = relative([setting], noise, [label])
    return {index: one.said.word for index, one in held.items() if one.said.word in APART}


def _pairs(
    settings: Sequence[Setting], bases: Collection[str]
) -> Iterator[tuple[Hashable, Sequence[_Row], _Row, tuple[float, int]]]:
    """Each row with the rows that it is relative to, the first of which gives the ratio, and the spread of visits at
    its length."""
    for setting in settings:
        timed = setting.ok.loc[setting.ok["time_median_s"] > 0, _COMPARED]
        groups: dict[tuple[int, int], dict[Hashable, _Row]] = {}
        for index, row in zip(timed.index, timed.to_dict("records"), strict=True):
            groups.setdefault((row["seq_len"], row["kv_len"]), {})[index] = row
        for rows in groups.values():
            held = [one for one in rows if (rows[one]["label"] in bases if bases else rows[one]["variant"] == BASELINE)]
            held.sort(key=lambda one: rows[one]["time_median_s"] if bases else len(rows[one]["label"]))
            shared = spread_of_visits(filter(None, map(_ends, rows.values())))
            for index in rows if held else ():
                if index != held[0]:
                    beside = [rows[one] for one in held[: None if bases else 1] if one != index]
                    yield index, beside, rows[index], shared


def _ends(row: _Row) -> Ends | None:
    low, high, visits = (float(row[name]) for name in ("time_ci_low_s", "time_ci_high_s", "time_rounds"))
    return (low, high, int(visits) if visits > 0 else 1) if 0 < low <= high < math.inf else None


def _ratio(
    bases: Sequence[_Row], row: _Row, shared: tuple[float, int], family: int, noise: float, named: bool
) -> Relation:
    base, every = bases[0], [*bases, row]
    *ours, theirs = map(_ends, every)
    known = None not in (*ours, theirs)  # as ``family`` counts them
    ends = [joint_ratio(one, theirs, family, shared) for one in ours if known and one and theirs]
    low, high = (min(low for low, _ in ends), min(high for _, high in ends)) if known else (None, None)
    if low and high and high > _WIDEST * low:
        low = high = None
    speed = float(base["time_median_s"] / row["time_median_s"])
    decodes = row["pass"] in STEPS
    held = [float(one["state_bytes" if decodes else "peak_bytes"]) for one in (row, base)]
    memory = held[0] / held[1] if min(held) > 0 and math.isfinite(sum(held)) else None
    busy = FEW_CLEAN if any(FEW_CLEAN in one["warnings"] for one in every) else ""
    rounds = min(int(one["time_rounds"]) if one["time_rounds"] > 0 else 0 for one in every)
    return Relation(speed, low, high, memory, noise, busy, rounds, family, base["label"] * named, decodes)
