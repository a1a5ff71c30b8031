"""``match --score``: the knob of each variant is turned until its trained score meets the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnbench.cell import STEPS, Cell, ModelSize, Pass
from attnbench.decision.budget import budget_of
from attnbench.decision.knobs import Entrant, entrants_of
from attnbench.decision.match import Prepared, one_length
from attnbench.decision.trainings import Trainings
from attnbench.errors import UsageError
from attnbench.measure.time import TimingRules
from attnbench.run.plan import Options, make_plan
from attnbench.run.score_question import ScoreQuestion
from attnbench.run.trial import load_all
from attnbench.suite.expand import MAX_CELLS
from attnbench.variant import VARIANTS


@dataclass(frozen=True, slots=True)
class ScoreMatch:
    """What is asked, as it was written; :func:`attnbench.match` says what each field means."""

    variants: Sequence[str]
    score: float | str
    training: ScoreQuestion = ScoreQuestion()
    run: Options = Options()
    """Options of the trainings and of the measuring process; ``cell_timeout`` also limits one look at a setting."""
    pass_: Pass = "training"
    """The pass of the trained model that is timed."""
    most: int | None = None
    min_time: float = 1.0

    def prepare(self) -> Prepared:
        """Load the plug-ins, look up every name, check every value.

        Raises:
            UsageError: a value that makes no sense, or nothing that can be turned.
        """
        budget, asked = budget_of(score=self.score), self.training
        if self.pass_ in STEPS:
            raise UsageError(f"--pass {self.pass_}: the encoder that is trained reads whole sequences; leave it out")
        load_all(self.run.plugins)
        entrants = entrants_of(self.variants, budget, asked.n, causal=asked.causal, most=self.most)
        plan = make_plan(asked.suite("match", self._labels(entrants)), self.run)
        plan = replace(plan, settings=replace(plan.settings, rates=False))
        first = plan.cells[0]
        cell = replace(
            first, suite="match", sweep="match", training=None, measure=("time", "memory"), pass_=self.pass_, seed=0
        )
        rules = TimingRules.lasting(self.min_time, 10)
        trainings = Trainings(plan)
        prepared = Prepared(
            budget,
            entrants,
            cell,
            plan.settings,
            rules,
            self.run.cell_timeout,
            self._about(first),
            unchecked=self.run.unchecked,
            trainings=trainings,
        )
        prepared.same = trainings.columns
        return prepared

    def _labels(self, entrants: Sequence[Entrant]) -> list[str]:
        """Every setting that may be tried, once.

        Raises:
            UsageError: they are more than a run can have.
        """
        settings = sum(len(one.ladder.values) if one.ladder else 1 for one in entrants)
        count = settings * self.training.seeds * len(self.training.rates.split(","))
        if count > MAX_CELLS:
            raise UsageError(f"{count} trainings are within reach, at most {MAX_CELLS}; give a smaller --most")
        specs = [setting for one in entrants for setting in one.settings()]
        return list(dict.fromkeys(VARIANTS.get(spec.name).normalise(spec).label for spec in specs))

    def _about(self, cell: Cell) -> str:
        shape, size, asked = cell.shape, cell.model or ModelSize(), self.training
        model = f"{size.layers} layer{'s' * (size.layers != 1)}, {shape.H} × {shape.D}, feed-forward {size.ffn}"
        trained = f"{asked.steps} steps, {asked.seeds} seed{'s' * (asked.seeds != 1)}"
        causal = ", causal" * shape.causal
        return f"{cell.task}, n = {shape.N}, {model}{causal}, batches of {shape.B}, {trained}, on {cell.device}"


def score_match(given: Mapping[str, Any]) -> ScoreMatch:
    """The question in the arguments of :func:`attnbench.match`, with the memory limit in bytes.

    Raises:
        UsageError: the length is none.
    """
    always = ("steps", "seeds", "rates", "layers", "ffn", "causal", "pretrain")
    sizes = ("batch", "heads", "head_dim", "task")
    asked = {name: given[name] for name in (*always, *sizes) if given[name] is not None}
    if given["n"] is not None:
        asked["n"] = one_length(given["n"])
    options = Options(
        device=given["device"],
        out=Path(given["out"]),
        plugins=tuple(given["plugins"]),
        threads=given["threads"],
        cell_timeout=given["timeout"],
        first_call_timeout=given["first_call_timeout"],
        memory_limit=given["memory_limit"],
        process=given["process"],
        fresh=given["fresh"],
        unchecked=given["unchecked"],
    )
    pass_: Pass = given["pass_"] or "training"
    return ScoreMatch(
        given["variants"],
        given["score"],
        ScoreQuestion(**asked),
        options,
        pass_,
        most=given["most"],
        min_time=given["min_time"],
    )
