"""Scores on a terminal: a table for each task, over seeds, compared with softmax and with no mixing at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnbench.cli.screen import console
from attnbench.results.frame.marks import name_text, score_text
from attnbench.results.trainings import ALIKE
from attnbench.suite.axes import AXES
from attnbench.text import quantity
from attnbench.units import format_seconds

if TYPE_CHECKING:
    from attnbench.results.frame.scored import Problem
    from attnbench.results.intervals import Difference, Summary
    from attnbench.results.record import Record

_UNTITLED = tuple(name for name in ALIKE if name not in ("seq_len", "test_len", "steps", "guide"))
"""Columns that distinguish models, and stand in a title only if they do."""


def print_scores(records: Sequence[Record]) -> None:
    """Print the scores of the trainings among these rows."""
    from attnbench.results.frame.scored import by_problem, family_of
    from attnbench.results.intervals import joint
    from attnbench.results.trainings import choose, trained

    of_rows = [record for record in records if record.steps is not None]
    problems = by_problem(choose(trained(of_rows)))
    several = [name for name in _UNTITLED if len({one.setting.get(name) for one in problems}) > 1]
    names = {record.label: name_text(record.label, record.own_form) for record in of_rows}
    family, withheld = family_of(problems), []
    for problem in problems:
        cells = {row.cell_id for choice in problem.choices for row in choice.rows}
        own = [record for record in of_rows if record.cell_id in cells]
        apart = "".join(f", {_in_words(name, problem.setting.get(name))}" for name in several)
        withheld.append(_print_problem(problem, own, names, apart, family))
    if of_rows:
        console.line(
            "95 %: over seeds, each for itself; with one seed over test examples"
            + f"\nminus softmax: {joint(family)}; unsure: it holds 0" * bool(family)
            + "\nwithheld: fewer than two common seeds" * any(withheld)
        )


def _in_words(name: str, value: object) -> str:
    return AXES[name].in_words(value) if name in AXES else f"{name.replace('_', ' ')} {value}"


def short_task(label: str) -> str:
    """A task's label without the options that are at their defaults."""
    from attnbench.contract.spec import parse_spec
    from attnbench.contract.task import TASKS

    spec = parse_spec(label)
    return TASKS.get(spec.name).normalise(spec).label if spec.name in TASKS else label


def _print_problem(problem: Problem, records: Sequence[Record], names: dict[str, str], apart: str, family: int) -> bool:
    """Print one table, and return True if a verdict was withheld.

    ``names``: label -> name with its mark. ``apart`` ends its title, and ``family`` is the number of differences tested
    together.
    """
    from attnbench.results.intervals import difference, learnt

    reference, rates = problem.reference, {one.rate for one in problem.parts}
    rows, lines = [], []
    for one in problem.parts:
        other = None if reference in (None, one) else difference(one, reference, family)
        score = score_text(one.over_seeds.mean, learnt=learnt(one, problem.floor))
        ends = "-" if one.ends is None else f"{one.ends[0]:.2f} to {one.ends[1]:.2f}"
        rate = f"{one.rate:g}" if one.rate is not None and len(rates) > 1 else "-"
        verdict = {"no difference found": "unsure"}.get(other.verdict, other.verdict) if other else "-"
        rows.append([names[one.label], score, ends, *_between(other), verdict, rate, _seconds(one, records)])
        if one.failed:
            lines.append(f"{one.label}: {one.failed} of {one.failed + len(one.by_seed)} trainings failed")
        if one.params_ratio is not None and abs(one.params_ratio - 1) > 0.1:
            lines.append(f"{one.label}: {one.params_ratio:.2f} times the parameters of softmax")
    facts = problem.setting
    seeds = max((len(one.by_seed) for one in problem.parts), default=0)
    title = f"{short_task(problem.task)}, n = {facts['seq_len']}, {facts['steps']} steps, {quantity(seeds, 'seed')}"
    if facts["test_len"] != facts["seq_len"]:
        title += f", {_in_words('test_len', facts['test_len'])}"
    if len(rates) == 1:
        title += f", learning rate {next(iter(rates)):g}"
    title += apart + (f", guided by {facts['guide']:g}" if facts.get("guide") else "")
    columns = ["variant", "score", "95 %", "minus softmax", "it is", "rate", "training"]
    console.table(
        columns,
        rows,
        right=["score", "95 %", "minus softmax", "rate", "training"],
        title=f"\n{title}",
    )
    with_score = {one.label for one in problem.parts}
    for choice in problem.choices:
        lines += [f"{choice.label} {note}" for note in choice.notes if choice.label in with_score]
        if choice.label not in with_score:
            why = next((f"{row.status}: {row.reason}" for row in choice.rows), "; ".join(choice.notes))
            lines.append(f"{choice.label}: {why}")
    for line in lines:
        console.line(line)
    if problem.chance is not None:
        console.line(f"always the same answer: {problem.chance:.3f}")
    console.mark_notes(cell for row in rows for cell in row[:2])
    return any("withheld" in row for row in rows)


def _between(other: Difference | None) -> list[str]:
    if other is None or other.of is None:
        return ["-"]
    ends = "" if other.of.low is None or other.of.high is None else f" ({other.of.low:+.2f} to {other.of.high:+.2f})"
    return [f"{other.of.mean:+.3f}{ends}"]


def _seconds(one: Summary, records: Sequence[Record]) -> str:
    from statistics import median

    taken = [
        record.train_s
        for record in records
        if record.label == one.label and record.train_s and record.learning_rate == one.rate
    ]
    return format_seconds(median(taken)) if taken else "-"
