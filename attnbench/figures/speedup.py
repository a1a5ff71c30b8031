"""Speed-up over a baseline and saved memory: one table for each, length against rank.

The layout is that of table 3 in Wang et al. 2020, "Linformer", arXiv:2006.04768.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from attnbench.errors import UsageError
from attnbench.figures.error_lines import differing
from attnbench.figures.kit.heat import Heat, draw_colour_key, draw_heat
from attnbench.figures.kit.page import NothingToDraw, Page, narrow, new_page, stacked
from attnbench.figures.kit.style import in_style
from attnbench.figures.kit.ticks import halves, length, plain
from attnbench.figures.published.lra import OWN_ROOM, WIDE, draw_ratios, only_published
from attnbench.measure.status import Status
from attnbench.results.frame.label_options import is_number, options_of, varying_numbers, written
from attnbench.results.frame.settings import PANELS, Setting, records, settings, timed, without_room
from attnbench.results.frame.words import bare, failures, own_form_note, where

NEEDS = "softmax or sdpa beside two sizes at two lengths"
Row = dict[str, Any]
_BASELINES = ("softmax", "sdpa")
_LIMIT = 4.0
"""log2 of the factor at which the colour is full."""
_KEY = 0.44


def _tabled(rows: pd.DataFrame) -> list[str]:
    names = {}
    for variant, part in rows[~rows["label"].isin(_BASELINES)].groupby("variant", sort=False):
        if part["seq_len"].nunique() > 1 and varying_numbers(options_of(part).values()):
            names[str(variant)] = len(part)
    return sorted(names, key=lambda name: (name != "linformer", -names[name]))


@in_style
def draw_speedup(
    frame: pd.DataFrame, *, variant: str | None = None, baseline: str | None = None, overlay: str | None = None
) -> Figure:
    """Draw two annotated heat maps: baseline over variant, in time and peak memory; above 1 the variant wins.

    Rows that were measured differently get separate tables. Default variant: ``linformer``, else the one with most
    rows; default baseline: ``softmax``, else ``sdpa``. ``overlay``: ``published`` adds the Linformer paper's own.
    Raises UsageError for a value without such rows or an unknown overlay, and NothingToDraw if no variant has two sizes
    and lengths, or there is no baseline for it.
    """
    every = timed(frame)
    known, there = _tabled(every), set(every["label"])
    baseline = baseline or next((name for name in _BASELINES if name in there), None)
    if not known or baseline is None:
        raise NothingToDraw(f"needs {NEEDS}")
    only_published("speedup", overlay)
    if variant is not None and variant not in known:
        raise UsageError(f"{variant!r} was not timed at several sizes and lengths; there are: {', '.join(known)}")
    if baseline not in there:
        raise UsageError(f"no rows of the baseline {baseline!r}; there are: {', '.join(sorted(there))}")
    variant = variant or known[0]
    both = every[(every["variant"] == variant) | (every["label"] == baseline)]
    prefer = {"level": ("operator", "layer", "model"), "pass": ("forward", "training")}
    found = settings(both, prefer, also_same=("inputs",))
    tables = [table for setting in found[:PANELS] if (table := _table(setting, variant, baseline))]
    if not tables:
        raise NothingToDraw("; ".join(failures(both)) or f"needs {NEEDS}")
    rows = pd.concat([table.rows for table in tables])
    name = bare(variant, tables[0].cells[0][0]["label"])
    drawn_at = dict.fromkeys(table.kind for table in tables if table.kind)
    notes = [
        own_form_note([name]),
        f"{baseline} over {variant}: 2× is twice as fast or half the memory. Italics: the intervals of the two medians "
        "overlap, so neither is known to be faster.",
        f"Drawn at {'; '.join(drawn_at)}." if drawn_at else "",
        *(f"Not measured — {line}" for line in failures(rows)),
        without_room(found),
    ]
    return _draw(tables, _title(tables, name, baseline), where(rows), notes, baseline, overlay=bool(overlay))


def _title(tables: Sequence[_Ratios], name: str, baseline: str) -> str:
    ratios = [_ratio(*cell, "time_median_s", baseline) for table in tables for cell in table.cells]
    found = [(gain, text) for text, gain in ratios if gain == gain]
    if not found:
        return f"{name} against {baseline}"
    return f"{name} is {min(found)[1]} to {max(found)[1]} as fast as {baseline}"


@dataclass(frozen=True)
class _Ratios:
    heading: str
    rows: pd.DataFrame
    cells: Sequence[tuple[Row, Row | None]]
    """Each row of the variant, and that of the baseline at its length."""
    size: str
    kind: str


def _table(setting: Setting, variant: str, baseline: str) -> _Ratios | None:
    rows = setting.rows
    options = options_of(rows[rows["variant"] == variant])
    size = next(iter(varying_numbers(options.values())), None)
    base = rows[rows["label"] == baseline]
    mine = rows[(rows["variant"] == variant) & (rows["label"] != baseline)]
    if size is None or base.empty or not (mine["status"] == Status.OK).any():
        return None
    mine = mine.assign(_size=[options[label].get(size, math.nan) for label in mine["label"]])
    mine = mine[[is_number(value) for value in mine["_size"]]]
    # Keep one setting of the other options: the one with most cells.
    split = [name for name in differing(list(options.values())) if name != size]
    kinds = [
        ", ".join(f"{name}={written(options[label].get(name, 'default'))}" for name in split) for label in mine["label"]
    ]
    kind = max(dict.fromkeys(kinds), key=kinds.count)
    mine = mine[[one == kind for one in kinds]]
    beside = {row["seq_len"]: row for row in records(base)}
    cells = [(row, beside.get(row["seq_len"])) for row in records(mine)]
    return _Ratios(setting.about, pd.concat([mine, base]), cells, size, kind)


def _draw(
    tables: Sequence[_Ratios], title: str, about: Sequence[str], notes: Sequence[str], baseline: str, *, overlay: bool
) -> Figure:
    rooms = [0.95 + 0.2 * len({row["seq_len"] for row, _ in table.cells}) for table in tables]
    if narrow():
        rooms = [2 * room for room in rooms]
    key = _KEY + 0.2 * narrow()
    headings = [table.heading for table in tables]
    if overlay:
        rooms[0] = max(rooms[0], 3.2)  # the eight lengths of the paper
    page = new_page(title, about, notes, width=WIDE if overlay else 8.0, room=stacked(rooms, headings) + key)
    inner = replace(page, bottom=page.bottom + key)
    for place, (part, table) in enumerate(zip(inner.parts(headings, rooms), tables, strict=True)):
        _panels(replace(part, right=part.left + OWN_ROOM) if overlay else part, table, baseline)
        if overlay and place == 0:
            draw_ratios(part, part.left + OWN_ROOM + 0.4, _LIMIT)
    draw_colour_key(
        page, page.bottom + 0.2, _LIMIT, f"{baseline} over the variant", lambda gain: f"{halves(2.0**gain)}×"
    )
    return page.figure


def _panels(page: Page, table: _Ratios, baseline: str) -> None:
    lengths, sizes = (sorted({row[name] for row, _ in table.cells}) for name in ("seq_len", "_size"))
    left, gap, bottom = page.left + 0.62, 0.75, page.bottom + 0.36
    wide, tall = (page.right - left - gap) / 2, page.top - bottom - 0.24
    across, up = wide + gap, 0.0
    if narrow():  # one panel above the other
        wide, across, up = page.right - left, 0.0, (page.top - page.bottom) / 2
        tall = up - 0.6
        bottom += up
    for place, (column, name) in enumerate((("time_median_s", "speed-up"), ("peak_bytes", "memory saving"))):
        ax = page.axes(left + place * across, bottom - place * up, wide, tall)
        gain = np.full((len(lengths), len(sizes)), math.nan)
        unsure = np.zeros(gain.shape, dtype=bool)
        texts = [[""] * len(sizes) for _ in lengths]
        for cell, other in table.cells:
            i, j = lengths.index(cell["seq_len"]), sizes.index(cell["_size"])
            texts[i][j], gain[i, j] = _ratio(cell, other, column, baseline)
            if column == "time_median_s" and other is not None:
                apart = (
                    other["time_ci_low_s"] - cell["time_ci_high_s"],
                    cell["time_ci_low_s"] - other["time_ci_high_s"],
                )
                unsure[i, j] = not any(gap >= 0 for gap in apart)  # nor without intervals
        names = [length(n) for n in lengths], [plain(size) for size in sizes]
        draw_heat(ax, (wide, tall), Heat(gain, texts, *names, unsure=unsure), _LIMIT)
        ax.set_title(name, loc="left", pad=4)
        ax.set_xlabel(table.size)
        ax.set_ylabel("length n")


def _ratio(cell: Row, other: Row | None, column: str, baseline: str) -> tuple[str, float]:
    if cell["status"] != Status.OK:
        return str(cell["status"]), math.nan
    if other is None:
        return f"no\n{baseline}", math.nan
    if other["status"] != Status.OK:
        return f"{baseline}\n{other['status']}", math.nan
    if not (cell[column] > 0 and other[column] > 0):
        return "–", math.nan
    ratio = float(other[column]) / float(cell[column])
    return f"{plain(float(f'{ratio:.2g}'))}×", math.log2(ratio)
