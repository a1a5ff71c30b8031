"""Style of every figure: colours by family, markers and dashes by variant, and reproducible files."""

from __future__ import annotations

import functools
import io
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec
from weakref import WeakKeyDictionary

from matplotlib import style as mpl_style
from matplotlib.artist import Artist
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from attnbench.errors import UsageError, cannot_write
from attnbench.figures.kit.compact import compact
from attnbench.figures.kit.palette import Palette, is_inline, palette
from attnbench.figures.kit.sheets import only, sheets
from attnbench.files import write_output

BESIDE = "in the text file beside this figure"
"""Words of a caption that lacks some notes."""


@dataclass(frozen=True)
class Caption:
    """The words of a figure: its title, the lines of its subtitle, and all its notes."""

    title: str
    about: Sequence[str]
    notes: Sequence[str]


CAPTIONS: WeakKeyDictionary[Figure, Caption] = WeakKeyDictionary()
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")
DASHES: tuple[Any, ...] = ("-", (0, (7, 1.5)), (0, (3.5, 1.5)), (0, (6, 1.5, 1, 1.5)), (0, (1.2, 1.2)))
"""Their number has no divisor in common with that of the markers, so that 60 lines of one colour all differ."""
TITLE_SIZE, TEXT_SIZE, SMALL_SIZE = 12.5, 9.0, 8.0

_RC = {
    "figure.dpi": 100,
    "savefig.dpi": 100,
    "font.family": ["DejaVu Sans"],
    "font.size": TEXT_SIZE,
    "axes.labelsize": TEXT_SIZE,
    "axes.titlesize": TEXT_SIZE + 0.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.unicode_minus": False,
    "xtick.labelsize": SMALL_SIZE,
    "ytick.labelsize": SMALL_SIZE,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "text.hinting": "none",  # otherwise text is up to a twelfth wider or narrower at another resolution
    "text.parse_math": False,  # a '$' in a label is a dollar sign
    "svg.fonttype": "none",  # text stays text: searchable, and small
    "svg.hashsalt": "attnbench",
    "pdf.fonttype": 42,
}
_METADATA: dict[str, dict[str, str | None]] = {"svg": {"Date": None}, "png": {}, "pdf": {"CreationDate": None}}
_NOT_IN_XML = re.compile(r"[^\n\t\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML does not allow: no program could open an SVG with one."""

P = ParamSpec("P")


def _colours(given: Palette) -> dict[str, str]:
    names = {
        given.page: "figure.facecolor axes.facecolor",
        given.ink: "text.color axes.labelcolor axes.titlecolor xtick.labelcolor ytick.labelcolor",
        given.faint: "axes.edgecolor xtick.color ytick.color",
        given.grid: "grid.color",
    }
    return {name: colour for colour, several in names.items() for name in several.split()}


def in_style(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Decorator: draw with these settings instead of the reader's own matplotlibrc, which is restored."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with styled():
            return draw(*args, **kwargs)

    return drawn


@contextmanager
def styled() -> Iterator[None]:
    """Draw and save with these settings, whatever the reader's own matplotlibrc says."""
    with mpl_style.context(_RC | _colours(palette()), after_reset=True), warnings.catch_warnings():
        # A plug-in's name may have a sign that the font lacks: a box in the picture, but correct in the SVG's text.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


@dataclass(frozen=True)
class Look:
    """Colour, marker and dashes of one line, the same in every figure drawn from one table."""

    colour: str
    marker: str
    dashes: Any
    hollow: bool = False

    @property
    def line(self) -> dict[str, Any]:
        face = palette().page if self.hollow else self.colour
        return {
            "color": self.colour,
            "linestyle": self.dashes,
            "marker": self.marker,
            "markeredgecolor": self.colour,
            "markerfacecolor": face,
        }


def looks(names_and_families: Iterable[tuple[str, str]]) -> dict[str, Look]:
    """Name -> look: the family gives the colour, the place within the family gives marker and dashes.

    If all lines but references are of one family, and there are several, each has another colour.
    """
    families = dict(names_and_families)
    others = [family for family in families.values() if family != "reference"]
    colours = palette().sequence if len(set(others)) == 1 < len(others) else ()
    places: dict[str, int] = {}
    table: dict[str, Look] = {}
    for name, family in families.items():
        turn = places[family] = places.get(family, -1) + 1
        own = colours and family != "reference"
        table[name] = look(colours[turn % len(colours)] if own else palette().family(family), turn)
    return table


def look(colour: str, turn: int) -> Look:
    """The look of the ``turn``-th line (from 0) of a colour; the second sixty have hollow markers."""
    hollow = turn // (len(MARKERS) * len(DASHES)) % 2 == 1
    return Look(colour, MARKERS[turn % len(MARKERS)], DASHES[turn % len(DASHES)], hollow)


def texts(artist: Artist) -> Iterator[Text]:
    """Every text in a figure or part of it, except tick labels of axes without any, which reading would create."""
    for part in artist.get_children():
        if isinstance(part, Axis) and part.axes is not None and not part.axes.axison:
            continue
        if isinstance(part, Text):
            yield part
        yield from texts(part)


def notes_of(figure: Figure) -> list[str]:
    """All notes of a figure; empty for one that has none."""
    return list(CAPTIONS[figure].notes) if figure in CAPTIONS else []


def mark(artist: Artist | Iterable[Artist], rows: Iterable[object], *, main: bool = False) -> None:
    """Tell a page the table's rows that an artist shows. Those of ``main`` get the focus, and tell all their rows."""
    told = " ".join(map(str, rows if main else [*rows][:1]))
    for one in [artist] if isinstance(artist, Artist) else artist:
        if is_inline() and told:
            one.set_gid(told + MAIN * main)


MAIN = "!"
"""End of the id of an artist with the focus."""


def save(
    figure: Figure, path_stem: str | Path, formats: Sequence[str] = ("svg", "png"), *, dpi: float | None = None
) -> list[Path]:
    """Write ``path_stem.svg`` and so on; the same figure gives the same bytes.

    Notes without room in the caption go to ``path_stem.txt``, a line each. A figure for one column that is too tall
    becomes several :func:`sheets <attnbench.figures.kit.sheets.sheets>`, ``path_stem-2.svg`` and so on. ``dpi``: dots
    per inch of a png. Raises UsageError for a format other than svg, png or pdf, CannotCreate without a folder or for a
    link in a file's place, StoreError if a file cannot be written.
    """
    unknown = [name for name in formats if name not in _METADATA]
    if unknown:
        raise UsageError(f"figures can be written as {', '.join(_METADATA)}, not {unknown[0]!r}")
    stem = Path(path_stem)
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(stem.parent, error) from None
    for text in texts(figure):
        text.set_text(_NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", text.get_text()))
    parts: Sequence[Bbox | None] = sheets(figure) or [None]
    files = [
        (stem.with_name(f"{stem.name}{f'-{turn}' * (turn > 1)}.{name}"), name, part)
        for turn, part in enumerate(parts, start=1)
        for name in formats
    ]
    for path, name, part in files:
        drawn = io.BytesIO()
        with styled(), only(figure, part) if part else nullcontext():
            figure.savefig(drawn, format=name, metadata=_METADATA[name], dpi=dpi or 100, bbox_inches=part)
        content = drawn.getvalue()
        write_output(path, compact(content.decode()).encode() if name == "svg" else content)
    paths = [path for path, _, _ in files]
    if any(BESIDE in text.get_text() for text in texts(figure)):
        paths.append(stem.with_name(f"{stem.name}.txt"))
        write_output(paths[-1], "".join(f"{note}\n" for note in notes_of(figure)).encode())
    return paths
