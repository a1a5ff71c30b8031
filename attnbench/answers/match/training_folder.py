"""The trainings behind the settings of ``match --score``, all in one run folder for any target of a question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attnbench.answers.match.budget import Budget, MeasuredSetting
from attnbench.contract.spec import Spec
from attnbench.contract.variant import VARIANTS
from attnbench.harness.outside.isolation import Worker
from attnbench.harness.outside.trainers import of_any, phases
from attnbench.harness.plan import Plan
from attnbench.harness.runner import Watcher, execute, go_on
from attnbench.measure.status import Status
from attnbench.results.intervals import summary
from attnbench.results.record import Record
from attnbench.results.store import RunFolder
from attnbench.results.trainings import CountedTrainings, choose, trained
from attnbench.suite.cell import Cell

_ALIKE = ("task", "layers", "ffn", "positions", "steps", "protocol", "pretrain_steps", "guide")
"""Columns of the rules that all trainings share."""


@dataclass(slots=True)
class Trainings:
    """Trains settings on demand, each with every seed, and keeps the results."""

    plan: Plan
    watcher: Watcher = field(default_factory=Watcher)
    notes: list[str] = field(default_factory=list)
    folder: Path | None = None
    _chance: float | None = None

    @property
    def of_one_setting(self) -> int:
        first, late = phases(next(iter(self._settings().values())))
        return len(first) + len({of_any(cell) for cell in late})

    @property
    def columns(self) -> dict[str, Any]:
        row = Record.of(self.plan.cells[0], Status.OK).to_json()
        return {name: row[name] for name in _ALIKE} | {"seeds": len({cell.seed for cell in self.plan.cells})}

    def score(self, worker: Worker, spec: Spec, point: MeasuredSetting) -> MeasuredSetting:
        """The setting with its score, or how its trainings failed.

        ``worker``, the measuring process, is stopped meanwhile, since trainings have processes of their own. Finished
        trainings survive KeyboardInterrupt. Raises StoreError and its kinds, and CorruptResults.
        """
        mine = frozenset(cell.cell_id for cell in self._settings()[_normal(spec)])
        plan = replace(self.plan, only=mine)
        if self.folder is None:
            opened, rows = execute(plan, self.watcher, worker)
            self.folder = opened.path
        else:
            rows = go_on(plan, RunFolder(self.folder), worker, self.watcher)
        (choice,) = choose(trained(row for row in rows if row.cell_id in mine))
        found = scored(point, choice)
        chances = [row.chance for row in choice.rows if row.chance is not None]
        self._chance = chances[0] if chances else self._chance
        self.notes += [f"{point.label} {note}" for note in choice.notes if found.status is Status.OK]
        return found

    def doubts(self, budget: Budget) -> list[str]:
        """Notes that weaken the answer, on single settings and on the target."""
        if self._chance is not None and budget.limit <= self._chance:
            said = f"always the same answer scores {self._chance:.3f}, so that {budget} asks for nothing; raise --score"
            return [said, *self.notes]
        return self.notes

    def _settings(self) -> Mapping[Spec, Sequence[Cell]]:
        found: dict[Spec, list[Cell]] = {}
        for cell in self.plan.cells:
            found.setdefault(_normal(cell.variant), []).append(cell)
        return found


def _normal(spec: Spec) -> Spec:
    return VARIANTS.get(spec.name).normalise(spec)


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
