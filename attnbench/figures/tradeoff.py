"""The Long Range Arena figure: speed to the right, agreement with exact attention upwards, memory as area.

After figure 3 of Tay et al. 2020, "Long Range Arena", arXiv:2011.04006. There y is the average score on the tasks. Here
every number comes from the user's own run: y is an error, or a score if the timed models were trained as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnbench.errors import UsageError
from attnbench.figures.catalogue import ENOUGH
from attnbench.figures.catalogue import applies as too_many_to_name
from attnbench.figures.kit.bubbles import (
    draw_circles,
    draw_front,
    draw_keys,
    draw_numbers,
    is_long,
    keys_height,
    round_sizes,
)
from attnbench.figures.kit.heights import BandLayout, arrange, draw_bands
from attnbench.figures.kit.labels import place_labels, write_along
from attnbench.figures.kit.page import NothingToDraw, Page, narrow, narrow_room, new_page, shorten, stacked, text_width
from attnbench.figures.kit.palette import is_inline, palette
from attnbench.figures.kit.style import SMALL_SIZE, in_style, mark
from attnbench.figures.kit.ticks import halves, log_axis, padded, plain, trimmed
from attnbench.figures.published.lra import draw_published, only_published
from attnbench.results.frame.agreement import OF_TRAINED, Y_AXES, of_trained
from attnbench.results.frame.contenders import TRIVIAL, Contenders, contenders, panels, spread
from attnbench.results.frame.relative import apart
from attnbench.results.frame.same_model import CHANCE, NO_MIXING, tasks_of_both
from attnbench.results.frame.settings import PANELS, check_length, compared, timed, without_room
from attnbench.results.frame.words import failures, own_form_note, short_names, where
from attnbench.suite.cell import UNTOUCHED
from attnbench.units import format_bytes

NEEDS = f"times and errors, of fewer than {ENOUGH} variants"
_X = {
    "examples_per_s": "examples/s (log2 scale)",
    "tokens_per_s": "tokens/s (log2 scale)",
    "time_median_s": "seconds per call (log2 scale, faster to the right)",
}
_AGREEMENT = {
    "score": "score",
    "loss_delta": "loss of a trained model",
    "hidden_error": "agreement with a trained model",
}
_FRONT = "Dashed steps: the Pareto front. For a method on it, no other method is both faster and {}. Only {} compete:"
_ERROR = "more accurate", "exact methods and approximations of softmax attention that beat answering mean(V)"
_SCORE = (
    "better at the task",
    "methods whose interval lies above that of identity trained on the task (else above chance)",
)
_TRAINED = "harms the model less", "methods that harm it less than answering mean(V)"
MOST_NAMES = 40
"""Most points of a page's figure that all have their names: pointing at one says its name too."""
_NUMBERED = 8
"""Most names in a panel for one column: more are numbers there, with a list of the names below."""
_BOTTOM = 0.42
"""Room below the axes for their scale, in inches."""


def applies(frame: pd.DataFrame, whole: pd.DataFrame | None = None) -> bool:
    """Something was timed (or failed), errors or scores exist, and a scatter plot can name all labels."""
    whole, rows = frame if whole is None else whole, timed(frame)
    known = not compared(whole).empty or bool(tasks_of_both(whole, rows)) or of_trained(rows) is not None
    return not rows.empty and known and not too_many_to_name(frame)


