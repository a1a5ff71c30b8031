"""Learning curves: each variant's validation score over the steps of its training, at the rate that counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnbench.figures.kit.page import NothingToDraw, no_room, winners
from attnbench.figures.kit.score_lines import ScoreLine, ScorePanel, draw_lines, linear_x
from attnbench.figures.kit.style import Look, in_style
from attnbench.results.frame.label_options import is_number
from attnbench.results.frame.scored import Problem, about, by_training, hidden_options, left_out, problems
from attnbench.results.frame.settings import PANELS, RUN
from attnbench.results.frame.words import own_form_note, short_names
from attnbench.results.read import read_curves
from attnbench.results.trainings import CountedTrainings

NEEDS = "curves.jsonl beside the results"

Curves = Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]


@in_style
def draw_curves(rows: pd.DataFrame) -> Figure:
    """Draw a panel a task: means over seeds, and each seed as a thin line, at the rate that validation chose.

    Raises NothingToDraw if no training has a curve, and CorruptResults if one was altered.
    """
    curves = read_curves(rows)
    found = [one for one, _ in by_training(problems(rows))]
    choices = [choice for one in found for choice in one.choices if choice.rows]
    pairs = [(choice.rows[0].label, choice.rows[0].variant) for choice in choices]
    names, hidden = short_names(pd.DataFrame(pairs, columns=["label", "variant"]))
    every = [(one, panel) for one in found if (panel := _panel(one, curves, names)).lines]
    if not every:
        raise NothingToDraw("no training has a learning curve; read the folder of a run that scored: it keeps them")
    panels = [panel for _, panel in every[:PANELS]]
    drawn = [one for one, _ in every[:PANELS]]
    notes = [
        "Scores of validation, at the rate that counts; the figure of scores shows those of the test. Thick: mean over "
        "seeds at the steps that all reached; thin: single seeds. Names from the best last mean down.",
        *left_out(rows, drawn),
        " ".join(part for part in (hidden_options(drawn), hidden) if part),
        own_form_note(names),
        no_room([panel.heading for _, panel in every], PANELS),
    ]
    best = winners([[(line.y[-1], line.name) for line in panel.lines] for panel in panels])
    return draw_lines(
        f"Highest last score of validation: {best}",
        about(rows, drawn),
        notes,
        panels,
        "validation score",
        lambda ax, panel: linear_x(ax, max(max(line.x) for line in panel.lines), "step"),
        _draw,
    )


def _panel(one: Problem, curves: Curves, names: Mapping[str, str]) -> ScorePanel:
    run = str(one.setting.get(RUN) or "")
    lines = [line for choice in one.choices if (line := _line(choice, run, curves, names))]
    lines.sort(key=lambda line: (-line.y[-1], line.name))
    return ScorePanel(one.heading, tuple(lines), () if one.chance is None else (("chance", one.chance),))


def _line(choice: CountedTrainings, run: str, curves: Curves, names: Mapping[str, str]) -> ScoreLine | None:
    single = []
    for training in choice.rows:
        points = [point for point in curves.get((run, training.cell_id), ()) if is_number(point.get("val_score"))]
        if training.ok and points:
            points.sort(key=lambda point: float(point["step"]))
            x = tuple(float(point["step"]) for point in points)
            single.append((x, tuple(float(point["val_score"]) for point in points)))
    common = sorted(set.intersection(*(set(x) for x, _ in single))) if single else []
    if not common:
        return None
    tables = [dict(zip(x, y, strict=True)) for x, y in single]
    mean = tuple(math.fsum(table[step] for table in tables) / len(tables) for step in common)
    first = choice.rows[0]
    behind = tuple(single) if len(single) > 1 else ()
    return ScoreLine(names[first.label], first.family, tuple(common), mean, mean, mean, behind)


def _draw(ax: Axes, line: ScoreLine, look: Look) -> None:
    for x, y in line.single:
        ax.plot(x, y, color=look.colour, lw=0.7, alpha=0.35, zorder=1.8)
    ax.plot(np.asarray(line.x), np.asarray(line.y), lw=1.4, markersize=4.2, alpha=0.95, **look.line)
