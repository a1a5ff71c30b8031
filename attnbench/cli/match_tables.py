"""A match on a terminal: a line for each variant, then the sentences that answer."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING

from attnbench.cli import console
from attnbench.printable import without_empty
from attnbench.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from attnbench.decision.budget import Point
    from attnbench.decision.matched import Match
    from attnbench.decision.search import Found

_COLUMNS = ("variant", "knob", "value", "error", "score", "95 % interval", "time", "peak", "tries", "budget")


def print_match(answer: Match, how: str) -> None:
    """Print what was found and how it compares.

    Args:
        how: by which process it was measured, for the second line.
    """
    console.line(answer.about)
    console.line(how)
    times = {label: side.time for label, side in answer.sides().items()}
    columns, rows = without_empty(_COLUMNS, [_row(answer, one, times) for one in answer.found])
    console.table(
        columns,
        rows,
        right=[name for name in columns if name not in ("variant", "knob", "budget")],
        title=f"\n{answer.budget}",
    )
    console.line()
    for sentence in answer.sentences():
        for part in wrap(sentence, console.width(), subsequent_indent="  ", break_on_hyphens=False):
            console.line(part)
    if answer.kept is not None:
        console.line(f"trainings: {answer.kept / 'results.csv'}")
    points = [point for one in answer.found for point in one.tries]
    console.error_notes({point.error_kind for point in points})
    console.own_form_note(point.own_form for point in points)


def _row(answer: Match, one: Found, times: dict[str, float | None]) -> list[str]:
    """The chosen setting, else what comes nearest to the budget, else the last try."""
    point = one.chosen or one.best(answer.budget) or (one.tries[-1] if one.tries else None)
    label = _in_parts(one.variant)
    if point is None:
        return [label, one.knob, "-", "-", "-", "-", "-", "-", "0", "not measured"]
    time = times.get(point.label) if one.chosen else None
    return [
        label + console.DAGGER * bool(point.own_form),
        one.knob,
        "-" if point.value is None else str(point.value),
        _error(point),
        "-" if point.score is None else f"{point.score:.3g}",
        _between(point),
        format_seconds(time or point.time),
        format_bytes(point.memory),
        str(len(one.tries)),
        "met" if one.chosen else "not measured" if point.lacks(answer.budget) else "not met",
    ]


def _in_parts(label: str) -> str:
    """A long label with each option on a line of its own, so that no word is broken."""
    return label if len(label) <= 24 else label.replace(":", ":\n").replace(",", ",\n")


def _error(point: Point) -> str:
    if point.error_kind == "learned":
        return "learned"
    return "-" if point.error is None else f"{point.error:.2g}" + " *" * (point.error_kind == "distance")


def _between(point: Point) -> str:
    """The interval of the score where there is one, else of the error."""
    if point.score_low is not None and point.score_high is not None:
        return f"{point.score_low:.2g} to {point.score_high:.2g}"
    return f"{point.spread[0]:.2g} to {point.spread[1]:.2g}" if point.spread else "-"
