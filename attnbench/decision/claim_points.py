"""The points at which a claim can be seen to hold or to fail: how each kind of claim reads rows."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import pandas as pd

from attnbench.decision.claim_rows import (
    AS_HEADS,
    AS_LENGTH,
    Row,
    having,
    is_spec,
    lines_of,
    names_of,
    of_variant,
    select,
    with_followers,
)
from attnbench.decision.claims import Ability, Claim, Crossover, Growth, Ratio, Score, Value
from attnbench.marks import by_host
from attnbench.plots.setting import RUN
from attnbench.scores import Summary, difference, summary
from attnbench.spec import parse_spec
from attnbench.status import Status
from attnbench.trained import Setting, choose, trained
from attnbench.units import format_number
from attnbench.variant import VARIANTS


@dataclass(frozen=True, slots=True)
class Point:
    """One place at which a claim was tested."""

    at: str
    """What tells it from the claim's other points: ``n=4096``."""
    value: float
    low: float
    high: float
    """Ends of the interval of ``value``; equal to it where the number is exact."""
    holds: bool | None
    """None if the interval holds the limit, so that nothing can be said."""
    said: str = ""
    """The value in words, where a number is not enough."""
    what: str = ""
    """What the number is: ``time ratio``, ``power of n in time``."""
    host: str = ""
    """Which of its times are mostly the host's."""

    def __str__(self) -> str:
        value, low, high = map(format_number, (self.value, self.low, self.high))
        number = self.said or f"{self.what} {value}".strip() + f" ({low} to {high})" * (self.low != self.high)
        number += f"; {self.host}" * bool(self.host)
        return f"{self.at}: {number}" if self.at else number


def points_of(claim: Claim, frame: pd.DataFrame | None) -> Iterator[Point]:
    """What the rows of a table say about a claim; nothing where they are about something else.

    Args:
        frame: None where there are no rows; an ability needs none.
    """
    test = claim.test
    if isinstance(test, Ability):
        yield _ability(test)
    if test is None or isinstance(test, Ability) or frame is None:
        return
    measured = frame[(frame["suite"] == claim.suite) & (frame["status"] == Status.OK)]
    rows = having(measured, test.where)
    host = _by_host(test, rows) if isinstance(test, Ratio | Crossover) and test.of == "time_median_s" else ""
    if isinstance(test, Ratio):
        below = having(measured, {**test.where, **test.bottom_where})
        yield from (replace(one, host=host) for one in _ratios(test, rows, below))
    elif isinstance(test, Growth):
        yield from _growths(test, rows)
    elif isinstance(test, Crossover):
        yield from (replace(one, host=host) for one in _crossovers(test, rows))
    elif isinstance(test, Score):
        yield from _scores(test, rows, having(measured, {**test.where, **test.bottom_where}))


def _by_host(test: Ratio | Crossover, rows: pd.DataFrame) -> str:
    """How much of a variant's time is the host's, at the length at which most of it is."""
    timed = rows[rows["host_share"].notna()] if "host_share" in rows else rows[:0]
    parts = [of_variant(timed, label) for label in (test.top, test.bottom) if label is not None]
    most = [part.iloc[int(part["host_share"].argmax())] for part in parts if len(part)]
    return "; ".join(filter(None, (by_host(one["label"], one["launched"], one["host_share"]) for one in most)))


def _ability(test: Ability) -> Point:
    spec = parse_spec(test.top)
    found = getattr(VARIANTS.get(spec.name).claims(spec), test.trait)
    value = float(bool(found))
    return Point("", value, value, value, bool(found), "yes" if found else str(found))


def _ratios(test: Ratio, rows: pd.DataFrame, below: pd.DataFrame) -> Iterator[Point]:
    # Rows of two numbers of threads are of two runs.
    apart = {*with_followers(test.bottom_where), *([RUN] if "threads" in test.bottom_where else [])}
    tops = [row.without(apart) for row in select(rows, test.of, test.top, test.bottom)]
    if test.bottom is None:
        pairs = [(top, Row(top.place, 1.0, 1.0, 1.0)) for top in tops]
    else:
        bottoms = {row.without(apart).key: row for row in select(below, test.of, test.bottom, test.top)}
        pairs = [(top, bottoms[top.key]) for top in tops if top.key in bottoms]
    names, what = names_of([top for top, _ in pairs]), _in_words(test.of) + " ratio" * (test.bottom is not None)
    for (top, bottom), at in zip(pairs, names, strict=True):
        if bottom.value > 0 and bottom.low > 0:
            low, high = top.low / bottom.high, top.high / bottom.low
            yield Point(at, top.value / bottom.value, low, high, _side(low, high, test.above, test.below), what=what)


