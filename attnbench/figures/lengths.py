"""Score over the length of the test, for models that were trained at one length."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnbench.figures.kit.page import NothingToDraw, no_room, winners
from attnbench.figures.kit.palette import palette
from attnbench.figures.kit.score_lines import ScorePanel, at_the_end, bars, draw_lines, draw_with_bars, line_of
from attnbench.figures.kit.style import in_style
from attnbench.figures.kit.ticks import length, log_axis, padded
from attnbench.results.frame.scored import Problem, about, by_training, hidden_options, left_out, problems
from attnbench.results.frame.settings import PANELS
from attnbench.results.frame.words import own_form_note, short_names
from attnbench.results.intervals import Summary

NEEDS = "scores of one training at several test_len"


@in_style
def draw_lengths(rows: pd.DataFrame) -> Figure:
    """Draw a panel for each task and training: the mean score of each variant over the length of the test.

    Raises NothingToDraw if no training was tested at two lengths.
    """
    trained = by_training(one for one in problems(rows) if one.parts)
    series = [(training, tests) for training, tests in trained if len(tests) > 1]
    if not series:
        raise NothingToDraw(f"needs {NEEDS}")
    drawn = series[:PANELS]
    found = [one for _, tests in drawn for one in tests]
    parts = [(part.label, part.variant) for one in found for part in one.parts]
    names, hidden = short_names(pd.DataFrame(parts, columns=["label", "variant"]))
    panels = [_panel(training, tests, names) for training, tests in drawn]
    notes = [
        f"One training, tested at each length. Upright: the length of the training. {bars(found)} Names from the "
        "highest score at the longest test down.",
        *left_out(rows, found),
        " ".join(part for part in (hidden_options(found), hidden) if part),
        own_form_note(names),
        no_room([training.heading for training, _ in series], PANELS),
    ]
    trained_at = {panel.heading: _length(one, "seq_len") for panel, (one, _) in zip(panels, drawn, strict=True)}

    def scale(ax: Axes, panel: ScorePanel) -> None:
        lengths = sorted({x for line in panel.lines for x in line.x})
        log_axis(ax, "x", padded(lengths, share=0.07), text=length, at=lengths)
        ax.set_xlabel("length of the test (log2 scale)")
        ax.axvline(trained_at[panel.heading], color=palette().faint, lw=0.9, ls=":", zorder=1.4)

    best = winners(list(map(at_the_end, panels)))
    title = f"Highest score at the longest test: {best}"
    return draw_lines(title, about(rows, found), notes, panels, "score", scale, draw_with_bars)


def _length(one: Problem, column: str = "test_len") -> float:
    return float(str(one.setting[column]))


def _panel(training: Problem, tests: list[Problem], names: Mapping[str, str]) -> ScorePanel:
    found: dict[str, list[tuple[float, Summary]]] = {}
    for one in tests:
        for part in one.parts:
            found.setdefault(part.label, []).append((_length(one), part))
    lines = [line_of(names[label], points) for label, points in found.items()]
    lines.sort(key=lambda line: (-line.x[-1], -line.y[-1], line.name))
    return ScorePanel(training.heading, tuple(lines), () if tests[0].chance is None else (("chance", tests[0].chance),))
