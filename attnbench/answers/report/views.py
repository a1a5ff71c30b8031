"""The contents of a report: rows measured alike, at each length, and scores by task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pandas as pd

from attnbench.figures.scores import signed
from attnbench.results.frame.agreement import of_trained
from attnbench.results.frame.contenders import Contenders, at_lengths, longest_of_most, panels
from attnbench.results.frame.same_model import tasks_of_both
from attnbench.results.frame.scored import Problem, means, problems
from attnbench.results.frame.settings import Setting, timed
from attnbench.results.frame.words import LEVELS, in_words
from attnbench.results.intervals import difference


@dataclass(frozen=True)
class View:
    """Rows that were measured alike."""

    setting: Setting
    at: Mapping[int, Callable[[], Contenders]]
    n: int
    """The longest of the lengths with most labels."""

    @property
    def what(self) -> str:
        row = self.setting.rows.iloc[0]
        passes = {"forward": "a forward pass", "training": "a training step", "backward": "a backward pass"}
        level = LEVELS.get(row["level"], row["level"])
        return f"{passes.get(row['pass'], in_words('pass', row['pass']))} of the {level}"

    @property
    def name(self) -> str:
        row = self.setting.rows.iloc[0]
        return self.setting.name or f"{in_words('level', row['level'])}, {in_words('pass', row['pass'])}"


def views(frame: pd.DataFrame) -> list[View]:
    """One view for each way of timing that has a speed."""
    return [view for setting in panels(timed(frame)) if (view := _view(frame, setting))]


def _view(frame: pd.DataFrame, setting: Setting) -> View | None:
    column = of_trained(setting.rows) or ("score" if tasks_of_both(frame, setting.rows) else "rel_error")
    first = longest_of_most(setting, "examples_per_s")
    if first is None:
        return None
    at = at_lengths(frame, setting, "examples_per_s", column, None)
    return View(setting, at, first)


def found_in(frame: pd.DataFrame) -> list[Problem]:
    """The tasks with a score, and the mean over those of one model last."""
    found = [one for one in problems(frame) if one.parts]
    return [*found, *means(found)]


def task_rows(one: Problem, family: int) -> list[tuple[str, str, str, str, str]]:
    """Label, score, its interval, difference from softmax, and its interval or why it has none, of each variant.

    ``family`` is the number of differences tested together.
    """
    rows = []
    for part in one.parts:
        less = ends = ""
        if one.reference is not None and part is not one.reference:
            found = difference(part, one.reference, family)
            ends = "withheld: fewer than two common seeds" * (found.verdict == "withheld")
            if found.of is not None:
                less = signed(found.of.mean) + f" {found.verdict}" * (found.verdict in ("better", "worse"))
                if found.of.low is not None and found.of.high is not None:
                    ends = f"{signed(found.of.low)} to {signed(found.of.high)}"
        interval = f"{part.ends[0]:.3f} to {part.ends[1]:.3f}" if part.ends else ""
        rows.append((part.label, f"{part.over_seeds.mean:.3f}", interval, less, ends))
    return rows
