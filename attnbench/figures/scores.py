"""Scores by training, a panel for each task: means with intervals over seeds, and paired differences from softmax."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnbench.figures.kit.page import (
    NothingToDraw,
    Page,
    counted,
    narrow,
    new_page,
    no_room,
    shorten,
    text_width,
    winners,
    wrap,
)
from attnbench.figures.kit.palette import palette
from attnbench.figures.kit.sheets import COLUMN
from attnbench.figures.kit.style import SMALL_SIZE, TEXT_SIZE, in_style, mark
from attnbench.figures.kit.ticks import linear_ticks
from attnbench.figures.published.lra import draw_rescored, only_published, rescored_height
from attnbench.results.frame.scored import Problem, about, family_of, hidden_options, left_out, means, problems
from attnbench.results.frame.words import own_form_note, short_names
from attnbench.results.intervals import MEAN, Difference, Summary, difference, joint, learnt

NEEDS = "scores of trainings"
_PANELS = 12
_ROW = 0.275
"""Least height of a row in inches: two lines of small letters."""
_HEADING = 0.15
"""Inches of each further line of a heading."""
_NARROW_ROOM = 7 * _ROW
"""Most inches of the rows of a panel in a figure for one column."""
_HEAD, _AXIS, _GAP = 0.34, 0.42, 0.16
_LINE = 0.065
"""Inches from the middle of a row to the middle of one of two lines in it."""
_SAID = 0.98


@in_style
def draw_scores(frame: pd.DataFrame, *, overlay: str | None = None) -> Figure:
    """Draw a panel for each task, variants from the best mean down; last the mean of labels with the same seeds on all.

    Each row has a dot with its 95 % interval over seeds, a tick for each seed, and the difference from softmax over the
    common seeds: ``better`` or ``worse`` only if its interval excludes 0. Softmax's interval is a band; chance and
    identity are lines. ``overlay``: ``published`` adds the Long Range Arena's scores, as printed and as repeated by
    others. Raises UsageError for an unknown overlay or if no row has a value, and NothingToDraw without a score.
    """
    every = problems(frame)
    found = [one for one in every if one.parts]
    if not found:
        raise NothingToDraw("; ".join(left_out(frame, every)) or f"needs {NEEDS}")
    only_published("scores", overlay)
    mean = means(found)
    drawn = [*found, *mean][:_PANELS]
    names, hidden = short_names(
        pd.DataFrame([(p.label, p.variant) for one in drawn for p in one.parts], columns=["label", "variant"])
    )
    notes = [*_notes(drawn, family := family_of(found)), *left_out(frame, every), *_without_mean(found, mean)]
    notes += [" ".join(part for part in (hidden_options(drawn), hidden) if part), own_form_note(names)]
    notes.append(no_room([one.heading for one in [*found, *mean]], _PANELS))
    across = 1 if narrow() or len(drawn) == 1 else 2
    wide = ((COLUMN if narrow() else 8.0) - 0.28 - _GAP * (across - 1)) / across
    panels = [(one, parts) for one in drawn for parts in _in_panels(one.parts, names, wide)]
    lines = [panels[at : at + across] for at in range(0, len(panels), across)]
    rooms = [max(_tall(one, parts, names, wide) for one, parts in line) for line in lines]
    below = rescored_height() + 0.3 if overlay else 0.0
    page = new_page(
        _title(drawn, names, family),
        about(frame, found),
        notes,
        height=2.0,
        room=sum(rooms) + _GAP * (len(rooms) - 1) + below,
    )
    limits, top = _limits(drawn), page.top
    for line, room in zip(lines, rooms, strict=True):
        for place, (one, parts) in enumerate(line):
            left = page.left + place * (wide + _GAP)
            bottom = top - _tall(one, parts, names, wide)
            part = replace(page, left=left, right=left + wide, bottom=bottom, top=top)
            _panel(part, one, parts, names, (limits, family, frame))
        top -= room + _GAP
    if overlay:
        draw_rescored(replace(page, top=page.bottom + below - 0.3))
    return page.figure


def _in_panels(parts: Sequence[Summary], names: Mapping[str, str], wide: float) -> list[Sequence[Summary]]:
    """The rows of each panel: in a figure for one column so many as a sheet has room for."""
    fit = int(_NARROW_ROOM / _row_of(_names(parts, names, wide)) + 1e-9) if narrow() else len(parts)
    panels = math.ceil(len(parts) / max(1, fit))
    most = -(-len(parts) // panels)
    return [parts[at : at + most] for at in range(0, len(parts), most)]


def _title(drawn: Sequence[Problem], names: Mapping[str, str], family: int) -> str:
    problems = [one for one in drawn if one.task != MEAN]
    pairs = [(names[part.label], part, one.reference) for one in problems if one.reference for part in one.parts]
    pairs = [(name, part, other) for name, part, other in pairs if part is not other]
    if not pairs:
        best = winners([[(part.over_seeds.mean, names[part.label]) for part in one.parts] for one in problems])
        return f"Highest mean score: {best}"
    found = [(difference(part, other, family).verdict, name) for name, part, other in pairs]
    better, worse = ([name for verdict, name in found if verdict == wanted] for wanted in ("better", "worse"))
    if better:
        return f"Better than softmax: {counted(better, len(problems))}"
    if all(verdict == "withheld" for verdict, _ in found):
        return "Nothing could be compared with softmax: that needs two common seeds"
    worst, of = len(set(worse)), len(set(names.values())) - 1
    return f"Nothing is shown to be better than softmax; {worst} of {of} {'is' if worst == 1 else 'are'} worse"


def _limits(drawn: Sequence[Problem]) -> tuple[float, float]:
    values = [value for one in drawn for part in one.parts for value in (part.least, part.most, *(part.ends or ()))]
    values += [one.chance for one in drawn if one.chance is not None]
    low, high = min(values), max(values)
    extra = 0.04 * (high - low) or 0.05
    return low - extra, high + extra


def _panel(
    page: Page,
    one: Problem,
    parts: Sequence[Summary],
    names: Mapping[str, str],
    of_all: tuple[tuple[float, float], int, pd.DataFrame],
) -> None:
    limits, family, frame = of_all
    wide, bottom = page.right - page.left, page.bottom + _AXIS
    named = _names(parts, names, wide)
    column = max(text_width(text, size) for lines in named for text, size in lines) + 0.03
    row, heading = _row_of(named), _heading(one, wide)
    tall, head = row * len(parts), page.top - _HEADING * (len(heading) - 1)
    page.write_heading("\n".join(heading))
    left, right = page.left + column + 0.06, page.right - _SAID
    ax = page.axes(left, bottom, right - left, tall)
    ax.set_xlim(*limits)
    ax.set_ylim(len(parts) - 0.5, -0.5)
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    ax.set_xticks(linear_ticks(*limits, most=4 if right - left < 2.2 else 6))
    ax.grid(axis="x")
    ax.set_xlabel("score")
    _lines(ax, one)
    beside = page.blank(page.left, bottom, wide, tall)
    reference, floor = one.reference, one.floor
    for place, part in enumerate(parts):
        rows = _rows(frame, one, part.label)
        _row(ax, place, part, rows, is_hollow=_is_hollow(part, floor))
        y = tall - row * (place + 0.5)
        for turn, (text, size) in enumerate(named[place]):
            up = _LINE * (len(named[place]) - 1 - 2 * turn)
            colour = palette().faint if turn else palette().ink
            mark(beside.text(column, y + up, text, fontsize=size, va="center", ha="right", color=colour), rows)
        if reference is not None and part is not reference:
            _say(beside, wide, y, difference(part, reference, family))
    if reference is not None:
        less = shorten(f"minus {reference.label}", 0.5 * wide, SMALL_SIZE)
        page.write(page.right, head - 0.17, less, va="top", ha="right", color=palette().faint)


def _names(parts: Sequence[Summary], names: Mapping[str, str], wide: float) -> list[list[tuple[str, float]]]:
    """The lines of each name and their sizes: the variant, and below it the options."""
    split = [names[part.label].partition(":")[::2] for part in parts]
    longest = max(text_width(variant, SMALL_SIZE) for variant, _ in split)
    room = min(max((0.3 if narrow() else 0.34) * wide - 0.05, longest), 0.42 * wide)
    below = SMALL_SIZE - 1
    return [
        [(shorten(variant, room, SMALL_SIZE), SMALL_SIZE), *((text, below) for text in wrap(options, room, below))]
        for variant, options in split
    ]


def _row_of(named: Sequence[Sequence[object]]) -> float:
    return _ROW + 2 * _LINE * max(0, *(len(lines) - 2 for lines in named))


def _heading(one: Problem, wide: float) -> list[str]:
    return wrap(one.heading, 0.9 * wide, TEXT_SIZE)


def _tall(one: Problem, parts: Sequence[Summary], names: Mapping[str, str], wide: float) -> float:
    """Height of a panel in inches."""
    head = _HEAD + _HEADING * (len(_heading(one, wide)) - 1)
    return head + _AXIS + _row_of(_names(parts, names, wide)) * len(parts)


def _lines(ax: Axes, one: Problem) -> None:
    if one.reference is not None and one.reference.ends is not None:
        ax.axvspan(*one.reference.ends, color=palette().family("exact"), alpha=0.1, lw=0, zorder=0)
    if one.chance is not None:
        ax.axvline(one.chance, color=palette().ink, lw=1.1, ls=":", zorder=1.4)
    if one.no_mixing is not None:
        ax.axvline(one.no_mixing.over_seeds.mean, color=palette().family("reference"), lw=1.1, ls="--", zorder=1.4)


def _is_hollow(part: Summary, floor: float | None) -> bool:
    return part.ends is not None and not learnt(part, floor)


def _rows(frame: pd.DataFrame, one: Problem, label: str) -> pd.Index[Any]:
    """The trainings of one label, or of a mean those of all tasks."""
    here = frame[(frame["label"] == label) & (frame["protocol"] != "")]
    cells = [training.cell_id for choice in one.choices if choice.label == label for training in choice.rows]
    return here.index[here["cell_id"].isin(cells)] if cells else here.index


def _row(ax: Axes, place: int, part: Summary, rows: pd.Index[Any], *, is_hollow: bool) -> None:
    colour = palette().family(part.family)
    if part.ends is not None:
        mark(ax.plot(part.ends, [place, place], color=colour, lw=1.4, solid_capstyle="butt", zorder=2), rows)
    seeds = list(part.by_seed.values())
    if len(seeds) > 1:
        mark(ax.plot(seeds, [place] * len(seeds), "|", color=colour, ms=8, mew=1.0, alpha=0.55, zorder=2.5), rows)
    face: Any = palette().page if is_hollow else colour
    dot = ax.plot([part.over_seeds.mean], [place], "o", ms=5.2, mec=colour, mfc=face, mew=1.2, zorder=3)
    mark(dot, rows, main=True)


def _say(ax: Axes, right: float, y: float, found: Difference) -> None:
    if found.of is None:
        ax.text(right, y, "no common seed", fontsize=SMALL_SIZE, va="center", ha="right", color=palette().faint)
        return
    clear = found.verdict in ("better", "worse")
    words = f"{signed(found.of.mean)} {found.verdict}" if clear else signed(found.of.mean)
    up = _LINE if found.of.low is not None else 0.0
    ax.text(right, y + up, words, fontsize=SMALL_SIZE, va="center", ha="right")
    if found.of.low is not None and found.of.high is not None:
        ends = f"{signed(found.of.low)} to {signed(found.of.high)}"
        ax.text(right, y - up, ends, fontsize=SMALL_SIZE - 1, va="center", ha="right", color=palette().faint)


def signed(value: float) -> str:
    """``+0.014``, ``−0.040`` or ``0.000``: a difference of scores."""
    return f"{value:+.3f}".replace("+0.000", "0.000").replace("-0.000", "0.000").replace("-", "−")


def _notes(drawn: Sequence[Problem], family: int) -> list[str]:
    several = any(len(part.by_seed) > 1 for one in drawn for part in one.parts)
    single = any(len(part.by_seed) == 1 for one in drawn for part in one.parts)
    lines = ["dotted: chance (the best constant answer)"] if any(one.chance is not None for one in drawn) else []
    lines += ["dashed: identity, which mixes no tokens"] if any(one.no_mixing for one in drawn) else []
    lines += ["band: softmax's interval"] if any(one.reference and one.reference.ends for one in drawn) else []
    hollow = any(_is_hollow(part, one.floor) for one in drawn for part in one.parts)
    notes = [
        "Dots: means over seeds; ticks: single seeds; bars: 95 % t-intervals over seeds, on one test set." * several,
        "With one seed the bar is the interval over test examples, which knows nothing of other seeds; a mean over "
        "tasks has none." * single,
        f"Upright: {'; '.join(lines)}." * bool(lines),
        "Hollow: its interval is not above identity's on the same task (without identity, not above chance)." * hollow,
        f"Right: score minus softmax's, seed by seed, with its interval, {joint(family)}; better or worse only where "
        f"that excludes 0{', never with one seed' * single}." * any(one.reference for one in drawn),
    ]
    return [" ".join(filter(None, notes))]


def _without_mean(found: Sequence[Problem], drawn: Sequence[Problem]) -> list[str]:
    if len({one.task for one in found}) < 2:
        return []
    if not drawn:
        return ["No mean over tasks: no variant has the same seeds on each task of one model."]
    every = dict.fromkeys(part.label for one in found for part in one.parts)
    missing = [label for label in every if all(label not in {part.label for part in one.parts} for one in drawn)]
    once = [label for label in missing if sum(label in {part.label for part in one.parts} for one in found) == 1]
    several = [label for label in missing if label not in once]
    lines = [f"Not in the mean, since trained on one task only: {', '.join(once)}."] if once else []
    if several:
        lines.append(f"Not in the mean, for want of the same seeds on each task: {', '.join(several)}.")
    return lines