@in_style
def draw_tradeoff(
    frame: pd.DataFrame,
    *,
    n: int | None = None,
    x: str = "examples_per_s",
    y: str | None = None,
    whole: pd.DataFrame | None = None,
    inputs: str | None = None,
    overlay: str | None = None,
) -> Figure:
    """Draw a bubble plot of one length: x is speed (log2), y agreement, area peak memory; with the Pareto front.

    Rows that were measured differently get separate panels, the whole model and the training step first.

    Args:
        n: by default the longest of the lengths with most labels.
        x: ``examples_per_s``, ``tokens_per_s`` or ``time_median_s``; right is faster.
        y: ``rel_error``, ``max_abs_error``, ``cosine``, ``score``, ``loss_delta`` or ``hidden_error``; up is better.
            By default ``score`` for the rows of tasks that were both timed and trained on; the loss of trained models
            if no error was measured; else ``rel_error``.
        whole: a table with further rows, for their errors and scores.
        inputs: of the errors, by label or name; by default ``listops``, else the first.
        overlay: ``published`` adds a panel with the paper's own measurements.

    Raises:
        UsageError: an option has a value that does not exist.
        NothingToDraw: no row has a speed.
    """
    for name, value, known in (("x", x, list(_X)), ("y", y, [None, *Y_AXES])):
        if value not in known:
            raise UsageError(f"{name} must be {' or '.join(one for one in known if one)}, not {value!r}")
    only_published("tradeoff", overlay)
    whole, rows = frame if whole is None else whole, timed(frame)
    check_length(n, set(rows["seq_len"]), "rows")
    both = tasks_of_both(whole, rows) if y is None else set()
    trained = rows["level"] == "pretrained"
    own = of_trained(rows) if trained.all() or compared(whole).empty else None
    y = y or ("score" if both else own or "rel_error")
    rest = ""
    if both:
        others = rows[~rows["task"].isin(both)]
        rows = rows[rows["task"].isin(both)]
        rest = f"Timed, not scored: {len(others)} rows of other inputs; --y rel_error draws them." * bool(len(others))
    elif trained.any() and y not in OF_TRAINED:
        rest = f"Timed, without an error: {trained.sum()} rows of trained models; --y loss_delta draws them."
    trained = rows["level"] == "pretrained"
    rows = rows[trained if y in OF_TRAINED else ~trained]
    found = [one for setting in panels(rows) if (one := contenders(whole, setting, n, x, y, inputs))]
    if not found:
        raise NothingToDraw("; ".join(failures(rows)) or "no row holds a time")
    rest = " ".join(part for part in (rest, without_room([one.setting for one in found])) if part)
    return draw_contenders(found[:PANELS], x=x, overlay=overlay, rest=rest)


def _title(one: Contenders) -> str:
    agreement = _AGREEMENT.get(one.agreed.column, "agreement with exact attention")
    names, _ = short_names(one.points)
    if len(one.points) == 1:
        return f"{names[one.points['label'].iloc[0]]} is the only method here"
    if (one.points["kind"] == "exact").all():
        first, *others = one.points.sort_values("x", ascending=one.fast_low).to_dict("records")
        far = apart(one.setting, first["label"])
        tied = [names[row["label"]] for row in others if row["row"] not in far]
        said = f"{names[first['label']]} is the fastest of {len(one.points)} exact methods"
        return said + f", not told apart from {', '.join(tied)}" * bool(tied)
    front = [names[label] for label in one.front["label"]]
    return f"Unbeaten in speed and {agreement}: {', '.join(front)}" if front else f"Speed, memory and {agreement}"


