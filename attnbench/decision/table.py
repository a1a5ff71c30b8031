"""A decision for people: a table with the worst first, on a terminal, in a file or as Markdown."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from attnbench.decision import words
from attnbench.decision.decide import Decision
from attnbench.decision.judge import ENOUGH_ROUNDS, MANY_ROUNDS, MEASURES, Finding
from attnbench.errors import any_of
from attnbench.manifest import FRESH
from attnbench.measure.statistics import BETWEEN_RUNS
from attnbench.printable import not_live, printable

COLUMNS = ("cell", "old", "new", "ratio", "interval", "verdict")
NUMBERS = ("old", "new", "ratio", "interval")
MOST_CHARACTERS = 65_536
"""What a comment on GitHub holds."""
_MOST_NOTES = 20


@dataclass(frozen=True, slots=True)
class Table:
    """What is shown of a decision."""

    head: tuple[str, ...]
    """Lines before the table, which are to be known before it is read."""
    rows: tuple[tuple[str, ...], ...]
    """Texts under :data:`COLUMNS`, of all that changed or may have."""
    foot: tuple[str, ...]
    """Lines after the table."""
    verdict: str
    """One line that answers."""


def table_of(decision: Decision) -> Table:
    """The texts of a decision."""
    told = [one for one in decision.findings if _is_told(one, decision)]
    axes = words.telling({one.pair.key: one.pair.shown for one in decision.findings}.values())
    return Table(
        head=tuple(_head(decision)),
        rows=tuple(_row(one, axes, decision.unit) for one in told),
        foot=(*_notes(told, axes), *_foot(decision)),
        verdict=verdict_line(decision),
    )


def _is_told(one: Finding, decision: Decision) -> bool:
    """Whether a finding has a line: not what is the same or new, nor what is unsure and does not even seem worse."""
    if one.verdict != "unsure":
        return one.verdict not in ("same", "new")
    return decision.fails(one) or _seems_worse(one, decision)


def verdict_line(decision: Decision) -> str:
    """``failed: 2 slower, 1 broken`` or ``passed``, with what is open; ``not known`` if no time could be judged."""
    rest = [one for one in decision.findings if one.verdict in ("unsure", "missing") and not decision.fails(one)]
    also = f"; {_counted(rest)}" if rest else ""
    looks = [one.ratio or 0.0 for one in rest if one.measure == "time" and _seems_worse(one, decision)]
    if looks and decision.passed:
        seem = f"{len(looks)} cell{'s look' if len(looks) > 1 else ' looks'} slower (up to {max(looks):.2f} times)"
        also += f"; {seem}, not beyond doubt: measure with more --rounds, or give --strict"
    if not decision.passed:
        return f"failed: {_counted(decision.failures)}{also}"
    if decision.undecided:
        rounds = f"{decision.rounds} round{'s' * (decision.rounds != 1)}"
        return f"not known: {rounds} cannot tell whether a time is worse{also}"
    return f"passed: nothing is worse beyond doubt{also}"


def _seems_worse(one: Finding, decision: Decision) -> bool:
    limit = decision.question.limits.error if one.measure == "error" else decision.question.limits.time
    return one.at_risk and (one.ratio or 0.0) > limit


def _counted(findings: Sequence[Finding]) -> str:
    """``2 slower, 1 with more memory``."""
    counts = Counter(words.plain(one) for one in findings)
    return ", ".join(f"{count} {'with ' * (' ' in said)}{said}" for said, count in counts.items())


def _head(decision: Decision) -> list[str]:
    said, question = [], decision.question
    if decision.few_rounds:
        rounds = f"{decision.rounds} round{'s' * (decision.rounds != 1)}"
        which = "" if decision.few == decision.times else f" of {decision.few} among {decision.times} timed cells"
        said.append(
            f"only {rounds}{which}: too few to know how the machine drifts; measure with --rounds {ENOUGH_ROUNDS}"
        )
    said.append(printable(f"{decision.new.name} against {', '.join(old.name for old in decision.olds)}"))
    if decision.paces:
        now, *before = (f"{pace.share:.0%}" for pace in decision.paces)
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
    return said


def _row(one: Finding, axes: Sequence[str], unit: str) -> tuple[str, ...]:
    old, new = words.sides(one, unit)
    name, span = words.name(one.pair.shown, axes), words.interval(one)
    return name, old, new, words.ratio(one.ratio), span, words.verdict(one)


def _notes(told: Sequence[Finding], axes: Sequence[str]) -> list[str]:
    said = [f"{words.name(one.pair.shown, axes)}: {printable(one.note)}" for one in told if one.note]
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
        said.append(f"new: {new} cell{'s' * (new > 1)} that no older run has")
    if same:
        said.append(f"unchanged: {', '.join(f'{one} {same[one]}' for one in MEASURES if same[one])}")
    if decision.common is not None:
        what = "time" if decision.unit == "s" else f"time over that of {decision.unit}"
        said.append(f"all cells together: {decision.common:.3f} times the old {what} (median of {decision.times})")
    return said


def _between(decision: Decision) -> str:
    """What the intervals allow for that no visit of one run shows."""
    if decision.between is not None:
        return f"runs of one program differ by {decision.between:.1%}, say {len(decision.olds)} older runs"
    return f"too few older runs: how runs differ is unknown, intervals {BETWEEN_RUNS:.0%} wider at each end"


def _bound(decision: Decision) -> list[str]:
    """By how much times may have grown at most, where nothing says that they have."""
    times = [one for one in decision.findings if one.measure == "time" and not one.is_worse]
    highs = sorted(math.ceil(100 * one.high - 1e-9) / 100 for one in times if one.high is not None)
    if not highs or all(one.verdict != "unsure" for one in times):
        return []
    half = highs[(len(highs) - 1) // 2]
    others = " else" if len(times) < sum(one.measure == "time" for one in decision.findings) else ""
    return [f"nothing{others} is slower than x{highs[-1]:.2f}, half of the times not than x{half:.2f}"]


def to_text(decision: Decision) -> str:
    """The table as plain text, as wide as it has to be."""
    table = table_of(decision)
    lines = [COLUMNS, *table.rows] if table.rows else []
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    drawn = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*table.head, *drawn, *table.foot, table.verdict]) + "\n"


def to_markdown(decision: Decision) -> str:
    """The table as Markdown, of at most 65,536 characters; what does not fit is counted."""
    table = table_of(decision)
    warned, about = table.head[: decision.few_rounds], table.head[decision.few_rounds :]
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
    """Lines that stay apart, and an empty one after them."""
    return [*(f"{_escaped(line)}  " for line in lines), ""] if lines else []


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_escaped, cells))} |"


def _escaped(text: str) -> str:
    """Foreign text without any meaning in Markdown."""
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    return not_live("".join(f"\\{c}" if c in "\\`*_[]|#~" else c for c in text))
