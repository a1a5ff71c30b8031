"""The length from which the other variant is faster, claimed only between lengths with opposite verdicts."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

import numpy as np

from attnbench.measure.statistics import Ratio


@dataclass(frozen=True, slots=True)
class Crossover:
    """The length at which A and B take the same time. All three numbers are None unless there is exactly one."""

    n: float | None
    """An estimate, by a straight line in log n between measured lengths."""
    low: int | None
    high: int | None
    """The nearest lengths with opposite verdicts. All verdicts together are right with 95 %, so the crossing lies
    between these two with 95 %, whatever the curve does there."""
    note: str
    """The faster one at each length, or the reason why there is no crossover."""


def crossover(lengths: Sequence[int], ratios: Sequence[Ratio | None], *, names: tuple[str, str]) -> Crossover:
    """The place where time A / time B passes through 1, never extrapolated, nor claimed without verdicts.

    ``lengths`` come in any order. ``ratios`` are None for a failure or a withheld verdict. ``names`` are for the note.
    """
    found = [(n, one) for n, one in zip(lengths, ratios, strict=True) if one is not None]
    rows = sorted(found, key=itemgetter(0))
    if len(rows) < 2:
        return Crossover(None, None, None, "not looked for: fewer than two lengths have a ratio")
    verdicts = [one.verdict for _, one in rows]
    decided = [place for place, verdict in enumerate(verdicts) if verdict in ("faster", "slower")]
    brackets = [(i, j) for i, j in pairwise(decided) if verdicts[i] != verdicts[j]]
    if len(brackets) == 1:
        ((i, j),) = brackets
        below, above = names if verdicts[i] == "faster" else names[::-1]
        between = [(n, one.estimate) for n, one in rows[i : j + 1]]
        return Crossover(_interpolate(between), rows[i][0], rows[j][0], f"{below} is faster below, {above} above")
    asked = sorted(set(lengths))
    wins = [{rows[place][0] for place in decided if verdicts[place] == side} for side in ("faster", "slower")]
    where = " and ".join(
        f"{name} is faster at n = {_spans(asked, won)}" for name, won in zip(names, wins, strict=True) if won
    )
    if brackets:
        return Crossover(None, None, None, f"{len(brackets)} crossings: {where}")
    if not decided:
        same = len(rows) == len(lengths) and set(verdicts) == {"same"}
        return Crossover(None, None, None, "none: the same at every length" if same else "no difference found")
    measured = {n for n, _ in rows}
    reasons = {"no difference found": measured - wins[0] - wins[1], "no ratio": set(asked) - measured}
    elsewhere = " or ".join(reason for reason, some in reasons.items() if some)
    if not elsewhere:
        return Crossover(None, None, None, f"not in range: {names[0 if wins[0] else 1]} is faster throughout")
    return Crossover(None, None, None, f"not in range: {where}, {elsewhere} elsewhere")


def _interpolate(points: Sequence[tuple[int, float]]) -> float:
    """The middle of the places where the polygon through ``points`` (length and ratio, in log and log) passes 1."""
    x, y = np.log(np.array(points).T)
    change = np.flatnonzero(np.diff(np.sign(y)))
    places = x[change] + (x[change + 1] - x[change]) * y[change] / (y[change] - y[change + 1])
    return math.exp((places[0] + places[-1]) / 2)


def _spans(lengths: Sequence[int], chosen: Collection[int]) -> str:
    """``512 to 2048, 8192``: the chosen ones of ``lengths``, those that follow each other as one span."""
    spans: list[list[int]] = []
    for place, n in enumerate(lengths):
        if n in chosen:
            if place and lengths[place - 1] in chosen:
                spans[-1].append(n)
            else:
                spans.append([n])
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]} to {span[-1]}" for span in spans)
