"""Sheets of a figure for one column: cut through empty places, so that none is much taller than wide."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

COLUMN = 3.3
"""Width of one column in a two-column paper, in inches."""
_REST = 0.3
"""Inches that a sheet has at least: more than a line of the caption."""
_BETWEEN_LINES = 0.09
"""Largest gap between two lines of a key, in inches: a key is cut only if no wider gap is near."""
TALLEST = 1.2
"""Largest height of a sheet over its width, unless one panel alone is taller."""


def sheets(figure: Figure) -> list[Bbox]:
    """The parts of a figure from top to bottom, in inches; none if it is not too tall or not for one column."""
    width, height = figure.get_size_inches()
    most = TALLEST * width
    if height <= most or width > COLUMN + 0.01:
        return []
    drawn = _drawn(figure)
    gaps = _gaps([(box.y0, box.y1) for _, box in drawn], float(height))
    cuts = {cut: gap for cut, gap in gaps.items() if cut > _REST and not _under_a_heading(cut, drawn, figure)}
    found, top = [], float(height)
    while top > most:
        below = [cut for cut in cuts if cut < top - 0.05]
        if not below:
            break
        near = [cut for cut in below if cut >= top - most]
        wide = [cut for cut in near if cuts[cut] > _BETWEEN_LINES]
        bottom = min(wide or near) if near else max(below)
        found.append(Bbox.from_extents(0, bottom, width, top))
        top = bottom
    return [*found, Bbox.from_extents(0, 0, width, top)]


def _under_a_heading(cut: float, drawn: list[tuple[Artist, Bbox]], figure: Figure) -> bool:
    """True if the text above a cut is that of a panel below it."""
    above, _ = min(((piece, box) for piece, box in drawn if box.y0 >= cut), key=lambda one: one[1].y0)
    return above in figure.texts and any(isinstance(piece, Axes) and box.y1 <= cut for piece, box in drawn)


@contextmanager
def only(figure: Figure, sheet: Bbox) -> Iterator[None]:
    """Show only one sheet: hidden artists outside it would still be in the file."""
    others = [artist for artist, box in _drawn(figure) if box.y1 <= sheet.y0 or box.y0 >= sheet.y1]
    for artist in others:
        artist.set_visible(False)
    try:
        yield
    finally:
        for artist in others:
            artist.set_visible(True)


def _drawn(figure: Figure) -> list[tuple[Artist, Bbox]]:
    """Indivisible pieces with their boxes in inches: panels with ticks and titles, and each piece of a key."""
    figure.draw_without_rendering()
    pieces: list[Artist] = [*figure.texts]
    for ax in figure.axes:
        unseen = (ax.patch, ax.title, ax.xaxis, ax.yaxis, *ax.spines.values())
        pieces += [ax] if ax.axison else [one for one in ax.get_children() if one not in unseen]
    boxes = [(piece, piece.get_tightbbox()) for piece in pieces if piece.get_visible()]
    scale = figure.dpi
    return [
        (piece, Bbox.from_extents(box.x0 / scale, box.y0 / scale - _shared(piece), box.x1 / scale, box.y1 / scale))
        for piece, box in boxes
        if box is not None and (box.width > 0 or box.height > 0) and box.height < 0.98 * figure.bbox.height
    ]


def _shared(piece: Artist) -> float:
    """Inches that a panel reaches into the one below it, which has the same scale."""
    return 0.3 if isinstance(piece, Axes) and piece.xaxis.get_tick_params().get("labelbottom") is False else 0.0


def _gaps(spans: list[tuple[float, float]], top: float) -> dict[float, float]:
    """The middle of each gap, and its height."""
    found, low = dict[float, float](), top
    for bottom, up in sorted(spans, key=lambda span: -span[1]):
        if up < low - 0.02 and low < top:
            found[(up + low) / 2] = low - up
        low = min(low, bottom)
    return found
