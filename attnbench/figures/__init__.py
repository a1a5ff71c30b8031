"""Figures from a table of results. Nothing here needs torch; matplotlib is needed only when a figure is drawn."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["FIGURES", "FigureKind", "draw", "draw_all", "figure_kinds"]


class FigureKind(NamedTuple):
    """A kind of figure: its drawing function, and the contents that a table needs for it."""

    draw: Callable[..., Figure]
    """Takes rows of ``read_results`` and its own options; as ``whole`` also all rows of the table that these are of.

    Raises UsageError if no row has a value, and ResultsError if this is not a results table.
    """
    applies: Callable[..., bool] | None
    """False for rows that are drawn on request only; None if all that can be drawn are."""
    needs: str


FIGURES = (
    *("tradeoff", "scores", "lengths", "curves", "recall", "peers", "catalogue", "scaling", "error", "own_error"),
    *("served", "steps", "map", "speedup", "share", "swap"),
)
"""Names of modules and their figures, the most important first. Each has ``draw_NAME`` and ``NEEDS``."""


@functools.cache
def figure_kinds() -> Mapping[str, FigureKind]:
    """Figures by name, the most important first. The first call imports matplotlib."""
    kinds = {}
    for figure in FIGURES:
        module = import_module(f"{__name__}.{figure}")
        applies = getattr(module, "applies", None)
        kinds[figure] = FigureKind(getattr(module, f"draw_{figure}"), applies, module.NEEDS)
    return MappingProxyType(kinds)


def draw(
    frame: pd.DataFrame,
    *,
    figures: Sequence[str] | None = None,
    only: Mapping[str, object] | None = None,
    title: str | None = None,
    style: str = "light",
    width: str = "page",
    on_left_out: Callable[[str, str], None] = lambda figure, why: None,
    **options: Any,
) -> dict[str, Figure]:
    """Draw the figures that apply, and none that would have nothing to show.

    Each suite gets its own set of figures; several runs (a column ``run`` tells them apart) share one.

    Args:
        figures: names of the figures to draw; None: all that apply.
        only: column -> value; chooses among the rows that a figure is about. The errors beside speeds are those that
            were measured in the most similar way.
        title: replaces the figures' own titles.
        style: ``light`` or ``dark``.
        width: ``page``, or ``column`` for one column of a paper, 3.3 inches, with letters of the same size.
        on_left_out: called with the name of each figure that was not drawn, and why.
        options: passed to the figures that know them (``n``, ``x``, ``inputs``, ``overlay`` and so on); None counts as
            not given. A figure that cannot use a value is left out. With a file of points as ``overlay`` only
            ``scaling`` is drawn.

    Returns:
        Figures by name: ``tradeoff`` and so on, prefixed with the suite's name if there are several suites.

    Raises:
        UsageError: a figure, style, width or option does not exist, or no figure can use a value.
        ResultsError: this is not a results table, or none of its rows can be drawn.
    """
    from attnbench.errors import AttnbenchError, UsageError, did_you_mean
    from attnbench.figures.kit.page import NothingToDraw, laid_out, retitle
    from attnbench.figures.kit.palette import drawn_in
    from attnbench.results.frame.settings import check_columns, restrict
    from attnbench.results.frame.words import failures

    check_columns(frame)
    kinds = figure_kinds()
    known = {name: [*inspect.signature(kind.draw).parameters][1:] for name, kind in kinds.items()}
    options = {name: value for name, value in options.items() if value is not None}
    every = sorted({option for options in known.values() for option in options} - {"whole"})
    for what, given, there in (("figure", figures or (), list(kinds)), ("option of a figure", options, every)):
        for name in given:
            if name not in there:
                hint = did_you_mean(name, there) or f"; there are: {', '.join(there)}"
                raise UsageError(f"unknown {what} {name!r}{hint}")
    if options.get("overlay") not in (None, "published"):  # a file of points, which no other figure could show
        for name in figures or ():
            if name != "scaling":
                raise UsageError(f"{name} takes no file of points; only the figure scaling does")
        figures = ["scaling"]
    restrict(frame, only or {})  # raises if no suite has such rows
    drawn: list[tuple[str, Figure]] = []
    left_out: list[tuple[str, AttnbenchError]] = []
    with drawn_in(style), laid_out(width):
        for rows, prefix in _tables(frame):
            for name in figures or kinds:
                kind = kinds[name]
                try:
                    chosen, given = restrict(rows, only or {}), {**options, "whole": rows}
                    if not figures and kind.applies and not kind.applies(chosen, rows):
                        raise NothingToDraw(f"needs {kind.needs}")
                    own = {option: value for option, value in given.items() if option in known[name]}
                    drawn.append((f"{prefix}{name}", kind.draw(chosen, **own)))
                except NothingToDraw as error:
                    reason = error if figures or kind.applies else NothingToDraw(f"needs {kind.needs}")
                    left_out.append((f"{prefix}{name}", reason))
                except UsageError as error:
                    left_out.append((f"{prefix}{name}", error))
    if not drawn:
        wrong = next((error for _, error in left_out if isinstance(error, UsageError)), None)
        needs = [f"{name} {error}" for name, error in left_out]
        reasons = failures(frame) if (frame["status"] != "ok").all() else needs
        raise wrong or NothingToDraw(f"nothing to draw: {'; '.join(reasons or needs)}")
    for name, why in left_out:
        on_left_out(name, str(why))
    for _, figure in drawn if title is not None else ():
        retitle(figure, title or "")
    return dict(drawn)


def draw_all(
    frame: pd.DataFrame,
    out_dir: str | Path,
    formats: Sequence[str] = ("svg", "png"),
    *,
    dpi: float | None = None,
    **options: Any,
) -> list[Path]:
    """Draw the figures that apply, like :func:`draw` with ``options``, into files in ``out_dir``; return their paths.

    ``dpi``: dots per inch of a png; 100 by default. Raises as :func:`draw`, UsageError for an unknown format, and
    StoreError if a file cannot be written.
    """
    from attnbench.figures.kit.style import save

    drawn = draw(frame, **options)
    return [path for name, figure in drawn.items() for path in save(figure, Path(out_dir) / name, formats, dpi=dpi)]


def _tables(frame: pd.DataFrame) -> list[tuple[pd.DataFrame, str]]:
    if "run" in frame:
        return [(frame, "")]
    prefixes = _prefixes(dict.fromkeys(frame["suite"]))
    return [(frame[frame["suite"] == suite], prefix) for suite, prefix in prefixes.items()]


def _prefixes(suites: Iterable[str]) -> dict[str, str]:
    """Suite -> prefix of its file names, unique on file systems that ignore case."""
    suites = list(suites)
    prefixes: dict[str, str] = {}
    for suite in suites if len(suites) > 1 else ():
        stem = re.sub(r"[^A-Za-z0-9._-]+", "_", suite).lstrip(".")[:64]
        names = (f"{stem}{turn}-" for turn in ("", *(f"-{number}" for number in range(2, len(suites) + 1))))
        taken = {prefix.casefold() for prefix in prefixes.values()}
        prefixes[suite] = next(name for name in names if name.casefold() not in taken)
    return prefixes or dict.fromkeys(suites, "")
