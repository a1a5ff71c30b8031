"""The variants of a match, the values of their knobs that are worth trying, and the search for the one that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from attnbench.answers.match.budget import Budget, MeasuredSetting
from attnbench.contract.registry import Entry
from attnbench.contract.spec import Spec, parse_specs
from attnbench.contract.traits import Knob
from attnbench.contract.variant import VARIANTS
from attnbench.errors import UsageError
from attnbench.harness.compare.compare import Side
from attnbench.laws.exact_error import error_kind
from attnbench.measure.status import Status

MOST_COUNTED = 256
_ANY = 2**31
"""More than any option is set to."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """Settings of one variant, the cheapest first."""

    spec: Spec
    """The variant without a value of its knob."""
    knob: Knob
    values: range
    """Values of the knob, the cheapest first; never empty."""

    def at(self, value: int) -> Spec:
        """The variant with this value of its knob, which the label shows even if it is the default."""
        return Spec.of(self.spec.name, {**dict(self.spec.options), self.knob.option: value})

    def climb(self) -> list[int]:
        """Places in ``values``: the cheapest, then twice the value (half of a falling one) each time, then the last."""
        places, last = [0], len(self.values) - 1
        while places[-1] < last:
            here = self.values[places[-1]]
            ahead = range(places[-1] + 1, last)
            places.append(next((place for place in ahead if self._far_from(here, self.values[place])), last))
        return places

    def _far_from(self, here: int, value: int) -> bool:
        return value <= here // 2 if self.knob.falling else value >= 2 * here


def knob_of(spec: Spec, *, causal: bool = False, level: str = "") -> Knob | None:
    """The knob that trades the variant's accuracy for cost, or None. Raises UsageError: unknown variant or option."""
    return VARIANTS.get(spec.name).at(level).claims(spec, causal=causal).knob


