"""Number of singular values that hold softmax's matrix, by layer and head.

After figure 1 of Wang et al. 2020, "Linformer", arXiv:2006.04768.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from attnbench.errors import UsageError
from attnbench.figures.kit.page import Page, narrow, new_page
from attnbench.figures.kit.palette import palette
from attnbench.figures.kit.style import DASHES, SMALL_SIZE, in_style
from attnbench.figures.kit.ticks import linear_ticks
from attnbench.figures.pictures.heads import Head, heads_of, softmax_matrix
from attnbench.figures.pictures.picture import Picture, draw_matrix, positive

TITLE = "How few singular values hold the attention matrix"
N = 512
"""Tokens, by default: those of the paper's figure."""
MOST = 4096
QUARTER = 4
"""The table has the part that the first n / 4 singular values hold: the paper's 128 of 512."""
_LINES = 40
"""Most lines with a key of their own dashes."""
_KEYED = 12
"""Most layers that are named one by one."""


@dataclass(frozen=True)
class Spectrum:
    """Singular values of one head."""

    head: Head
    values: np.ndarray
    """``(n,)``, the largest first."""

    @property
    def cumulative(self) -> np.ndarray:
        """``(n,)``: the sum of the first 1, 2, ... n over that of all."""
        return np.asarray(self.values.cumsum() / self.values.sum())

    def needed(self, part: float) -> int:
        return int(np.searchsorted(self.cumulative, part) + 1)


def draw_spectrum(
    *,
    inputs: str = "listops",
    layer: int | None = None,
    head: int | None = None,
    n: int = N,
    causal: bool = False,
) -> Picture:
    """Draw the cumulative singular values of softmax's matrix P of each head, and the part of the first quarter.

    ``inputs``: ``listops``, or a file of your own model as ``file:path=qkv.safetensors``. ``n``: first tokens, 512 by
    default. ``layer``, ``head``: one only, from 0. Raises UsageError for an unknown one of these, or an n below 2 or
    above :data:`MOST`, and Unsupported if the input is too short.
    """
    if not 2 <= n <= MOST:
        raise UsageError(f"a spectrum has 2 to {MOST} tokens, not {n}")
    label, found = heads_of(inputs, n, causal=causal, layer=layer, head=head)
    spectra = [spectrum(one, causal=causal) for one in found]
    about = f"inputs {label} · softmax of the first {n} tokens" + " · causal" * causal
    return Picture(_draw(spectra, about), _numbers(spectra))


def spectrum(head: Head, *, causal: bool) -> Spectrum:
    """The singular values of a head's softmax matrix."""
    return Spectrum(head, torch.linalg.svdvals(softmax_matrix(head, causal=causal)).numpy())


def _numbers(spectra: Sequence[Spectrum]) -> pd.DataFrame:
    parts = [
        pd.DataFrame(
            {
                "layer": one.head.layer,
                "head": one.head.head,
                "index": range(1, len(one.values) + 1),
                "singular_value": one.values,
                "cumulative": one.cumulative,
            }
        )
        for one in spectra
    ]
    return pd.concat(parts, ignore_index=True)


@in_style
def _draw(spectra: Sequence[Spectrum], about: str) -> Figure:
    n = len(spectra[0].values)
    needed = [one.needed(0.9) for one in spectra]
    least, most = min(needed), max(needed)
    hold = f"90 % of the sum: the first {least}" + (f" to {most}" if most > least else "") + f" of {n} singular values"
    notes = [
        "Cumulative sum of the singular values of P = softmax(QKᵀ/√D), the largest first, over the sum of all. "
        f"Dotted: a matrix whose singular values are all equal. The table: what the first {max(1, n // QUARTER)} hold."
    ]
    layers = list(dict.fromkeys(one.head.layer for one in spectra))
    heads = list(dict.fromkeys(one.head.head for one in spectra))
    table = min(2.6, 0.26 * len(layers)) + 0.6
    colours = _colours(layers)
    keys = _keys(colours, heads)
    under = max(table, 0.17 * len(keys) + 0.1)
    room = 3.1 + under if narrow() else max(3.4, table + 0.6 + 0.17 * len(keys))
    page = new_page(TITLE, [about, hold], notes, height=1.0, room=room)
    if narrow():
        chart = page.axes(page.left + 0.5, page.top - 2.55, page.right - page.left - 0.6, 2.5)
        right = (page.left + 0.45, page.bottom + 0.05, page.right - page.left - 0.55)
    else:
        tall = page.top - page.bottom - 0.5
        chart = page.axes(page.left + 0.56, page.bottom + 0.42, 4.6, tall)
        right = (page.left + 5.8, page.top - table - 0.1, page.right - page.left - 5.85)
    _lines(chart, spectra, colours, heads)
    _table(page, spectra, layers, heads, right, table)
    if not narrow():
        _write_keys(page, keys, page.left + 5.4, page.top - table - 0.45)
    elif len(heads) <= 2:  # next to the table
        _write_keys(page, keys, page.left + 1.5, page.bottom + under)
    return page.figure