def _in_words(column: str) -> str:
    """``time`` for ``time_median_s``: a column without its unit."""
    return re.sub(r"(_median)?(_s|_bytes)?$", "", column).replace("_", " ")


def _side(low: float, high: float, above: float | None, below: float | None) -> bool | None:
    """Whether an interval lies above, or below, a limit; None where it holds the limit."""
    if above is not None:
        return True if low > above else False if high <= above else None
    if below is not None:
        return True if high < below else False if low >= below else None
    return None


def _growths(test: Growth, rows: pd.DataFrame) -> Iterator[Point]:
    over = test.over
    letter, apart = ("n", AS_LENGTH) if over == "seq_len" else (over, AS_HEADS)
    lines = lines_of(select(rows, test.of, test.top), apart)
    names, what = names_of([line[-1] for line in lines], apart), f"power of {letter} in {_in_words(test.of)}"
    for line, at in zip(lines, names, strict=True):
        last = line[-1]
        n = last.place[over]
        earlier = [row for row in line if row.place[over] * 4 <= n and row.low > 0]
        if not earlier:
            continue
        first = earlier[-1]
        by = math.log(n / first.place[over])
        value, low, high = (
            math.log(a / b) / by for a, b in ((last.value, first.value), (last.low, first.high), (last.high, first.low))
        )
        least = None if test.at_least is None else math.nextafter(test.at_least, -math.inf)
        most = None if test.at_most is None else math.nextafter(test.at_most, math.inf)
        where = f"{letter}={first.place[over]} to {n}"
        yield Point(f"{where}, {at}" if at else where, value, low, high, _side(low, high, least, most), what=what)


def _crossovers(test: Crossover, rows: pd.DataFrame) -> Iterator[Point]:
    below = {row.key: row for row in select(rows, test.of, test.bottom, test.top)}
    tops = [row for row in select(rows, test.of, test.top, test.bottom) if row.key in below]
    lines = lines_of(tops)
    names = names_of([line[-1] for line in lines], AS_LENGTH)
    for line, at in zip(lines, names, strict=True):
        # The longest length at which it is slower, and the shortest from which on it is faster.
        slower, faster = 0, math.inf
        for row in line:
            other, n = below[row.key], int(row.place["seq_len"])
            if row.low > other.high:
                slower, faster = n, math.inf
            elif row.high < other.low:
                faster = min(faster, n)
            else:
                faster = math.inf
        longest = int(line[-1].place["seq_len"])
        holds: bool | None
        if faster is math.inf:
            said = f"not faster up to n={longest}"
            holds = False if slower >= test.highest else None
        elif not slower:
            said = f"faster from n={faster} on, or shorter"
            holds = False if faster <= test.lowest else None
        else:
            said = f"slower at n={slower}, faster from n={faster} on"
            holds = slower < test.highest and faster > test.lowest
        yield Point(at, float(faster), float(slower), float(faster), holds, said)


def _scores(test: Score, rows: pd.DataFrame, below: pd.DataFrame) -> Iterator[Point]:
    top, bottom, wanted = parse_spec(test.top), parse_spec(test.bottom), [parse_spec(task) for task in test.tasks]
    others = [one for one in _summaries(below) if is_spec(parse_spec(one.label), bottom)]
    for one in _summaries(rows):
        task = parse_spec(one.task)
        if not is_spec(parse_spec(one.label), top) or not any(is_spec(task, one) for one in wanted):
            continue
        for other in others:
            if other.task == one.task and _alike(one.setting, other.setting, test.bottom_where):
                apart = difference(one, replace(other, setting=one.setting))
                if apart.of is None:
                    continue
                low, high = apart.of.low, apart.of.high
                known = low is not None and high is not None
                holds = _side(low, high, test.above, None) if low is not None and high is not None else None
                ends = (low or 0.0, high or 0.0) if known else (-1.0, 1.0)
                said = f"{one.over_seeds.mean:.3g} against {other.over_seeds.mean:.3g}"
                said += f", difference {apart.of.mean:+.3g}" + (f" ({low:+.3g} to {high:+.3g})" if known else "")
                yield Point(f"{task.name}, n={dict(one.setting)['seq_len']}", apart.of.mean, *ends, holds, said)


def _summaries(rows: pd.DataFrame) -> list[Summary]:
    records = [{str(name): value for name, value in row.items()} for row in rows.to_dict("records")]
    also = [RUN] if RUN in rows else []
    return [one for choice in choose(trained(records, also_alike=also)) if (one := summary(choice))]


def _alike(one: Setting, other: Setting, but: Mapping[str, Value]) -> bool:
    apart = with_followers(but)
    return [part for part in one if part[0] not in apart] == [part for part in other if part[0] not in apart]
