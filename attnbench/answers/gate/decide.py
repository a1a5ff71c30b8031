"""Compare a new run with older ones, and decide which cells are worse beyond doubt."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, Literal

from attnbench.answers.gate.join import RowPair, in_turn, join, ratios_of_times
from attnbench.answers.gate.pace import as_measured, at_one_speed
from attnbench.answers.gate.phrases import address
from attnbench.answers.gate.verdict import ENOUGH_ROUNDS, VERDICTS, Measure, Ruling, Tolerance, Verdict, judge, times_of
from attnbench.errors import Exit, ResultsError, UsageError, any_of, did_you_mean
from attnbench.measure.machine import PRODUCTS
from attnbench.measure.statistics import FEWEST_VISITS
from attnbench.measure.status import Status
from attnbench.results.key import NAMES, Key
from attnbench.results.manifest import BESIDE, RUN_ID
from attnbench.results.measurements import MeasuredRun, Visits, differing_facts, load, refuse_copies
from attnbench.results.record import Record
from attnbench.suite.select import matches
from attnbench.text import quantity

if TYPE_CHECKING:
    from attnbench.harness.runner import Watcher

REFERENCE = "softmax"
"""The default divisor of times from another machine."""


@dataclass(frozen=True, slots=True)
class GateQuestion:
    """Options of a comparison of runs."""

    measures: tuple[Measure, ...] = ("time", "memory", "error", "status")
    limits: Tolerance = Tolerance()
    relative_to: str | None = None
    """An unchanged variant: ratios of times are divided by the median of its own."""
    select: str | None = None
    """An expression as after ``-k``; other cells are left out."""
    missing: Literal["fail", "warn", "ignore"] = "warn"
    other_machine: Literal["refuse", "ratios"] = "refuse"
    strict: bool = False
    """True if a cell that may be worse, but need not be, fails as well."""
    as_measured: bool = False
    """True if times are judged as they are, and not at one speed of the machine."""
    closes: bool = True
    """True if a worse cell fails, as in ``gate``; in ``diff`` nothing fails."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The findings, the worst first, and facts about all of them together."""

    question: GateQuestion
    new: MeasuredRun
    olds: tuple[MeasuredRun, ...]
    findings: tuple[Ruling, ...]
    drift: float | None
    """The drift that time ratios were divided by; None if they were not."""
    common: float | None
    """Median ratio of all times, before any division; None if no two times were compared."""
    times: int
    """Number of ratios behind ``common``."""
    rounds: int | None
    """Fewest visits of a timed cell; None without times."""
    few: int
    """Number of timed cells with fewer than five visits."""
    unit: str = "s"
    """Unit of times: seconds, or the variant that they were divided by."""
    paces: tuple[float, ...] = ()
    """Share of the machine's full speed in the new run and in each older one; empty if times are judged as measured."""
    known: int = 0
    """Number of ratios of times with an interval, also those that others are divided by; these hold together."""
    between: float | None = None
    """Spread between runs of one program, on the log scale; None if the older runs do not show it."""
    unjudged: tuple[Measure, ...] = ()
    """Measures of which no number could be judged."""

    @property
    def failures(self) -> list[Ruling]:
        return [one for one in self.findings if self.fails(one)]

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def undecided(self) -> bool:
        """True if no number of a measure could be judged, so that passing means nothing for it."""
        return self.passed and bool(self.unjudged)

    @property
    def exit_code(self) -> Exit:
        return Exit.OK if self.passed else Exit.FAILED

    def counts(self, findings: Sequence[Ruling] | None = None) -> dict[Verdict, int]:
        found = Counter(one.verdict for one in (self.findings if findings is None else findings))
        return {verdict: found[verdict] for verdict in VERDICTS if found[verdict]}

    def seems_worse(self, one: Ruling) -> bool:
        """True if it is not known to be worse than the limit, but its ratio is."""
        limits = self.question.limits
        return one.at_risk and (one.ratio or 0.0) > (limits.error if one.measure == "error" else limits.time)

    def fails(self, one: Ruling) -> bool:
        if not self.question.closes:
            return False
        if one.verdict == "missing":
            return self.question.missing == "fail"
        return one.is_worse or (self.question.strict and one.at_risk)


