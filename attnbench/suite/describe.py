"""A cell in words: for ``-k`` all that it is, for people what tells it from the other cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnbench.cell import Cell
from attnbench.spec import format_scalar


def axes_of(cell: Cell) -> dict[str, Any]:
    """Axis -> value of everything but variant and length; None where it does not apply."""
    shape = cell.shape
    return {
        "batch": shape.B,
        "heads": shape.H,
        "head_dim": shape.D,
        "kv_len": shape.kv_len,
        "causal": shape.causal,
        "bias": shape.bias,
        "compile": cell.compile,
        "padding": cell.padding,
        "dtype": cell.dtype,
        "inputs": cell.inputs.label if cell.level == "operator" else None,
        "task": cell.task.label if cell.task else None,
        "learning_rate": cell.training.learning_rate if cell.training else None,
        "seed": cell.seed,
    }


def varying(cells: Sequence[Cell]) -> list[str]:
    """The axes in which cells of one sweep differ."""
    by_sweep: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        by_sweep.setdefault(cell.sweep, []).append(axes_of(cell))
    names = by_sweep and next(iter(by_sweep.values()))[0]
    return [axis for axis in names if any(len({row[axis] for row in rows}) > 1 for rows in by_sweep.values())]


def shown(value: Any) -> str:
    """A value of an axis as one would write it; ``-`` where the axis does not apply."""
    return "-" if value is None else format_scalar(value)


def name(cell: Cell, axes: Sequence[str]) -> str:
    """``performer:features=64 n=4096 causal=true`` with the values of ``axes``."""
    values = axes_of(cell)
    parts = [f"{axis}={shown(values[axis])}" for axis in axes if values[axis] is not None]
    return " ".join([cell.variant.label, f"n={cell.shape.N}", *parts])


def address(cell: Cell) -> str:
    """What ``-k`` looks at: ``speed/performer:features=64/n4096/model/training/float32/causal/batch=1/heads=4/...``."""
    axes = axes_of(cell)
    dtype, bias, inputs, padding, task = (axes.pop(axis) for axis in ("dtype", "bias", "inputs", "padding", "task"))
    flags = {"causal": axes.pop("causal"), "compiled": axes.pop("compile"), bias: bias != "none"}
    label = [cell.sweep, cell.variant.label, f"n{cell.shape.N}", cell.level, cell.pass_, dtype]
    label += [flag for flag, on in flags.items() if on]
    axes |= {"padding": padding or None}
    rest = [f"{axis}={value}" for axis, value in axes.items() if value is not None]
    return "/".join([*label, *(one for one in (inputs, task) if one), *rest])
