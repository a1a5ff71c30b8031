"""The result of a match: a setting of each variant, paired times, a row for every tried setting, and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from attnbench.answers.match.budget import Budget, MeasuredSetting
from attnbench.answers.match.search import FoundSetting
from attnbench.harness.compare.compare import CompareRow, Comparison, Side
from attnbench.measure.status import Status
from attnbench.results.frame import marks
from attnbench.units import format_bytes, format_number, format_seconds


@dataclass(slots=True)
class Match:
    """The outcome of each variant, and the comparison of the settings found."""

    budget: Budget
    found: list[FoundSetting]
    about: str = ""
    same: Mapping[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    environment: Mapping[str, Any] = field(default_factory=dict)
    comparison: Comparison | None = None
    """Paired times of the settings found; None for fewer than two, or a finished run."""
    kept: Path | None = None

    @property
    def ok(self) -> bool:
        return any(point.status is Status.OK for one in self.found for point in one.tries)

    def sides(self) -> dict[str, Side]:
        rows = [row for pair in self.comparison.rows.values() for row in pair] if self.comparison else []
        return {side.record.label: side for row in rows for side in (row.a, row.b)}

    def sentences(self) -> list[str]:
        """One sentence for each variant, then how the settings found compare."""
        lines = [_of_one(self.budget, one) + (f"; in the run: {one.before}" * bool(one.before)) for one in self.found]
        lines += _over_budget(self)
        if self.comparison:
            lines += [_ratio(a, b, rows[0]) for (a, b), rows in self.comparison.rows.items()]
        else:
            lines += _unpaired(self)
        return [*lines, *_verdicts(self)]

    def to_rows(self) -> list[dict[str, Any]]:
        """A row for each setting in the order of measuring; seconds and bytes, None if not measured.

        A variant without a setting has a row with the reason.
        """
        rows = []
        for one in self.found:
            nothing = MeasuredSetting(one.variant, None, Status.UNSUPPORTED, one.note)
            for point in one.tries or (nothing,):
                told = point.columns()
                last = {name: told.pop(name) for name in ("family", "own_form")}
                asked: dict[str, Any] = {"target": self.budget.target, "budget": self.budget.limit}
                asked |= {"variant": one.variant, "knob": one.knob, "value": point.value}
                held = {"reached": point.within(self.budget), "chosen": point == one.chosen, "tries": len(one.tries)}
                rows.append({**asked, **told, **held, **last, **self.same})
        return rows

    def headline(self) -> str:
        """The sentences that compare settings within the budget; of a single one its own."""
        met = [_of_one(self.budget, one) for one in self.found if one.met(self.budget)]
        said = "; ".join(_verdicts(self)) or "; ".join(met) or f"nothing is {self.budget.inside}"
        return said if met and said == met[0] else said[0].upper() + said[1:]

    def to_json(self) -> dict[str, Any]:
        """Plain data. The times of a setting stand in its row alone: those in its pairs are of fewer turns."""
        pairs = self.comparison.to_rows() if self.comparison else []
        return {
            "budget": {"target": self.budget.target, "limit": self.budget.limit},
            "answers": self.sentences(),
            "rows": self.to_rows(),
            "comparison": [{name: one for name, one in row.items() if "_time_" not in name} for row in pairs],
            "warnings": self.warnings,
            "trainings": None if self.kept is None else str(self.kept),
            "environment": dict(self.environment),
        }


_COMPARABLE = ("exact", "approximation")
"""Kinds of error that may be ranked; a distance from softmax attention is no error of another operator."""


def _of_one(budget: Budget, one: FoundSetting) -> str:
    if not one.tries:
        return f"{one.variant}: not measured: {one.note}"
    if not one.knob:
        return _as_it_stands(budget, one)
    chosen = one.chosen
    if chosen is None:
        return _missed(budget, one)
    if budget.bounds_cost:
        end = f"; no more expensive {one.knob} is tried" if one.at_end else ""
        verb = "fits into" if chosen.within(budget) else "was found for"  # the turns may contradict the search
        return f"{chosen.label} {verb} {budget}: {amount_text(chosen, budget)}{end}"
    end = f"; already at the smallest {one.knob} that is tried" if one.at_end else ""
    return f"{chosen.label} reaches {budget}: {amount_text(chosen, budget)}{end}"


def _as_it_stands(budget: Budget, one: FoundSetting) -> str:
    (point,) = one.tries
    start = f"{point.label} takes part as it stands ({one.note}): "
    if point.status is not Status.OK:
        return start + _failure(point)
    if point.lacks(budget):
        return f"{start}no {budget.target} measured"
    return f"{start}{amount_text(point, budget)}, {'' if one.met(budget) else 'not '}{budget.inside}"


def _missed(budget: Budget, one: FoundSetting) -> str:
    best = one.best(budget)
    verb = "does not fit into" if budget.bounds_cost else "does not reach"
    amount = None if best is None or budget.bounds_cost else best.amount(budget)
    if amount is not None and (amount <= budget.limit if budget.target == "error" else amount >= budget.limit):
        verb = "may reach, but is not shown to reach,"  # as the end of its interval lies outside
    start = f"{one.variant} {verb} {budget}"
    failed = [f"{one.knob}={point.value}: {_failure(point)}" for point in one.tries if point.status is not Status.OK]
    if best is None:
        learned = any(point.error_kind == "learned" for point in one.tries)
        nothing = "its error means nothing before it is fitted" if learned else f"no {budget.target} measured"
        return f"{start}: {failed[0] if failed else nothing}"
    also = f"; {failed[-1]}" if failed else ""
    return f"{start}: best {amount_text(best, budget)} at {one.knob}={best.value}{also}"


def _failure(point: MeasuredSetting) -> str:
    return f"{point.status}" + (f", {point.reason}" if point.reason else "")


def amount_text(point: MeasuredSetting, budget: Budget) -> str:
    """The amount that the budget is about: ``0.095 (0.092 to 0.099)``, ``64.0 MiB``."""
    if budget.target == "error":
        return error_text(point)
    ends = (point.score_low, point.score_high)
    between = f" ({ends[0]:.3g} to {ends[1]:.3g})" if budget.target == "score" and None not in ends else ""
    return budget.text(point.amount(budget)) + between


def error_text(point: MeasuredSetting) -> str:
    """``0.095 (0.092 to 0.099)``; marked if the number is no error."""
    known = point.spread if point.error is not None and point.error_kind != marks.LEARNED else None
    return marks.error_text(point.error, point.error_kind, 3) + (
        f" ({known[0]:.3g} to {known[1]:.3g})" if known else ""
    )


def _over_budget(match: Match) -> Iterator[str]:
    if match.budget.target != "time":
        return
    for label, side in match.sides().items():
        if side.time is not None and side.time > match.budget.limit:
            yield f"in turns {label} takes {format_seconds(side.time)}, above the budget"


def _ratio(a: str, b: str, row: CompareRow) -> str:
    if row.ratio is None:
        why = next((side.record.reason for side in (row.a, row.b) if side.record.status is not Status.OK), "")
        return f"{a} and {b} were not timed in turns: {row.verdict}" + f": {why}" * bool(why)
    if row.shown is None:
        return f"{a} and {b}: no verdict on times: {row.withheld}"
    low, high = row.shown.low, row.shown.high
    ends = f" ({format_number(low)} to {format_number(high)})" if low and high else ""
    return f"{a} takes {format_number(row.shown.estimate)}{ends} of the time of {b}: {row.word}"


def _unpaired(match: Match) -> Iterator[str]:
    """Ratios of times that were not taken in turns, with the interval that the two intervals allow."""
    chosen = [one.chosen for one in match.found if one.chosen is not None]
    for a, b in combinations(chosen, 2):
        if a.time and b.time:
            ends = ""
            if a.time_low and a.time_high and b.time_low and b.time_high:
                ends = f" ({format_number(a.time_low / b.time_high)} to {format_number(a.time_high / b.time_low)})"
            yield f"{a.label} takes {format_number(a.time / b.time)}{ends} of the time of {b.label}; not timed in turns"


def _verdicts(match: Match) -> Iterator[str]:
    chosen = [point for one in match.found if (point := one.met(match.budget))]
    if len(chosen) < 2:
        return
    inside = match.budget.inside
    if match.budget.target != "time" and match.comparison:
        fastest = [point.label for point in chosen if _beats_all(match, point.label)]
        yield f"fastest {inside}: {fastest[0] if fastest else 'cannot be told'}"
    if match.budget.target != "memory":
        least = min((point.memory for point in chosen if point.memory is not None), default=None)
        equals = [point.label for point in chosen if point.memory == least]
        if least is not None:
            more = f" and {len(equals) - 3} more" * (len(equals) > 3)
            yield f"least memory {inside}: {', '.join(equals[:3])}{more}, {format_bytes(least)}"
    if match.budget.target != "error":
        yield from _least_error(chosen, match.budget)


def _beats_all(match: Match, label: str) -> bool:
    assert match.comparison is not None
    found = False
    for (a, b), rows in match.comparison.rows.items():
        if label in (a, b):
            found = True
            if rows[0].verdict != ("faster" if label == a else "slower"):
                return False
    return found


def _least_error(chosen: Sequence[MeasuredSetting], budget: Budget) -> Iterator[str]:
    ranked = sorted(
        (point for point in chosen if point.error is not None and point.error_kind in _COMPARABLE),
        key=lambda point: point.error or 0.0,
    )
    if len(ranked) < 2:
        return
    first, second = next(pairwise(ranked))
    apart = first.error_high is not None and all(first.error_high < (one.error_low or 0.0) for one in ranked[1:])
    if apart:
        yield f"smallest error {budget.inside}: {first.label}, {error_text(first)}"
    else:
        yield f"smallest error {budget.inside}: cannot be told, {first.label} and {second.label} overlap"
