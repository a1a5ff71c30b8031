"""Summaries of the rows of a swap: over seeds, and against the control that was trained as long."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from attnbench.harness.swap.question import MEAN_VALUE, NONE
from attnbench.harness.swap.row import Row
from attnbench.measure.statistics import median, median_interval


@dataclass(frozen=True, slots=True)
class Between:
    """A difference of losses, paired over windows."""

    median: float
    low: float
    high: float
    """Ends of the exact 95 % interval of the median over windows; both infinite if there are too few."""


@dataclass(frozen=True, slots=True)
class Line:
    """One variant in some layers after some steps, as the median over seeds."""

    label: str
    layers: str
    steps: int
    seeds: int
    loss: float | None
    over_original: Between | None
    over_control: Between | None
    """Loss above the control after as many steps; None at step 0, or without control."""
    as_trivial: bool
    """True if it is no better than averaging all values, trained as long: no attention was repaired."""
    repaired: float | None
    """Share of the swap's damage that training repaired: 1 if it ends with the control, below 0 if it is farther from
    it than the untrained swap was from the original.
    """
    accuracy: float | None
    top1_agreement: float | None
    kl: float | None
    hidden_error: float | None
    cosine: float | None
    neighbours: float | None
    attention_error: float | None
    pairs_seen: float | None


def lines(rows: Sequence[Row]) -> list[Line]:
    """A line for each label, layers and steps with a row that is ok, in the order of the rows."""
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        if row.ok:
            groups.setdefault((row.label, row.layers, row.steps), []).append(row)
    return [_line(of, groups) for of in groups.values()]


def _line(rows: Sequence[Row], groups: dict[tuple[str, str, int], list[Row]]) -> Line:
    first = rows[0]
    control = groups.get((NONE, NONE, first.steps), []) if first.label != NONE else []
    start = groups.get((first.label, first.layers, 0), [])
    over_control = _between(rows, control) if first.steps else None
    trivial = groups.get((MEAN_VALUE, first.layers, first.steps), []) if first.label != MEAN_VALUE else []
    over_trivial = _between(rows, trivial) if first.steps else None
    return Line(
        label=first.label,
        layers=first.layers,
        steps=first.steps,
        seeds=len(rows),
        over_original=_over_original(rows),
        over_control=over_control,
        as_trivial=over_trivial is not None and 0 <= over_trivial.high < math.inf,
        repaired=_repaired(over_control, _over_original(start)) if start else None,
        **{name: _middle(rows, name) for name in _MIDDLES},
    )


_MIDDLES = (
    *("loss", "accuracy", "top1_agreement", "kl", "hidden_error", "cosine", "neighbours"),
    *("attention_error", "pairs_seen"),
)
"""Columns of which a line has the median over seeds."""


def _middle(rows: Sequence[Row], column: str) -> float | None:
    values = [value for row in rows if (value := getattr(row, column)) is not None]
    return median(values) if values else None


def _over_original(rows: Sequence[Row]) -> Between | None:
    if not rows or rows[0].loss_delta is None:
        return None
    if len(rows) > 1:  # of several seeds the row alone does not know the losses of the original in each window
        middle = _middle(rows, "loss_delta")
        assert middle is not None
        return Between(
            middle, min(_end(row.loss_delta_low, -1) for row in rows), max(_end(row.loss_delta_high, 1) for row in rows)
        )
    return Between(rows[0].loss_delta, _end(rows[0].loss_delta_low, -1), _end(rows[0].loss_delta_high, 1))


def _end(value: float | None, sign: int) -> float:
    return sign * math.inf if value is None else value


def _between(rows: Sequence[Row], control: Sequence[Row]) -> Between | None:
    """Losses of each window, as the mean over seeds, above those of the control."""
    if not control or not rows[0].window_losses:
        return None
    deltas = [a - b for a, b in zip(_over_seeds(rows), _over_seeds(control), strict=True)]
    low, high = median_interval(deltas) or (-math.inf, math.inf)
    return Between(median(deltas), low, high)


def _over_seeds(rows: Sequence[Row]) -> list[float]:
    return [math.fsum(losses) / len(rows) for losses in zip(*(row.window_losses for row in rows), strict=True)]


def _repaired(after: Between | None, before: Between | None) -> float | None:
    """1 - (loss above the control now) / (loss above the original before any training)."""
    if after is None or before is None or before.median <= 0:
        return None
    return 1 - after.median / before.median
