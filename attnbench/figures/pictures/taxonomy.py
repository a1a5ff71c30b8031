"""The families as sets that may overlap, with the year, the claimed cost and decoding of every variant.

After figure 2 and table 1 of Tay et al. 2020, "Efficient Transformers: A Survey", arXiv:2009.06732. The sets are bars
beside the names instead of circles around them, so that no overlap is lost, however many there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from attnbench.contract.variant import FAMILIES, HOME, VARIANTS, Variant
from attnbench.figures.kit.page import new_page, only_on_a_page, shorten
from attnbench.figures.kit.palette import palette
from attnbench.figures.kit.style import SMALL_SIZE, in_style
from attnbench.figures.pictures.picture import Picture
from attnbench.results.frame.marks import OWN_FORM
from attnbench.results.frame.words import own_form_note

TITLE = "The families as sets, and what is claimed"
_STEP = 0.165
"""Inches from line to line."""
_NAMES, _SET, _HEAD = 1.35, 0.26, 1.0
"""Inches for the names, for one set, and above the lines."""


def draw_taxonomy() -> Picture:
    """Draw a line for each variant of the catalogue and a bar for each family, over the lines of its members."""
    entries = in_order([one for one in VARIANTS if one.make.__module__.startswith(f"{HOME}.")])
    return Picture(_draw(entries), _numbers(entries))


def in_order(entries: Sequence[Variant]) -> list[Variant]:
    """Variants by family; those that also belong to a later family come last, so that sets overlap at their ends."""

    def place(entry: Variant) -> tuple[int, int, int, str]:
        first = FAMILIES.index(entry.family)
        others = [FAMILIES.index(one) - first for one in entry.also]
        # Those of a set before this one come first, those of a set after it last, and the nearest set is the nearest.
        side = 0 if not others else min(others, key=abs)
        towards = 0 if not side else (1 if side > 0 else -1) * (len(FAMILIES) - abs(side))
        return first, towards, entry.year or 0, entry.name

    return sorted(entries, key=place)


def spans(entries: Sequence[Variant], family: str) -> list[tuple[int, int]]:
    """The runs of lines, first and last, of the members of a family."""
    runs: list[tuple[int, int]] = []
    for row, entry in enumerate(entries):
        if family in entry.families:
            if runs and runs[-1][1] == row - 1:
                runs[-1] = (runs[-1][0], row)
            else:
                runs.append((row, row))
    return runs


def _numbers(entries: Sequence[Variant]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "variant": entry.name,
                "families": "; ".join(entry.families),
                "kind": entry.kind,
                "year": entry.year,
                "source": entry.source,
                "cost": entry.cost,
                "time_exponent": entry.time_exponent,
                "memory_exponent": entry.memory_exponent,
                "causal": bool(entry.traits.causal),
                "decode": bool(entry.traits.decode),
                "longer": bool(entry.traits.longer),
                "own_form": entry.own_form,
            }
            for entry in entries
        ]
    ).astype({"year": "Int64"})


@in_style
def _draw(entries: Sequence[Variant]) -> Figure:
    only_on_a_page("taxonomy")
    families = [one for one in FAMILIES if spans(entries, one)]
    names = {entry.name: entry.name + OWN_FORM * entry.own_form for entry in entries}
    notes = [
        "A bar covers the variants that belong to a family; a thin line joins its parts. Families after figure 2 of "
        "Tay et al. 2020, arXiv:2009.06732. Cost: what the source claims, for n tokens of width d; R features, rank or "
        "latents; other letters are options. Year: of the first source. Decodes: one token at a time from a state "
        "or a cache. Longer: takes longer sequences than it was made for.",
        own_form_note(names.values()),
    ]
    shared = sum(bool(entry.also) for entry in entries)
    about = [f"{len(entries)} variants in {len(families)} families; {shared} are in more than one"]
    tall = _STEP * len(entries)
    page = new_page(TITLE, about, notes, height=1.0, room=tall + _HEAD)
    left, bottom = page.left, page.top - _HEAD - tall
    width = page.right - page.left
    ax = page.blank(left, bottom, width, tall + _HEAD)
    ax.set_ylim(len(entries) + 0.0, -_HEAD / _STEP)  # one unit is one line, counted from the top
    for row, entry in enumerate(entries):
        if row % 2:
            ax.axhspan(row, row + 1, color=palette().band, lw=0, zorder=0)
        ax.text(0.0, row + 0.5, shorten(names[entry.name], _NAMES, SMALL_SIZE), va="center", fontsize=SMALL_SIZE)
    for place, family in enumerate(families):
        x = _NAMES + _SET * (place + 0.5)
        ax.text(x - 0.04, -0.5, family, rotation=55, rotation_mode="anchor", va="center", fontsize=SMALL_SIZE)
        runs = spans(entries, family)
        colour = palette().family(family)
        ax.plot([x, x], [runs[0][0] + 0.5, runs[-1][1] + 0.5], color=colour, lw=1.0, zorder=2)
        for first, last in runs:
            # Corners are round in inches, and a line is lower than an inch.
            shape = "round,pad=0,rounding_size=0.06"
            ax.add_patch(
                FancyBboxPatch(
                    (x - 0.09, first + 0.12), 0.18, last - first + 0.76, boxstyle=shape, mutation_aspect=1 / _STEP,
                    facecolor=colour, edgecolor="none", zorder=3,
                )
            )  # fmt: skip
    _columns(ax, entries, _NAMES + _SET * len(families) + 0.4, width)
    return page.figure


def _columns(ax: Axes, entries: Sequence[Variant], left: float, right: float) -> None:
    causal, decodes, longer = right - 1.28, right - 0.76, right - 0.24
    cost = left + 0.45
    able = ((causal, "causal"), (decodes, "decodes"), (longer, "longer"))
    heads = ((left, "year", "left"), (cost, "claimed cost", "left"), *((x, text, "center") for x, text in able))
    for x, text, side in heads:
        ax.text(x, -0.5, text, ha=side, va="center", fontsize=SMALL_SIZE, color=palette().faint)
    for row, entry in enumerate(entries):
        y = row + 0.5
        ax.text(left, y, str(entry.year or "–"), va="center", fontsize=SMALL_SIZE)
        ax.text(cost, y, shorten(entry.cost, causal - cost - 0.22, SMALL_SIZE), va="center", fontsize=SMALL_SIZE)
        traits = entry.traits
        for x, has in ((causal, traits.causal), (decodes, traits.decode), (longer, traits.longer)):
            ax.text(x, y, "yes" if has else "–", ha="center", va="center", fontsize=SMALL_SIZE,
                    color=palette().ink if has else palette().faint)  # fmt: skip
