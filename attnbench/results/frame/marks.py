"""Marks in the cells of a row and their meanings, on a terminal, in Markdown, in LaTeX and in a report."""

from __future__ import annotations

from collections.abc import Iterable

from attnbench.units import format_number

OWN_FORM = "†"
"""Mark after a label: the variant is this project's own form of a paper's method."""
NO_ERROR = " *"
"""Mark after a distance from softmax attention, which another operator has."""
NOT_SHOWN = "°"
"""Mark after the score of a variant that is not shown to have learnt to look at other tokens."""
LEARNED = "learned"


def name_text(label: str, own_form: object) -> str:
    """A label, marked once if the variant is not the form that its source describes."""
    return label.removesuffix(OWN_FORM) + OWN_FORM * bool(own_form)


def error_text(error: float | None, kind: str | None, digits: int = 2) -> str:
    """``0.061``, ``1.2 *`` for a distance that is no error, ``learned``; ``-`` for none."""
    if kind == LEARNED:
        return LEARNED
    return "-" if error is None or error != error else format_number(error, digits) + NO_ERROR * (kind == "distance")


def score_text(score: float, *, learnt: bool) -> str:
    """``0.871``, or ``0.512°``."""
    return f"{score:.3f}" + NOT_SHOWN * (not learnt)


def notes(cells: Iterable[str]) -> list[str]:
    """The meanings of the marks in these cells, one line each."""
    texts = set(cells)
    meanings = {
        "* another operator: its distance from softmax attention is not an error": any(
            text.endswith(NO_ERROR) for text in texts
        ),
        "learned: an error means nothing before the projections are fitted": LEARNED in texts,
        f"{NOT_SHOWN} not shown to be better than without mixing": any(text.endswith(NOT_SHOWN) for text in texts),
        f"{OWN_FORM} not the form that the source describes; attnbench show NAME says what differs": any(
            OWN_FORM in text for text in texts
        ),
    }
    return [said for said, used in meanings.items() if used]


HOST_SHARE = 0.2
"""Largest share of a time that may be the host's without a note."""


def by_host(label: str, launched: str, share: float | None) -> str:
    """``eager: 88 % of performer's time is the host``; empty if the share is small or unknown."""
    if share is None or not share > HOST_SHARE:
        return ""
    return f"{launched}: {100 * share:.0f} % of {label}'s time is the host"