def _colours(layers: Sequence[int | None]) -> dict[int | None, str]:
    if len(layers) <= len(palette().sequence):
        return dict(zip(layers, palette().sequence, strict=False))
    scale = matplotlib.colormaps["cividis"]
    return {one: to_hex(scale(place / (len(layers) - 1))) for place, one in enumerate(layers)}


def _lines(ax: Axes, spectra: Sequence[Spectrum], colours: dict[int | None, str], heads: Sequence[int]) -> None:
    n = len(spectra[0].values)
    for one in spectra:
        dashes = DASHES[heads.index(one.head.head) % len(DASHES)] if len(spectra) <= _LINES else "-"
        wide = 1.3 if len(spectra) <= _LINES else 0.7
        ax.plot(range(1, n + 1), one.cumulative, color=colours[one.head.layer], ls=dashes, lw=wide)
    ax.plot([0, n], [0, 1], ls=":", lw=1.2, color=palette().faint)
    ax.set_xlim(0, n)
    ax.set_ylim(0, 1.02)
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1])
    ax.set_xticks(linear_ticks(0, n, 4 if narrow() else 8))
    ax.grid(axis="both")
    ax.set_xlabel("number of singular values")
    ax.set_ylabel("part of their sum")


def _table(
    page: Page,
    spectra: Sequence[Spectrum],
    layers: Sequence[int | None],
    heads: Sequence[int],
    place: tuple[float, float, float],
    tall: float,
) -> None:
    left, bottom, width = place
    quarter = max(1, len(spectra[0].values) // QUARTER)
    held = np.full((len(layers), len(heads)), np.nan)
    for one in spectra:
        held[layers.index(one.head.layer), heads.index(one.head.head)] = one.cumulative[quarter - 1]
    wide, high = min(width, 0.5 * len(heads)), tall - 0.6
    ax = page.axes(left, bottom + 0.25, wide, high)
    # From the part of a matrix without any structure to all of it; beyond half of the colour letters are light.
    full = np.clip((np.nan_to_num(held) - 1 / QUARTER) / (1 - 1 / QUARTER), 0, 1)
    draw_matrix(ax, full, positive())
    cell = (wide / len(heads), high / len(layers))
    if cell[0] >= 0.3 and cell[1] >= 0.12:
        for i in range(len(layers)):
            for j in range(len(heads)):
                ink = palette().page if full[i, j] > 0.5 else palette().ink
                ax.text(j, i, f"{held[i, j]:.2f}", ha="center", va="center", fontsize=SMALL_SIZE - 0.5, color=ink)
    named = [place for place in range(len(heads)) if place % max(1, -(-len(heads) // 6)) == 0]
    ax.set_xticks(named, [str(heads[place]) for place in named])
    if layers != [None]:
        rows = [place for place in range(len(layers)) if place % max(1, -(-len(layers) // 12)) == 0]
        ax.set_yticks(rows, [str(layers[place]) for place in rows])
        ax.set_ylabel("layer")
    ax.tick_params(length=0)
    ax.set_xlabel("head")
    page.write(left, bottom + tall - 0.3, f"first {quarter}", va="bottom")


def _keys(colours: dict[int | None, str], heads: Sequence[int]) -> list[tuple[str, dict[str, Any]]]:
    layers = list(colours)
    if layers == [None]:
        return []
    named = layers if len(layers) <= _KEYED else [layers[0], layers[len(layers) // 2], layers[-1]]
    rows: list[tuple[str, dict[str, Any]]] = [(f"layer {one}", {"color": colours[one], "ls": "-"}) for one in named]
    if 1 < len(heads) <= len(DASHES):
        rows += [(f"head {head}", {"color": palette().ink, "ls": DASHES[at]}) for at, head in enumerate(heads)]
    return rows


def _write_keys(page: Page, rows: Sequence[tuple[str, dict[str, Any]]], left: float, top: float) -> None:
    tall = 0.17 * len(rows) + 0.05
    ax = page.blank(left, top - tall, 1.6, tall)
    for row, (name, line) in enumerate(rows):
        y = tall - 0.1 - 0.17 * row
        ax.add_line(Line2D([0.4, 0.8], [y, y], lw=1.4, **line))
        ax.text(0.88, y, name, fontsize=SMALL_SIZE, va="center")
