"""A decision as a table for people, the worst first, and for programs as JSON, JUnit's XML and rows of trends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any
from xml.etree import ElementTree

from attnbench.answers.gate import phrases
from attnbench.answers.gate.decide import Decision, is_beside
from attnbench.answers.gate.verdict import ENOUGH_ROUNDS, MANY_ROUNDS, MEASURES, Measure, Ruling
from attnbench.errors import any_of
from attnbench.measure.machine import differing_versions
from attnbench.measure.statistics import BETWEEN_RUNS
from attnbench.results.manifest import FRESH
from attnbench.results.measurements import differing_rules
from attnbench.text import not_live, printable, quantity
from attnbench.units import format_interval

COLUMNS = ("cell", "old", "new", "ratio", "interval", "verdict")
NUMBERS = ("old", "new", "ratio", "interval")
MOST_CHARACTERS = 65_536
"""The length limit of a comment on GitHub."""
_MOST_NOTES = 20


@dataclass(frozen=True, slots=True)
class DecisionTable:
    """The lines of a decision as shown."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    foot: tuple[str, ...]
    verdict: str


def table_of(decision: Decision) -> DecisionTable:
    """The texts of a decision."""
    told = [one for one in decision.findings if _is_told(one, decision)]
    axes = phrases.telling({one.pair.key: one.pair.shown for one in decision.findings}.values())
    return DecisionTable(
        head=tuple(_head(decision)),
        rows=tuple(_row(one, axes, decision.unit) for one in told),
        foot=(*_notes(told, axes), *_foot(decision)),
        verdict=verdict_line(decision),
    )


def _is_told(one: Ruling, decision: Decision) -> bool:
    """True if a finding has a line: not if it is the same or new, nor if it is unsure and its ratio is not worse."""
    if one.verdict != "unsure":
        return one.verdict not in ("same", "new")
    return decision.fails(one) or decision.seems_worse(one) or one.ratio is None


def verdict_line(decision: Decision) -> str:
    """``failed: 2 slower, 1 broken`` or ``passed``, with open cells; ``not known`` if a measure could not be judged.

    If nothing can fail: ``differs: 2 slower, 1 faster``.
    """
    closes = decision.question.closes
    found = decision.failures if closes else [one for one in decision.findings if one.is_changed]
    rest = [one for one in decision.findings if one.verdict in ("unsure", "missing") and not decision.fails(one)]
    also = f"; {_counted(rest)}" if rest else ""
    looks = [one.ratio or 0.0 for one in rest if one.measure == "time" and decision.seems_worse(one)]
    if looks and not found:
        seem = f"{len(looks)} cell{'s look' if len(looks) > 1 else ' looks'} slower (up to {max(looks):.2f} times)"
        also += f"; {seem}, not beyond doubt: measure with more --rounds{', or give --strict' * closes}"
    few = "time" in decision.unjudged and decision.times > 0
    none = [one for one in decision.unjudged if not (few and one == "time")]
    lacking = f"no {any_of(none)} of both runs could be compared" if none else ""
    if found:
        return f"{'failed' if closes else 'differs'}: {_counted(found)}{also}{'; ' * bool(none)}{lacking}"
    if decision.undecided:
        rounds = f"{quantity(decision.rounds or 0, 'round')} cannot tell whether a time is worse" if few else ""
        return f"not known: {', and '.join(filter(None, [rounds, lacking]))}{also}"
    return f"{'passed: nothing is worse' if closes else 'nothing differs'} beyond doubt{also}"


def _counted(findings: Sequence[Ruling]) -> str:
    counts = Counter(phrases.plain(one) for one in findings)
    return ", ".join(f"{count} {'with ' * (' ' in said)}{said}" for said, count in counts.items())


