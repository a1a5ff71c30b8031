"""The figures of a report: those of ``attnbench plot``, as SVG for a wide and for a narrow screen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd
from matplotlib.figure import Figure

from attnbench.answers.report.table_rows import tokens
from attnbench.answers.report.views import View
from attnbench.errors import UsageError
from attnbench.figures import figure_kinds
from attnbench.figures.kit.inline import SharedStyles
from attnbench.figures.kit.page import NothingToDraw, laid_out
from attnbench.figures.kit.palette import drawn_inline
from attnbench.figures.kit.style import CAPTIONS, Caption
from attnbench.figures.tradeoff import draw_contenders
from attnbench.results.frame.settings import by_model

MOST = 6
"""Most figures of speed against error in a section, and of time over length."""
_TOLD = {"scaling": "time peak", "error": "error", "scores": "score"}
"""Figure with marks of several rows -> columns of the table that pointing at a mark tells."""


@dataclass(frozen=True)
class Drawn:
    """One figure; ``narrow`` is empty if it has no form for a narrow screen."""

    kind: str
    caption: Caption
    wide: str
    narrow: str
    view: int = 0
    n: int = 0
    name: str = ""

    @property
    def told(self) -> str:
        return _TOLD.get(self.kind, "")


def draw_views(rows: pd.DataFrame, views: Sequence[View], shared: SharedStyles) -> tuple[list[Drawn], tuple[str, int]]:
    """Speed against error of each view, at several lengths as far as there is room, and time over length; then the
    others in words, and the longest of their lengths."""
    kinds = figure_kinds()
    chosen = _chosen(views)
    every = []
    for place, view in enumerate(views):
        lengths = [n for one, n in chosen if one == place]
        for n in sorted(lengths):
            every.append(drawn("tradeoff", partial(draw_contenders, [view.at[n]()]), shared, (place, n, view.name)))
        if lengths and len(view.at) > 1:
            alike = rows.loc[view.setting.rows.index]
            every.append(drawn("scaling", partial(kinds["scaling"].draw, alike), shared, (place, 0, view.name)))
    left = {view.name: [n for n in view.at if (place, n) not in chosen] for place, view in enumerate(views)}
    words = "; ".join(_lengths(name, without) for name, without in left.items() if without)
    return [one for one in every if one], (words, max((n for lengths in left.values() for n in lengths), default=0))


def _chosen(views: Sequence[View]) -> list[tuple[int, int]]:
    """Places of views with lengths: each view as it opens, then the longest other lengths of the first views."""
    first = [(place, view.n) for place, view in enumerate(views)]
    others = [(place, n) for place, view in enumerate(views) for n in sorted(view.at, reverse=True) if n != view.n]
    return [*first, *others][:MOST]


def _lengths(name: str, lengths: Sequence[int]) -> str:
    more = f" and {len(lengths) - MOST} more" * (len(lengths) > MOST)
    return f"{name} at n = {', '.join(map(tokens, lengths[:MOST]))}{more}"


def draw_whole(kinds: Sequence[str], rows: pd.DataFrame, shared: SharedStyles) -> list[Drawn]:
    """The figures of these kinds that apply to a table; that of a swap for each trained model."""
    known = {kind: figure_kinds()[kind] for kind in kinds}
    wanted = {kind: one.draw for kind, one in known.items() if one.applies is None or one.applies(rows)}
    parts = {kind: by_model(rows[rows["level"] == "pretrained"]) if kind == "swap" else [rows] for kind in wanted}
    tried = (drawn(kind, partial(draw, part), shared) for kind, draw in wanted.items() for part in parts[kind])
    return [one for one in tried if one]


def drawn(
    kind: str, draw: Callable[[], Figure], shared: SharedStyles, about: tuple[int, int, str] = (0, 0, "")
) -> Drawn | None:
    """A figure of a report; None if it has nothing to show. ``about``: view, length and name of the view."""
    try:
        with drawn_inline():
            figure = draw()
            caption = CAPTIONS[figure]
            return Drawn(kind, caption, shared.svg(figure, caption.title), _narrow(draw, shared, caption.title), *about)
    except (NothingToDraw, UsageError):
        return None


def _narrow(draw: Callable[[], Figure], shared: SharedStyles, title: str) -> str:
    try:
        with laid_out("column"):
            return shared.svg(draw(), title)
    except UsageError:
        return ""
