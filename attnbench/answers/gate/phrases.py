"""Cells and their numbers in words: short in a table, and as ``-k`` matches them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from attnbench.answers.gate.verdict import COLUMNS, MANY_ROUNDS, Ruling
from attnbench.results.record import Record
from attnbench.suite.axes import AXES, Axis, Flag, Rate, Share, Specs, Whole, shortened
from attnbench.suite.describe import address_of
from attnbench.text import printable
from attnbench.units import format_bytes, format_number, format_seconds


def address(row: Record) -> str:
    """The text that ``-k`` matches, as :func:`attnbench.suite.describe.address` gives it for a cell."""
    values = shortened({axis: getattr(row, axis) for axis in AXES})
    values["inputs"] = row.inputs if row.level == "operator" else None
    values["positions"] = row.positions or None
    return address_of([row.sweep, row.label, f"n{row.seq_len}", row.level, row.pass_], values)


_NAMING = sorted(
    (axis for axis in AXES.values() if not axis.required),
    key=lambda axis: (not isinstance(axis.values, Specs), axis.asked),
)
"""Axes that a name may show with variant and length, in that order."""
_NUMBERS = ("layers", "ffn", "steps", "pretrain_steps", "guide", "threads")
"""Columns that are no axes, and say nothing without their name."""


def _axes(row: Record) -> dict[str, str]:
    numbers = {name: getattr(row, name) for name in _NUMBERS}
    return {
        "level": row.level,
        "pass": row.pass_,
        **{axis.name: _said(axis, row) for axis in _NAMING},
        "positions": row.positions,  # none of them is worth saying as well
        "protocol": row.protocol or "",
        "process": row.process,
        **{name: "" if value is None else f"{name}={value:g}" for name, value in numbers.items()},
    }


def _said(axis: Axis, row: Record) -> str:
    value = getattr(row, axis.name)
    if axis.same_as and value == getattr(row, axis.same_as):
        return ""
    if axis.only == "operator" and row.level != "operator":
        return ""
    if isinstance(axis.values, Flag):
        return axis.in_words(value) if value else ""
    if value is None or value == "none" or (isinstance(axis.values, Share) and not value):
        return ""
    return f"{axis.name}={value:g}" if isinstance(axis.values, Whole | Share | Rate) else str(value)


def telling(rows: Iterable[Record]) -> list[str]:
    """The axes that, with variant and length, distinguish the names of these rows."""
    said = [{"": f"{row.label} {row.seq_len}", **_axes(row)} for row in rows]
    chosen, apart = [""], len({one[""] for one in said})
    for axis in said[0] if said else ():
        now = len({tuple(one[name] for name in (*chosen, axis)) for one in said})
        if now > apart:
            chosen.append(axis)
            apart = now
    return chosen[1:]


def name(row: Record, axes: Sequence[str]) -> str:
    """``performer:features=64 n=4096 training causal``, with the values of ``axes``."""
    said = _axes(row)
    return printable(" ".join(filter(None, [row.label, f"n={row.seq_len}", *(said.get(axis, "") for axis in axes)])))


def number(value: float | None, measure: str, unit: str = "s") -> str:
    """A value with its unit: ``12.3 ms``, ``1.5 MiB``, ``0.31``; ``-`` for None. Times without seconds are ratios."""
    if value is None:
        return "-"
    if measure == "memory":
        return format_bytes(value)
    return format_seconds(value) if measure == "time" and unit == "s" else format_number(value)


def ratio(value: float | None) -> str:
    """``1.034``; ``-`` for None and ``∞`` for a ratio to nothing."""
    return (
        "-" if value is None else "∞" if math.isinf(value) else f"{value:.3f}" if value < 10 else format_number(value)
    )


def interval(one: Ruling) -> str:
    """``1.02 to 1.05``; ``-`` if there is none or it is a single number."""
    return (
        "-" if one.low is None or one.high is None or one.low == one.high else f"{ratio(one.low)} to {ratio(one.high)}"
    )


def sides(one: Ruling, unit: str = "s") -> tuple[str, str]:
    """The old and the new value, as text."""
    if one.measure == "status":
        old, new = ("-" if row is None else str(row.status) for row in (one.pair.old, one.pair.new))
        return old, new
    return number(one.old, one.measure, unit), number(one.new, one.measure, unit)


def note(one: Ruling) -> str:
    """A note on a finding that its numbers do not show, or an empty text."""
    if one.more_rounds is None:
        return printable(one.note)
    more = f"at least {MANY_ROUNDS}" if one.more_rounds >= MANY_ROUNDS else f"about {one.more_rounds}"
    return printable("; ".join(filter(None, [f"needs {more} more round{'s' * (one.more_rounds > 1)}", one.note])))


_SAID: dict[tuple[str, str], str] = {
    ("memory", "worse"): "more memory",
    ("memory", "better"): "less memory",
    ("error", "worse"): "more error",
    ("error", "better"): "less error",
    ("score", "worse"): "lower score",
    ("score", "better"): "higher score",
    ("error", "unsure"): "unsure error",
    ("score", "unsure"): "unsure score",
    **{(measure, "missing"): f"{measure} missing" for measure in COLUMNS},
}


def plain(one: Ruling) -> str:
    """The verdict, with its measure if the verdict alone does not say it: ``more memory``."""
    return _SAID.get((one.measure, one.verdict), one.verdict)


def verdict(one: Ruling) -> str:
    """The verdict; ``unsure (+3)`` if three more rounds would probably decide."""
    more = "" if one.more_rounds is None else f" (+{one.more_rounds}{'…' * (one.more_rounds >= MANY_ROUNDS)})"
    return plain(one) + more