def _head(decision: Decision) -> list[str]:
    said, question = [], decision.question
    if decision.few:
        rounds = quantity(decision.rounds or 0, "round")
        which = "" if decision.few == decision.times else f" of {decision.few} among {decision.times} timed cells"
        said.append(
            f"only {rounds}{which}: too few to know how the machine drifts; measure with --rounds {ENOUGH_ROUNDS}"
        )
    said.append(printable(f"{decision.new.name} against {', '.join(old.name for old in decision.olds)}"))
    for old in decision.olds:
        versions = differing_versions(decision.new.environment, old.environment)
        for what, found in (("versions", versions), ("rules of timing", differing_rules(decision.new, old))):
            said += [printable(f"other {what} now and before: {'; '.join(found)}")] * bool(found)
    if decision.paces:
        now, *before = (f"{share:.0%}" for share in decision.paces)
        said.append(f"times at the machine's full speed, of which it had {now} now and {', '.join(before)} before")
    if "time" in question.measures and len({FRESH in run.environment for run in (decision.new, *decision.olds)}) > 1:
        silent = [run.name for run in (decision.new, *decision.olds) if FRESH not in run.environment]
        said.append(
            printable(f"{any_of(silent)} may have measured all rounds in one process: its intervals may be too narrow")
        )
    if decision.unit != "s":
        said.append(f"another machine: only times are judged, each divided by the time of {decision.unit}")
    if decision.drift is not None:
        said.append(f"ratios are divided by {decision.drift:.3f}, the median ratio of {question.relative_to}")
    return list(dict.fromkeys(said))


def _row(one: Ruling, axes: Sequence[str], unit: str) -> tuple[str, ...]:
    old, new = phrases.sides(one, unit)
    name, span = phrases.name(one.pair.shown, axes), phrases.interval(one)
    return name, old, new, phrases.ratio(one.ratio), span, phrases.verdict(one)


def _notes(told: Sequence[Ruling], axes: Sequence[str]) -> list[str]:
    said = [f"{phrases.name(one.pair.shown, axes)}: {printable(one.note)}" for one in told if one.note]
    lines = list(dict.fromkeys(said))
    more = [f"… and {len(lines) - _MOST_NOTES} more notes; --format json has them"] if len(lines) > _MOST_NOTES else []
    return [*lines[:_MOST_NOTES], *more]


def _foot(decision: Decision) -> list[str]:
    said = []
    unsure = [one for one in decision.findings if one.more_rounds is not None]
    if unsure:
        more = int(median(one.more_rounds or 0 for one in unsure))
        rounds = f"{'over' if more >= MANY_ROUNDS else 'about'} {more} more round{'s' * (more > 1)}"
        said.append(f"unsure: {len(unsure)}; to settle half of them takes {rounds} of both runs")
    if decision.known:
        slower = sum(one.verdict == "slower" for one in decision.findings)
        said.append(f"{slower} of {decision.known} comparisons slower; joint 95 % at each end of an interval")
        said.append(_between(decision))
    said += _bound(decision)
    same = Counter(one.measure for one in decision.findings if one.verdict == "same")
    new = sum(one.verdict == "new" for one in decision.findings)
    if new:
        said.append(f"new: {quantity(new, 'cell')} that no older run has")
    if same:
        said.append(f"unchanged: {', '.join(f'{one} {same[one]}' for one in MEASURES if same[one])}")
    if decision.common is not None:
        what = "time" if decision.unit == "s" else f"time over that of {decision.unit}"
        said.append(f"all cells together: {decision.common:.3f} times the old {what} (median of {decision.times})")
    return said


def _between(decision: Decision) -> str:
    if is_beside(decision.new, decision.olds):
        return "each round is one ratio, since the two runs took turns"
    if decision.between is not None:
        return f"runs of one program differ by {decision.between:.1%}, say {len(decision.olds)} older runs"
    return f"too few older runs: how runs differ is unknown, intervals {BETWEEN_RUNS:.0%} wider at each end"


def _bound(decision: Decision) -> list[str]:
    """The largest growth that the intervals allow to times that are not shown to have grown."""
    times = [one for one in decision.findings if one.measure == "time" and not one.is_worse]
    highs = sorted(math.ceil(100 * one.high - 1e-9) / 100 for one in times if one.high is not None)
    if not highs or all(one.verdict != "unsure" for one in times):
        return []
    half = highs[(len(highs) - 1) // 2]
    others = " else" if len(times) < sum(one.measure == "time" for one in decision.findings) else ""
    which, half_of = (" with an interval", "these") if len(highs) < len(times) else ("", "the times")
    return [f"nothing{others}{which} is slower than x{highs[-1]:.2f}, half of {half_of} not than x{half:.2f}"]


def to_text(decision: Decision) -> str:
    """The table as plain text, as wide as it has to be."""
    table = table_of(decision)
    lines = [COLUMNS, *table.rows] if table.rows else []
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    drawn = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*table.head, *drawn, *table.foot, table.verdict]) + "\n"