def read_runs(paths: Sequence[Path]) -> list[MeasuredRun]:
    """Load runs, none of them twice. Raises UsageError: two paths lead to the same run, or to copies of one. Raises
    ResultsError, CorruptResults: as :func:`~attnbench.results.measurements.load`."""
    runs = [load(path) for path in paths]
    refuse_copies((run.path, run.environment) for run in runs)
    return runs


def decide(new: MeasuredRun, olds: Sequence[MeasuredRun], question: GateQuestion) -> Decision:
    """Compare ``new`` with all of ``olds`` together. Raises UsageError: the runs may not be compared, nothing is
    selected, or the reference variant is missing. Raises ResultsError: they have no row in common."""
    measures, unit = question.measures, "s"
    beside = is_beside(new, olds)
    elsewhere = not beside and _other_machines(new, olds, question)
    if (elsewhere or question.relative_to or question.as_measured) and "time" not in measures:
        of_times = "--other-machine ratios, --relative-to and --as-measured"
        raise UsageError(f"--on {','.join(measures)}: {of_times} judge times; add time")
    runs, paces = [new, *olds], list[float]()
    if "time" in measures:
        paced = None if question.as_measured or beside else at_one_speed(runs, alike=not elsewhere)
        runs, paces = paced or ([as_measured(run) for run in runs], paces)
    if elsewhere:
        unit = question.relative_to or REFERENCE
        runs, measures = [over(run, unit) for run in runs], ("time",)
    new, *olds = runs
    chosen = question.select
    every = [in_turn(pair) for pair in join(new, olds)] if beside else join(new, olds)
    pairs = [pair for pair in every if chosen is None or matches(chosen, address(pair.shown))]
    if not pairs:
        example = address(next(iter(new.rows.values())))
        raise UsageError(f"-k {(chosen or '')[:60]!r}: no cell matches; a cell is called {example}")
    both = [pair for pair in pairs if pair.old and pair.new]
    if not both:
        raise ResultsError(f"{new.path} and {olds[0].path} have no cell in common{_what_keeps_apart(pairs)}")
    reference = unchanged(every, question.relative_to) if question.relative_to and not elsewhere else []
    # Runs that took turns differ by nothing but their environments.
    times = times_of(both, reference, between=(0.0, 1) if beside else None)
    timed = [pair for pair in both if pair.times]
    findings = [one for pair in pairs for one in judge(pair, measures, question.limits, times)]
    known = {one.measure for one in findings if one.is_judged}
    usual = {*GateQuestion().measures} <= {*measures}  # a measure that no run has is told only if --on names few
    held = {one.measure for one in findings} if usual else measures
    if question.missing == "ignore":
        findings = [one for one in findings if one.verdict != "missing"]
    return Decision(
        question=question,
        new=new,
        olds=tuple(olds),
        findings=ordered(findings),
        drift=times.drift if reference else None,
        common=median(ratios_of_times(timed)) if timed else None,
        times=len(timed),
        rounds=min((pair.rounds for pair in timed), default=None),
        few=sum(pair.rounds < ENOUGH_ROUNDS for pair in timed),
        unit=unit,
        paces=tuple(paces),
        known=len(times.ratios),
        between=times.between,
        unjudged=tuple(one for one in measures if one in held and one not in known),
    )


def is_beside(new: MeasuredRun, olds: Sequence[MeasuredRun]) -> bool:
    """True if there is one older run, and each cell was measured in turn with the new one (``run --beside``)."""
    run_id, beside = ({run.environment.get(name) for run in (new, *olds)} for name in (RUN_ID, BESIDE))
    return len(olds) == 1 and bool((run_id & beside) - {None})


