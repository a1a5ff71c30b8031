"""How every figure looks: colours by family, markers by variant, and files that are the same byte for byte."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec

from matplotlib import style as mpl_style
from matplotlib.figure import Figure
from matplotlib.text import Text

from attnbench.errors import CannotCreate, StoreError, UsageError

FAMILY_COLOURS = {
    "exact": "#000000",
    "reference": "#8a8a8a",
    "fixed pattern": "#0072b2",
    "learned pattern": "#56b4e9",
    "low rank": "#009e73",
    "kernel": "#d55e00",
    "recurrence": "#e69f00",
    "memory": "#c9b400",
    "synthetic": "#cc79a7",
    "mixing": "#7a3e9d",
}
"""Okabe and Ito's, which colour-blind readers tell apart, the yellow darkened for thin lines; and grey, violet."""
OTHER_COLOUR = "#5c4033"
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")
INK, FAINT, LINE = "#222222", "#666666", "#d0d0d0"
TITLE_SIZE, TEXT_SIZE, SMALL_SIZE = 12.0, 8.5, 7.5

_RC = {
    "figure.dpi": 100,
    "savefig.dpi": 100,
    "font.family": ["DejaVu Sans"],
    "font.size": TEXT_SIZE,
    "axes.labelsize": TEXT_SIZE,
    "axes.titlesize": TEXT_SIZE + 0.5,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.unicode_minus": False,
    "xtick.labelsize": SMALL_SIZE,
    "ytick.labelsize": SMALL_SIZE,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": "#ebebeb",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": SMALL_SIZE,
    "text.parse_math": False,  # a '$' in a label is a dollar sign
    "svg.fonttype": "none",  # text stays text: searchable, and small
    "svg.hashsalt": "attnbench",
    "pdf.fonttype": 42,
}
_METADATA: dict[str, dict[str, str | None]] = {"svg": {"Date": None}, "png": {}, "pdf": {"CreationDate": None}}
_NOT_IN_XML = re.compile(r"[^\n\t\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Control characters, with which nobody could open the SVG."""

P = ParamSpec("P")


def in_style(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Decorator: draw with these settings, whatever the reader's own matplotlibrc says, and restore the reader's."""

    @functools.wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with _styled():
            return draw(*args, **kwargs)

    return styled


@contextmanager
def _styled() -> Iterator[None]:
    with mpl_style.context(_RC, after_reset=True), warnings.catch_warnings():
        # A plug-in's name may hold a sign that the font lacks: a box in the picture, whole in the SVG's text.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


@dataclass(frozen=True)
class Look:
    """The colour and marker of one label, the same in every figure drawn from one table."""

    colour: str
    marker: str
    hollow: bool = False


def looks(labels_and_families: Iterable[tuple[str, str]]) -> dict[str, Look]:
    """Label -> look: the family gives the colour, the position within the family the marker (hollow after twelve)."""
    seen: dict[str, int] = {}
    table: dict[str, Look] = {}
    for label, family in labels_and_families:
        if label in table:
            continue
        turn = seen[family] = seen.get(family, -1) + 1
        colour = FAMILY_COLOURS.get(family, OTHER_COLOUR)
        table[label] = Look(colour, MARKERS[turn % len(MARKERS)], hollow=turn // len(MARKERS) % 2 == 1)
    return table


def save(figure: Figure, path_stem: str | Path, formats: Sequence[str] = ("svg", "png")) -> list[Path]:
    """Write ``path_stem.svg`` and so on; the same figure gives the same bytes.

    Raises:
        UsageError: a format that is not svg, png or pdf.
        CannotCreate: the folder cannot be made, or a link stands in the place of a file.
        StoreError: a file cannot be written.
    """
    unknown = [name for name in formats if name not in _METADATA]
    if unknown:
        raise UsageError(f"figures can be written as {', '.join(_METADATA)}, not {unknown[0]!r}")
    stem = Path(path_stem)
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotCreate(f"{stem.parent}: cannot make this folder ({error.strerror})") from None
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_text(_NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", text.get_text()))
    paths = [stem.with_name(f"{stem.name}.{name}") for name in formats]
    for name, path in zip(formats, paths, strict=True):
        if path.is_symlink():
            raise CannotCreate(f"{path} is a link, and figures are written to no other place; remove it")
        try:
            with _styled():
                figure.savefig(path, format=name, metadata=_METADATA[name])
        except OSError as error:
            raise StoreError(f"{path}: cannot be written ({error.strerror})") from None
    return paths