def to_markdown(decision: Decision) -> str:
    """The table as Markdown, of at most 65,536 characters; omitted rows are counted."""
    table = table_of(decision)
    warns = decision.few > 0
    warned, about = table.head[:warns], table.head[warns:]
    head = [*_paragraph(warned), f"### attnbench: {_escaped(table.verdict)}", "", *_paragraph(about)]
    foot = ["", *_paragraph(table.foot)]
    lines = [_line(row) for row in table.rows]
    head += [_line(COLUMNS), _line(["---"] * len(COLUMNS))] if lines else []
    room = MOST_CHARACTERS - len("\n".join([*head, *foot])) - 100  # for the line that counts
    kept, size = 0, 0
    while kept < len(lines) and size + len(lines[kept]) + 1 <= room:
        size += len(lines[kept]) + 1
        kept += 1
    cut = ["", f"… and {len(lines) - kept} more lines"] if kept < len(lines) else []
    return "\n".join([*head, *lines[:kept], *cut, *foot])


def _paragraph(lines: Sequence[str]) -> list[str]:
    return [*(f"{_escaped(line)}  " for line in lines), ""] if lines else []


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_escaped, cells))} |"


def _escaped(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    return not_live("".join(f"\\{c}" if c in "\\`*_[]|#~" else c for c in text))


SCHEMA = 1
"""Version of :func:`to_json`; increment it for a change that a reader has to know."""

_UNITS = {"time": "s", "memory": "bytes", "error": "relative error", "score": "score"}


def to_json(decision: Decision) -> dict[str, Any]:
    """``{schema, gate, summary, exit, limits, cells: [{key, measure, old, new, ratio, low, high, verdict}]}`` and more.

    docs/gate.md says what each key holds.
    """
    question = decision.question
    return {
        "schema": SCHEMA,
        "gate": ("unknown" if decision.undecided else "passed" if decision.passed else "failed")
        if question.closes
        else None,
        "summary": verdict_line(decision),
        "head": _head(decision),
        "exit": int(decision.exit_code),
        "counts": decision.counts(),
        "limits": _limits(decision),
        "judged": judged(decision),
        "machine": {"class": decision.new.machine_class, "id": decision.new.environment.get("machine_id")},
        "new": str(decision.new.path),
        "old": [str(old.path) for old in decision.olds],
        "rounds": decision.rounds,
        "comparisons": decision.known,
        "between_runs": decision.between,
        "unit": decision.unit,
        "relative_to": question.relative_to,
        "drift": decision.drift,
        "all_times_together": decision.common,
        "machine_speed": list(decision.paces) or None,
        "cells": [_cell(one) for one in decision.findings],
    }


def _limits(decision: Decision) -> dict[str, Any]:
    question = decision.question
    return {**asdict(question.limits), "missing": question.missing, "strict": question.strict}


def judged(decision: Decision) -> dict[Measure, str]:
    """Measure -> the limit above which it is worse, for the measures that are judged."""
    limits = decision.question.limits
    how = "at one speed of the machine" if decision.paces else "as measured"
    if decision.unit != "s":
        how = f"each over the time of {decision.unit}"
    elif decision.drift is not None:
        how += f", ratios over {decision.drift:.3f}, the median ratio of {decision.question.relative_to}"
    said: dict[Measure, str] = {
        "time": f"slower if the whole joint interval of its ratio is above {limits.time:g}; times {how}",
        "memory": f"more if its ratio is above {limits.memory:g}",
        "error": f"more if the whole interval of its ratio is above {limits.error:g}",
        "score": "lower if the intervals over test examples have nothing in common",
        "status": "broken if it was ok before and is not now",
    }
    asked = decision.question.measures if decision.unit == "s" else ("time",)
    return {measure: said[measure] for measure in said if measure in asked}


def _cell(one: Ruling) -> dict[str, Any]:
    row = one.pair.shown
    numbers = {name: getattr(one, name) for name in ("old", "new", "ratio", "low", "high")}
    return {
        "label": row.label,
        "suite": row.suite,
        "sweep": row.sweep,
        "key": one.pair.key.to_json(),
        "measure": one.measure,
        "old_status": None if one.pair.old is None else str(one.pair.old.status),
        "new_status": None if one.pair.new is None else str(one.pair.new.status),
        **{name: value if value is None or math.isfinite(value) else None for name, value in numbers.items()},
        "verdict": one.verdict,
        "note": phrases.note(one),
    }


def to_junit(decision: Decision) -> str:
    """A ``testcase`` for each cell: failed with all its failures, skipped if it is unsure or missing.

    Properties of the suite hold the notes and limits of the whole decision.
    """
    axes = phrases.telling({one.pair.key: one.pair.shown for one in decision.findings}.values())
    cells: dict[Any, list[Ruling]] = {}
    for one in decision.findings:
        cells.setdefault(one.pair.key, []).append(one)
    suite = ElementTree.Element("testsuite", name=f"attnbench {'gate' if decision.question.closes else 'diff'}")
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in _properties(decision).items():
        ElementTree.SubElement(properties, "property", name=name, value=value)
    counts = {"tests": len(cells), "failures": 0, "errors": 0, "skipped": 0}
    for found in cells.values():
        row = found[0].pair.shown
        place = printable(f"{row.suite}.{row.sweep}")
        case = ElementTree.SubElement(suite, "testcase", classname=place, name=phrases.name(row, axes))
        failed = [one for one in found if decision.fails(one)]
        open_ = [one for one in found if one.verdict in ("unsure", "missing")]
        if failed:
            counts["failures"] += 1
            first = failed[0]
            told = ElementTree.SubElement(case, "failure", type=first.verdict, message=_sentence(first, decision))
            told.text = _sentences(failed, decision)
        elif open_:
            counts["skipped"] += 1
            ElementTree.SubElement(case, "skipped", message=_sentences(open_, decision))
        if changed := [one for one in found if one.is_changed and not decision.fails(one)]:
            ElementTree.SubElement(case, "system-out").text = _sentences(changed, decision)
    for name, count in counts.items():
        suite.set(name, str(count))
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _properties(decision: Decision) -> dict[str, str]:
    return {
        "summary": verdict_line(decision),
        "head": "; ".join(_head(decision)),
        "exit": str(int(decision.exit_code)),
        **{f"count.{verdict}": str(count) for verdict, count in decision.counts().items()},
        **{f"limit.{name}": str(value) for name, value in _limits(decision).items()},
        **{f"judged.{measure}": printable(said) for measure, said in judged(decision).items()},
    }


def _sentences(found: Iterable[Ruling], decision: Decision) -> str:
    return "; ".join(_sentence(one, decision) for one in found)


def _sentence(one: Ruling, decision: Decision) -> str:
    if one.pair.new is None:
        return "missing: an older run has this cell"
    old, new = phrases.sides(one, decision.unit)
    said = f"{phrases.plain(one)}: {new}, was {old}"
    if one.ratio is not None:
        span = phrases.interval(one)
        said += f", ratio {phrases.ratio(one.ratio)}" + (f" ({span})" if span != "-" else "")
    return printable(said + (f"; {note}" if (note := phrases.note(one)) else ""))


def to_action(decision: Decision) -> list[dict[str, Any]]:
    """``[{name, unit, value, range, extra}]`` of the new run, the smaller the better; without scores.

    Values are the run's own, as in its table, and do not depend on the older run.
    """
    axes = phrases.telling({one.pair.key: one.pair.shown for one in decision.findings}.values())
    found = [one for one in decision.findings if one.new is not None and one.measure != "score"]
    return [
        {
            "name": f"{phrases.name(one.pair.shown, axes)} {one.measure}",
            "unit": f"× {decision.unit}" if one.measure == "time" and decision.unit != "s" else _UNITS[one.measure],
            "value": one.pair.new.time_median_s if one.measure == "time" and one.pair.new else one.new,
            "range": _range(one),
            "extra": _sentence(one, decision),
        }
        for one in found
    ]


def _range(one: Ruling) -> str:
    row = one.pair.new
    if one.measure != "time" or row is None:
        return ""
    return format_interval(row.time_median_s, row.time_ci_low_s, row.time_ci_high_s)
