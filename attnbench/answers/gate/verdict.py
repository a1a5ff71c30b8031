"""The verdict on each measure of a pair of rows, by the whole interval of the ratio.

The ratio is new over old. The interval of a ratio of times comes from how the visits to the cell vary in both runs, and
holds together with those of all other cells (:func:`attnbench.measure.statistics.ratios_over_visits`). Errors and
scores have intervals of their own: the smallest ratio is the new one's lower end over the old one's upper end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal, get_args

from attnbench.answers.gate.join import RowPair, ratios_of_times
from attnbench.measure.statistics import (
    BETWEEN_RUNS,
    FEWEST_VISITS,
    OF_MEDIAN,
    OverVisits,
    Visited,
    ends_of,
    error_interval,
    ratios_over_visits,
)
from attnbench.measure.status import Status
from attnbench.results.frame.marks import by_host
from attnbench.results.key import Key
from attnbench.results.measurements import Visits
from attnbench.results.record import Record

Measure = Literal["time", "memory", "error", "score", "status"]
MEASURES: tuple[Measure, ...] = get_args(Measure)
COLUMNS: dict[Measure, str] = {"time": "time_median_s", "memory": "peak_bytes", "error": "rel_error", "score": "score"}
Verdict = Literal["broken", "slower", "worse", "missing", "unsure", "fixed", "faster", "better", "new", "same"]
"""``slower`` and ``faster``: time. ``worse`` and ``better``: memory, error, score. ``broken`` and ``fixed``: it ran
before and fails now, and the other way round. ``unsure``: the interval holds a limit."""
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

ENOUGH_ROUNDS = 5
"""Fewest visits with which an interval knows enough of a machine's drift."""
MANY_ROUNDS = 50
"""Most further rounds that are worth while for one cell."""
RAN = {Status.OK, Status.DISTURBED}
"""Outcomes of a program that ran to its end."""
_EQUAL = 1e-3
"""Errors this close come from the same draws."""
_ROUNDING = {"float64": 4e-15, "float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}
"""Errors below this are rounding noise, of which a factor of two means nothing; exact attention has up to 1.1e-6."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """New over old: how much more is too much, as a ratio of at least 1."""

    time: float = 1.05
    memory: float = 1.02
    error: float = 1.1


@dataclass(frozen=True, slots=True)
class Ruling:
    """The verdict on one measure of one cell."""

    pair: RowPair
    measure: Measure
    verdict: Verdict
    old: float | None = None
    """Seconds, bytes, an error or a score; None for a status."""
    new: float | None = None
    ratio: float | None = None
    low: float | None = None
    """low to high is the interval of the ratio; None without one."""
    high: float | None = None
    note: str = ""
    at_risk: bool = False
    """``unsure``, and it may be worse than the limit allows."""
    more_rounds: int | None = None
    """Number of further rounds of both that would probably decide an ``unsure`` time, at most :data:`MANY_ROUNDS`."""

    @property
    def is_worse(self) -> bool:
        return self.verdict in ("slower", "worse", "broken")

    @property
    def is_changed(self) -> bool:
        return self.is_worse or self.verdict in ("fixed", "faster", "better")

    @property
    def is_judged(self) -> bool:
        """True if two numbers were compared, whatever the interval allows."""
        return self.verdict not in ("missing", "unsure") or self.low is not None


@dataclass(frozen=True, slots=True)
class Times:
    """The visits of all times together."""

    ratios: Mapping[Key, tuple[float, float, float]]
    """Ratio, lower and upper end of the cells with enough visits for an interval."""
    between: float | None
    """Spread between runs of one program, on the log scale; None if older runs do not show it."""
    drift: float = 1.0
    """Slow-down of the whole machine; each ratio of times is divided by it."""
    doubt: float = 0.0
    """Half the interval of the drift, on the log scale and as sure as those of the ratios."""


def times_of(
    pairs: Sequence[RowPair],
    reference: Sequence[RowPair] = (),
    *,
    between: tuple[float, int] | None = None,
    looks: float = 1,
) -> Times:
    """The ratios of these pairs' times, with intervals that hold together, and with those of other ``looks``.

    Ratios are divided by the median of those of ``reference``, pairs of an unchanged program; its uncertainty counts.
    """
    timed = [pair for pair in (*pairs, *reference) if pair.times]
    known = {pair.key: visited for pair in timed if (visited := _visited(pair)).enough}
    found: OverVisits = ratios_over_visits(list(known.values()), known=between, looks=looks)
    ratios = dict(zip(known, found.ratios, strict=True))
    if not reference:
        return Times(ratios, found.between)
    by = [pair for pair in reference if pair.key in ratios]
    if not by:
        return Times({}, found.between, median(ratios_of_times(reference)))
    halves = [(math.log(high) - math.log(low)) / 2 for _, low, high in (ratios[pair.key] for pair in by)]
    doubt = OF_MEDIAN * math.sqrt(sum(half**2 for half in halves)) / len(by)
    return Times(ratios, found.between, median(ratios_of_times(by)), doubt)


def _visited(pair: RowPair) -> Visited:
    apart = _slower(pair.new_visits) - _slower(pair.old_visits)
    news, olds = ([list(one.seconds.values()) for one in of] for of in (pair.new_visits, pair.old_visits))
    return Visited(
        [one for run in news for one in run], olds, float(apart @ pair.new_visits[0].doubt @ apart), len(news)
    )


def _slower(of: Sequence[Visits]) -> Any:
    return sum(one.slower for one in of) / len(of)


def judge(pair: RowPair, measures: Sequence[Measure], limits: Tolerance, times: Times) -> list[Ruling]:
    """A finding for each measure of the old row, a single one if a side is missing; ``times`` are of all pairs."""
    old, new = pair.old, pair.new
    if old is None or new is None:
        verdict: Verdict = "missing" if new is None else "new"
        return [Ruling(pair, "status", verdict)]
    found = [_of_status(pair, old, new)] if "status" in measures else []
    if {old.status, new.status} <= RAN:
        if "time" in measures and pair.times:
            found.append(_of_time(pair, *pair.times, limits.time, times))
        elif "time" in measures and pair.withheld:
            found.append(Ruling(pair, "time", "unsure", note=pair.withheld, at_risk=bool(pair.disturbed)))
        judged = [_JUDGES[measure](pair, old, new, limits) for measure in _JUDGES if measure in measures]
        found += [one for one in judged if one is not None]
    if {old.status, new.status} <= RAN or not found:
        told = {one.measure for one in found}
        found += [one for measure in measures if measure not in told for one in _lost(pair, old, new, measure)]
    said = _changed_options(old, new)
    return [replace(one, note="; ".join(filter(None, [one.note, said]))) if said else one for one in found]


def _lost(pair: RowPair, old: Record, new: Record, measure: Measure) -> list[Ruling]:
    """The finding on a number that only the old run has, or that cannot be compared for lack of an interval."""
    before, now = (getattr(row, COLUMNS[measure]) if row.status in RAN else None for row in (old, new))
    if before is None or (measure == "error" and now is not None):  # a learned error says nothing of the variant
        return []
    if now is None:
        why = "" if new.status in RAN else f"{new.status}: {new.reason}"
        return [Ruling(pair, measure, "missing", before, note=why)]
    return [Ruling(pair, measure, "unsure", before, now, note="one of the runs has no interval of it", at_risk=True)]


def _of_status(pair: RowPair, old: Record, new: Record) -> Ruling:
    if old.status in RAN and new.status not in RAN:
        return Ruling(pair, "status", "broken", note=f"{new.status}: {new.reason}")
    if old.status not in RAN and new.status in RAN:
        return Ruling(pair, "status", "fixed", note=f"before: {old.status}: {old.reason}")
    return Ruling(pair, "status", "same", note="" if old.status is new.status else f"{old.status}, now {new.status}")


def _of_time(pair: RowPair, before: float, now: float, limit: float, times: Times) -> Ruling:
    bare = Ruling(pair, "time", "unsure", before, now, now / before / times.drift)
    if pair.key not in times.ratios:
        lacking = "each run" if pair.rounds < FEWEST_VISITS else "the unchanged variant in each run"
        return replace(bare, note=f"no interval: it takes {FEWEST_VISITS} rounds of {lacking}", at_risk=True)
    ratio, low, high = map(math.log, times.ratios[pair.key])
    down, up = (math.hypot(span, times.doubt) for span in (ratio - low, high - ratio))
    middle = math.log(now / before / times.drift)
    ends = ends_of(middle, down)[0], ends_of(middle, up)[1]
    found = _with_interval(bare, *ends, limit, "slower", "faster")
    if found.verdict != "unsure":
        rows = [row for row in (pair.old, pair.new) if row]
        shares = [by_host(row.label, row.launched or "eager", row.host_share) for row in rows]
        return replace(found, note="; ".join(dict.fromkeys(filter(None, shares))))
    fixed = math.log1p(BETWEEN_RUNS) if times.between is None else 0.0
    return replace(found, more_rounds=_more_rounds(found, limit, pair.rounds, fixed))


def _of_memory(pair: RowPair, old: Record, new: Record, limits: Tolerance) -> Ruling | None:
    before, now = old.peak_bytes, new.peak_bytes
    if before is None or now is None:
        return None
    ratio = _over(now, before)
    return _with_interval(Ruling(pair, "memory", "same", before, now, ratio), ratio, ratio, limits.memory)


def _of_error(pair: RowPair, old: Record, new: Record, limits: Tolerance) -> Ruling | None:
    before, now = old.rel_error, new.rel_error
    if before is None or now is None or "learned" in (old.error_kind, new.error_kind):
        return None
    bare = Ruling(pair, "error", "same", before, now, _over(now, before))
    if max(before, now) <= _ROUNDING.get(new.dtype, 0.0) or abs(now - before) <= _EQUAL * before:
        return bare
    here = error_interval(now, new.rel_error_std, new.error_draws)
    there = error_interval(before, old.rel_error_std, old.error_draws)
    low, high = _over(here[0], there[1]), _over(here[1], there[0])
    found = _with_interval(bare, low, high, limits.error)
    return replace(found, note="its draws differ too much; raise error_draws") if found.verdict == "unsure" else found


def _of_score(pair: RowPair, old: Record, new: Record, limits: Tolerance) -> Ruling | None:
    """Better or worse only if the two intervals over test examples do not overlap."""
    ends = old.score_low, old.score_high, new.score_low, new.score_high
    if old.score is None or new.score is None or None in ends:
        return None
    old_low, old_high, new_low, new_high = (float(end or 0.0) for end in ends)
    verdict: Verdict = "worse" if new_high < old_low else "better" if new_low > old_high else "same"
    ratio, low, high = _over(new.score, old.score), _over(new_low, old_high), _over(new_high, old_low)
    return Ruling(pair, "score", verdict, old.score, new.score, ratio, low, high)


_JUDGES: dict[Measure, Callable[[RowPair, Record, Record, Tolerance], Ruling | None]] = {
    "memory": _of_memory,
    "error": _of_error,
    "score": _of_score,
}


def _with_interval(
    bare: Ruling, low: float, high: float, limit: float, above: Verdict = "worse", below: Verdict = "better"
) -> Ruling:
    verdict: Verdict = "unsure"
    if low > limit:
        verdict = above
    elif high < 1 / limit:
        verdict = below
    elif low >= 1 / limit and high <= limit:
        verdict = "same"
    return replace(bare, low=low, high=high, verdict=verdict, at_risk=verdict == "unsure" and high > limit)


def _over(now: float, before: float) -> float:
    return now / before if before else (math.inf if now else 1.0)


def _more_rounds(found: Ruling, limit: float, rounds: int, fixed: float) -> int:
    """Number of further rounds that would probably decide: the interval's width falls with their root.

    ``fixed`` is half the width that no number of rounds removes, on the log scale.
    """
    assert found.ratio
    assert found.low
    assert found.high
    low, middle, high = math.log(found.low), math.log(found.ratio), math.log(found.high)
    ends = math.log(limit), -math.log(limit)
    gap = min((abs(middle - end) for end in ends if low <= end <= high), default=0.0) - fixed
    half = (high - low) / 2 - fixed
    if half >= gap * math.sqrt(1 + MANY_ROUNDS / rounds):
        return MANY_ROUNDS
    return max(1, round(rounds * ((half / gap) ** 2 - 1)))


def _changed_options(old: Record, new: Record) -> str:
    if old.options == new.options:
        return ""
    try:
        said = options_before(json.loads(old.options), json.loads(new.options))
    except (ValueError, AttributeError, TypeError):
        return "with other options"
    return f"before: {said}" if said else ""


def options_before(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Earlier values of the options that changed: ``no beta, kernel=relu``."""
    changed = [name for name in dict.fromkeys([*then, *now]) if then.get(name) != now.get(name)]
    return ", ".join(f"{name}={then[name]}" if name in then else f"no {name}" for name in changed)
