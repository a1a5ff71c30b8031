"""A decision for programs: JSON, JUnit's XML, and what dashboards of trends read."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any
from xml.etree import ElementTree

from attnbench.decision import words
from attnbench.decision.decide import Decision
from attnbench.decision.judge import Finding, Measure
from attnbench.decision.table import verdict_line
from attnbench.printable import printable
from attnbench.units import format_interval

SCHEMA = 1
"""Version of :func:`to_json`; incremented when a reader has to know."""

_UNITS = {"time": "s", "memory": "bytes", "error": "relative error", "score": "score"}


def to_json(decision: Decision) -> dict[str, Any]:
    """``{schema, gate, summary, exit, limits, cells: [{key, measure, old, new, ratio, low, high, verdict}]}`` and more.

    docs/gate.md says what each key holds.
    """
    question = decision.question
    return {
        "schema": SCHEMA,
        "gate": "unknown" if decision.undecided else "passed" if decision.passed else "failed",
        "summary": verdict_line(decision),
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
        "machine_speed": [pace.share for pace in decision.paces] or None,
        "cells": [_cell(one) for one in decision.findings],
    }


def _limits(decision: Decision) -> dict[str, Any]:
    question = decision.question
    return {**asdict(question.limits), "missing": question.missing, "strict": question.strict}


def judged(decision: Decision) -> dict[Measure, str]:
    """Measure -> what makes it worse in this decision, for the measures that are judged."""
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


def _cell(one: Finding) -> dict[str, Any]:
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
        "note": words.note(one),
    }


def to_junit(decision: Decision) -> str:
    """A ``testcase`` for each cell: failed with all that fails in it, skipped where it is unsure or missing.

    Properties of the suite say what the command said of all cells together, and by which limits.
    """
    axes = words.telling({one.pair.key: one.pair.shown for one in decision.findings}.values())
    cells: dict[Any, list[Finding]] = {}
    for one in decision.findings:
        cells.setdefault(one.pair.key, []).append(one)
    suite = ElementTree.Element("testsuite", name="attnbench gate")
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in _properties(decision).items():
        ElementTree.SubElement(properties, "property", name=name, value=value)
    counts = {"tests": len(cells), "failures": 0, "errors": 0, "skipped": 0}
    for found in cells.values():
        row = found[0].pair.shown
        place = printable(f"{row.suite}.{row.sweep}")
        case = ElementTree.SubElement(suite, "testcase", classname=place, name=words.name(row, axes))
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
    for name, count in counts.items():
        suite.set(name, str(count))
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _properties(decision: Decision) -> dict[str, str]:
    """``summary``, ``exit``, ``count.slower``, ``limit.time``, ``judged.time`` and so on."""
    return {
        "summary": verdict_line(decision),
        "exit": str(int(decision.exit_code)),
        **{f"count.{verdict}": str(count) for verdict, count in decision.counts().items()},
        **{f"limit.{name}": str(value) for name, value in _limits(decision).items()},
        **{f"judged.{measure}": printable(said) for measure, said in judged(decision).items()},
    }


def _sentences(found: Iterable[Finding], decision: Decision) -> str:
    return "; ".join(_sentence(one, decision) for one in found)


def _sentence(one: Finding, decision: Decision) -> str:
    """``time slower: 12.3 ms, was 10.1 ms, ratio 1.218 (1.19 to 1.24)``."""
    if one.verdict == "missing":
        return "missing: an older run has this cell"
    old, new = words.sides(one, decision.unit)
    said = f"{words.plain(one)}: {new}, was {old}"
    if one.ratio is not None:
        span = words.interval(one)
        said += f", ratio {words.ratio(one.ratio)}" + (f" ({span})" if span != "-" else "")
    return printable(said + (f"; {note}" if (note := words.note(one)) else ""))


def to_action(decision: Decision) -> list[dict[str, Any]]:
    """``[{name, unit, value, range, extra}]`` of what the new run measured, the smaller the better; without scores.

    Values are the run's own, as in its table. They do not depend on what it is held against.
    """
    axes = words.telling({one.pair.key: one.pair.shown for one in decision.findings}.values())
    found = [one for one in decision.findings if one.new is not None and one.measure != "score"]
    return [
        {
            "name": f"{words.name(one.pair.shown, axes)} {one.measure}",
            "unit": f"× {decision.unit}" if one.measure == "time" and decision.unit != "s" else _UNITS[one.measure],
            "value": one.pair.new.time_median_s if one.measure == "time" and one.pair.new else one.new,
            "range": _range(one),
            "extra": _sentence(one, decision),
        }
        for one in found
    ]


def _range(one: Finding) -> str:
    """The interval of the new value, as :func:`format_interval` tells it; empty where it has none."""
    row = one.pair.new
    if one.measure != "time" or row is None:
        return ""
    return format_interval(row.time_median_s, row.time_ci_low_s, row.time_ci_high_s)