@in_style
def draw_contenders(
    found: Sequence[Contenders], *, x: str = "examples_per_s", overlay: str | None = None, rest: str = ""
) -> Figure:
    """Draw a panel for each of these points; ``rest`` is a further note."""
    points = pd.concat([one.points for one in found])
    names, hidden = short_names(points)
    lengths, said = {one.n for one in found}, {one.agreed.said for one in found}
    about = where(pd.concat([one.rows for one in found]), found[0].n if len(lengths) == 1 else None)
    headings = [_heading(one, with_n=len(lengths) > 1, with_error=len(said) > 1) for one in found]
    # More than two dozen names need a taller panel.
    named = [24 if _has_too_many(one) else len(one.points) for one in found]
    rooms = [4.3 + 0.13 * max(0, count - 24) for count in named]
    keys, numbers = 0.0, dict[str, str]()
    if narrow():
        rooms = [narrow_room(heading) for heading in headings]
        if max(named) > _NUMBERED:
            every = dict.fromkeys(points.sort_values(["family", "label"])["label"])
            order = sorted(every, key=lambda label: is_long(names[label]))
            numbers = {label: str(turn) for turn, label in enumerate(order, start=1)}
        keys = keys_height(list(points["family"]), [names[label] for label in numbers])
    page = new_page(
        _title(found[0]),
        [*about, *(said if len(said) == 1 else ())],
        [*_notes(found, points), hidden, own_form_note(names), rest],
        width=13.6 if overlay else 8.0,
        room=stacked(rooms, headings) + keys,
    )
    page, under = page.split(keys)
    largest, limits = float(points["memory"].max()), spread(list(found))
    for place, (part, one) in enumerate(zip(page.parts(headings, rooms), found, strict=True)):
        widest = min(1.9, 0.8 * _width(part))
        written = [numbers.get(label) or shorten(names[label], widest, SMALL_SIZE) for label in one.points["label"]]
        shown = one.points.assign(name=written)
        if _has_too_many(one):
            shown["name"] = shown["name"].where(shown["label"].isin(one.front["label"]), "")
        _panel(part, one, shown, x, limits[place], largest)
        if place == 0:
            _keys(under if narrow() else replace(part, left=part.left + 0.96 + _width(part) + 0.14), points, largest)
            if numbers:
                draw_numbers(under, {number: names[label] for label, number in numbers.items()})
            if overlay:
                draw_published(part, part.left + 0.96 + _width(part) + 1.62)
    return page.figure


def _has_too_many(one: Contenders) -> bool:
    return is_inline() and len(one.points) > MOST_NAMES


def _width(page: Page) -> float:
    return page.right - page.left - 0.96 - 0.06 if narrow() else 5.55


def _heading(one: Contenders, *, with_n: bool, with_error: bool) -> str:
    said = one.agreed.said if with_error else ""
    task = str(one.rows["inputs"].iloc[0]) if one.agreed.column == "score" and with_error else ""  # ``said`` names it
    about = [part for part in one.setting.about.split(" · ") if part != task]
    parts = [*about, f"n = {one.n}" if with_n else "", said]
    return " · ".join(part for part in parts if part)


def _panel(
    page: Page, one: Contenders, points: pd.DataFrame, x: str, ends: tuple[float, float], largest: float
) -> None:
    height, width = page.top - page.bottom - _BOTTOM, _width(page)
    slow, fast = padded(ends, share=0.1)
    limits = (fast, slow) if one.fast_low else (slow, fast)

    def place(value: float) -> float:
        return math.log(value / limits[0]) / math.log(limits[1] / limits[0]) * width

    lines, front = one.lines, one.front
    also, within = list(lines.values()), (-math.inf, math.inf)
    if one.agreed.column == "loss_delta":
        also += [*points["y_low"], *points["y_high"]]
    if one.agreed.column == "score":
        also += [*points["y_low"], *points["y_high"], *(one.agreed.band or ())]
        within = (0.0, 1.0)
    layout = arrange(points, place, height, log=one.log, down=one.down, also=also, within=within)
    ax = page.axes(page.left + 0.96, page.bottom + _BOTTOM, width, height)
    log_axis(ax, "x", limits, text=halves, most=5 if narrow() else 8)
    ax.set_xlabel(_X[x])
    draw_bands(ax, layout, height, Y_AXES[one.agreed.column], width)
    if len(front) > 1:
        at = layout.points.set_index("label").loc[front["label"], "at"]
        draw_front(ax, front["x"].to_numpy(), at.to_numpy(), layout.scale[0])
    if one.agreed.band:
        low, high = (layout.height_of(end) for end in one.agreed.band)
        ax.axhspan(low, high, color=palette().family("exact"), alpha=0.09, lw=0, zorder=0)
    _mark_spread(ax, layout)
    drawn = layout.points
    radii = draw_circles(ax, drawn, largest)
    _mark_lines(ax, layout, lines, width)
    texts = place_labels(ax, list(drawn["name"]), list(drawn["x"]), list(drawn["at"]), radii)
    for text, row in zip(texts, drawn.loc[drawn["name"] != "", "row"], strict=True):
        mark(text, [row])


