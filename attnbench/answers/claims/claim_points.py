"""The points at which a claim holds or fails, and the rows of a table that they are read from."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from typing import Any

import numpy as np
import pandas as pd

from attnbench.answers.claims.claims import Ability, Claim, CrossoverTest, GrowthTest, RatioTest, ScoreTest, Value
from attnbench.contract.spec import Scalar, Spec, parse_spec
from attnbench.contract.variant import VARIANTS
from attnbench.measure.statistics import error_interval
from attnbench.measure.status import Status
from attnbench.results.frame.marks import by_host
from attnbench.results.frame.settings import RUN, SAME, records
from attnbench.results.intervals import Summary, difference, summary
from attnbench.results.trainings import Setting, choose, trained
from attnbench.suite.axes import FOLLOWING, exists
from attnbench.units import format_number

_INTERVALS = {"time_median_s": ("time_ci_low_s", "time_ci_high_s")}
_ALIKE = (*(name for name in SAME if name not in (RUN, "quick")), "seq_len", "kv_len", "inputs", "task", RUN)
"""Columns in which two rows agree if nothing but the variant differs."""
AS_LENGTH = ("seq_len", "kv_len")
AS_HEADS = ("heads", "head_dim", "kv_heads", "qk_heads", "v_dim")
"""Columns in which rows differ that share a model's width among more or fewer heads."""
_NAMES = {"seq_len": "n", "head_dim": "d"}


@dataclass(frozen=True, slots=True)
class ClaimRow:
    """The parts of a row that a claim uses."""

    place: Mapping[str, Any]
    """Values of the columns in which compared rows agree, options of the variant included."""
    value: float
    low: float
    high: float

    @property
    def key(self) -> tuple[object, ...]:
        # NaN differs from itself, and would never meet its like.
        return tuple((name, str(value)) for name, value in sorted(self.place.items()) if name != "options")

    def without(self, columns: Collection[str]) -> ClaimRow:
        return replace(self, place={name: value for name, value in self.place.items() if name not in columns})


def with_followers(columns: Collection[str]) -> set[str]:
    """These columns and their followers, as the width of values follows that of heads unless a suite says otherwise."""
    return {*columns, *(axis for axis, other in FOLLOWING.items() if other in columns)}


def select(rows: pd.DataFrame, column: str, label: str, other: str | None = None) -> list[ClaimRow]:
    """The rows of a variant that have a number in a column.

    Options that neither ``label`` nor ``other`` names are part of the place, if both are about one variant.
    """
    spec, beside = parse_spec(label), parse_spec(other) if other else None
    named = {name for one in (spec, beside) if one for name, _ in one.options}
    found = []
    for row in of_variant(rows[rows[column].notna()], label).to_dict("records"):
        options = json.loads(row["options"])
        place = {name: row[name] for name in _ALIKE if name in row}
        if beside is None or beside.name == spec.name:
            place |= {name: value for name, value in options.items() if name not in named}
        value = float(row[column])
        low, high = _ends({str(name): cell for name, cell in row.items()}, column, value)
        if not (math.isfinite(low) and math.isfinite(high)):  # one sample of --quick says nothing about its spread
            continue
        found.append(ClaimRow(place | {"options": options}, value, low, high))
    return found


def having(rows: pd.DataFrame, values: Mapping[str, Value]) -> pd.DataFrame:
    """The rows with these values in these columns; None matches an empty cell."""
    chosen = np.ones(len(rows), dtype=np.bool_)
    for column, value in values.items():
        chosen &= (rows[column].isna() if value is None else rows[column] == value).to_numpy(np.bool_)
    return rows[chosen]  # once, since each choice copies all columns


def of_variant(rows: pd.DataFrame, label: str) -> pd.DataFrame:
    """The rows of a variant with all options that ``label`` names."""
    spec = parse_spec(label)
    pairs = zip(rows["variant"], rows["options"], strict=True)
    chosen = [name == spec.name and has_options(json.loads(options), spec) for name, options in pairs]
    return rows[np.array(chosen, dtype=np.bool_)]


def is_spec(spec: Spec, wanted: Spec) -> bool:
    """True if the spec is ``wanted``, perhaps with further options."""
    return spec.name == wanted.name and has_options(dict(spec.options), wanted)


def has_options(options: Mapping[str, Scalar], spec: Spec) -> bool:
    """True if ``options`` contain all options of ``spec``."""
    return all(name in options and options[name] == value for name, value in spec.options)


def _ends(row: Mapping[str, Any], column: str, value: float) -> tuple[float, float]:
    if column in _INTERVALS:
        low, high = (float(row[name]) for name in _INTERVALS[column])
        return low, high
    if column == "rel_error":
        return error_interval(value, row["rel_error_std"], row["error_draws"])
    return value, value


