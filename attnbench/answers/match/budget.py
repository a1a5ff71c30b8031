"""A budget that every variant is to meet, and one setting held to it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from attnbench.errors import UsageError
from attnbench.measure.statistics import error_interval
from attnbench.measure.status import Status
from attnbench.results.intervals import summary
from attnbench.results.record import Record
from attnbench.results.trainings import CountedTrainings
from attnbench.suite.axes import IN_ROWS
from attnbench.units import format_bytes, format_number, format_seconds, parse_bytes, parse_seconds

Target = Literal["error", "memory", "time", "score"]
COLUMN = {"time": "time_median_s", "time_low": "time_ci_low_s", "time_high": "time_ci_high_s", "memory": "peak_bytes"}
"""Field of :class:`MeasuredSetting` -> its column, if the name differs."""


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit on error, memory, time or score."""

    target: Target
    limit: float
    """Relative error, bytes, seconds, or a score between 0 and 1."""

    def __str__(self) -> str:
        return f"{self.target} {self.text(self.limit)}"

    def text(self, amount: float | None) -> str:
        if not self.bounds_cost:
            return "-" if amount is None else format_number(amount)
        return format_bytes(amount) if self.target == "memory" else format_seconds(amount)

    @property
    def bounds_cost(self) -> bool:
        """True for memory and time, which seek the most expensive setting that fits, not the cheapest good one."""
        return self.target in ("memory", "time")

    @property
    def inside(self) -> str:
        """``within error 0.1``, ``at score 0.9 or more``."""
        return f"at {self} or more" if self.target == "score" else f"within {self}"


def budget_of(**amounts: float | str | None) -> Budget:
    """The one budget that is given: ``error=0.1``, ``memory="64MiB"`` or bytes, ``time="10ms"`` or seconds, or a score.
    Raises UsageError: none or several are given, or one is not a positive amount."""
    given = {target: amount for target in _KINDS if (amount := amounts.get(target)) is not None}
    if len(given) != 1:
        said = "match needs a budget" if not given else f"match takes one budget, not {' and '.join(given)}"
        raise UsageError(f"{said}; give --error 0.1, --memory 64MiB, --time 10ms or --score 0.9")
    ((target, written),) = given.items()
    kind = f"{written!r} is not a {_KINDS[target]}"
    try:
        parse = {"memory": parse_bytes, "time": parse_seconds}.get(target, float)
        limit = parse(written) if isinstance(written, str) else written
    except ValueError as problem:
        raise UsageError(f"--{target}: {kind if target in ('error', 'score') else problem}") from None
    if not 0 < limit < (1 if target == "score" else math.inf):
        raise UsageError(f"--{target}: {kind}")
    return Budget(target, limit)


_KINDS: dict[Target, str] = {
    "error": "relative error above 0 such as 0.1",
    "memory": "number of bytes above 0",
    "time": "number of seconds above 0",
    "score": "score between 0 and 1 such as 0.9",
}


@dataclass(frozen=True, slots=True)
class MeasuredSetting:
    """One setting of one variant as measured, in seconds and bytes; None if not measured."""

    label: str
    value: int | None = None
    """Value of the knob; None for a variant without one."""
    status: Status = Status.OK
    reason: str = ""
    error_kind: str | None = None
    error: float | None = None
    """Median over the draws."""
    error_low: float | None = None
    error_high: float | None = None
    """Ends of the 95 % interval; the error itself if all draws are one."""
    time: float | None = None
    time_low: float | None = None
    time_high: float | None = None
    memory: float | None = None
    score: float | None = None
    """Score of the trained model, the mean over seeds."""
    score_low: float | None = None
    score_high: float | None = None
    """Ends of the 95 % interval over seeds; with one seed, over test examples."""
    family: str = ""
    own_form: str = ""

    @classmethod
    def of(cls, row: Mapping[Any, Any], value: int | None = None) -> MeasuredSetting:
        """The setting of a row of ``results.csv``, without its score (see :mod:`attnbench.results.trainings`)."""
        told: dict[str, Any] = {name: _number(row[column]) for name, column in COLUMN.items()}
        told |= {name: row[name] for name in ("label", "reason", "error_kind", "family", "own_form")}
        told["memory"] = None if told["memory"] is None else int(told["memory"])
        error, *spread = (_number(row[name]) for name in ("rel_error", "rel_error_std", "error_draws"))
        low, high = (None, None) if error is None else error_interval(error, *spread)
        return cls(value=value, status=Status(row["status"]), error=error, error_low=low, error_high=high, **told)

    def columns(self) -> dict[str, Any]:
        return {COLUMN.get(name, name): value for name, value in asdict(self).items()}

    @property
    def spread(self) -> tuple[float, float] | None:
        """Ends of the interval of an error that is more than rounding; None if all draws are equal."""
        if self.error_kind == "exact" or self.error_low is None or self.error_high is None:
            return None
        return None if self.error_low == self.error_high else (self.error_low, self.error_high)

    def amount(self, budget: Budget) -> float | None:
        return {"error": self.error, "memory": self.memory, "time": self.time, "score": self.score}[budget.target]

    def lacks(self, budget: Budget) -> bool:
        learned = budget.target == "error" and self.error_kind == "learned"
        return self.status is Status.OK and self.amount(budget) is None and not learned

    def within(self, budget: Budget) -> bool:
        """True if the budget is met; of an error or a score, by its whole interval."""
        if self.status is not Status.OK:
            return False
        if budget.target == "score":
            return self.score_low is not None and self.score_low >= budget.limit
        amount = self.error_high if budget.target == "error" else self.amount(budget)
        return amount is not None and amount <= budget.limit


def _number(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def scored(point: MeasuredSetting, choice: CountedTrainings) -> MeasuredSetting:
    """The setting with the score of its trainings; none if a training failed, since the others would flatter it."""
    lost = [row for row in choice.rows if not row.ok]
    found = summary(choice)
    if lost or found is None:
        status = lost[0].status if lost else Status.ERROR
        reason = lost[0].reason if lost else "; ".join(choice.notes)
        if found is not None:
            reason = f"{len(lost)} of {len(choice.rows)} trainings failed: {reason}"
        return replace(point, status=status, reason=reason)
    low, high = found.ends or (None, None)
    return replace(point, score=found.over_seeds.mean, score_low=low, score_high=high)


def circumstances(record: Record) -> dict[str, Any]:
    """Columns that all rows of a match share, so that the table describes itself."""
    asked = {"level", "pass", "seq_len", "device", *IN_ROWS} - {"kv_len"}
    return {name: value for name, value in record.to_json().items() if name in asked}
