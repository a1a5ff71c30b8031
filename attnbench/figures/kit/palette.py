"""The colours of a figure: a light set, a dark set, and the one in use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from attnbench.errors import UsageError, did_you_mean


@dataclass(frozen=True)
class Palette:
    """Colours by meaning."""

    page: str
    ink: str
    faint: str
    line: str
    grid: str
    band: str
    """Background of points without a place on the scale."""
    worse: str
    """Background of errors that are no better than the trivial answer."""
    families: Mapping[str, str]
    other: str
    """Colour of a family that a plug-in brought."""
    sequence: tuple[str, ...]
    """Colours of lines by their order, since they are often of one family."""
    diverging: str
    """Name of a matplotlib colour map from loss to gain; its middle is close to the page's colour."""

    def family(self, name: str) -> str:
        return self.families.get(name, self.other)


LIGHT = Palette(
    page="#ffffff",
    ink="#222222",
    faint="#666666",
    line="#d0d0d0",
    grid="#ebebeb",
    band="#f5f5f5",
    worse="#fbeee6",
    # Okabe and Ito's colours without their yellow, which a thin line loses; and a brown, two violets and a grey that
    # colour-blind readers can tell from these.
    families={
        "exact": "#000000",
        "reference": "#707070",
        "fixed pattern": "#0072b2",
        "learned pattern": "#56b4e9",
        "low rank": "#009e73",
        "kernel": "#d55e00",
        "pairwise": "#76260a",
        "recurrence": "#e69f00",
        "memory": "#7a66ff",
        "synthetic": "#cc79a7",
        "mixing": "#1c1c8c",
    },
    other="#5c4033",
    sequence=("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"),
    diverging="RdBu",
)
DARK = Palette(
    page="#14171c",
    ink="#eceff3",
    faint="#a3abb5",
    line="#434b56",
    grid="#262b33",
    band="#1c2027",
    worse="#33241d",
    # Mostly the hues of the light set, brighter so that thin lines stand out.
    families={
        "exact": "#ffffff",
        "reference": "#828a94",
        "fixed pattern": "#3d9be9",
        "learned pattern": "#9bd8ff",
        "low rank": "#1fbf8d",
        "kernel": "#ff7a2f",
        "pairwise": "#f25a5a",
        "recurrence": "#ffb52e",
        "memory": "#c4ff80",
        "synthetic": "#f29cc4",
        "mixing": "#ff4ded",
    },
    other="#c39a80",
    sequence=("#3d9be9", "#ff7a2f", "#22c793", "#f29cc4", "#ffb52e", "#9bd8ff", "#ffffff"),
    diverging="berlin_r",
)
STYLES = {"light": LIGHT, "dark": DARK}

_SINGLE = ("page", "ink", "faint", "line", "grid", "band", "worse", "other")


def variables(given: Palette) -> dict[str, str]:
    """Name of a CSS variable -> colour: ``ink``, ``f3`` for the fourth family, ``s0`` for the first of the sequence."""
    named = {name: str(getattr(given, name)) for name in _SINGLE}
    families = {f"f{place}": colour for place, colour in enumerate(given.families.values())}
    return named | families | {f"s{place}": colour for place, colour in enumerate(given.sequence)}


_STANDINS = {name: f"#fe{place:02x}01" for place, name in enumerate(variables(LIGHT))}
VARIABLES = {colour: f"var(--{name})" for name, colour in _STANDINS.items()}
"""A colour of :data:`INLINE` -> the CSS variable that it stands for."""
INLINE = Palette(
    **{name: _STANDINS[name] for name in _SINGLE},
    families={name: _STANDINS[f"f{place}"] for place, name in enumerate(LIGHT.families)},
    sequence=tuple(_STANDINS[f"s{place}"] for place in range(len(LIGHT.sequence))),
    diverging=LIGHT.diverging,
)
"""The colours of figures inside a page, which gives each its value: one that stands for nothing keeps its own."""

_CURRENT: ContextVar[Palette] = ContextVar("palette", default=LIGHT)


def palette() -> Palette:
    """The colours to draw with: the light set, or the choice of :func:`drawn_in`."""
    return _CURRENT.get()


@contextmanager
def drawn_in(style: str) -> Iterator[None]:
    """Draw and save figures in this style; UsageError if it is unknown."""
    if style not in STYLES:
        raise UsageError(f"unknown style {style!r}{did_you_mean(style, STYLES) or '; there are: light, dark'}")
    with _drawn_with(STYLES[style]):
        yield


@contextmanager
def drawn_inline() -> Iterator[None]:
    """Draw figures for :mod:`a page <attnbench.figures.kit.inline>`: no title, no notes, colours of the page."""
    with _drawn_with(INLINE):
        yield


def is_inline() -> bool:
    """True within :func:`drawn_inline`."""
    return palette() is INLINE


@contextmanager
def _drawn_with(given: Palette) -> Iterator[None]:
    token = _CURRENT.set(given)
    try:
        yield
    finally:
        _CURRENT.reset(token)
