"""A cell in words: all of it for ``-k``, and for people the parts in which it differs from the other cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnbench.contract.spec import Spec, format_scalar
from attnbench.suite.axes import AXES, Flag, Masks, Specs, Words
from attnbench.suite.cell import Cell

_FIRST = (
    *("batch", "heads", "kv_heads", "qk_heads", "head_dim", "v_dim", "kv_len", "q_start", "causal", "mask", "bias"),
    *("sink", "compile", "launch", "padding", "new_tokens", "kept_prefix", "state_dtype", "added_tokens"),
    *("query_stride", "architecture", "dtype", "inputs", "seed", "task", "positions", "test_len", "learning_rate"),
    *("replaced", "tuned", "train"),
)
_TOLD = sorted((name for name in AXES if not AXES[name].required), key=[*_FIRST, *AXES].index)
"""The axes in the order of the columns."""


def axes_of(cell: Cell) -> dict[str, Any]:
    """Axis -> value of everything but variant and length; None where it does not apply."""
    applies = [axis for axis in _TOLD if AXES[axis].only != "operator" or cell.level == "operator"]
    values = dict.fromkeys(_TOLD) | {axis: cell.at(axis) for axis in applies}
    return {axis: value.label if isinstance(value, Spec) else value for axis, value in values.items()}


def varying(cells: Sequence[Cell]) -> list[str]:
    """The axes in which cells of one sweep differ."""
    by_sweep: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        by_sweep.setdefault(cell.sweep, []).append(axes_of(cell))
    return [axis for axis in _TOLD if any(len({row[axis] for row in rows}) > 1 for rows in by_sweep.values())]


def shown(value: Any) -> str:
    """A value of an axis as one would write it; ``-`` if the axis does not apply."""
    return "-" if value is None else format_scalar(value)


def name(cell: Cell, axes: Sequence[str]) -> str:
    """``performer:features=64 n=4096 causal=true`` with the values of ``axes``."""
    values = axes_of(cell)
    parts = [f"{axis}={shown(values[axis])}" for axis in axes if values[axis] is not None]
    return " ".join([cell.variant.label, f"n={cell.shape.N}", *parts])


def address(cell: Cell) -> str:
    """The text for ``-k``: ``speed/performer:features=64/n4096/model/training/causal/float32/batch=1/heads=4/...``."""
    return address_of([cell.sweep, cell.variant.label, f"n{cell.shape.N}", cell.level, cell.pass_], axes_of(cell))


def address_of(parts: Sequence[str], values: Mapping[str, Any]) -> str:
    """``parts``, then the values of axes that are words, then those that are numbers."""
    words: list[str] = []
    numbers: list[str] = []
    for name in _TOLD:
        axis, value = AXES[name], values[name]
        if value is None or (axis.added and axis.unsaid(value)):
            continue
        if isinstance(axis.values, Words | Specs | Masks):
            words.append(value)
        elif not isinstance(axis.values, Flag):
            numbers.append(f"{name}={value}")
        elif value:
            words.append(axis.in_words(value))
    return "/".join([*parts, *words, *numbers])
