"""The figure of a swap: loss over the steps of training, or damage over error, and each layer's part in the damage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnbench.plots.keys import KEY, wrapped_height, write_wrapped
from attnbench.plots.page import NothingToDraw, Page, narrow, new_page
from attnbench.plots.palette import palette
from attnbench.plots.style import Look, in_style, looks
from attnbench.plots.ticks import linear_ticks, log_axis, padded, plain
from attnbench.pretrained.question import EXACT, NONE
from attnbench.pretrained.row import Row
from attnbench.pretrained.summary import Line, lines
from attnbench.spec import parse_spec
from attnbench.variant import VARIANTS

TITLE = "A trained model with another attention"
_LEAST_KL = 1e-6
"""Nats below which a divergence is rounding."""
_LEAST_ERROR = 1e-4
"""Error of a layer below which a variant computed exact attention: one that sees every pair of so short a window."""
_TALL = 2.9
"""Height of a panel, in inches."""


@in_style
def draw_swap(rows: Sequence[Row]) -> Figure:
    """Draw a line for each variant over the steps, and one over the layers that were replaced alone.

    Without training there is a point for each variant instead: what the model loses over the error of its layers.

    Raises:
        NothingToDraw: there was neither training, nor a layer replaced alone, nor a second variant.
    """
    found = [line for line in lines(rows) if line.label != EXACT]
    together = [line for line in found if not line.layers.isdecimal()]
    trained = [line for line in together if line.loss is not None]
    untrained = [line for line in together if not line.steps and _damage(line) is not None and not _exact(line)]
    alone = [line for line in found if line.layers.isdecimal() and _damage(line) is not None and not _exact(line)]
    panels = []
    if len({line.steps for line in trained}) > 1:
        panels.append(trained)
    elif len(untrained) > 1:
        panels.append(untrained)
    if len({line.layers for line in alone}) > 1:
        panels.append(alone)
    if not panels:
        raise NothingToDraw("neither steps nor layers to draw over; ask for --steps 0,50 or --layers each")
    hows = _hows([line for panel in panels for line in panel])
    said = {NONE: "whole, trained as long"} if NONE in hows else {}
    key = wrapped_height(hows, said)
    tall = _TALL * len(panels) + key if narrow() else max(_TALL, key)
    page = new_page(
        TITLE,
        [_about(next((row for row in rows if row.train), rows[0]))],
        [*_notes(panels, untrained, alone), *_left_out(found, panels)],
        height=1.0,
        room=tall + 0.4,
    )
    for ax, panel in zip(_axes(page, len(panels), key), panels, strict=True):
        if panel is alone:
            _by_layer(ax, panel, hows)
        elif panel is untrained:
            _by_error(ax, panel, hows)
        else:
            _by_step(ax, panel, hows, rows)
    keys = page.split(key)[1] if narrow() else Page(page.figure, page.right - KEY, page.bottom, page.right, page.top)
    write_wrapped(keys, hows, said)
    return page.figure


def _about(row: Row) -> str:
    how = f"; trained: {row.train}, rate {row.learning_rate:g}" if row.train else ""
    return f"{row.model}, {row.windows} windows of {row.length} tokens of {row.text}{how}"


def _notes(panels: Sequence[Sequence[Line]], untrained: Sequence[Line], alone: Sequence[Line]) -> list[str]:
    notes = []
    if any(panel is untrained for panel in panels):
        notes.append(
            "Error: of the output of a replaced layer on what the untouched model's layer gets, mean over layers. Up: "
            "what the whole model loses, all layers replaced, untrained; log scale."
        )
    if any(panel is not alone and panel is not untrained for panel in panels):
        notes.append(
            "Loss: mean cross-entropy in nats, on windows that no training saw. Thin line: the model as it was. By "
            "what the dashed line falls, a model learns the text; that is no recovery from a swap."
        )
    if any(panel is alone for panel in panels):
        of = "KL: of the untouched model's answers to those" if alone[0].kl is not None else "Last features: of a model"
        notes.append(f"{of} with one layer replaced, untrained; log scale.")
    return notes


def _left_out(found: Sequence[Line], panels: Sequence[Sequence[Line]]) -> list[str]:
    drawn = {line.label for panel in panels for line in panel}
    names = dict.fromkeys(line.label for line in found if _exact(line) and line.label not in drawn)
    return [f"Exact at this length, so not drawn: {', '.join(names)}."] if names else []


def _hows(found: Sequence[Line]) -> dict[str, Look]:
    names = dict.fromkeys(line.label for line in found)
    families = [(name, VARIANTS.get(parse_spec(name).name).family) for name in names if name != NONE]
    hows = looks(families)
    if NONE in names:
        hows[NONE] = Look(palette().faint, "", (0, (4, 2)))
    return hows


def _axes(page: Page, count: int, key: float) -> list[Axes]:
    """Panels below each other in a column, side by side on a page."""
    if narrow():
        tall = (page.top - page.bottom - key) / count
        return [
            page.axes(page.left + 0.5, page.top - (place + 1) * tall + 0.42, page.right - page.left - 0.6, tall - 0.5)
            for place in range(count)
        ]
    wide = (page.right - page.left - KEY - 0.2) / count
    return [
        page.axes(page.left + 0.5 + place * wide, page.bottom + 0.42, wide - 0.65, page.top - page.bottom - 0.5)
        for place in range(count)
    ]


def _by_step(ax: Axes, found: Sequence[Line], hows: Mapping[str, Look], rows: Sequence[Row]) -> None:
    last = max(line.steps for line in found)
    for label, how in hows.items():
        own = sorted((line for line in found if line.label == label), key=lambda line: line.steps)
        ax.plot([line.steps for line in own], [line.loss for line in own if line.loss is not None], **how.line)
    base = next((row.loss_base for row in rows if row.loss_base is not None), None)
    if base is not None:
        ax.axhline(base, color=palette().ink, lw=0.8, zorder=1)
    ax.set_xlim(-0.03 * last, 1.03 * last)
    ticks = linear_ticks(0, 1.03 * last)
    ax.set_xticks(ticks, [plain(tick) for tick in ticks])
    ax.set_xlabel("steps of training")
    ax.set_ylabel("loss, nats")
    ax.grid(axis="y")


def _exact(line: Line) -> bool:
    """Whether nothing was lost but by rounding, which would squeeze all else on a scale of logarithms."""
    return line.attention_error is not None and line.attention_error < _LEAST_ERROR


def _damage(line: Line) -> float | None:
    """KL from the untouched model; of a model that predicts nothing the error of its last features."""
    return line.hidden_error if line.kl is None else line.kl


def _scale_of_damage(ax: Axes, found: Sequence[Line]) -> None:
    log_axis(ax, "y", padded(_damages(found)), base=10)
    ax.set_ylabel("error of the last features" if found[0].kl is None else "KL from the original, nats")
    ax.grid(axis="y")


def _damages(found: Sequence[Line]) -> list[float]:
    return [max(damage, _LEAST_KL) for line in found if (damage := _damage(line)) is not None]


def _by_error(ax: Axes, found: Sequence[Line], hows: Mapping[str, Look]) -> None:
    errors = [line.attention_error for line in found if line.attention_error is not None]
    for label, how in hows.items():
        own = [line for line in found if line.label == label]
        ax.plot([line.attention_error or 0.0 for line in own], _damages(own), **how.line)
    _scale_of_damage(ax, found)
    last = max(errors)
    ax.set_xlim(0, 1.06 * last)
    ticks = linear_ticks(0, 1.06 * last)
    ax.set_xticks(ticks, [plain(tick) for tick in ticks])
    ax.set_xlabel("error of a layer alone")


def _by_layer(ax: Axes, found: Sequence[Line], hows: Mapping[str, Look]) -> None:
    for label, how in hows.items():
        own = sorted((line for line in found if line.label == label), key=lambda line: int(line.layers))
        ax.plot([int(line.layers) for line in own], _damages(own), **how.line)
    _scale_of_damage(ax, found)
    last = max(int(line.layers) for line in found)
    ax.set_xlim(-0.05 * last - 0.1, 1.05 * last + 0.1)
    step = max(1, -(-(last + 1) // 8))
    ax.set_xticks(range(0, last + 1, step), [str(place) for place in range(0, last + 1, step)])
    ax.set_xlabel("layer replaced alone")
