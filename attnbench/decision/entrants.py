"""Who takes part in a match: which variants, what can be turned on each, and who cannot be held to the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnbench.decision.budget import Budget
from attnbench.decision.knobs import Ladder, knob_of, ladder_of
from attnbench.errors import UsageError
from attnbench.measure.error import error_kind
from attnbench.spec import Spec, parse_specs
from attnbench.variant import VARIANTS

NEEDS_ONE = "match needs a variant; for example: attnbench match performer local --error 0.1"


@dataclass(frozen=True, slots=True)
class Entrant:
    """One of the variants that were asked for."""

    spec: Spec
    ladder: Ladder | None
    """The settings to search; None for a variant that takes part as it stands."""
    note: str = ""
    """Why it takes part as it stands."""
    hopeless: str = ""
    """Why it can never be held to the budget, and is not measured."""

    def settings(self) -> list[Spec]:
        """All that may be tried, the cheapest first."""
        return [self.ladder.at(value) for value in self.ladder.values] if self.ladder else [self.spec]


def entrants_of(
    written: Sequence[str], budget: Budget, n: int, *, causal: bool = False, most: int | None = None
) -> list[Entrant]:
    """What each text stands for, and what can be turned.

    Raises:
        UsageError: an unknown name or option, one thing twice, or nothing that can be turned.
    """
    entrants: dict[str, Entrant] = {}
    for spec in (spec for text in written for spec in parse_specs(text)):
        entry = VARIANTS.get(spec.name)
        given, normal = entry.check(dict(spec.options)), entry.normalise(spec)
        knob = knob_of(normal, causal=causal)
        hopeless = ""
        if budget.target == "error" and entry.kind == "mixer":
            hopeless = "a mixer has no q, k and v, and so no error; give --memory or --time with --level layer"
        elif budget.target == "error" and error_kind(entry, normal) == "learned":
            hopeless = "its error means nothing before it is fitted; give --memory or --time"
        if knob is None:
            one = Entrant(normal, None, "it has no knob", hopeless)
        elif knob.option in given:
            one = Entrant(Spec.of(spec.name, given), None, f"its {knob.option} is given", hopeless)
        else:
            one = Entrant(normal, ladder_of(normal, knob, n, most=most), "", hopeless)
        if one.spec.label in entrants:
            raise UsageError(f"{one.spec.label} is given twice; name each variant once")
        entrants[one.spec.label] = one
    if not entrants:
        raise UsageError(NEEDS_ONE)
    if not any(one.ladder for one in entrants.values()):
        who = ", ".join(f"{label}: {one.note}" for label, one in entrants.items())
        raise UsageError(f"there is no knob to turn ({who}); name a variant that has one: attnbench match performer")
    if all(one.hopeless for one in entrants.values()):
        raise UsageError("; ".join(f"{label}: {one.hopeless}" for label, one in entrants.items()))
    return list(entrants.values())
