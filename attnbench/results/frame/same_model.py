"""Scores of the timed models: those of the same model at equal length, or a note on the differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from attnbench.results.frame.scored import Problem, hidden_options, left_out, means, problems, seeds_of
from attnbench.results.frame.settings import RUN, Setting, scored
from attnbench.results.frame.words import in_words
from attnbench.results.intervals import MEAN
from attnbench.suite.axes import AXES, OF_MODEL

SAME = tuple(
    dict.fromkeys(
        ["task", "level", "seq_len", "test_len", "heads", "head_dim", "layers", "ffn"]
        + [axis for axis in OF_MODEL if AXES[axis].of == "shape"]
    )
)
"""Columns, besides the label with its options, that must agree for a scored model to be the timed one.

It may be timed in another dtype than it was trained in, and a task has padding of its own.
"""
CHANCE, NO_MIXING = "chance", "identity trained on the same task"


def tasks_of_both(frame: pd.DataFrame, rows: pd.DataFrame) -> set[str]:
    """Tasks of the timed ``rows`` on which other rows of the table were trained for a score."""
    trainings = scored(frame)
    return (set(rows["task"].dropna()) & set(trainings.loc[trainings["score"].notna(), "task"])) - {""}


def match(every: Sequence[Problem], speed: Setting, n: int) -> tuple[Problem, str] | None:
    """The problem, among its run's ``every``, whose model is most like that timed at length ``n``, with words for a
    caption; None without a score."""
    found = [one for one in every if one.parts]
    if not found:
        return None
    first = speed.rows.iloc[0]
    timed = _model({**{name: first[name] for name in SAME}, "seq_len": n, "test_len": n})
    if not timed["task"]:
        found = [*means(found), *found]
    best = min(found, key=lambda one: (len(_differing(timed, _scored(one))), -len(one.parts)))
    model = _scored(best)
    differs = _differing(timed, model)
    said = f"{_how(best)} · the model that was timed"
    if differs:
        said = f"NOT ONE MODEL — timed: {_words(timed, differs)}; scored: {_words(model, differs)} · {_how(best)}"
    return best, said


def notes(frame: pd.DataFrame, found: Problem, labels: Sequence[str]) -> list[str]:
    """Notes on labels that were scored but not timed (``labels`` were), and the reasons of missing scores."""
    unseen = sorted(one.label for one in found.parts if one.label not in labels)
    lines = [f"Scored, not timed alike: {', '.join(unseen)}."] if unseen else []
    if found.task == MEAN:
        return [*lines, *left_out(frame, [one for one in problems(frame) if one.parts])]
    options = hidden_options([found])
    return [*lines, *([options] if options else []), *left_out(frame, [found])]


def _scored(one: Problem) -> dict[str, object]:
    return _model({**one.setting, "task": one.task, "level": "model"})


def _model(columns: Mapping[str, object]) -> dict[str, object]:
    values = {name: columns.get(name) for name in SAME}
    return {name: None if value is None or value != value or value == "" else value for name, value in values.items()}


def _differing(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    follows = all(model["test_len"] == model["seq_len"] for model in (one, other))  # then the length says it
    return [name for name in SAME if one[name] != other[name] and not (follows and name == "test_len")]


def _words(model: Mapping[str, object], names: Sequence[str]) -> str:
    said = [in_words(name, model[name]) if model[name] is not None else f"no {name}" for name in names]
    return ", ".join(said)


def _how(one: Problem) -> str:
    setting = one.setting
    parts = [
        f"score: {one.short or one.task}",
        *(in_words(name, setting[name]) for name in ("layers", "ffn") if setting.get(name)),
    ]
    if one.task != MEAN and setting.get("steps"):
        parts.append(in_words("steps", setting["steps"]))
    rates = "best rate by validation" if setting.get("protocol") == "sweep" else "one fixed rate"
    rates = "" if one.task == MEAN else rates  # rates may differ from task to task
    parts += [rates, seeds_of([one]), f"run {setting[RUN]}" if RUN in setting else ""]
    return " · ".join(part for part in parts if part)
