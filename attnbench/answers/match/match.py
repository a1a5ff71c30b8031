"""``match``: turn the knob of each variant until all meet one budget, then time the settings found in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from attnbench.answers.match.budget import Budget, MeasuredSetting, circumstances, scored
from attnbench.answers.match.result import Match
from attnbench.answers.match.search import Entrant, FoundSetting, entrants_of, most_tries, search
from attnbench.contract.spec import Spec
from attnbench.contract.variant import VARIANTS
from attnbench.errors import UsageError
from attnbench.harness.compare.compare import LONGEST_ERROR, Comparison, Contest
from attnbench.harness.compare.compare_question import CompareQuestion
from attnbench.harness.compare.length import without_error
from attnbench.harness.outside.isolation import CellFailed, Settings, Worker
from attnbench.harness.outside.trainers import of_any, phases
from attnbench.harness.plan import Options, Plan, make_plan
from attnbench.harness.runner import Watcher, execute, go_on
from attnbench.harness.score.score_question import ScoreQuestion
from attnbench.harness.trial import load_all
from attnbench.harness.wire.protocol import VisitCell
from attnbench.measure.status import Status
from attnbench.measure.time import TimingRules
from attnbench.results.record import Record
from attnbench.results.store import RunFolder
from attnbench.results.trainings import choose, trained
from attnbench.suite.axes import defaults
from attnbench.suite.cell import STEPS, Cell, ModelSize
from attnbench.suite.expand import MAX_CELLS
from attnbench.suite.ranges import parse_range
from attnbench.text import quantity

_LOOK = 0.1
"""Seconds of timing for one setting of the search; the settings found are timed in turns."""
_OF_TRAININGS = ("task", "layers", "ffn", "positions", "steps", "protocol", "pretrain_steps", "guide")
"""Columns of the rules that all trainings share."""


def one_length(written: str | int | Sequence[int]) -> int:
    """A length as typed. Raises UsageError: not a number, several, or 0."""
    lengths = parse_range(written)
    if len(lengths) > 1 or not lengths[0]:
        said = "match takes one length" if lengths[0] else "a length is at least 1"
        raise UsageError(f"--n {written}: {said}; write --n {lengths[0] or 1024}")
    return lengths[0]


@dataclass(slots=True)
class Trainings:
    """Trains settings on demand, each with every seed, and keeps the results in one run folder."""

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
        return {name: row[name] for name in _OF_TRAININGS} | {"seeds": len({cell.seed for cell in self.plan.cells})}

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


OnTry = Callable[[str, MeasuredSetting], None]


@dataclass(slots=True)
class ReadyMatch:
    """A checked question, ready to be answered."""

    budget: Budget
    entrants: list[Entrant]
    cell: Cell
    settings: Settings
    rules: TimingRules
    timeout: float
    """Seconds for one try, and for each variant that takes turns at the end."""
    about: str
    unchecked: bool = False
    """True if settings take turns even if they break laws."""
    trainings: Trainings | None = None
    warnings: list[str] = field(default_factory=list)
    same: dict[str, Any] = field(default_factory=dict)

    def most_tries(self, entrant: Entrant) -> int:
        ladder = entrant.ladder
        return 1 if ladder is None else most_tries(ladder.climb())

    def answer(
        self,
        on_search: Callable[[str], None] = lambda label: None,
        on_try: OnTry = lambda label, point: None,
    ) -> Match:
        """Search for every variant, then time the settings found in turns.

        ``on_search`` is called with each variant before its search, and with an empty text before the turns; ``on_try``
        with the variant and each measured setting. Raises WorkerFailed, StoreError and its kinds, and CorruptResults.
        """
        found = []
        with Worker(self.settings) as worker:
            environment = dict(worker.start())
            for entrant in self.entrants:
                on_search(entrant.spec.label)
                found.append(self._search(worker, entrant, on_try))
        on_search("")
        trained = self.trainings.doubts(self.budget) if self.trainings else []
        match = Match(self.budget, found, self.about, dict(self.same), [*self.warnings, *trained], environment)
        match.comparison = self._turns(found)
        if match.comparison:
            match.found = [one.in_turns(match.sides()) for one in found]
            match.warnings += match.comparison.warnings
        if self.trainings:
            match.kept = self.trainings.folder
        return match

    def _search(self, worker: Worker, entrant: Entrant, on_try: OnTry) -> FoundSetting:
        label, ladder = entrant.spec.label, entrant.ladder
        knob = ladder.knob.option if ladder else ""
        if entrant.hopeless:
            return FoundSetting(label, knob, (), None, entrant.hopeless)

        def measure(spec: Spec, value: int | None = None) -> MeasuredSetting:
            point = MeasuredSetting.of(self._look(worker, replace(self.cell, variant=spec)).to_json(), value)
            if self.trainings is not None and point.status is Status.OK:
                point = self.trainings.score(worker, spec, point)
            on_try(label, point)
            return point

        if ladder is None:
            point = measure(entrant.spec)
            return FoundSetting(label, "", (point,), point if point.within(self.budget) else None, entrant.note)
        return search(ladder, self.budget, lambda value: measure(ladder.at(value), value))

    def _look(self, worker: Worker, cell: Cell) -> Record:
        rules = replace(TimingRules.lasting(min(_LOOK, self.rules.min_time), 5), min_samples=6)
        try:
            record = VisitCell(cell, rules, unchecked=self.unchecked).ask(worker, self.timeout).record
        except CellFailed as failed:
            if not failed.late or self.budget.target == "error" or "error" not in cell.measure:
                remedy = "; raise --timeout" if failed.late else ""
                record = Record.of(cell, failed.status, failed.reason + remedy)
            else:  # perhaps it was exact attention that took so long
                record = self._look(worker, without_error(cell))
                if record.status is Status.OK and "error" in self.cell.measure:
                    self.cell = without_error(self.cell)
                    self.warnings.append("no errors: exact attention in float64 takes too long at this length")
        else:
            if worker.traces:
                said = f"{cell.variant.label} {worker.traces}, so the next one starts in a fresh process"
                self.warnings.append(said)
        if record.status is Status.DISTURBED and self.budget.target != "time":
            record = replace(record, status=Status.OK)  # only its time is lost, and the turns measure that
        self.same = {**circumstances(record), **self.same}
        return record

    def _turns(self, found: Sequence[FoundSetting]) -> Comparison | None:
        cells: dict[str, Cell] = {}
        for entrant, one in zip(self.entrants, found, strict=True):
            if one.chosen is not None:
                value = one.chosen.value
                spec = entrant.spec if entrant.ladder is None or value is None else entrant.ladder.at(value)
                cell = replace(self.cell, variant=spec, measure=("time", "memory"))
                cells.setdefault(cell.entry.normalise(spec).label, cell)
        if len(cells) < 2:
            return None
        n, limit = self.cell.shape.N, self.timeout * len(cells)
        return Contest(list(cells.values()), [n], self.settings, self.rules, limit, self.unchecked).answer()


def prepare_costs(variants: Sequence[str], budget: Budget, given: Mapping[str, Any]) -> ReadyMatch:
    """Settings to be measured at one error, memory or time.

    ``given`` are the options of :func:`attnbench.match`, with the memory limit in bytes. Loads the plug-ins. Raises
    UsageError: a value that makes no sense, or nothing that can be turned.
    """
    n = one_length(4096 if given["n"] is None else given["n"])
    how = {**given, "error": True, "rates": False, "pass_": given["pass_"] or "forward"}
    asked = replace(CompareQuestion.of(variants, how), lengths=n)
    at = defaults() | dict(asked.axes)
    logits = at["batch"] * at["heads"] * n**2
    if budget.target == "error" and asked.level != "operator":
        raise UsageError(f"errors are measured for attention alone; leave --level {asked.level} out")
    if budget.target == "error" and logits > LONGEST_ERROR:
        raise UsageError(f"--n {n}: exact attention in float64 takes too long; give a shorter --n")
    load_all(asked.plugins)
    entrants = entrants_of(variants, budget, n, causal=at["causal"], most=given["most"], level=asked.level)
    contest = replace(asked, variants=[entrants[0].spec.label]).prepare(alone=True)
    cell = replace(contest.cells[0], suite="match", sweep="match", error_draws=given["draws"])
    cell = without_error(cell) if logits > LONGEST_ERROR else cell
    about = f"n = {n}, {contest}"
    return ReadyMatch(budget, entrants, cell, contest.settings, contest.rules, asked.timeout, about, asked.unchecked)


def prepare_scores(variants: Sequence[str], budget: Budget, given: Mapping[str, Any]) -> ReadyMatch:
    """Settings to be trained at one score, as :func:`prepare_costs`; each is one model of the command score."""
    pass_ = given["pass_"] or "training"
    if pass_ in STEPS:
        raise UsageError(f"--pass {pass_}: the encoder that is trained reads whole sequences; leave it out")
    named = {one.name: given[one.name] for one in fields(ScoreQuestion) if given.get(one.name) is not None}
    asked = ScoreQuestion(**named | ({} if given["n"] is None else {"n": one_length(given["n"])}))
    shared = ("device", "threads", "first_call_timeout", "memory_limit", "process", "fresh", "unchecked")
    run = Options(
        out=Path(given["out"]),
        plugins=tuple(given["plugins"]),
        cell_timeout=given["timeout"],
        **{name: given[name] for name in shared},
    )
    load_all(run.plugins)
    entrants = entrants_of(variants, budget, asked.n, causal=asked.causal, most=given["most"])
    plan = make_plan(asked.suite("match", _labels(entrants, asked)), run)
    plan = replace(plan, settings=replace(plan.settings, rates=False))
    first, trainings = plan.cells[0], Trainings(plan)
    measured: dict[str, Any] = {"training": None, "measure": ("time", "memory"), "pass_": pass_, "seed": 0}
    return ReadyMatch(
        budget,
        entrants,
        replace(first, suite="match", sweep="match", **measured),
        plan.settings,
        TimingRules.lasting(given["min_time"], 10),
        run.cell_timeout,
        _about(first, asked),
        unchecked=run.unchecked,
        trainings=trainings,
        same=trainings.columns,
    )


def _labels(entrants: Sequence[Entrant], asked: ScoreQuestion) -> list[str]:
    settings = sum(len(one.ladder.values) if one.ladder else 1 for one in entrants)
    count = settings * asked.seeds * len(asked.rates.split(","))
    if count > MAX_CELLS:
        raise UsageError(f"{count} trainings are within reach, at most {MAX_CELLS}; give a smaller --most")
    specs = [setting for one in entrants for setting in one.settings()]
    return list(dict.fromkeys(VARIANTS.get(spec.name).normalise(spec).label for spec in specs))


def _about(cell: Cell, asked: ScoreQuestion) -> str:
    shape, size = cell.shape, cell.model or ModelSize()
    model = f"{quantity(size.layers, 'layer')}, {shape.H} × {shape.D}, feed-forward {size.ffn}"
    trained = f"{asked.steps} steps, {quantity(asked.seeds, 'seed')}"
    causal = ", causal" * shape.causal
    return f"{cell.task}, n = {shape.N}, {model}{causal}, batches of {shape.B}, {trained}, on {cell.device}"
