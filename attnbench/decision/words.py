"""Cells and their numbers in words: short in a table, and as ``-k`` looks at them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from attnbench.axes import AXES, IN_ROWS, shortened
from attnbench.decision.judge import MANY_ROUNDS, Finding
from attnbench.printable import printable
from attnbench.record import Record
from attnbench.suite.describe import address_of
from attnbench.units import format_bytes, format_seconds


def address(row: Record) -> str:
    """What ``-k`` looks at, as :func:`attnbench.suite.describe.address` says it of a cell."""
    values = shortened({axis: getattr(row, axis) for axis in AXES})
    values["inputs"] = row.inputs if row.level == "operator" else None
    return address_of([row.sweep, row.label, f"n{row.seq_len}", row.level, row.pass_], values)


_NUMBERS = (
    "batch",
    "heads",
    "head_dim",
    "layers",
    "ffn",
    "steps",
    "learning_rate",
    "pretrain_steps",
    "seed",
    "threads",
)


def _axes(row: Record) -> dict[str, str]:
    """Axis -> what to say of it, where variant and length do not say it already; empty for nothing worth saying."""
    numbers = {axis: getattr(row, axis) for axis in _NUMBERS}
    said = {
        "level": row.level,
        "pass": row.pass_,
        "task": row.task or "",
        "inputs": row.inputs if row.level == "operator" else "",
        "kv_len": f"kv_len={row.kv_len}" if row.kv_len != row.seq_len else "",
        "causal": "causal" if row.causal else "",
        "bias": row.bias if row.bias != "none" else "",
        "compile": "compiled" if row.compile else "",
        "padding": f"padding={row.padding:g}" if row.padding else "",
        "dtype": row.dtype,
        "positions": row.positions,
        "protocol": row.protocol or "",
        "process": row.process,
        **{axis: "" if value is None else f"{axis}={value:g}" for axis, value in numbers.items()},
    }
    rest = {axis: getattr(row, axis) for axis in IN_ROWS if axis not in said}
    return said | {
        axis: "" if value == AXES[axis].default else AXES[axis].in_words(value) for axis, value in rest.items()
    }


def telling(rows: Iterable[Record]) -> list[str]:
    """The axes that it takes, beside variant and length, to tell these rows apart by their names."""
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
    """A value with its unit: ``12.3 ms``, ``1.5 MiB``, ``0.31``; ``-`` for None.

    Args:
        unit: of times; if it is not seconds, they are plain ratios.
    """
    if value is None:
        return "-"
    if measure == "memory":
        return format_bytes(value)
    return format_seconds(value) if measure == "time" and unit == "s" else f"{value:.3g}"


def ratio(value: float | None) -> str:
    """``1.034``; ``-`` for None and ``∞`` for a ratio to nothing."""
    return "-" if value is None else "∞" if math.isinf(value) else f"{value:.3f}" if value < 10 else f"{value:.3g}"


def interval(one: Finding) -> str:
    """``1.02 to 1.05``; ``-`` where there is none, and where it is a single number."""
    return (
        "-" if one.low is None or one.high is None or one.low == one.high else f"{ratio(one.low)} to {ratio(one.high)}"
    )


def status(row: Record | None) -> str:
    """``ok``, ``oom``, or ``-`` for no row."""
    return "-" if row is None else str(row.status)


def sides(one: Finding, unit: str = "s") -> tuple[str, str]:
    """The old and the new value, as text."""
    if one.measure == "status":
        return status(one.pair.old), status(one.pair.new)
    return number(one.old, one.measure, unit), number(one.new, one.measure, unit)


def note(one: Finding) -> str:
    """What is to be said of a finding beside its numbers; empty for nothing."""
    if one.more_rounds is None:
        return printable(one.note)
    more = f"{MANY_ROUNDS} or more" if one.more_rounds >= MANY_ROUNDS else f"about {one.more_rounds}"
    return printable("; ".join(filter(None, [f"needs {more} more round{'s' * (one.more_rounds > 1)}", one.note])))


_SAID = {
    ("memory", "worse"): "more memory",
    ("memory", "better"): "less memory",
    ("error", "worse"): "more error",
    ("error", "better"): "less error",
    ("score", "worse"): "lower score",
    ("score", "better"): "higher score",
    ("error", "unsure"): "unsure error",
}


def plain(one: Finding) -> str:
    """The verdict with its measure, where the verdict alone does not say it: ``more memory``."""
    return _SAID.get((one.measure, one.verdict), one.verdict)


def verdict(one: Finding) -> str:
    """The verdict; ``unsure (+3)`` where three more rounds would probably decide."""
    more = "" if one.more_rounds is None else f" (+{one.more_rounds}{'…' * (one.more_rounds >= MANY_ROUNDS)})"
    return plain(one) + more