def _other_machines(new: MeasuredRun, olds: Sequence[MeasuredRun], question: GateQuestion) -> bool:
    elsewhere = False
    for old in olds:
        facts = differing_facts(new, old)
        if not facts:
            continue
        of_the_method = [fact for fact in facts if fact.startswith("method_version:")]
        if question.other_machine == "ratios" and of_the_method:
            facts = of_the_method  # ratios would allow the others
        said = f"{new.path} and {old.path} differ in {'; '.join(facts)}"
        if of_the_method:
            raise UsageError(f"{said}: numbers of two methods are not comparable; measure both again")
        if question.other_machine == "refuse":
            raise UsageError(f"{said}: {_remedy(facts, old)}, or give --other-machine ratios")
        elsewhere = True
    return elsewhere


def _remedy(facts: Sequence[str], old: MeasuredRun) -> str:
    kinds = dict.fromkeys(re.split("[: ]", fact)[0].replace("python", "Python") for fact in facts)
    own = dict.fromkeys(PRODUCTS, f"--fresh --like {old.path}")
    own |= {"threads": f"--threads {old.environment.get('threads')}", "variable": "these variables as they were"}
    versions = [name for name in kinds if name in ("Python", "torch")]
    both = " on one machine" * bool(kinds.keys() - own.keys() - {*versions})
    both += f" with one version of {' and '.join(versions)}" * bool(versions)
    again = " and ".join(dict.fromkeys(own[name] for name in kinds if name in own))
    ways = [f"measure both{both}"] * bool(both) + [f"measure the new run again with {again}"] * bool(again)
    return "a probe chose otherwise; " * (not kinds.keys().isdisjoint(PRODUCTS)) + ", and ".join(ways)


def _what_keeps_apart(pairs: Sequence[RowPair]) -> str:
    """The columns that keep all cells from having a counterpart, or else the remedy."""
    new = [pair.key for pair in pairs if pair.old is None]
    old = [pair.key for pair in pairs if pair.new is None]
    alone = []
    for name in NAMES:
        hidden = dict.fromkeys([name, *(["kv_len", "test_len"] if name == "seq_len" else [])])
        if {key.but(**hidden) for key in new} & {key.but(**hidden) for key in old}:
            alone.append(name.rstrip("_"))
    return f": they differ in {any_of(alone)}" if alone else "; compare runs of the same suite"


def ordered(findings: Iterable[Ruling]) -> tuple[Ruling, ...]:
    """The worst first."""

    def badness(one: Ruling) -> tuple[int, bool, float]:
        size = abs(math.log(one.ratio)) if one.ratio and math.isfinite(one.ratio) else math.inf if one.ratio else 0.0
        return VERDICTS.index(one.verdict), not one.at_risk, -size

    return tuple(sorted(findings, key=badness))


def unchanged(pairs: Sequence[RowPair], variant: str) -> list[RowPair]:
    """The pairs of ``variant``, by name or label, that have two times. Raises UsageError: there is none; the message
    lists variants that have some."""
    timed = [pair for pair in pairs if pair.times]
    found = [pair for pair in timed if _is(pair.shown, variant)]
    if not found:
        known = list(dict.fromkeys(pair.shown.variant for pair in timed))
        hint = did_you_mean(variant, known) or f"; there are {', '.join(known) or 'none'}"
        raise UsageError(f"--relative-to {variant!r}: no variant of this name was timed in both runs{hint}")
    return found


def over(run: MeasuredRun, variant: str) -> MeasuredRun:
    """The run with every time divided by that of ``variant`` in the same circumstances, and nothing else in it.

    Each round's two times are divided, since one process measured both. Keys lose the facts of the machine: threads and
    the state of the process. Raises UsageError if ``variant`` was timed nowhere in this run, or nothing beside it.
    """
    timed = {key: row for key, row in run.rows.items() if row.status is Status.OK and row.time_median_s}
    rows = {key.but(threads=None, process=""): row for key, row in timed.items()}
    reference = {_circumstances(key): row for key, row in rows.items() if _is(row, variant)}
    if not reference:
        raise UsageError(f"--relative-to {variant!r}: {run.path} has no time of this variant; name another one")
    found, visits = {}, {}
    for key, row in rows.items():
        by = reference.get(_circumstances(key))
        if by is not None and not _is(row, variant):
            found[key], visits[row.cell_id] = _divided(row, by), _over(run.visits[row.cell_id], run.visits[by.cell_id])
    if not found:
        raise UsageError(
            f"--relative-to {variant!r}: {run.path} has no other time in its circumstances; name another variant"
        )
    return replace(run, rows=found, visits=visits)