def names_of(rows: Sequence[ClaimRow], ignore: Sequence[str] = ()) -> list[str]:
    """The columns and options in which the rows differ."""
    flat = [{**one.place, **one.place["options"]} for one in rows]
    known = [name for name in dict.fromkeys(name for one in flat for name in one) if name != "options"]
    levels = [str(one.get("level", "model")) for one in flat]
    differ = [
        name
        for name in known
        if name not in ignore
        and len({str(one.get(name)) for one, level in zip(flat, levels, strict=True) if exists(name, level)}) > 1
    ]
    for axis, other in FOLLOWING.items():
        if other in differ and axis in differ and all(one[other] == one[axis] for one in flat):
            differ.remove(axis)
    return [
        ", ".join(_said(name, one[name]) for name in differ if name in one and exists(name, level))
        for one, level in zip(flat, levels, strict=True)
    ]


def _said(name: str, value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if name == "level" else f"{_NAMES.get(name, name)}={text}"


def lines_of(rows: Sequence[ClaimRow], apart: Sequence[str] = AS_LENGTH) -> list[list[ClaimRow]]:
    """Rows that differ in these columns alone, by default in their length; the smallest come first."""
    found: dict[tuple[object, ...], list[ClaimRow]] = {}
    for row in rows:
        key = tuple((name, str(value)) for name, value in sorted(row.place.items()) if name not in apart)
        found.setdefault(key, []).append(row)
    return [sorted(line, key=lambda row: int(row.place[apart[0]])) for line in found.values()]


@dataclass(frozen=True, slots=True)
class Point:
    """One place at which a claim was tested."""

    at: str
    value: float
    low: float
    high: float
    """Ends of the interval of ``value``; equal to it for an exact number."""
    holds: bool | None
    """None if the interval contains the limit, so that it decides nothing."""
    said: str = ""
    """The value in words, where a number is not enough."""
    what: str = ""
    """The quantity: ``time ratio``, ``power of n in time``."""
    host: str = ""
    """The times that are mostly the host's."""

    def __str__(self) -> str:
        value, low, high = map(format_number, (self.value, self.low, self.high))
        number = self.said or f"{self.what} {value}".strip() + f" ({low} to {high})" * (self.low != self.high)
        number += f"; {self.host}" * bool(self.host)
        return f"{self.at}: {number}" if self.at else number


def points_of(claim: Claim, frame: pd.DataFrame | None) -> Iterator[Point]:
    """The points of a table, or of None, for a claim; none if its rows are about something else."""
    test = claim.test
    if isinstance(test, Ability):
        yield _ability(test)
    if test is None or isinstance(test, Ability) or frame is None:
        return
    measured = frame[(frame["status"] == Status.OK) & (claim.suite is None or frame["suite"] == claim.suite)]
    rows = having(measured, test.where)
    host = _by_host(test, rows) if isinstance(test, RatioTest | CrossoverTest) and test.of == "time_median_s" else ""
    if isinstance(test, RatioTest):
        below = having(measured, {**test.where, **test.bottom_where})
        yield from (replace(one, host=host) for one in _ratios(test, rows, below))
    elif isinstance(test, GrowthTest):
        yield from _growths(test, rows)
    elif isinstance(test, CrossoverTest):
        yield from (replace(one, host=host) for one in _crossovers(test, rows))
    elif isinstance(test, ScoreTest):
        yield from _scores(test, rows, having(measured, {**test.where, **test.bottom_where}))


def _by_host(test: RatioTest | CrossoverTest, rows: pd.DataFrame) -> str:
    timed = rows[rows["host_share"].notna()] if "host_share" in rows else rows[:0]
    parts = [of_variant(timed, label) for label in (test.top, test.bottom) if label is not None]
    most = [part.iloc[int(part["host_share"].argmax())] for part in parts if len(part)]
    return "; ".join(filter(None, (by_host(one["label"], one["launched"], one["host_share"]) for one in most)))


def _ability(test: Ability) -> Point:
    spec = parse_spec(test.top)
    found = getattr(VARIANTS.get(spec.name).claims(spec), test.trait)
    value = float(bool(found))
    return Point("", value, value, value, bool(found), "yes" if found else str(found))


def _ratios(test: RatioTest, rows: pd.DataFrame, below: pd.DataFrame) -> Iterator[Point]:
    # Rows of two numbers of threads are of two runs.
    apart = {*with_followers(test.bottom_where), *([RUN] if "threads" in test.bottom_where else [])}
    tops = [row.without(apart) for row in select(rows, test.of, test.top, test.bottom)]
    if test.bottom is None:
        pairs = [(top, ClaimRow(top.place, 1.0, 1.0, 1.0)) for top in tops]
    else:
        bottoms = {row.without(apart).key: row for row in select(below, test.of, test.bottom, test.top)}
        pairs = [(top, bottoms[top.key]) for top in tops if top.key in bottoms]
    names, what = names_of([top for top, _ in pairs]), _in_words(test.of) + " ratio" * (test.bottom is not None)
    for (top, bottom), at in zip(pairs, names, strict=True):
        if bottom.value > 0:
            low, high = top.low / bottom.high, top.high / bottom.low if bottom.low > 0 else math.inf
            here = Point(at, top.value / bottom.value, low, high, _side(low, high, test.above, test.below), what=what)
            yield here if test.about is None else _beside(test.about, 1 + test.within, here)


def _beside(published: float, most: float, here: Point) -> Point:
    said = f"{here}, {format_number(here.value / published)} of the published"
    if here.what.endswith("ratio") and not 1 / most <= published <= most:
        won, lost = (here.low > 1, here.high < 1) if published > 1 else (here.high < 1, here.low > 1)
        said += "; order holds" if won else "; order is reversed" if lost else "; order open"
    near = here.low <= published * most and here.high * most >= published
    holds = near and (published / most <= here.value <= published * most or None)
    return replace(here, at="", holds=holds, said=said)


def _in_words(column: str) -> str:
    return re.sub(r"(_median)?(_s|_bytes)?$", "", column).replace("_", " ")


def _side(low: float, high: float, above: float | None, below: float | None) -> bool | None:
    """True if an interval lies above a limit, False if below; None if it contains the limit."""
    if above is not None:
        return True if low > above else False if high <= above else None
    if below is not None:
        return True if high < below else False if low >= below else None
    return None


def _growths(test: GrowthTest, rows: pd.DataFrame) -> Iterator[Point]:
    over = test.over
    letter, apart = ("n", AS_LENGTH) if over == "seq_len" else (over, AS_HEADS)
    lines = lines_of(select(rows, test.of, test.top), apart)
    names, what = names_of([line[-1] for line in lines], apart), f"power of {letter} in {_in_words(test.of)}"
    for line, at in zip(lines, names, strict=True):
        last = line[-1]
        n = last.place[over]
        earlier = [row for row in line if row.place[over] * 4 <= n and row.low > 0]
        if not earlier or last.value <= 0:  # nothing has no power
            continue
        first = earlier[-1]
        by = math.log(n / first.place[over])
        value, low, high = (
            math.log(a / b) / by if a > 0 else -math.inf
            for a, b in ((last.value, first.value), (last.low, first.high), (last.high, first.low))
        )
        least = None if test.at_least is None else math.nextafter(test.at_least, -math.inf)
        most = None if test.at_most is None else math.nextafter(test.at_most, math.inf)
        where = f"{letter}={first.place[over]} to {n}"
        yield Point(f"{where}, {at}" if at else where, value, low, high, _side(low, high, least, most), what=what)


def _crossovers(test: CrossoverTest, rows: pd.DataFrame) -> Iterator[Point]:
    below = {row.key: row for row in select(rows, test.of, test.bottom, test.top)}
    tops = [row for row in select(rows, test.of, test.top, test.bottom) if row.key in below]
    lines = lines_of(tops)
    names = names_of([line[-1] for line in lines], AS_LENGTH)
    for line, at in zip(lines, names, strict=True):
        told = [(_speed(row, below[row.key]), int(row.place["seq_len"])) for row in line]
        # The longest length at which it is slower, and the shortest from which on it is faster.
        slower = max((n for word, n in told if word == "slower"), default=0)
        faster = min((n for _, n in takewhile(lambda one: one[0] == "faster", reversed(told))), default=math.inf)
        holds: bool | None
        if faster is math.inf:
            each = [(word, [n for _, n in some]) for word, some in groupby(told, lambda one: one[0])]
            said = ", ".join(f"{word} at n={' to '.join(map(str, sorted({ns[0], ns[-1]})))}" for word, ns in each)
            said = said if "faster" in dict(each) else f"not faster up to n={told[-1][1]}"
            holds = False if slower >= test.highest else None
        elif not slower:
            said = f"faster from n={faster} on, or shorter"
            holds = False if faster <= test.lowest else None
        else:
            said = f"slower at n={slower}, faster from n={faster} on"
            holds = slower < test.highest and faster > test.lowest
        yield Point(at, float(faster), float(slower), float(faster), holds, said)


def _speed(row: ClaimRow, other: ClaimRow) -> str:
    return "slower" if row.low > other.high else "faster" if row.high < other.low else "open"


def _scores(test: ScoreTest, rows: pd.DataFrame, below: pd.DataFrame) -> Iterator[Point]:
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
    also = [RUN] if RUN in rows else []
    return [one for choice in choose(trained(records(rows), also_alike=also)) if (one := summary(choice))]


def _alike(one: Setting, other: Setting, but: Mapping[str, Value]) -> bool:
    apart = with_followers(but)
    return [part for part in one if part[0] not in apart] == [part for part in other if part[0] not in apart]
