"""Decoding as it is served: to the first token, for each that follows, what is kept, and several tokens in one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnbench.figures.kit.page import NothingToDraw, winners
from attnbench.figures.kit.score_lines import ScoreLine, ScorePanel, at_the_end, draw_lines, draw_plain, least_last
from attnbench.figures.kit.style import in_style
from attnbench.figures.kit.ticks import length, log_axis, padded, trimmed
from attnbench.measure.status import Status
from attnbench.results.frame.settings import PANELS, check_columns, settings, without_room
from attnbench.results.frame.words import own_form_note, short_names, where
from attnbench.units import format_bytes, format_seconds

NEEDS = "pass generate at two lengths or with two kept_prefix, or pass decode with two numbers of new_tokens"


class _PanelAxes(NamedTuple):
    pass_: str
    x: str
    y: str
    words: str
    text: Callable[[float], str] = format_seconds


_KINDS = (
    _PanelAxes("decode", "new_tokens", "time_median_s", "one step"),
    _PanelAxes("generate", "seq_len", "token_s", "each token that follows"),
    _PanelAxes("generate", "seq_len", "first_token_s", "to the first token"),
    _PanelAxes("generate", "kept_prefix", "first_token_s", "to the first token behind a kept prefix"),
    _PanelAxes("generate", "seq_len", "state_bytes", "cache or state", format_bytes),
)
_AXES = {
    "seq_len": "n of the prompt (log2 scale)",
    "new_tokens": "tokens in one step (log2 scale)",
    "kept_prefix": "tokens of the prompt that are not kept (log2 scale)",
}


@in_style
def draw_served(rows: pd.DataFrame) -> Figure:
    """Draw times of decoding and bytes of the cache or state over the prompt, and the time of a step over its tokens.

    Steps are those at the longest n with several numbers of tokens, and first tokens behind a kept prefix those at the
    longest n with several prefixes. Rows that were measured differently get separate panels. Raises NothingToDraw
    without such rows.
    """
    check_columns(rows)
    drawn = [(kind, _of(kind, rows)) for kind in _KINDS]
    drawn = [(kind, rows) for kind, rows in drawn if len(rows)]
    found = [(kind, one) for kind, rows in drawn for one in settings(rows, also_same=("inputs",))]
    found = [(kind, one) for kind, one in found if one.rows["seq_len"].nunique() > 1]
    if not found:
        raise NothingToDraw(f"needs {NEEDS}")
    every = pd.concat([one.rows for _, one in found])
    names, hidden = short_names(every)
    panels, kinds = [], dict[str, _PanelAxes]()
    for kind, one in found[:PANELS]:
        n = f", n = {length(int(one.rows['_n'].iloc[0]))}" if kind.x != "seq_len" else ""
        heading = ", ".join(filter(None, (kind.words + n, one.name)))
        lines = [_line(names[str(label)], kind, part) for label, part in one.rows.groupby("label", sort=False)]
        panels.append(ScorePanel(heading, tuple(sorted(lines, key=least_last)), ()))
        kinds[heading] = kind
    notes = [
        "Medians. Names from the smallest number at the right up.",
        hidden,
        own_form_note(names),
        without_room([one for _, one in found]),
    ]
    first = [panel for panel in panels if kinds[panel.heading] is kinds[panels[0].heading]]
    least = winners(list(map(at_the_end, first)), largest=False)
    title = f"Least time, {kinds[panels[0].heading].words}: {least}"
    return draw_lines(title, where(every, None), notes, panels, "", partial(_scale, kinds), draw_plain)


def _of(kind: _PanelAxes, rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of a panel with ``seq_len`` as its axis, whatever the axis counts; none if all have one place."""
    rows = rows[(rows["status"] == Status.OK) & (rows["pass"] == kind.pass_) & (rows[kind.y] > 0)]
    if kind.x != "seq_len":
        several = rows.groupby("seq_len")[kind.x].nunique()
        rows = rows[rows["seq_len"] == several[several > 1].index.max()]
        at = rows["new_tokens"].clip(lower=1) if kind.x == "new_tokens" else rows["seq_len"] - rows["kept_prefix"]
        rows = rows.assign(_n=rows["seq_len"], seq_len=at, kv_len=at, **{kind.x: 0})
    return rows if rows["seq_len"].nunique() > 1 else rows[:0]


def _line(name: str, kind: _PanelAxes, part: pd.DataFrame) -> ScoreLine:
    part = part.sort_values("seq_len")
    x, y = tuple(map(float, part["seq_len"])), tuple(map(float, part[kind.y]))
    return ScoreLine(name, str(part["family"].iloc[0]), x, y, y, y)


def _scale(kinds: Mapping[str, _PanelAxes], ax: Axes, panel: ScorePanel) -> None:
    kind, values = kinds[panel.heading], [y for line in panel.lines for y in line.y]
    places = sorted({x for line in panel.lines for x in line.x})
    base, limits = 2 if kind.text is format_bytes else 10, padded(values, share=0.07, least=4)
    log_axis(ax, "y", limits, base=base, most=5, text=lambda value: trimmed(kind.text(value)))
    log_axis(ax, "x", padded(places, share=0.04), at=places, most=len(places), text=length)
    ax.set_xlabel(_AXES[kind.x])