def _is(row: Record, variant: str) -> bool:
    return variant in (row.variant, row.label)


def _circumstances(key: Key) -> Key:
    return key.but(variant="", options="")


def _divided(row: Record, by: Record) -> Record:
    assert row.time_median_s
    assert by.time_median_s
    return replace(row, time_median_s=row.time_median_s / by.time_median_s, time_ci_low_s=None, time_ci_high_s=None)


def _over(one: Visits, by: Visits) -> Visits:
    seconds = {round_: time / by.seconds[round_] for round_, time in one.seconds.items() if round_ in by.seconds}
    without = {0: median(one.seconds.values()) / median(by.seconds.values())}  # one visit has no interval
    return Visits(seconds or without, one.slower - by.slower, one.doubt + by.doubt)


def doubtful(decision: Decision) -> list[str]:
    """Ids of the new run's cells with a time that is or seems slower, and that more rounds may decide."""
    times = [one for one in decision.findings if one.measure == "time" and (one.is_worse or decision.seems_worse(one))]
    rounds = [(one.pair.new, sum(len(old.seconds) for old in one.pair.old_visits)) for one in times]
    return [row.cell_id for row, before in rounds if row and before >= FEWEST_VISITS]


def confirm(
    first: Decision,
    new: MeasuredRun,
    olds: Sequence[MeasuredRun],
    rounds: int,
    *,
    plugins: Sequence[str] = (),
    watcher: Watcher | None = None,
) -> Decision:
    """Measure ``rounds`` more rounds of the doubtful cells in the new run's folder, and judge by all rounds.

    As in ``compare``, the first look only chooses what more processes measure, and the interval over all of them
    decides. A cell is slower only if the new rounds alone are too, on average.

    Raises UsageError as :func:`attnbench.harness.runner.more_rounds`, StoreError and its kinds, and
    CorruptResults.
    """
    from attnbench.harness.runner import more_rounds

    divisor = first.question.relative_to if first.unit == "s" else first.unit
    beside = [row.cell_id for row in new.rows.values() if divisor and row.time_median_s and _is(row, divisor)]
    more_rounds(new.path, [*doubtful(first), *beside], rounds, plugins=plugins, watcher=watcher)
    second = decide(load(new.path), olds, first.question)
    before = {one.pair.key: one for one in first.findings if one.measure == "time"}
    findings = [_of_both(before.get(one.pair.key), one, second) for one in second.findings]
    return replace(second, findings=ordered(findings))


def _of_both(first: Ruling | None, one: Ruling, second: Decision) -> Ruling:
    """A time that seemed slower is so only if its new rounds alone say so too."""
    if one.measure != "time" or first is None or not one.old or not (first.is_worse or second.seems_worse(first)):
        return one
    known = {round_ for visits in first.pair.new_visits for round_ in visits.seconds}
    new = [at for visits in one.pair.new_visits for round_, at in visits.seconds.items() if round_ not in known]
    if not new:
        return one
    is_slower = one.is_worse and geometric_mean(new) / one.old / (second.drift or 1.0) > second.question.limits.time
    said = f"seemed slower, and with {quantity(len(new), 'more round')} is {'' if is_slower else 'not '}beyond doubt"
    told = replace(one, note="; ".join(filter(None, [said, one.note])))
    return replace(told, verdict="unsure", at_risk=True) if one.is_worse and not is_slower else told
