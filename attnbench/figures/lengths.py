"""Score over the length of the test, for models that were trained at one length."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnbench.figures.kit.page import NothingToDraw, winners
from attnbench.figures.kit.score_lines import Line, Panel, draw_lines
from attnbench.figures.kit.style import Look, in_style
from attnbench.figures.kit.ticks import log_axis, padded
from attnbench.results.frame.scored import Problem, about, hidden_options, left_out, problems
from attnbench.results.frame.settings import PANELS, restrict
from attnbench.results.frame.words import own_form_note, short_names

NEEDS = "scores of one training at several test_len"
_Tests = list[tuple[int, Problem]]
"""Problems that differ in the length of the test alone, with that length, the shortest first."""


def applies(frame: pd.DataFrame, only: Mapping[str, object] | None = None) -> bool:
    """Models of one training length were tested at several lengths."""
    return bool(_series(problems(restrict(frame, only or {}))))


def _series(found: list[Problem]) -> list[_Tests]:
    groups: dict[tuple[object, ...], _Tests] = {}
    for one in found:
        if one.parts:
            same = [value for name, value in one.setting.items() if name != "test_len"]
            groups.setdefault((one.task, *same), []).append((int(float(str(one.setting["test_len"]))), one))
    return [sorted(tests, key=lambda test: test[0]) for tests in groups.values() if len(tests) > 1]


@in_style
def draw_lengths(frame: pd.DataFrame, *, only: Mapping[str, object] | None = None) -> Figure:
    """Draw a panel for each task and training: each variant's mean score over the length of the test.

    Raises NothingToDraw if no training was tested at two lengths.
    """
    rows = restrict(frame, only or {})
    series = _series(problems(rows))
    if not series:
        raise NothingToDraw(f"needs {NEEDS}")
    drawn = series[:PANELS]
    found = [one for tests in drawn for _, one in tests]
    parts = [(part.label, part.variant) for one in found for part in one.parts]
    names, hidden = short_names(pd.DataFrame(parts, columns=["label", "variant"]))
    panels = [_panel(tests, names) for tests in drawn]
    rest = [_heading(tests) for tests in series[PANELS:]]
    notes = [
        "Upright: the length of the training. One training, tested at each length. Bars: 95 % t-intervals over seeds, of "
        "one seed over test examples. Names from the best score at the longest length down.",
        *left_out(rows, found),
        " ".join(part for part in (hidden_options(found), hidden) if part),
        own_form_note(names),
        f"Not drawn, for want of room: {', '.join(rest)}." if rest else "",
    ]
    best = winners([[(line.y[-1], line.name) for line in panel.lines] for panel in panels])
    trained = {panel.heading: float(str(tests[0][1].setting["seq_len"])) for panel, tests in zip(panels, drawn, strict=True)}

    def scale(ax: Axes, panel: Panel) -> None:
        log_axis(ax, "x", padded([x for line in panel.lines for x in line.x], share=0.07), text="{:.0f}".format, most=7)
        ax.set_xlabel("length of the test (log2 scale)")
        ax.axvline(trained[panel.heading], lw=0.9, ls=":", zorder=1.4)

    return draw_lines(f"Highest score at the longest test: {best}", about(rows, found), notes, panels, "score", scale, _draw)
