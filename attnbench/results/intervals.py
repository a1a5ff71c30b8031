"""Intervals of scores over seeds, paired differences, and the variants that learnt anything.

Every interval is Student's t over seeds at 95 % (Student 1908, "The probable error of a mean"). Those of differences
in one table hold together (Bonferroni): of twenty suites of equals, one at most holds a difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from attnbench.measure.statistics import student
from attnbench.results.trainings import CountedTrainings, Setting
from attnbench.text import quantity

REFERENCE, NO_MIXING = "softmax", "identity"
"""The reference variant, and the variant that mixes no tokens."""
MEAN = "mean of the tasks"

Verdict = Literal["better", "worse", "no difference found", "withheld"]


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds and the ends of its 95 % interval, which are None with one seed."""

    mean: float
    low: float | None
    high: float | None


def interval(
    values: Iterable[float], bounds: tuple[float, float] = (0.0, 1.0), *, grain: float = 0.0, family: int = 1
) -> Interval:
    """Student's t-interval of the mean, cut to ``bounds``. Raises ValueError without values.

    Args:
        family: how many intervals hold together with 95 %.
        grain: the least difference that could be seen; the standard deviation counts as at least this much. On few
            examples two seeds often agree exactly, and their interval would have no width.
    """
    ordered = sorted(values)  # so that the order of seeds changes no digit
    n = len(ordered)
    if not n:
        raise ValueError("no values, no mean")
    mean = math.fsum(ordered) / n
    if n == 1:
        return Interval(mean, None, None)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / (n - 1))
    half = student(n - 1, max(1, family)) * max(deviation, grain) / math.sqrt(n)
    return Interval(mean, max(mean - half, bounds[0]), min(mean + half, bounds[1]))


@dataclass(frozen=True, slots=True)
class Summary:
    """Scores of one label on one task, or averaged over tasks, by seed."""

    label: str
    variant: str
    family: str
    task: str
    setting: Setting
    rate: float | None
    by_seed: Mapping[int, float]
    grain: float
    chance: float | None
    params_ratio: float | None
    state_bytes: float | None
    of_test: tuple[float, float] | None
    """Interval of the score over test examples, if there is one seed; None otherwise."""
    failed: int = 0
    notes: tuple[str, ...] = ()

    @property
    def over_seeds(self) -> Interval:
        return interval(self.by_seed.values(), grain=self.grain)

    @property
    def ends(self) -> tuple[float, float] | None:
        """Ends of the interval over seeds; with one seed, of the interval over test examples."""
        found = self.over_seeds
        return self.of_test if found.low is None or found.high is None else (found.low, found.high)

    @property
    def least(self) -> float:
        return min(self.by_seed.values())

    @property
    def most(self) -> float:
        return max(self.by_seed.values())


def summary(choice: CountedTrainings) -> Summary | None:
    """Summary of the trainings that count; None if none ended ok."""
    ok = sorted((one for one in choice.rows if one.ok), key=lambda one: one.seed)
    if not ok:
        return None
    first = ok[0]
    single = len(ok) == 1 and first.score_low is not None and first.score_high is not None
    return Summary(
        label=choice.label,
        variant=first.variant,
        family=first.family,
        task=choice.problem[0],
        setting=choice.problem[1],
        rate=choice.rate,
        by_seed={one.seed: float(one.score or 0.0) for one in ok},
        grain=max(one.grain for one in ok),
        chance=first.chance,
        params_ratio=first.params_ratio,
        state_bytes=first.state_bytes,
        of_test=(float(first.score_low or 0.0), float(first.score_high or 0.0)) if single else None,
        failed=len(choice.rows) - len(ok),
        notes=choice.notes,
    )


def over_tasks(parts: Sequence[Summary]) -> Summary | None:
    """One label's mean over its tasks, for each seed; None if a task lacks a seed that another has."""
    if not parts or len({frozenset(one.by_seed) for one in parts}) > 1:
        return None
    by_seed = {seed: math.fsum(one.by_seed[seed] for one in parts) / len(parts) for seed in parts[0].by_seed}
    known = [one.chance for one in parts if one.chance is not None]
    return replace(
        parts[0],
        task=MEAN,
        rate=None,
        by_seed=by_seed,
        grain=math.fsum(one.grain for one in parts) / len(parts),
        chance=math.fsum(known) / len(known) if len(known) == len(parts) else None,
        of_test=None,
        failed=sum(one.failed for one in parts),
        notes=(),
    )


@dataclass(frozen=True, slots=True)
class Difference:
    """Score of one label minus that of another, seed by seed."""

    label: str
    reference: str
    seeds: tuple[int, ...]
    of: Interval | None
    """The mean difference and its interval; None without a common seed."""

    @property
    def verdict(self) -> Verdict:
        """``better`` or ``worse`` only where the interval excludes 0; ``withheld`` with fewer than two common seeds."""
        if self.of is None or self.of.low is None or self.of.high is None:
            return "withheld"
        return "better" if self.of.low > 0 else "worse" if self.of.high < 0 else "no difference found"


def comparisons(tables: Iterable[tuple[Sequence[Summary], Summary | None]]) -> int:
    """Number of differences with an interval.

    Each table has the summaries of a problem, or the means over several, and the reference among them.
    """
    return sum(
        one is not reference and len(one.by_seed.keys() & reference.by_seed.keys()) > 1
        for parts, reference in tables
        if reference is not None
        for one in parts
    )


def joint(family: int) -> str:
    """``joint 95 % over 12 comparisons``, as written under a table."""
    return f"joint 95 % over {quantity(family, 'comparison')}"


def difference(one: Summary, reference: Summary, family: int = 1) -> Difference:
    """The difference paired by seed: trainings with the same seed saw the same examples in the same order.

    The intervals of ``family`` differences hold together (:func:`comparisons`). Raises ValueError for different
    problems.
    """
    if (one.task, one.setting) != (reference.task, reference.setting) and one.task != MEAN:
        raise ValueError(f"{one.label} on {one.task} and {reference.label} on {reference.task} were not trained alike")
    seeds = tuple(sorted(one.by_seed.keys() & reference.by_seed.keys()))
    grain = max(one.grain, reference.grain)
    differences = [one.by_seed[seed] - reference.by_seed[seed] for seed in seeds]
    found = interval(differences, (-1.0, 1.0), grain=grain, family=family) if seeds else None
    return Difference(one.label, reference.label, seeds, found)


def floor_of(parts: Iterable[Summary]) -> float | None:
    """The score that only mixing tokens can exceed: the upper end of identity's interval, else chance."""
    parts = list(parts)
    still = next((one for one in parts if one.variant == NO_MIXING), None)
    if still is not None:
        return still.ends[1] if still.ends else still.most
    return max((one.chance for one in parts if one.chance is not None), default=None)


def learnt(one: Summary, floor: float | None) -> bool:
    """True if its interval lies wholly above ``floor`` (:func:`floor_of`); if not, mixing may not have helped."""
    low = one.ends[0] if one.ends else None
    return low is not None and floor is not None and low > floor
