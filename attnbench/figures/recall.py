"""Score over the bytes that a variant keeps of earlier tokens."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnbench.figures.kit.page import NothingToDraw, no_room, winners
from attnbench.figures.kit.score_lines import ScorePanel, bars, draw_lines, draw_with_bars, line_of
from attnbench.figures.kit.style import in_style
from attnbench.figures.kit.ticks import log_axis, padded, trimmed
from attnbench.results.frame.scored import Problem, about, hidden_options, left_out, problems
from attnbench.results.frame.settings import PANELS
from attnbench.results.frame.words import bare, own_form_note
from attnbench.results.intervals import Summary
from attnbench.units import format_bytes

FEWEST = 3
"""Fewest labels with measured bytes that can show a relation."""
NEEDS = f"scores of {FEWEST} labels whose state_bytes were measured"


def _kept(one: Summary) -> float:
    return one.state_bytes or 0.0


@in_style
def draw_recall(rows: pd.DataFrame) -> Figure:
    """Draw a panel for each task: a line over the options of each variant, or a point if it has a single setting.

    After figure 2 of Arora et al. 2024, arXiv:2402.18668. Here the bytes were measured. Raises NothingToDraw if fewer
    than three labels have a score and bytes.
    """
    found = [one for one in problems(rows) if sum(_kept(part) > 0 for part in one.parts) >= FEWEST]
    if not found:
        raise NothingToDraw(f"needs {NEEDS}")
    drawn = found[:PANELS]
    labels = [part.label for one in drawn for part in one.parts if _kept(part) > 0]
    without = dict.fromkeys(part.label for one in drawn for part in one.parts if not _kept(part) > 0)
    notes = [
        "Bytes that all layers keep of one sequence of this length to decode its next token, as measured; of the "
        f"causal form, where the trained model sees all. {bars(drawn)} A line joins the options of one variant.",
        f"Without measured bytes: {', '.join(without)}." if without else "",
        hidden_options(drawn),
        own_form_note(labels),
        *left_out(rows, drawn),
        no_room([one.heading for one in found], PANELS),
    ]
    panels = [_panel(one) for one in drawn]
    best = winners([[(max(line.y), line.name) for line in panel.lines] for panel in panels])
    title = f"Highest score, whatever the state: {best}"
    return draw_lines(title, about(rows, drawn), notes, panels, "score", _scale, draw_with_bars)


def _panel(one: Problem) -> ScorePanel:
    variants: dict[str, list[tuple[float, Summary]]] = {}
    for part in sorted(one.parts, key=lambda part: (_kept(part), part.label)):
        if _kept(part) > 0:
            variants.setdefault(bare(part.variant, part.label), []).append((_kept(part), part))
    lines = sorted((line_of(*each) for each in variants.items()), key=lambda line: (-max(line.y), line.name))
    levels = [("chance", one.chance)] if one.chance is not None else []
    levels += [("identity", one.no_mixing.over_seeds.mean)] if one.no_mixing else []
    return ScorePanel(one.heading, tuple(lines), tuple(levels))


def _scale(ax: Axes, panel: ScorePanel) -> None:
    bytes_ = [value for line in panel.lines for value in line.x]
    log_axis(ax, "x", padded(bytes_, share=0.07), text=lambda value: trimmed(format_bytes(value)), most=7)
    ax.set_xlabel("state for one sequence (log2 scale)")