def _keys(page: Page, points: pd.DataFrame, largest: float) -> None:
    sizes = {size: trimmed(format_bytes(size)) for size in round_sizes(largest)}
    title = "peak memory\n(circle area)" if sizes else ""
    draw_keys(page, list(points["family"]), largest, title, sizes)


def _mark_lines(ax: Axes, layout: BandLayout, lines: Mapping[str, float], width: float) -> None:
    """Draw errors without a speed: the oracles, and mean(V), which a useful method beats; or chance and no mixing."""
    if not (layout.points["kind"] == "measured").any():
        return
    for name, value in lines.items():
        trivial = name == TRIVIAL
        if trivial:
            ax.axhspan(layout.scale[0], layout.height_of(value), facecolor=palette().worse, lw=0, zorder=0)
        colour = palette().ink if trivial or name == CHANCE else palette().family("reference")
        ax.axhline(layout.height_of(value), color=colour, lw=1.2, ls=":", zorder=1.6)
    for name, value in lines.items():
        if narrow():
            name = name.removesuffix(" trained on the same task")
        said = f": {plain(float(f'{value:.3g}'))}" + "; no better below" * (name == TRIVIAL and not narrow())
        fitting = shorten(name, width - text_width(said, SMALL_SIZE) - 0.1, SMALL_SIZE)
        write_along(ax, fitting + said, layout.height_of(value))


def _mark_spread(ax: Axes, layout: BandLayout) -> None:
    columns = layout.points[["family", "kind", "x", "at", "x_low", "x_high", "y", "y_std", "y_low", "y_high", "row"]]
    for family, kind, x, at, low, high, y, std, least, most, row in columns.itertuples(index=False):
        how: dict[str, Any] = {"color": palette().family(family), "lw": 0.9, "zorder": 2.5}
        if math.isfinite(low) and math.isfinite(high):
            mark(ax.plot([low, high], [at, at], **how), [row])
        ends = (least, most) if math.isfinite(least) else (y - std, y + std)
        if kind == "measured" and math.isfinite(ends[0]):
            mark(ax.plot([x, x], [layout.height_of(end) for end in ends], **how), [row])


def _notes(found: Sequence[Contenders], points: pd.DataFrame) -> list[str]:
    notes = []
    if any(len(one.points) > 1 and (one.points["kind"] == "exact").all() for one in found):
        notes.append("All are exact: their heights only keep the circles apart.")
    if any(len(one.front) > 1 for one in found):
        every = [one.setting.rows for one in found]
        of = sum(rows.loc[rows["family"] != "reference", "label"].nunique() for rows in every)
        fair = sum(len(one.competing) for one in found)
        column = found[0].agreed.column
        words = _SCORE if column == "score" else _TRAINED if column in OF_TRAINED else _ERROR
        notes.append(f"{_FRONT.format(*words)} {fair} of {of} methods.")
    if any(one.agreed.column == "loss_delta" for one in found):
        notes.append("Upright bars: exact 95 % intervals of the median over windows.")
    if found[0].agreed.column in OF_TRAINED and (points["variant"] == UNTOUCHED).any():
        notes.append("none: the model as it is.")
    if any(one.agreed.band for one in found):
        notes.append(
            "Grey band: softmax's interval. Upright bars: 95 % t-intervals over seeds, of one seed over test examples."
        )
    if narrow() and any(NO_MIXING in one.lines for one in found):
        notes.append(f"Dotted: {CHANCE} and {NO_MIXING}.")
    if narrow() and any(TRIVIAL in one.lines for one in found):
        notes.append(f"Shaded: no better than {TRIVIAL}.")
    if any(map(_has_too_many, found)):
        notes.append("Names: the Pareto front; pointing at another circle says its name.")
    if points["memory"].isna().any():
        notes.append("Dashed circle: memory was not measured.")
    return [*notes, *dict.fromkeys(line for one in found for line in one.left_out)]
