"""The error of random features by their number and the logits' standard deviation, with a panel for each kind.

The best feature map and projection depend on the sharpness of the attention, so that one number misleads. Figure 4 of
Choromanski et al. 2021, arXiv:2009.14794, is one column of these maps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from attnbench.errors import UsageError
from attnbench.figures.error_lines import ORACLES, at_one_length, differing
from attnbench.figures.kit.heat import Heat, draw_colour_key, draw_heat
from attnbench.figures.kit.page import NothingToDraw, narrow, new_page, shorten
from attnbench.figures.kit.style import SMALL_SIZE, in_style
from attnbench.figures.kit.ticks import plain
from attnbench.measure.status import Status
from attnbench.results.frame.label_options import is_number, most_peaked, options_of, varying_numbers, written
from attnbench.results.frame.settings import PANELS, compared, of_length, only_length, settings, without_room
from attnbench.results.frame.words import bare, failures, own_form_note, where

NEEDS = "errors at two sizes and two logit_std"
_LIMIT = 2.0
"""log10 of the factor at which the colour is full."""


def _mapped(rows: pd.DataFrame) -> list[str]:
    names = {}
    for variant, part in rows.groupby("variant", sort=False):
        spread = most_peaked(part["inputs"].unique())
        if not np.isfinite(part.loc[part["error_kind"] == "approximation", "rel_error"]).any():
            continue
        if len(spread) > 1 and variant not in ORACLES and varying_numbers(options_of(part).values()):
            names[str(variant)] = len(part)
    return sorted(names, key=lambda name: -names[name])


@in_style
def draw_map(frame: pd.DataFrame, *, n: int | None = None, variant: str | None = None) -> Figure:
    """Draw heat maps: size upwards, standard deviation of the logits to the right, panels by further options.

    A cell's number is the relative error; its colour compares it with mean(V) on the same inputs. Rows that were
    measured differently get separate panels. By default ``n`` is the longest of the lengths with most measured rows,
    and ``variant`` the one with most. Raises UsageError if these have no rows, and NothingToDraw without errors at two
    sizes and two standard deviations.
    """
    rows = compared(frame)
    known = _mapped(rows)
    if variant is not None and variant not in known:
        raise UsageError(f"no map of {variant!r} in these rows; there are: {', '.join(known) or 'none'}")
    rows = of_length(rows[rows["variant"].isin([variant] if variant else known)], n, "error rows")
    known = _mapped(rows)
    if not known:
        raise NothingToDraw(f"needs {NEEDS}")
    variant = known[0]
    found = settings(rows[rows["variant"] == variant], {"level": ("operator",)})
    shown = [at_one_length(one).assign(_setting=one.name) for one in found[:PANELS]]
    rows = pd.concat(shown)
    options = options_of(rows)
    varying = varying_numbers(options.values())
    stds = rows["inputs"].map(most_peaked(rows["inputs"].unique()))
    size = next(iter(varying), None)
    if size is None or stds.nunique() < 2 or not (rows["status"] == Status.OK).any():
        raise NothingToDraw("; ".join(failures(rows)) or f"needs {NEEDS}")
    sizes = [options[label].get(size, math.nan) for label in rows["label"]]
    rows = rows.assign(_std=stds, _size=[float(one) if is_number(one) else math.nan for one in sizes])
    unknown = rows["_size"].isna() | rows["_std"].isna()
    split = [name for name in differing(list(options.values())) if name != size]
    split.sort(key=lambda name: -len({repr(one.get(name)) for one in options.values()}))
    notes = [
        own_form_note(rows["label"]),
        f"Number: relative error against exact attention. Colour: the same over the error of answering mean(V); "
        f"the middle of the scale is no better than that, red is worse. Rows: {size}.",
        f"Not drawn, since without {size} or on other inputs: {int(unknown.sum())}." if unknown.any() else "",
        *(f"Not measured — {line}" for line in failures(rows, at_n=False)),
        without_room(found),
    ]
    rows = rows[~unknown]
    across = [_told(options[label], split[:1]) for label in rows["label"]]
    down = [_told(options[label], split[1:]) for label in rows["label"]]
    down = [", ".join(part for part in (told, of) if part) for told, of in zip(down, rows["_setting"], strict=True)]
    ok = rows[rows["status"] == Status.OK]
    below = int((ok["rel_error"] < ok["trivial_error"]).sum())
    title = f"{bare(variant, rows['label'].iloc[0])} is better than answering mean(V) in {below} of {len(ok)} cells"
    return _draw(rows.assign(_across=across, _down=down), title, where(rows, only_length(rows)), notes, size)


def _told(options: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{name} {written(options.get(name, 'default'))}" for name in names)


def _draw(rows: pd.DataFrame, title: str, about: Sequence[str], notes: Sequence[str], size: str) -> Figure:
    columns, bands = list(dict.fromkeys(rows["_across"])), list(dict.fromkeys(rows["_down"]))
    grid = [[(column, band) for column in columns] for band in bands]
    if narrow():  # all panels one above the other
        grid = [[at] for row in grid for at in row]
    stds, sizes = sorted(rows["_std"].unique()), sorted(rows["_size"].unique(), reverse=True)
    page = new_page(title, about, notes, room=0.95 + 0.2 * narrow() + len(grid) * max(0.9, 0.16 * len(sizes) + 0.3))
    left, bottom, gap_x, gap_y = page.left + 0.55, page.bottom + 0.78 + 0.2 * narrow(), 0.12, 0.26
    wide = (page.right - left + gap_x) / len(grid[0]) - gap_x
    tall = (page.top - bottom) / len(grid) - gap_y
    names = {(c, b): ", ".join(part for part in (c, b) if part) for c in columns for b in bands}
    if any(shorten(name, wide, SMALL_SIZE) != name for name in names.values()):
        # "kernel trig, norms chi" without the names of the options: the values show which they are.
        names = {at: ", ".join(part.rpartition(" ")[2] for part in name.split(", ")) for at, name in names.items()}
    for i, places in enumerate(grid):
        for j, (column, band) in enumerate(places):
            here = rows[(rows["_across"] == column) & (rows["_down"] == band)]
            ax = page.axes(left + j * (wide + gap_x), bottom + (len(grid) - 1 - i) * (tall + gap_y), wide, tall)
            row_names = [plain(one) if j == 0 else "" for one in sizes]
            column_names = [plain(one) if i == len(grid) - 1 else "" for one in stds]
            draw_heat(ax, (wide, tall), Heat(*_cells(here, sizes, stds), row_names, column_names), _LIMIT)
            ax.set_title(shorten(names[column, band], wide, SMALL_SIZE), fontsize=SMALL_SIZE, loc="left", pad=3)
    page.write((left + page.right) / 2, bottom - 0.34, "standard deviation of the logits", ha="center", va="center")
    page.write(page.left + 0.08, (bottom + page.top) / 2, size, rotation=90, ha="center", va="center")
    key = "error of answering mean(V) over this error"
    draw_colour_key(page, page.bottom + 0.22, _LIMIT, key, lambda gain: f"{plain(float(f'{10**gain:.2g}'))}×")
    return page.figure


def _cells(rows: pd.DataFrame, sizes: Sequence[float], stds: Sequence[float]) -> tuple[np.ndarray, list[list[str]]]:
    gain = np.full((len(sizes), len(stds)), math.nan)
    texts = [[""] * len(stds) for _ in sizes]
    columns = rows[["_size", "_std", "status", "rel_error", "trivial_error"]]
    for at, std, status, error, trivial in columns.itertuples(index=False):
        i, j = sizes.index(at), stds.index(std)
        if status != Status.OK or not error >= 0:
            texts[i][j] = str(status) if status != Status.OK else "–"
            continue
        texts[i][j] = (
            plain(float(f"{error:.2g}"))
            if 1e-3 <= error < 1000 or error == 0
            else f"{error:.0e}".replace("e+0", "e").replace("e-0", "e-")
        )
        reference = trivial if trivial > 0 else 1.0
        gain[i, j] = -math.log10(min(max(error / reference, 1e-9), 1e9))
    return gain, texts
