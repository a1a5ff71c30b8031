"""What a match found: a setting of each variant, paired times, and every setting that was tried as a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnbench.decision.answers import answers
from attnbench.decision.budget import Budget, Point
from attnbench.decision.search import Found
from attnbench.run.compare import Comparison, Side
from attnbench.status import Status


@dataclass(slots=True)
class Match:
    """What was found for each variant, and how the settings found compare."""

    budget: Budget
    found: list[Found]
    about: str = ""
    """The circumstances that all variants share, in one line."""
    same: Mapping[str, Any] = field(default_factory=dict)
    """The same as columns."""
    warnings: list[str] = field(default_factory=list)
    environment: Mapping[str, Any] = field(default_factory=dict)
    comparison: Comparison | None = None
    """Paired times of the settings found; None where there are fewer than two, or they are from a finished run."""
    kept: Path | None = None
    """The folder of the trainings behind the scores."""

    @property
    def ok(self) -> bool:
        """Whether anything could be measured."""
        return any(point.status is Status.OK for one in self.found for point in one.tries)

    def sides(self) -> dict[str, Side]:
        """Label -> what the turns gave."""
        rows = [row for pair in self.comparison.rows.values() for row in pair] if self.comparison else []
        return {side.record.label: side for row in rows for side in (row.a, row.b)}

    def sentences(self) -> list[str]:
        """The answer, one sentence for each variant and then for what they have in common."""
        return answers(self)

    def to_rows(self) -> list[dict[str, Any]]:
        """A row for each setting that was measured, in that order; seconds and bytes, None where not measured."""
        return rows_of(self.budget, self.found, self.same)

    def to_json(self) -> dict[str, Any]:
        """The answers, all rows, the paired comparison, warnings and the environment."""
        return {
            "budget": {"target": self.budget.target, "limit": self.budget.limit},
            "answers": self.sentences(),
            "rows": self.to_rows(),
            "comparison": self.comparison.to_rows() if self.comparison else [],
            "warnings": self.warnings,
            "trainings": None if self.kept is None else str(self.kept),
            "environment": dict(self.environment),
        }


def rows_of(budget: Budget, found: Iterable[Found], same: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of match.csv: every setting that was measured; a variant without one has a row that says why."""
    rows = []
    for one in found:
        nothing = Point(one.variant, None, Status.UNSUPPORTED, one.note)
        for point in one.tries or (nothing,):
            rows.append(
                {
                    "target": budget.target,
                    "budget": budget.limit,
                    "variant": one.variant,
                    "knob": one.knob,
                    "value": point.value,
                    "label": point.label,
                    "status": str(point.status),
                    "reason": point.reason,
                    "error_kind": point.error_kind,
                    "error": point.error,
                    "error_low": point.error_low,
                    "error_high": point.error_high,
                    "time_median_s": point.time,
                    "time_ci_low_s": point.time_low,
                    "time_ci_high_s": point.time_high,
                    "peak_bytes": point.memory,
                    "score": point.score,
                    "score_low": point.score_low,
                    "score_high": point.score_high,
                    "reached": point.within(budget),
                    "chosen": point == one.chosen,
                    "tries": len(one.tries),
                    "family": point.family,
                    "own_form": point.own_form,
                    **same,
                }
            )
    return rows
