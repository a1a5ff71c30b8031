"""``match --from RUN --score``: hold what a finished run trained to a score; nothing is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from attnbench.decision.budget import Budget, Point
from attnbench.decision.matched import Match
from attnbench.decision.points_of_run import Measured, alike, hold, key_of, plain, timed_kinds, timed_points, timed_rows
from attnbench.decision.trainings import scored
from attnbench.errors import ResultsError, UsageError
from attnbench.plots.captions import in_words
from attnbench.plots.matched import SAME
from attnbench.plots.scored import short_tasks
from attnbench.plots.setting import RUN
from attnbench.spec import parse_spec
from attnbench.status import Status
from attnbench.trained import Choice, choose, trained

Problem = tuple[str, tuple[tuple[str, object], ...]]
"""A task, and how the models were trained on it, by column."""


def match_scores(
    frame: pd.DataFrame,
    variants: Sequence[str],
    budget: Budget,
    *,
    n: int | None = None,
    task: str | None = None,
    pass_: str = "training",
) -> Match:
    """Choose among the settings that a run trained.

    Scores are those at the learning rate that validation chose, over seeds. Times and memory are those of the same
    model, of the circumstances in which most was measured.

    Args:
        frame: rows as :func:`attnbench.plots.load.read_results` gives them.
        variants: names with options; empty for everything that was trained. A value of the knob that is given stays.
        n: the length; by default that of the task and length with the most settings, and the longest of these.
        task: by label or name.
        pass_: whose times and memory are told.

    Raises:
        UsageError: an unknown variant, or a length or task that was not trained.
        ResultsError: the run has no score.
    """
    rows = [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]
    problems: dict[Problem, list[Choice]] = {}
    for choice in choose(trained(rows, also_alike=[RUN] if RUN in frame else [])):
        problems.setdefault(choice.problem, []).append(choice)
    if not problems:
        raise ResultsError("the run has no score; train first: attnbench match --score without --from, or score")
    (name, setting), choices = _wanted(problems, n, task)
    facts = {**dict(setting), "task": name, "level": "model"}
    known = {row["label"]: row for row in rows}
    timed = timed_rows(frame, "model", pass_)
    speed = alike(timed[_of_the_model(timed, facts)])
    times, points = timed_points(speed), Measured()
    for choice in choices:
        row = known[choice.label]
        key = key_of(row)
        bare = Point(choice.label, own_form=row["own_form"], family=row["family"])
        base = replace(times[key], status=Status.OK, reason="") if key in times else bare
        points[key] = scored(base, choice)
    found = hold(budget, variants, points)
    same = {"level": "model", "pass": pass_, **facts, "seeds": len({one.seed for one in _rows(choices)})}
    warnings = [f"{choice.label} {note}" for choice in choices for note in choice.notes]
    if speed.empty:
        others = timed_kinds(frame)
        warnings.append(f"no times of model {pass_} of these models" + (f"; {others}" if others else ""))
    return Match(budget, found, _about(facts, pass_), plain(same), warnings)


def _rows(choices: Sequence[Choice]) -> list[Any]:
    return [row for choice in choices for row in choice.rows]


def _wanted(problems: Mapping[Problem, list[Choice]], n: int | None, task: str | None) -> tuple[Problem, list[Choice]]:
    """The problem that was asked for; of several the one with the most settings, and of these the longest."""
    left = dict(problems)
    if task is not None:
        left = {one: choices for one, choices in left.items() if task in (one[0], parse_spec(one[0]).name)}
        if not left:
            known = ", ".join(sorted(short_tasks({name for name, _ in problems}).values()))
            raise UsageError(f"--task {task}: nothing was trained on it; there are: {known}")
    if n is not None:
        lengths = sorted({_length(one) for one in left})
        left = {one: choices for one, choices in left.items() if _length(one) == n}
        if not left:
            raise UsageError(f"no trainings at n = {n}; there are: {', '.join(map(str, lengths))}")
    best = max(left, key=lambda one: (len(left[one]), _length(one)))
    return best, left[best]


def _length(problem: Problem) -> int:
    return int(float(str(dict(problem[1])["seq_len"])))


def _of_the_model(rows: pd.DataFrame, facts: Mapping[str, object]) -> pd.Series[bool]:
    """Which timed rows are of the model that was trained; it may have been timed with another batch."""
    same = pd.Series(True, index=rows.index)
    for name in SAME:
        if facts.get(name) is not None:
            same &= rows[name] == facts[name]
    return same


def _about(facts: Mapping[str, object], pass_: str) -> str:
    task = str(facts["task"])
    model = [in_words(name, facts[name]) for name in ("layers", "heads", "head_dim", "ffn", "steps") if facts.get(name)]
    return ", ".join([short_tasks({task})[task], f"n = {facts['seq_len']}", *model, f"times of {pass_}"])