def ladder_of(spec: Spec, knob: Knob, n: int, *, most: int | None = None) -> Ladder:
    """The settings to try at length ``n``: multiples of the knob's step that its option takes, at most ``most`` or
    ``n``.

    With n features or landmarks a method costs as much as exact attention. If ``n`` is less than one step, every value
    is tried. 0 is an amount only of single rounds or blocks; ``factors=0`` is a switch. Raises UsageError if the option
    takes no value up to ``most``.
    """
    low, high, unit = _bounds(VARIANTS.get(spec.name), knob.option)
    counts = knob.step == 1 and not knob.falling
    top = min(high, most or (min(n, MOST_COUNTED) if counts else n))
    step = math.lcm(knob.step, unit)
    if step > top:
        step = unit
    first = -(-max(low, 1 if knob.step > 1 else low) // step) * step
    values = range(first, top + 1, step)
    if not values:
        raise UsageError(
            f"{spec.name}: {knob.option} must be at least {first}, and at most {top} is tried; raise --most"
        )
    rest = {option: value for option, value in spec.options if option != knob.option}
    return Ladder(Spec.of(spec.name, rest), knob, values[::-1] if knob.falling else values)


def _bounds(entry: Entry, option: str) -> tuple[int, int, int]:
    """The smallest and largest value of an option, and the number that its values are multiples of."""
    rules = entry.options[option].metadata
    low = max([rule.ge for rule in rules if hasattr(rule, "ge")] or [1])
    high = min([rule.le for rule in rules if hasattr(rule, "le")] or [_ANY])
    unit = math.lcm(*(rule.multiple_of for rule in rules if hasattr(rule, "multiple_of")))
    return low, high, unit


@dataclass(frozen=True, slots=True)
class Entrant:
    """A variant that takes part in the match."""

    spec: Spec
    ladder: Ladder | None
    note: str = ""
    """The reason for having no knob."""
    hopeless: str = ""
    """The reason why it can never meet the budget, and is not measured."""

    def settings(self) -> list[Spec]:
        return [self.ladder.at(value) for value in self.ladder.values] if self.ladder else [self.spec]


def turned(written: Sequence[str], *, causal: bool = False, level: str = "") -> Iterator[tuple[Spec, Knob | None, str]]:
    """Each variant that is named, its knob, and the reason for having none that may be turned.

    Raises UsageError: an unknown variant or option.
    """
    for spec in (spec for text in written for spec in parse_specs(text)):
        entry = VARIANTS.get(spec.name).at(level)
        given, normal = entry.check(dict(spec.options)), entry.normalise(spec)
        knob = knob_of(normal, causal=causal, level=level)
        if knob is None:
            yield normal, None, "it has no knob"
        elif knob.option in given:
            yield Spec.of(spec.name, given), None, f"its {knob.option} is given"
        else:
            yield normal, knob, ""


def entrants_of(
    written: Sequence[str], budget: Budget, n: int, *, causal: bool = False, most: int | None = None, level: str = ""
) -> list[Entrant]:
    """The variants and their knobs. Raises UsageError: an unknown name or option, one thing twice, or nothing that can
    be turned."""
    entrants: dict[str, Entrant] = {}
    for spec, knob, note in turned(written, causal=causal, level=level):
        entry, hopeless = VARIANTS.get(spec.name).at(level), ""
        if budget.target == "error" and entry.kind == "mixer":
            hopeless = "a mixer has no q, k and v, and so no error; give --memory or --time with --level layer"
        elif budget.target == "error" and error_kind(entry, spec) == "learned":
            hopeless = "its error means nothing before it is fitted; give --memory or --time"
        one = Entrant(spec, None if knob is None else ladder_of(spec, knob, n, most=most), note, hopeless)
        if one.spec.label in entrants:
            raise UsageError(f"{one.spec.label} is given twice; name each variant once")
        entrants[one.spec.label] = one
    if not entrants:
        raise UsageError("match needs a variant; for example: attnbench match performer local --error 0.1")
    if not any(one.ladder for one in entrants.values()):
        who = ", ".join(f"{label}: {one.note}" for label, one in entrants.items())
        raise UsageError(f"there is no knob to turn ({who}); name a variant that has one: attnbench match performer")
    if all(one.hopeless for one in entrants.values()):
        raise UsageError("; ".join(f"{label}: {one.hopeless}" for label, one in entrants.items()))
    return list(entrants.values())


@dataclass(frozen=True, slots=True)
class FoundSetting:
    """The outcome for one variant."""

    variant: str
    """The variant as given, without a value of its knob."""
    knob: str
    """Empty for a variant without one."""
    tries: tuple[MeasuredSetting, ...]
    chosen: MeasuredSetting | None
    """The cheapest setting that meets a budget of error or score, or the most expensive that fits memory or time."""
    note: str = ""
    """The reason for having no knob, or for not being measured at all."""
    before: str = ""
    """Options that differ in the version that wrote these rows."""
    at_end: bool = False
    """True if the chosen one is the cheapest of all, for an error or a score, or the most expensive, for a cost."""

    @property
    def label(self) -> str:
        return self.chosen.label if self.chosen else self.variant

    def met(self, budget: Budget) -> MeasuredSetting | None:
        """The setting that was chosen, unless its turns took longer than the budget allows."""
        return self.chosen if self.chosen and self.chosen.within(budget) else None

    def in_turns(self, sides: Mapping[str, Side]) -> FoundSetting:
        """The outcome with the times of the turns (label -> times), for every table, figure and file."""

        def told(point: MeasuredSetting) -> MeasuredSetting:
            side = sides.get(point.label)
            if side is None or side.time is None:
                return point
            low, high = side.interval or (None, None)
            return replace(point, time=side.time, time_low=low, time_high=high)

        chosen = None if self.chosen is None else told(self.chosen)
        return replace(self, tries=tuple(map(told, self.tries)), chosen=chosen)

    def best(self, budget: Budget) -> MeasuredSetting | None:
        sign = -1 if budget.target == "score" else 1
        measured = [(sign * amount, point) for point in self.tries if (amount := point.amount(budget)) is not None]
        return min(measured, key=lambda pair: pair[0])[1] if measured else None


def search(ladder: Ladder, budget: Budget, measure: Callable[[int], MeasuredSetting]) -> FoundSetting:
    """Find the cheapest setting that meets a budget of error or score, or the most expensive that fits.

    It doubles from the cheapest setting, then bisects between the last two; in all at most 2·log₂ of the number of
    settings, rounded up. It assumes that cost and score rise along the ladder and that error falls. If noise breaks
    this, the answer is still a measured setting that meets the budget, though perhaps not the best.

    A setting that runs out of memory or time, or fails in another way, is a bound: nothing more expensive is tried. A
    setting with an output that is not finite has no error, and more expensive ones are tried.
    """
    tries: dict[int, MeasuredSetting] = {}

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
    return FoundSetting(ladder.spec.label, ladder.knob.option, tuple(tries.values()), chosen, at_end=at_end)


def boundary(size: int, climb: Sequence[int], below: Callable[[int], bool]) -> int:
    """The first of ``size`` places that is not ``below``, which is True up to some place; ``size`` if all are.

    ``climb`` has rising places to try first, from 0 to the last one. Each place is tried at most once.
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
    """About the largest number of places that :func:`boundary` asks if it climbs these."""
    most, before = len(climb), -1
    for asked, place in enumerate(climb, start=1):
        most = max(most, asked + math.ceil(math.log2(place - before)))
        before = place
    return most
