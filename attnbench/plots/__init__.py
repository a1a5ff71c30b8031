"""Figures from a table of results. Nothing here needs torch, and matplotlib only when a figure is drawn."""

from __future__ import annotations

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

__all__ = ["FIGURES", "FigureKind", "draw_all"]


class FigureKind(NamedTuple):
    """How to draw one kind of figure, and whether a table holds what it needs."""

    draw: Callable[..., Figure]
    applies: Callable[[pd.DataFrame], bool]


_NAMES = ("tradeoff", "peers", "catalogue", "scaling", "error", "map", "speedup")
"""Module and figure name: ``draw_NAME`` and ``applies`` live in ``attnbench.plots.NAME``; the first matters most."""

FIGURES: Mapping[str, FigureKind]


def __getattr__(name: str) -> Any:
    """Fill the table of figures on first use: importing this package must not pay for matplotlib."""
    if name != "FIGURES":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    kinds = {}
    for figure in _NAMES:
        module = import_module(f"{__name__}.{figure}")
        kinds[figure] = FigureKind(getattr(module, f"draw_{figure}"), module.applies)
    globals()["FIGURES"] = table = MappingProxyType(kinds)
    return table


def draw_all(
    frame: pd.DataFrame,
    out_dir: str | Path,
    formats: Sequence[str] = ("svg", "png"),
    *,
    figures: Sequence[str] | None = None,
    **options: Any,
) -> list[Path]:
    """Draw the figures that apply, one set for each suite, into ``out_dir``.

    Args:
        figures: names of those to draw, whether they apply or not; None for all that apply.
        options: passed to those figures that know them (``n``, ``x``, ``inputs``, ``overlay`` and so on); None means
            not given. Where a value suits one figure and not another, the other says so on its page.

    Returns:
        The files written: ``tradeoff.svg`` and so on, with the suite's name in front where there are several.

    Raises:
        UsageError: a figure or option that does not exist, a value that suits no figure, or an unknown format.
        ResultsError: not a results table.
        StoreError: a file cannot be written.
    """
    from attnbench.errors import UsageError, did_you_mean
    from attnbench.plots.page import draw_nothing
    from attnbench.plots.setting import check_columns
    from attnbench.plots.style import save

    check_columns(frame)
    kinds = import_module(__name__).FIGURES
    known = {name: set(inspect.signature(kind.draw).parameters) - {"frame"} for name, kind in kinds.items()}
    every = sorted(set().union(*known.values()))
    options = {name: value for name, value in options.items() if value is not None}
    for what, given, there in (("figure", figures or (), list(kinds)), ("option of a figure", options, every)):
        for name in given:
            if name not in there:
                hint = did_you_mean(name, there) or f"; there are: {', '.join(there)}"
                raise UsageError(f"unknown {what} {name!r}{hint}")
    drawn: list[tuple[str, Figure]] = []
    refused: list[tuple[str, UsageError]] = []
    for suite, prefix in _prefixes(dict.fromkeys(frame["suite"])).items():
        rows = frame[frame["suite"] == suite]
        for name, kind in kinds.items():
            if name in figures if figures else kind.applies(rows):
                own = {key: value for key, value in options.items() if key in known[name]}
                try:
                    drawn.append((f"{prefix}{name}", kind.draw(rows, **own)))
                except UsageError as error:
                    refused.append((f"{prefix}{name}", error))
    if refused and not drawn:
        raise refused[0][1]
    drawn += [(name, draw_nothing(name, [], [str(error)])) for name, error in refused]
    return [path for name, figure in drawn for path in save(figure, Path(out_dir) / name, formats)]


def _prefixes(suites: Iterable[str]) -> dict[str, str]:
    """Suite -> what the names of its files begin with, different also where upper and lower case are one."""
    suites = list(suites)
    prefixes: dict[str, str] = {}
    for suite in suites if len(suites) > 1 else ():
        stem = re.sub(r"[^A-Za-z0-9._-]+", "_", suite).lstrip(".")[:64]
        names = (f"{stem}{turn}-" for turn in ("", *(f"-{number}" for number in range(2, len(suites) + 1))))
        taken = {prefix.casefold() for prefix in prefixes.values()}
        prefixes[suite] = next(name for name in names if name.casefold() not in taken)
    return prefixes or dict.fromkeys(suites, "")
