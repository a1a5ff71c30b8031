"""The verdict on a claim, computed from rows.

A point is one place at which a claim can be seen to hold or to fail: a pair of rows that were measured alike, say. It
answers only if its whole interval lies on one side of the claim's limit. A claim holds if every point says so, fails if
none does, and depends where points disagree.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from attnbench.decision.claims import Claim, Crossover, Growth, Ratio, Score
from attnbench.plots.setting import RUN, SAME
from attnbench.scores import difference, summary
from attnbench.spec import Scalar, Spec, parse_spec
from attnbench.status import Status
from attnbench.trained import choose, trained

Verdict = Literal["holds", "fails", "depends on", "not tested here"]

_INTERVALS = {"time_median_s": ("time_ci_low_s", "time_ci_high_s")}
"""Columns that have a measured interval -> the columns with its ends."""
_ALIKE = (*(name for name in SAME if name not in (RUN, "quick")), "seq_len", "kv_len", "inputs", "task", RUN)
"""Columns in which two rows agree if nothing but the variant differs."""
_AS_LENGTH = ("seq_len", "kv_len")
_NAMES = {"seq_len": "n", "head_dim": "d"}
"""Columns that a reader knows by a letter."""


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

    def __str__(self) -> str:
        number = self.said or (
            f"{self.value:.3g}" if self.low == self.high else f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"
        )
        return f"{self.at}: {number}" if self.at else number


@dataclass(frozen=True, slots=True)
class Judgement:
    """A claim with its verdict."""

    claim: Claim
    verdict: Verdict
    points: tuple[Point, ...] = ()
    why: str = ""
    """Why the claim is not tested."""

    @property
    def evidence(self) -> str:
        """The points in few words: all of them if they are few or disagree little, else where it holds and fails."""
        if self.why:
            return self.why
        if len(self.points) <= _FEW:
            return "; ".join(map(str, self.points))
        places = {
            word: [point for point in self.points if point.holds is answer]
            for word, answer in (("holds", True), ("fails", False), ("open", None))
        }
        return "; ".join(f"{word} at {_most(found)}" for word, found in places.items() if found)


_FEW = 4
"""Most points that are listed one by one."""


def _most(points: Sequence[Point]) -> str:
    shown = ", ".join(point.at.replace(", ", " ") for point in points[:_FEW])
    rest = f" and {len(points) - _FEW} more" if len(points) > _FEW else ""
    values = [point.value for point in points]
    return f"{shown}{rest} ({min(values):.3g} to {max(values):.3g})"


def judge(claim: Claim, frame: pd.DataFrame | None) -> Judgement:
    """Hold a claim to the rows of a table.

    Args:
        frame: a table as :func:`attnbench.plots.load.read_results` gives it; None where there is none.
    """
    if claim.test is None:
        return Judgement(claim, "not tested here", why=claim.missing)
    points = [] if frame is None else list(_points(claim, frame))
    if not points:
        return Judgement(claim, "not tested here", why=f"no such rows; measure them with: {claim.command}")
    answers = {point.holds for point in points}
    if answers == {None}:
        ends = "; ".join(map(str, points[:_FEW]))
        return Judgement(claim, "not tested here", tuple(points), f"the intervals hold both answers: {ends}")
    verdict: Verdict = "holds" if answers == {True} else "fails" if True not in answers else "depends on"
    return Judgement(claim, verdict, tuple(points))


def _points(claim: Claim, frame: pd.DataFrame) -> Iterator[Point]:
    test = claim.test
    rows = frame[(frame["suite"] == claim.suite) & (frame["status"] == Status.OK)]
    for column, value in (test.where if test else {}).items():
        rows = rows[rows[column] == value]
    if isinstance(test, Ratio):
        yield from _ratios(test, rows)
    elif isinstance(test, Growth):
        yield from _growths(test, rows)
    elif isinstance(test, Crossover):
        yield from _crossovers(test, rows)
    elif isinstance(test, Score):
        yield from _scores(test, rows)


@dataclass(frozen=True, slots=True)
class _Row:
    """What a claim needs of a row."""

    place: Mapping[str, Any]
    """Column -> value, of the columns in which rows that are compared agree; options of the variant are among them."""
    value: float
    low: float
    high: float


def _select(rows: pd.DataFrame, column: str, label: str, other: str | None = None) -> list[_Row]:
    """The rows of a variant that have a number in a column.

    Options that neither ``label`` nor ``other`` names are part of the place, if both are about one variant.
    """
    spec, beside = parse_spec(label), parse_spec(other) if other else None
    named = {name for one in (spec, beside) if one for name, _ in one.options}
    found = []
    for row in rows[(rows["variant"] == spec.name) & rows[column].notna()].to_dict("records"):
        options = json.loads(row["options"])
        if not _has(options, spec):
            continue
        place = {name: row[name] for name in _ALIKE if name in row}
        if beside is None or beside.name == spec.name:
            place |= {name: value for name, value in options.items() if name not in named}
        value = float(row[column])
        low, high = _ends({str(name): cell for name, cell in row.items()}, column, value)
        if not (math.isfinite(low) and math.isfinite(high)):  # one sample of --quick says nothing about its spread
            continue
        found.append(_Row(place | {"options": options}, value, low, high))
    return found


def _has(options: Mapping[str, Scalar], spec: Spec) -> bool:
    return all(name in options and options[name] == value for name, value in spec.options)


def _ends(row: Mapping[str, Any], column: str, value: float) -> tuple[float, float]:
    if column in _INTERVALS:
        low, high = (float(row[name]) for name in _INTERVALS[column])
        return low, high
    if column == "rel_error" and row["error_draws"] > 1:
        half = 2 * float(row["rel_error_std"]) / math.sqrt(row["error_draws"])  # two standard errors
        return value - half, value + half
    return value, value


def _key(row: _Row) -> tuple[object, ...]:
    # NaN differs from itself, and would never meet its like.
    return tuple((name, str(value)) for name, value in sorted(row.place.items()) if name != "options")


def _names(rows: Sequence[_Row], ignore: Sequence[str] = ()) -> list[str]:
    """What tells each row from the others: the columns and options in which they differ."""
    flat = [{**one.place, **one.place["options"]} for one in rows]
    names = [name for name in dict.fromkeys(name for one in flat for name in one) if name != "options"]
    differ = [name for name in names if name not in ignore and len({str(one.get(name)) for one in flat}) > 1]
    if "seq_len" in differ and "kv_len" in differ and all(one["seq_len"] == one["kv_len"] for one in flat):
        differ.remove("kv_len")
    return [", ".join(f"{_NAMES.get(name, name)}={_text(one[name])}" for name in differ if name in one) for one in flat]


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _ratios(test: Ratio, rows: pd.DataFrame) -> Iterator[Point]:
    tops = _select(rows, test.of, test.top, test.bottom)
    if test.bottom is None:
        pairs = [(top, _Row(top.place, 1.0, 1.0, 1.0)) for top in tops]
    else:
        below = {_key(row): row for row in _select(rows, test.of, test.bottom, test.top)}
        pairs = [(top, below[_key(top)]) for top in tops if _key(top) in below]
    names = _names([top for top, _ in pairs])
    for (top, bottom), at in zip(pairs, names, strict=True):
        if bottom.value > 0 and bottom.low > 0:
            low, high = top.low / bottom.high, top.high / bottom.low
            yield Point(at, top.value / bottom.value, low, high, _side(low, high, test.above, test.below))


def _side(low: float, high: float, above: float | None, below: float | None) -> bool | None:
    """Whether an interval lies above, or below, a limit; None where it holds the limit."""
    if above is not None:
        return True if low > above else False if high <= above else None
    if below is not None:
        return True if high < below else False if low >= below else None
    return None


def _growths(test: Growth, rows: pd.DataFrame) -> Iterator[Point]:
    lines = _lines(_select(rows, test.of, test.top))
    names = _names([line[-1] for line in lines], _AS_LENGTH)
    for line, at in zip(lines, names, strict=True):
        last = line[-1]
        n = last.place["seq_len"]
        earlier = [row for row in line if row.place["seq_len"] * 4 <= n and row.low > 0]
        if not earlier:
            continue
        first = earlier[-1]
        by = math.log(n / first.place["seq_len"])
        value, low, high = (
            math.log(a / b) / by for a, b in ((last.value, first.value), (last.low, first.high), (last.high, first.low))
        )
        least = None if test.at_least is None else math.nextafter(test.at_least, -math.inf)
        most = None if test.at_most is None else math.nextafter(test.at_most, math.inf)
        where = f"n={first.place['seq_len']} to {n}"
        yield Point(f"{where}, {at}" if at else where, value, low, high, _side(low, high, least, most))


def _lines(rows: Sequence[_Row]) -> list[list[_Row]]:
    """Rows that differ in their length alone, shortest first."""
    found: dict[tuple[object, ...], list[_Row]] = {}
    for row in rows:
        key = tuple((name, str(value)) for name, value in sorted(row.place.items()) if name not in _AS_LENGTH)
        found.setdefault(key, []).append(row)
    return [sorted(line, key=lambda row: int(row.place["seq_len"])) for line in found.values()]


def _crossovers(test: Crossover, rows: pd.DataFrame) -> Iterator[Point]:
    below = {_key(row): row for row in _select(rows, test.of, test.bottom, test.top)}
    tops = [row for row in _select(rows, test.of, test.top, test.bottom) if _key(row) in below]
    lines = _lines(tops)
    names = _names([line[-1] for line in lines], _AS_LENGTH)
    for line, at in zip(lines, names, strict=True):
        slower, faster = (
            0,
            math.inf,
        )  # the longest length at which it is slower; the shortest from which on it is faster
        for row in line:
            other, n = below[_key(row)], int(row.place["seq_len"])
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


def _scores(test: Score, rows: pd.DataFrame) -> Iterator[Point]:
    records = [{str(name): value for name, value in row.items()} for row in rows.to_dict("records")]
    top, bottom, wanted = parse_spec(test.top), parse_spec(test.bottom), parse_spec(test.task)
    also = [RUN] if RUN in rows else []
    found = [one for choice in choose(trained(records, also_alike=also)) if (one := summary(choice))]
    for one in found:
        task = parse_spec(one.task)
        if not _is(parse_spec(one.label), top) or not _is(task, wanted):
            continue
        for other in found:
            if _is(parse_spec(other.label), bottom) and (other.task, other.setting) == (one.task, one.setting):
                apart = difference(one, other)
                if apart.of is None:
                    continue
                low, high = apart.of.low, apart.of.high
                known = low is not None and high is not None
                holds = _side(low, high, test.above, None) if low is not None and high is not None else None
                ends = (low or 0.0, high or 0.0) if known else (-1.0, 1.0)
                said = f"{one.over_seeds.mean:.3g} against {other.over_seeds.mean:.3g}"
                said += f", difference {apart.of.mean:+.3g}" + (f" ({low:+.3g} to {high:+.3g})" if known else "")
                yield Point(f"{task.name}, n={dict(one.setting)['seq_len']}", apart.of.mean, *ends, holds, said)


def _is(spec: Spec, wanted: Spec) -> bool:
    return spec.name == wanted.name and _has(dict(spec.options), wanted)
