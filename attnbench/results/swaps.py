"""Summaries of the rows of a swap: over seeds, and against the control that was trained as long."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnbench.measure.statistics import median, median_interval
from attnbench.suite.cell import UNTOUCHED

EXACT, MEAN_VALUE = "exact", "mean-value"
"""The sweep of a swap in which softmax attention takes the place of the model's own, which must change nothing; and the
variant that attends to nothing.
"""
Row = Mapping[str, Any]
"""A row by column; a number that is not there may be None or NaN."""


@dataclass(frozen=True, slots=True)
class Between:
    """A difference of losses, paired over windows."""

    median: float
    low: float
    high: float
    """Ends of the exact 95 % interval of the median over windows; both infinite if there are too few."""


@dataclass(frozen=True, slots=True)
class SwapLine:
    """One variant in some layers after some steps, as the median over seeds."""

    label: str
    """The variant with its options; ``exact`` for that sweep."""
    replaced: str
    alone: bool
    """True if it is one of several layers that were replaced one after the other."""
    steps: int
    seeds: int
    loss: float | None
    over_original: Between | None
    over_control: Between | None
    """Loss above the control after as many steps; None at step 0, or without control."""
    as_trivial: bool
    """True if it ends level with averaging all values, trained as long: no attention was repaired."""
    repaired: float | None
    """Share of the swap's damage that training repaired: 1 if it ends with the control, below 0 if it is farther from
    it than the untrained swap was from the original.
    """
    accuracy: float | None
    top1_agreement: float | None
    kl: float | None
    hidden_error: float | None
    feature_cosine: float | None
    neighbours: float | None
    attention_error: float | None
    pairs_seen: float | None

    @property
    def is_exact(self) -> bool:
        """True if it computed exact attention here, as a variant that sees all of a short window does."""
        return self.attention_error is not None and self.attention_error < 1e-4


Group = tuple[str, str, str, int]
"""Sweep, label, layers, steps."""


def lines(rows: Sequence[Row]) -> list[SwapLine]:
    """A line for each label, layers and steps of a sweep with a row that is ok, in the order of the rows."""
    groups: dict[Group, list[Row]] = {}
    for row in rows:
        if row["status"] == "ok":
            label = EXACT if row["sweep"] == EXACT else str(row["label"])
            groups.setdefault((str(row["sweep"]), label, str(row["replaced"]), int(row["tuned"])), []).append(row)
    single = {(sweep, replaced) for sweep, _, replaced, _ in groups if replaced.isdecimal()}
    several = {sweep for sweep, _ in single if sum(other == sweep for other, _ in single) > 1}
    return [_line(group, groups, alone=group[0] in several and group[2].isdecimal()) for group in groups]


def _line(group: Group, groups: Mapping[Group, list[Row]], *, alone: bool) -> SwapLine:
    sweep, label, replaced, steps = group
    rows = groups[group]
    # Folders of older versions name all layers where none is replaced.
    controls = (groups.get((sweep, UNTOUCHED, layers, steps), []) for layers in (replaced, "all"))
    control = next(filter(None, controls), []) if label != UNTOUCHED else []
    start = groups.get((sweep, label, replaced, 0), [])
    over_control = _between(rows, control) if steps else None
    trivial = groups.get((sweep, MEAN_VALUE, replaced, steps), []) if label != MEAN_VALUE else []
    over_trivial = _between(rows, trivial) if steps else None
    left = max(over_control.median, 0.0) if over_control else 0.0
    return SwapLine(
        label=label,
        replaced=replaced,
        alone=alone,
        steps=steps,
        seeds=len(rows),
        over_original=_over_original(rows),
        over_control=over_control,
        as_trivial=over_trivial is not None and -_LEVEL * left <= over_trivial.high < math.inf,
        repaired=_repaired(over_control, _over_original(start)) if start else None,
        **{name: _middle(rows, name) for name in _MIDDLES},
    )


_LEVEL = 0.05
"""Share of the damage that is left by which a variant may be better than averaging and still be called level."""
_MIDDLES = (
    *("loss", "accuracy", "top1_agreement", "kl", "hidden_error", "feature_cosine", "neighbours"),
    *("attention_error", "pairs_seen"),
)
"""Columns of which a line has the median over seeds."""


def _middle(rows: Sequence[Row], column: str) -> float | None:
    values = [value for row in rows if (value := _number(row, column)) is not None]
    return median(values) if values else None


def _number(row: Row, column: str) -> float | None:
    value = row[column]
    return None if value is None or value != value else float(value)


def _over_original(rows: Sequence[Row]) -> Between | None:
    if not rows or (one := _number(rows[0], "loss_delta")) is None:
        return None
    lows = [_end(_number(row, "loss_delta_low"), -1) for row in rows]
    highs = [_end(_number(row, "loss_delta_high"), 1) for row in rows]
    # Of several seeds no row knows the losses of the original in each window.
    return Between(one if len(rows) == 1 else _middle(rows, "loss_delta") or 0.0, min(lows), max(highs))


def _end(value: float | None, sign: int) -> float:
    return sign * math.inf if value is None else value


def _between(rows: Sequence[Row], control: Sequence[Row]) -> Between | None:
    """Losses of each window, as the mean over seeds, above those of the control."""
    if not control or not rows[0]["window_losses"]:
        return None
    deltas = [a - b for a, b in zip(_over_seeds(rows), _over_seeds(control), strict=True)]
    low, high = median_interval(deltas) or (-math.inf, math.inf)
    return Between(median(deltas), low, high)


def _over_seeds(rows: Sequence[Row]) -> list[float]:
    of_rows = [json.loads(row["window_losses"]) for row in rows]
    return [math.fsum(losses) / len(rows) for losses in zip(*of_rows, strict=True)]


def _repaired(after: Between | None, before: Between | None) -> float | None:
    """1 - (loss above the control now) / (loss above the original before any training)."""
    if after is None or before is None or before.median <= 0:
        return None
    return 1 - after.median / before.median
