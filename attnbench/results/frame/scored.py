"""Scores by training for the figures: problems with a summary for every label, and the labels left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from attnbench.measure.status import Status
from attnbench.results.frame.settings import RUN, records, scored
from attnbench.results.frame.words import difference as told_apart
from attnbench.results.frame.words import failures, follows, in_words, is_expected, where
from attnbench.results.intervals import MEAN, NO_MIXING, REFERENCE, Summary, comparisons, floor_of, over_tasks, summary
from attnbench.results.trainings import SAME_MODEL, CountedTrainings, Setting, choose, trained
from attnbench.suite.axes import OF_MODEL

_MOST = 12
"""Most notes on rates in a caption."""


@dataclass(frozen=True)
class Problem:
    """One task and one way of training on it; or the mean over the tasks of one model."""

    task: str
    setting: Mapping[str, object]
    parts: tuple[Summary, ...]
    choices: tuple[CountedTrainings, ...] = ()
    name: str = ""
    short: str = ""

    @property
    def heading(self) -> str:
        return " · ".join(part for part in (self.short or self.task or "task not known", self.name) if part)

    @property
    def floor(self) -> float | None:
        return floor_of(self.parts)

    @property
    def chance(self) -> float | None:
        return next((one.chance for one in self.parts if one.chance is not None), None)

    def of(self, variant: str) -> Summary | None:
        found = [one for one in self.parts if one.variant == variant]
        return min(found, key=lambda one: (one.label != variant, one.label), default=None)

    @property
    def reference(self) -> Summary | None:
        return self.of(REFERENCE)

    @property
    def no_mixing(self) -> Summary | None:
        return self.of(NO_MIXING)


def problems(frame: pd.DataFrame) -> list[Problem]:
    """The problems of a table, with tasks in the order of its rows; within a task, those with most labels first."""
    rows = scored(frame)
    made = by_problem(choose(trained(records(rows), also_alike=[RUN] if RUN in rows else [])))
    tasks = list(dict.fromkeys(one.task for one in made))
    made.sort(key=lambda one: (tasks.index(one.task), -len(one.parts)))
    return [one for one in _named(made) if one.parts or one.choices]


def by_problem(choices: Iterable[CountedTrainings]) -> list[Problem]:
    """The problem of each task and way of training, in the order of the trainings that count."""
    found: dict[tuple[str, Setting], list[CountedTrainings]] = {}
    for choice in choices:
        found.setdefault(choice.problem, []).append(choice)
    return [_problem(task, dict(setting), of_one) for (task, setting), of_one in found.items()]


def _problem(task: str, setting: Mapping[str, object], choices: Sequence[CountedTrainings]) -> Problem:
    parts = [part for one in choices if (part := summary(one))]
    return Problem(task, setting, _best_first(parts), tuple(choices))


def _best_first(parts: Sequence[Summary]) -> tuple[Summary, ...]:
    return tuple(sorted(parts, key=lambda one: (-one.over_seeds.mean, one.label)))


def _named(found: Sequence[Problem]) -> list[Problem]:
    if not found:
        return []
    table = pd.DataFrame([one.setting for one in found])
    if (table["test_len"] == table["seq_len"]).all():
        table = table.drop(columns="test_len")
    names = told_apart(table)
    short = short_tasks({one.task for one in found})
    return [replace(one, name=said, short=short[one.task]) for one, (said, _) in zip(found, names, strict=True)]


def by_training(found: Iterable[Problem]) -> list[tuple[Problem, list[Problem]]]:
    """The tests of each training, the shortest first, behind a problem that is named as the training alone."""
    groups: dict[tuple[object, ...], list[Problem]] = {}
    for one in found:
        groups.setdefault((one.task, *_trained_only(one).setting.values()), []).append(one)
    tests = [sorted(group, key=lambda one: float(str(one.setting["test_len"]))) for group in groups.values()]
    return list(zip(_named([_trained_only(group[0]) for group in tests]), tests, strict=True))


def _trained_only(one: Problem) -> Problem:
    return replace(one, setting={**one.setting, "test_len": one.setting["seq_len"]})


def family_of(found: Iterable[Problem]) -> int:
    """Number of differences from softmax that are tested together in these problems and the means over them."""
    tasks = [one for one in found if one.task != MEAN]
    return comparisons((one.parts, one.reference) for one in (*tasks, *means(tasks)))


def short_tasks(tasks: Iterable[str]) -> dict[str, str]:
    """Each task, ``NAME:OPTION=VALUE,...``, with only the options that distinguish it from others of its name."""
    alike: dict[str, dict[str, list[str]]] = {}
    for task in tasks:
        name, _, options = task.partition(":")
        alike.setdefault(name, {})[task] = options.split(",") if options else []
    short = {}
    for name, of_name in alike.items():
        for task, given in of_name.items():
            own = [option for option in given if not all(option in others for others in of_name.values())]
            short[task] = f"{name}:{','.join(own)}" if own else name
    return short


def hidden_options(found: Sequence[Problem]) -> str:
    """One line with the options of tasks that headings leave out."""
    tasks = [task for task, short in dict.fromkeys((one.task, one.short) for one in found) if task != short]
    return f"Tasks: {'; '.join(tasks)}." if tasks else ""


def means(found: Sequence[Problem]) -> list[Problem]:
    """For each model with several tasks, each trained in one way only, the mean over tasks of the labels on all.

    If options depend on the length, few labels are on tasks of every length; each length then has a mean of its own.
    """
    models: dict[tuple[object, ...], list[Problem]] = {}
    for one in found:
        if one.parts:
            values = [one.setting.get(name) for name in (*SAME_MODEL, "pretrain_steps", "guide", RUN)]
            models.setdefault((*values, _tested_apart(one)), []).append(one)
    made = []
    for of_model in models.values():
        groups = [of_model]
        if len(_common(of_model)) <= max(len(one.parts) for one in of_model) / 2:
            lengths = dict.fromkeys(one.setting.get("seq_len") for one in of_model)
            groups = [[one for one in of_model if one.setting.get("seq_len") == n] for n in lengths]
        for group in groups:
            if len(group) < 2 or len({one.task for one in group}) < len(group):
                continue
            of_label = [[part for one in group for part in one.parts if part.label == name] for name in _common(group)]
            parts = [mean for summaries in of_label if (mean := over_tasks(summaries))]
            if parts:
                made.append(Problem(MEAN, group[0].setting, _best_first(parts)))
    return _named(made)


def _tested_apart(one: Problem) -> object:
    """The length of the test if it is another one than that of the training; else None."""
    return None if follows("test_len", one.setting) else one.setting.get("test_len")


def _common(found: Sequence[Problem]) -> list[str]:
    every = [{part.label for part in one.parts} for one in found]
    return [part.label for part in found[0].parts if all(part.label in labels for labels in every)]


def about(frame: pd.DataFrame, found: Sequence[Problem]) -> list[str]:
    """Lines for a subtitle: the model, its training and machine, as far as all problems agree."""
    table = pd.DataFrame([one.setting for one in found])
    same = {str(name): table[name].iloc[0] for name in table if table[name].nunique(dropna=False) == 1}
    rows = scored(frame)

    def said(*names: str) -> list[str]:
        return [in_words(name, same[name]) for name in names if name in same and same[name] is not None]

    heads = f"{in_words('heads', same['heads'])} × {same['head_dim']}" if {"heads", "head_dim"} <= same.keys() else ""
    model = [
        *said("layers"),
        heads or " · ".join(said("heads", "head_dim")),
        *said("ffn"),
        *said("seq_len", *[] if follows("test_len", same) else ["test_len"], "batch", "dtype"),
    ]
    further = [axis for axis in OF_MODEL if axis not in ("heads", "head_dim", "dtype", "causal", "positions")]
    further = [axis for axis in further if not (is_expected(axis, same.get(axis)) or follows(axis, same))]
    suites = list(dict.fromkeys(rows["suite"]))
    first = [suites[0] if len(suites) == 1 else "", "encoder", *model, *said("positions", "causal", *further)]
    rates = sorted({float(rate) for rate in rows["learning_rate"].dropna()})
    protocols = {str(one.setting.get("protocol")) for one in found}
    rate = ", ".join(f"{one:g}" for one in rates)
    how = f"rate {rate}"
    if "sweep" in protocols and len(rates) > 1:
        of_several = "" if protocols == {"sweep"} else "where a task has several "
        how = f"of the rates {rate} {of_several}the best by mean validation score"
    seeds = seeds_of(found)
    second = [*said("steps"), how * bool(rates), f"protocol {' and '.join(sorted(protocols))}", seeds]
    if same.get("pretrain_steps"):
        second.append(in_words("pretrain_steps", same["pretrain_steps"]))
    if same.get("guide"):
        second.append(in_words("guide", same["guide"]))
    where_ = where(rows, None)
    return [" · ".join(part for part in line if part) for line in (first, second)] + where_[1:]


def seeds_of(found: Sequence[Problem]) -> str:
    """``5 seeds``, or ``2 to 5 seeds`` if their number differs; empty for no score."""
    counts = sorted({len(part.by_seed) for one in found for part in one.parts})
    return f"{' to '.join(map(str, counts[:1] + counts[1:][-1:]))} seed{'s' * (counts != [1])}" if counts else ""


def left_out(frame: pd.DataFrame, found: Sequence[Problem]) -> list[str]:
    """Notes on labels without a score, with the reason, on the rates and on failed trainings."""
    rows = scored(frame)
    headings: dict[str, list[str]] = {}
    for one in found:
        none = {choice.label for choice in one.choices} - {part.label for part in one.parts}
        here = rows[(rows["task"] == one.task) & rows["label"].isin(none) & (rows["status"] != Status.OK)]
        for line in failures(here, at_n=False):
            headings.setdefault(line, []).append(one.heading)
    lines = [
        f"No score{'' if len(on) == len(found) else ' on ' + ', '.join(on)} — {line}" for line, on in headings.items()
    ]
    notes: dict[str, list[str]] = {}
    for one in found:
        scores = {part.label: part for part in one.parts}
        for choice in one.choices:
            part = scores.get(choice.label)
            said = list(choice.notes)
            if part and part.failed:
                said.append(f"{part.failed} of {part.failed + len(part.by_seed)} seeds failed and do not count")
            if said:
                notes.setdefault(f"{choice.label} on {one.heading}", []).extend(said)
    told = [f"{who}: {', '.join(said)}" for who, said in notes.items()]
    more = [f"and {len(told) - _MOST} more"] if len(told) > _MOST else []
    return [*lines, *([f"Rates — {'; '.join([*told[:_MOST], *more])}."] if told else [])]
