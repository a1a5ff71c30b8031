"""Turn a knob until a budget is met: by doubling, then by bisection. Whoever calls it measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from attnbench.decision.budget import Budget, Point
from attnbench.decision.knobs import Ladder
from attnbench.run.compare import Side
from attnbench.status import Status


@dataclass(frozen=True, slots=True)
class Found:
    """What became of one variant."""

    variant: str
    """The variant as it was asked for, without a value of its knob."""
    knob: str
    """Empty for a variant that takes part as it stands."""
    tries: tuple[Point, ...]
    """Everything that was measured, in that order."""
    chosen: Point | None
    """The cheapest setting that meets a budget of error or score, or the most expensive that fits memory or time."""
    note: str = ""
    """Why it takes part as it stands, or was not measured at all."""
    before: str = ""
    """Options that this version knows otherwise than the version whose rows these are."""
    at_end: bool = False
    """The chosen one is the cheapest of all settings, for an error or a score, or the most expensive, for a cost."""

    @property
    def label(self) -> str:
        """Label of the chosen setting, else of the variant."""
        return self.chosen.label if self.chosen else self.variant

    def in_turns(self, sides: Mapping[str, Side]) -> Found:
        """The same with the times that the turns gave, for every table, figure and file that tells of it.

        Args:
            sides: label -> what the turns gave.
        """

        def told(point: Point) -> Point:
            side = sides.get(point.label)
            if side is None or side.time is None:
                return point
            low, high = side.interval or (None, None)
            return replace(point, time=side.time, time_low=low, time_high=high)

        chosen = None if self.chosen is None else told(self.chosen)
        return replace(self, tries=tuple(map(told, self.tries)), chosen=chosen)

    def best(self, budget: Budget) -> Point | None:
        """The measured setting that comes nearest to the budget."""
        sign = -1 if budget.target == "score" else 1
        measured = [(sign * amount, point) for point in self.tries if (amount := point.amount(budget)) is not None]
        return min(measured, key=lambda pair: pair[0])[1] if measured else None


def search(ladder: Ladder, budget: Budget, measure: Callable[[int], Point]) -> Found:
    """Find the cheapest setting that meets a budget of error or score, or the most expensive that fits.

    It doubles from the cheapest setting, then halves what is left between the last two; in all at most 2·log₂ of the
    number of settings, rounded up. It takes cost and score to rise along the ladder and error to fall. Where noise
    breaks this, the answer is still a setting that was measured and meets the budget, though perhaps not the best.

    A setting that runs out of memory or time, or fails in another way, is a bound: nothing more expensive is tried. A
    setting whose output is not finite has no error, and more expensive ones are tried.

    Args:
        measure: measures the setting with this value of the knob.
    """
    tries: dict[int, Point] = {}

    def must_rise(place: int) -> bool:
        point = tries[place] = replace(measure(ladder.values[place]), value=ladder.values[place])
        if budget.bounds_cost:
            return point.within(budget)
        return point.status is Status.NONFINITE or (point.status is Status.OK and not point.within(budget))

    above = boundary(len(ladder.values), ladder.climb(), must_rise)
    place = above - 1 if budget.bounds_cost else above
    point = tries.get(place)
    chosen = point if point is not None and point.within(budget) else None
    at_end = place == (len(ladder.values) - 1 if budget.bounds_cost else 0)
    return Found(ladder.spec.label, ladder.knob.option, tuple(tries.values()), chosen, at_end=at_end)


def boundary(size: int, climb: Sequence[int], below: Callable[[int], bool]) -> int:
    """The first of ``size`` places that is not ``below`` something; ``size`` if all are.

    Args:
        climb: rising places to ask about first, from 0 to the last one.
        below: asked about each place at most once; True up to some place, then False.
    """
    low, high = -1, size
    for place in climb:
        if not below(place):
            high = place
            break
        low = place
    while high - low > 1:
        middle = (low + high) // 2
        if below(middle):
            low = middle
        else:
            high = middle
    return high


def most_tries(climb: Sequence[int]) -> int:
    """About how many places :func:`boundary` asks at most, if it climbs these."""
    most, before = len(climb), -1
    for asked, place in enumerate(climb, start=1):
        most = max(most, asked + math.ceil(math.log2(place - before)))
        before = place
    return most
