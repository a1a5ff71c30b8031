"""Trainings among result rows, and those that count: at the learning rate that validation chose."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attnbench.measure.status import Status
from attnbench.results.record import Record
from attnbench.suite.axes import OF_MODEL

UNSTABLE = 0.3
"""A rate is called unstable if its validation scores range over more than this between seeds."""
SAME_MODEL = tuple(dict.fromkeys(["heads", "head_dim", "layers", "ffn", "positions", *OF_MODEL, "device"]))
"""Columns that are the same in all trainings of one model, whatever the task."""
ALIKE = ("seq_len", "test_len", *SAME_MODEL, "batch", "protocol", "steps", "pretrain_steps", "guide", "quick")
"""Columns, apart from the task, that must agree for scores to share a column of a table."""

Setting = tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True)
class Trained:
    """One training of one variant on one task, at one learning rate and with one seed; or how it failed."""

    label: str
    variant: str
    family: str
    task: str
    setting: Setting
    """Columns of :data:`ALIKE` with their values, and ``learning_rate`` where a label has several fixed rates."""
    seed: int
    learning_rate: float | None
    status: Status
    reason: str
    cell_id: str
    score: float | None
    score_low: float | None
    score_high: float | None
    val_score: float | None
    chance: float | None
    params_ratio: float | None
    state_bytes: float | None
    grain: float
    """The least difference that its test examples can show; 0 where their number is unknown."""
    started_at: str = ""

    @property
    def ok(self) -> bool:
        return self.status is Status.OK and self.score is not None

    @property
    def problem(self) -> tuple[str, Setting]:
        """Task and setting, the same for all trainings with comparable scores."""
        return self.task, self.setting


def trained(rows: Iterable[Record | Mapping[str, Any]], *, also_alike: Sequence[str] = ()) -> list[Trained]:
    """The trainings among result rows, failed ones too; of one that was repeated, the newest that is ok.

    Args:
        rows: records, or column -> value, NaN or empty where there is no value.
        also_alike: further columns that must agree for trainings to be compared.
    """
    newest: dict[tuple[object, ...], Trained] = {}
    alike = (*ALIKE, *also_alike)
    for row in rows:
        given = row.to_json() if isinstance(row, Record) else row
        if _is_nothing(given.get("protocol")) and _is_nothing(given.get("score")):
            continue
        known = {name: given.get(name) for name in (*_READ, *alike)}
        one = _training({name: None if _is_nothing(value) else value for name, value in known.items()}, alike)
        key = (one.label, *one.problem, one.learning_rate, one.seed)
        if key not in newest or (newest[key].ok, newest[key].started_at) <= (one.ok, one.started_at):
            newest[key] = one
    return _rates_apart(list(newest.values()))


def _is_nothing(value: object) -> bool:
    return value is None or value == "" or (isinstance(value, float) and not math.isfinite(value))


_WORDS = ("label", "variant", "family", "task", "reason", "cell_id", "started_at")
_NUMBERS = ("score", "score_low", "score_high", "val_score", "params_ratio", "state_bytes", "learning_rate")
_READ = (*_WORDS, *_NUMBERS, "protocol", "test_examples", "score_kind", "test_len", "seed", "status", "chance_score")


def _training(columns: Mapping[str, Any], alike: Sequence[str]) -> Trained:
    examples = columns.get("test_examples") or math.inf
    answers = examples if columns.get("score_kind") != "token accuracy" else examples * (columns["test_len"] or 1)
    plain: dict[str, Any] = {name: str(columns.get(name) or "") for name in _WORDS}
    plain |= {name: columns.get(name) for name in _NUMBERS}
    return Trained(
        **plain,
        setting=tuple((name, columns.get(name)) for name in alike),
        seed=int(columns["seed"]),
        status=Status(columns["status"]),
        chance=columns.get("chance_score"),
        grain=1 / answers,
    )


def _rates_apart(found: list[Trained]) -> list[Trained]:
    """Make each rate a setting of its own if rates were fixed and a label has several."""
    rates: dict[tuple[object, ...], set[float | None]] = {}
    for one in found:
        rates.setdefault((one.problem, one.label), set()).add(one.learning_rate)
    several = {problem for (problem, _), used in rates.items() if len(used) > 1}
    return [
        replace(one, setting=(*one.setting, ("learning_rate", one.learning_rate)))
        if one.problem in several and dict(one.setting).get("protocol") != "sweep"
        else one
        for one in found
    ]


@dataclass(frozen=True, slots=True)
class CountedTrainings:
    """The trainings of one label on one problem that count."""

    label: str
    problem: tuple[str, Setting]
    rate: float | None
    """The rate that was chosen, or the only one; None if none could be chosen."""
    rows: tuple[Trained, ...]
    """Trainings at that rate, failed ones too."""
    notes: tuple[str, ...] = ()
    """Notes on the rates: which are unstable, and at which a training failed."""


def choose(found: Iterable[Trained]) -> list[CountedTrainings]:
    """For each label and problem the learning rate with the best mean validation score.

    The mean is over the seeds that every rate was tried with: later seeds, for the best rate alone, do not count. A
    rate with fewer of these ended ok ranks lower; of equals the smaller rate wins. No test score is used. With the
    protocol ``fixed`` there is one rate, which counts.
    """
    groups: dict[tuple[object, ...], list[Trained]] = {}
    for one in found:
        groups.setdefault((one.problem, one.label), []).append(one)
    return [_choice(rows) for rows in groups.values()]


def _choice(rows: list[Trained]) -> CountedTrainings:
    label, problem = rows[0].label, rows[0].problem
    rates: dict[float | None, list[Trained]] = {}
    for one in sorted(rows, key=lambda one: (one.learning_rate or 0.0, one.seed)):
        rates.setdefault(one.learning_rate, []).append(one)
    notes = tuple(note for rate, tried in rates.items() for note in _notes(rate, tried))
    if len(rates) == 1:
        ((rate, tried),) = rates.items()
        return CountedTrainings(label, problem, rate, tuple(tried), notes)
    seeds = set.intersection(*({one.seed for one in tried} for tried in rates.values()))

    def rank(rate: float | None) -> tuple[int, float]:
        values = [one.val_score for one in rates[rate] if one.seed in seeds and one.ok and one.val_score is not None]
        return len(values), math.fsum(values) / len(values) if values else 0.0

    best = max(rates, key=rank)
    if rank(best)[0] == 0 and any(one.ok for one in rows):
        why = "no seed has a validation score" if seeds else "no seed was trained at every rate"
        return CountedTrainings(label, problem, None, (), (*notes, f"no rate chosen: {why}"))
    return CountedTrainings(label, problem, best, tuple(rates[best]), notes)


def _notes(rate: float | None, tried: Sequence[Trained]) -> list[str]:
    at = "" if rate is None else f"at {rate:g} "
    failed = {one.status: one.reason for one in tried if not one.ok and one.status is not Status.UNSUPPORTED}
    notes = [f"{at}{status}" + f": {reason}" * bool(reason) for status, reason in failed.items()]
    values = [one.val_score for one in tried if one.ok and one.val_score is not None]
    if values and max(values) - min(values) > UNSTABLE:
        notes.append(f"{at}unstable: {min(values):.2f} to {max(values):.2f} over seeds")
    return notes
