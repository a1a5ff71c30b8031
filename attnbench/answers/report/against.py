"""A comparison of a run with an older one: a verdict for each row, and the changes of all of them together."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from attnbench.answers.gate import phrases
from attnbench.answers.gate.decide import Decision, GateQuestion, decide, read_runs
from attnbench.answers.gate.decision_table import table_of
from attnbench.answers.gate.verdict import MEASURES, Ruling
from attnbench.errors import UsageError
from attnbench.results.measurements import differing_facts
from attnbench.text import one_line

_MOST = 12


@dataclass(frozen=True)
class Change:
    """One row and its older one."""

    ratio: float | None
    low: float | None
    high: float | None
    verdict: str
    """Verdict on the time, then on everything else that changed: ``slower, more memory``."""


@dataclass(frozen=True)
class Against:
    """A report's findings about an older run."""

    name: str
    changes: Mapping[str, Change]
    said: tuple[str, ...]
    listed: tuple[tuple[str, ...], ...]
    """The worst, with the columns of :data:`~attnbench.answers.gate.decision_table.COLUMNS`."""
    more: int


def read_against(folders: Mapping[str, Path], old: Path, warn: Callable[[str], None] = warnings.warn) -> Against:
    """Compare the only run of a report with an older one.

    ``folders``: name -> folder of the report's runs; ``warn`` gets faults of the older one. Raises UsageError for
    several runs, twice the same, or runs that may not be compared, and ResultsError for an unreadable one or no cell in
    common.
    """
    if len(folders) != 1:
        raise UsageError(f"--against compares one run with an older one, and {len(folders)} are named; name one")
    (new,) = folders.values()
    now, before = read_runs([new, old])
    for doubt in before.doubts:
        warn(doubt)
    if facts := differing_facts(now, before):
        said = f"{now.path} and {before.path} differ in {'; '.join(facts)}"
        alike = now.method_version == before.method_version
        remedy = "attnbench diff --other-machine ratios compares them over softmax" if alike else "measure both again"
        raise UsageError(f"{said}: their times have no common axis; {remedy}")
    return _told(decide(now, [before], GateQuestion(measures=MEASURES)))


def _told(decision: Decision) -> Against:
    by_cell: dict[str, list[Ruling]] = {}
    for one in decision.findings:
        if one.pair.new is not None:
            by_cell.setdefault(one.pair.new.cell_id, []).append(one)
    shown = table_of(decision)
    counts = Counter(phrases.plain(one) for one in decision.findings)
    verdicts = f"verdicts: {', '.join(f'{count} {said}' for said, count in counts.items())}"
    return Against(
        one_line(decision.olds[0].name, 80),
        {cell: _change(found) for cell, found in by_cell.items()},
        (*shown.head, *shown.foot, verdicts),
        shown.rows[:_MOST],
        max(0, len(shown.rows) - _MOST),
    )


def _change(found: list[Ruling]) -> Change:
    time = next((one for one in found if one.measure == "time"), None)
    others = [one for one in found if one is not time and one.verdict != "same"]
    said = [phrases.plain(one) for one in ([time] if time else []) + others] or ["same"]
    return Change(
        time.ratio if time else None, time.low if time else None, time.high if time else None, ", ".join(said)
    )
